"""Replacements for functions that torch, or its oldest supported version, can't record."""

from __future__ import annotations

from typing import Any, Callable, Dict, Optional, Tuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ipufit.poptorch._operators.ctc_loss import ctc_loss
from ipufit.poptorch._operators.products import in_place, index_reduce, scatter_reduce
from ipufit.poptorch._schemas import tensors_in
from ipufit.poptorch._tracing import tracing
from ipufit.tracing import recurrent

__all__ = ["REPLACED"]


def bincount(input: Tensor, weights: Optional[Tensor] = None, minlength: int = 0) -> Tensor:
    """Count how often each number under ``minlength`` occurs; larger ones are not counted."""
    if weights is None:
        weights = torch.ones(input.shape, dtype=torch.int64, device=input.device)
    elif weights.dtype != torch.float32:
        weights = weights.double()
    # The last place takes what is not counted.
    places = input.to(torch.int64).clamp(max=minlength)
    sums = torch.zeros(minlength + 1, dtype=weights.dtype, device=input.device)
    return sums.scatter_add(0, places, weights)[:minlength]


def one_hot(input: Tensor, num_classes: int = -1) -> Tensor:
    """Encode classes as one-hot vectors; a number that is no class gives zeros."""
    classes = torch.arange(num_classes, dtype=input.dtype, device=input.device)
    return (input.unsqueeze(-1) == classes).to(torch.int64)


def _single(value: Optional[Tensor]) -> Optional[Tensor]:
    return None if value is None else value.float()


def _normalised(
    function: Callable[..., Tensor], input: Tensor, running: Tuple[Any, Any], *rest: Any
) -> Tensor:
    """Normalise half-precision input in float32, and update the running statistics."""
    single = [_single(statistic) for statistic in running]
    result = function(input.float(), *single, *[_widened(value) for value in rest])
    for statistic, value in zip(running, single):
        if statistic is not None and value is not None and value is not statistic:
            statistic.copy_(value)
    return result.to(input.dtype)


def _widened(value: object) -> Any:
    return value.float() if isinstance(value, Tensor) else value


def batch_norm(
    input: Tensor,
    running_mean: Optional[Tensor],
    running_var: Optional[Tensor],
    weight: Optional[Tensor] = None,
    bias: Optional[Tensor] = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """Compute ``torch.nn.functional.batch_norm`` for half precision and any type of statistics.

    A device changes running statistics along with the weights: not in a model for inference, even
    where the layer is in training mode and normalises with the micro-batch's own.
    """
    trace = tracing()
    if training and trace is not None and not trace.training:
        running_mean = running_var = None
    rest = (weight, bias, training, momentum, eps)
    if input.dtype in (torch.float16, torch.bfloat16):
        return _normalised(F.batch_norm, input, (running_mean, running_var), *rest)
    return F.batch_norm(input, running_mean, running_var, *rest)


def instance_norm(
    input: Tensor,
    running_mean: Optional[Tensor] = None,
    running_var: Optional[Tensor] = None,
    weight: Optional[Tensor] = None,
    bias: Optional[Tensor] = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """Compute ``torch.nn.functional.instance_norm``, also in half precision."""
    rest = (weight, bias, use_input_stats, momentum, eps)
    if input.dtype in (torch.float16, torch.bfloat16):
        return _normalised(F.instance_norm, input, (running_mean, running_var), *rest)
    return F.instance_norm(input, running_mean, running_var, *rest)


def _in_single(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compute a function of half-precision input in float32, because torch 2.0 can't record it."""

    def computed(input: Tensor, *args: Any, **kwargs: Any) -> Any:
        if input.dtype not in (torch.float16, torch.bfloat16):
            return function(input, *args, **kwargs)
        results = function(input.float(), *args, **kwargs)
        if isinstance(results, Tensor):
            return results.to(input.dtype)
        values, places = results
        return values.to(input.dtype), places

    return computed


def mse_loss(input: Tensor, target: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Compute ``torch.nn.functional.mse_loss``, with a gradient for operands of two dtypes."""
    dtype = torch.promote_types(input.dtype, target.dtype)
    return F.mse_loss(input.to(dtype), target.to(dtype), *args, **kwargs)


def _typed_by_out(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Compute a cumulative function in the type of ``out``, which torch 2.0 does not record."""

    def typed(*args: Any, **kwargs: Any) -> Tensor:
        if isinstance(kwargs.get("out"), Tensor) and kwargs.get("dtype") is None:
            kwargs["dtype"] = kwargs["out"].dtype
        return function(*args, **kwargs)

    return typed


def _whole(kind: str) -> Callable[..., Any]:
    """Record a recurrent layer as one operator, or step by step in half precision."""
    original = getattr(torch, kind)

    def layer(*args: Any, **kwargs: Any) -> Any:
        if any(tensor.dtype == torch.float16 for tensor in tensors_in([args, kwargs])):
            return original(*args, **kwargs)
        return recurrent.call_whole(kind, True, *args, **kwargs)

    return layer


# What takes the place of a function of torch, with the same arguments.
REPLACED: Dict[Any, Callable[..., Any]] = {
    **{getattr(torch, kind): _whole(kind) for kind in recurrent.KINDS},
    torch.bincount: bincount,
    Tensor.bincount: bincount,
    F.one_hot: one_hot,
    F.ctc_loss: ctc_loss,
    torch.ctc_loss: ctc_loss,
    F.batch_norm: batch_norm,
    F.instance_norm: instance_norm,
    F.max_pool3d: _in_single(F.max_pool3d),
    F.max_pool3d_with_indices: _in_single(F.max_pool3d_with_indices),
    F.mse_loss: mse_loss,
    F.rrelu: _in_single(F.rrelu),
    torch.scatter_reduce: scatter_reduce,
    Tensor.scatter_reduce: scatter_reduce,
    Tensor.scatter_reduce_: in_place(scatter_reduce),
    torch.index_reduce: index_reduce,
    Tensor.index_reduce: index_reduce,
    Tensor.index_reduce_: in_place(index_reduce),
    torch.cumprod: _typed_by_out(torch.cumprod),
    torch.cumsum: _typed_by_out(torch.cumsum),
}
