"""Dispatch of torch functions while a PopTorch model is recorded."""

from __future__ import annotations

from typing import Any, Dict, Mapping, Sequence, Tuple

import torch
from torch import Tensor

from ipufit.poptorch._operators import slices, unsupported
from ipufit.poptorch._operators.casting import cast
from ipufit.poptorch._operators.losses import LOSSES
from ipufit.poptorch._operators.replaced import REPLACED
from ipufit.poptorch._tracing import tracing

__all__ = ["call"]


# Where a function takes a mask, or indices one of which may be a mask.
_MASKED: Dict[Any, Tuple[int, str]] = {
    Tensor.__getitem__: (1, ""),
    Tensor.__setitem__: (1, ""),
    torch.where: (0, "condition"),
    Tensor.where: (1, "condition"),
}
for _name in ("index_put", "masked_fill", "masked_select", "masked_scatter"):
    _keyword = "indices" if _name == "index_put" else "mask"
    for _owner, _full in ((torch, _name), (Tensor, _name), (Tensor, _name + "_")):
        if hasattr(_owner, _full):
            _MASKED[getattr(_owner, _full)] = (1, _keyword)


def _bool(value: object) -> Any:
    if isinstance(value, Tensor) and value.dtype == torch.uint8:
        return value != 0
    if isinstance(value, (list, tuple)) and any(isinstance(each, Tensor) for each in value):
        return type(value)(_bool(each) for each in value)
    return value


def with_bool_masks(func: object, args: Sequence[Any], kwargs: Dict[str, Any]) -> Sequence[Any]:
    """Return the positional arguments with bool masks; those in ``kwargs`` are replaced there."""
    if func not in _MASKED:
        return args
    place, name = _MASKED[func]
    if name in kwargs:
        kwargs[name] = _bool(kwargs[name])
    return [_bool(value) if i == place else value for i, value in enumerate(args)]


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
