"""Layers that compute in the type of their input, whatever the type of their weights."""

from __future__ import annotations

from typing import Any, Dict, Mapping, Sequence, Tuple

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["CASTS", "cast"]

Call = Tuple[Tuple[Any, ...], Dict[str, Any]]

# Function: where its weights stand, and their names. The input always comes first.
CASTS: Dict[Any, Dict[int, str]] = {
    F.group_norm: {2: "weight", 3: "bias"},
    torch.group_norm: {2: "weight", 3: "bias"},
    F.layer_norm: {2: "weight", 3: "bias"},
    torch.layer_norm: {2: "weight", 3: "bias"},
    F.batch_norm: {3: "weight", 4: "bias"},
    torch.batch_norm: {1: "weight", 2: "bias"},
    F.instance_norm: {3: "weight", 4: "bias"},
    torch.instance_norm: {1: "weight", 2: "bias"},
    F.multi_head_attention_forward: {
        5: "in_proj_weight",
        6: "in_proj_bias",
        7: "bias_k",
        8: "bias_v",
        11: "out_proj_weight",
        12: "out_proj_bias",
        18: "q_proj_weight",
        19: "k_proj_weight",
        20: "v_proj_weight",
    },
}
for _place in (F, torch, torch._C._nn):
    for _name in (
        "linear",
        *(f"conv{n}d" for n in (1, 2, 3)),
        *(f"conv_transpose{n}d" for n in (1, 2, 3)),
        "convolution",
    ):
        if hasattr(_place, _name):
            CASTS[getattr(_place, _name)] = {1: "weight", 2: "bias"}


def _cast(value: object, dtype: torch.dtype) -> Any:
    if isinstance(value, Tensor) and value.is_floating_point() and value.dtype != dtype:
        return value.to(dtype)
    return value


def cast(func: object, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Call:
    """Return the arguments of a call, with weight and bias in the type of the input.

    Arguments of functions that are not in ``CASTS`` are returned unchanged.
    """
    places = CASTS.get(func)
    tensor = args[0] if args else kwargs.get("input", kwargs.get("query"))
    if places is None or not isinstance(tensor, Tensor) or not tensor.is_floating_point():
        return tuple(args), dict(kwargs)
    names = set(places.values())
    return (
        tuple(_cast(a, tensor.dtype) if i in places else a for i, a in enumerate(args)),
        {k: _cast(v, tensor.dtype) if k in names else v for k, v in kwargs.items()},
    )
