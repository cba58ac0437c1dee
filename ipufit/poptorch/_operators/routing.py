"""How a call of a torch function is recorded in a PopTorch model."""

from __future__ import annotations

from typing import Any, Mapping, Sequence

from torch import Tensor

from ipufit.poptorch._operators import slices, unsupported
from ipufit.poptorch._operators.casting import cast
from ipufit.poptorch._operators.losses import LOSSES
from ipufit.poptorch._operators.masks import with_bool_masks
from ipufit.poptorch._operators.replaced import REPLACED
from ipufit.poptorch._tracing import tracing

__all__ = ["call"]


def call(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Call a torch function as the device would compute it, and mark its result if it is a loss.

    For a TorchFunctionMode that is active while a model is recorded: whatever torch function is
    called comes here.

    Raises:
        Error: torch accepts the call, a model for IPUs can't have it.
    """
    unsupported.check(func, args, kwargs)
    if func is Tensor.__getitem__ and slices.has_tensor_bounds(args[1]):
        return slices.getitem(args[0], args[1])
    args, kwargs = cast(func, args, kwargs)
    args = with_bool_masks(func, args, kwargs)
    result = REPLACED.get(func, func)(*args, **kwargs)
    trace = tracing()
    return trace.mark_loss(result) if func in LOSSES and trace is not None else result
