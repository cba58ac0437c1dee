"""Masks of uint8: bool ones, which are all that new versions of torch take."""

from __future__ import annotations

from typing import Any, Dict, Sequence, Tuple

import torch
from torch import Tensor

__all__ = ["with_bool_masks"]

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


def _bool(value: Any) -> Any:
    if isinstance(value, Tensor) and value.dtype == torch.uint8:
        return value != 0
    if isinstance(value, (list, tuple)) and any(isinstance(each, Tensor) for each in value):
        return type(value)(_bool(each) for each in value)
    return value


def with_bool_masks(func: Any, args: Sequence[Any], kwargs: Dict[str, Any]) -> Sequence[Any]:
    """The positional arguments of a call; a mask among the named ones is replaced in place."""
    if func not in _MASKED:
        return args
    place, name = _MASKED[func]
    if name in kwargs:
        kwargs[name] = _bool(kwargs[name])
    return [_bool(value) if i == place else value for i, value in enumerate(args)]
