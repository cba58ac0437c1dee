"""Calling a module with other tensors in the place of its parameters and buffers."""

from __future__ import annotations

import itertools
from typing import Any, Dict, Mapping, Optional, Sequence

from torch import Tensor, nn
from torch.func import functional_call

__all__ = ["call_with"]


def call_with(
    module: nn.Module,
    tensors: Mapping[str, Tensor],
    args: Sequence[Any],
    kwargs: Optional[Dict[str, Any]] = None,
) -> Any:
    """``torch.func.functional_call``, also of a module that has another one under two names.

    Torch's puts tensors in place name by name, and what it takes back last is then its own.

    Args:
        module: called.
        tensors: by the first name of a parameter or buffer; its other names get the same.
        args, kwargs: of the call.
    """
    named = itertools.chain(module.named_parameters(), module.named_buffers())
    wanted = {id(own): tensors[name] for name, own in named if name in tensors}
    places: Dict[str, Tensor] = {}
    for prefix, part in module.named_modules():
        for key, own in itertools.chain(part._parameters.items(), part._buffers.items()):
            if id(own) in wanted:
                places[f"{prefix}.{key}" if prefix else key] = wanted[id(own)]
    return functional_call(module, places, tuple(args), kwargs, tie_weights=False)
