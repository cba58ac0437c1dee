"""Sums and counts of one micro-batch, from which an epoch's mean is made."""

from __future__ import annotations

import numbers
from typing import Any, Callable, Optional, Tuple

import torch
from torch import Tensor

from ipufit.core.objective_arguments import describe_tensor
from ipufit.core.sample_weights import as_weights, broadcast_weights
from ipufit.errors import MetricError
from ipufit.metrics.values import Values
from ipufit.utils.tree import flatten_with_paths

__all__ = ["Part", "shapes", "sum_of_elements", "sum_of_samples", "sum_of_weighted_samples", "sums"]

# Sum and count of one micro-batch, from (prediction, target, size, sample_weight).
Part = Callable[[Any, Any, int, Any], Tuple[float, float]]


def shapes(value: Any) -> str:
    """What came, for a sentence: shapes and dtypes of all tensors in it."""
    leaves, structure = flatten_with_paths(value)
    if structure.kind is None or not leaves:
        return describe_tensor(value)
    inside = "; ".join(f"{path} {describe_tensor(leaf)}" for path, leaf in leaves)
    return f"{type(value).__name__} ({inside})"


def sums(name: str, values: Tensor, kept: Optional[Tensor], weight: Any) -> Tuple[float, float]:
    """The sum of the values and how many there are, each times its weight.

    Args:
        name: of the metric, for messages.
        values: shape (batch, ...).
        kept: which of them count, of their shape; None: all.
        weight: shape (batch,) or more leading dimensions of the values; None: 1 each. A weight of
            zero hides inf and nan.
    """
    if weight is None and values.dtype is torch.bool:
        hits = values if kept is None else values & kept
        return float(hits.sum()), values.numel() if kept is None else int(kept.sum())
    values = values.double()
    if weight is None:
        values = values if kept is None else values[kept]
        return float(values.sum()), values.numel()
    spreaded = broadcast_weights(
        as_weights(weight, MetricError), values.shape, f"metric {name!r}", MetricError
    )
    wide = spreaded.double().expand(values.shape)
    counts = wide != 0 if kept is None else kept & (wide != 0)
    return float((values[counts] * wide[counts]).sum()), float(wide[counts].sum())


def sum_of_elements(
    values: Values, name: str, prediction: Any, target: Any, size: int, weight: Any
) -> Tuple[float, float]:
    """Of a named metric. Every element counts the same, so samples of one shape do as well."""
    for role, value in (("prediction", prediction), ("target", target)):
        if not isinstance(value, Tensor):
            raise MetricError(
                f"metric {name!r} takes one tensor as {role}, got {type(value).__name__}. Pass a "
                "callable metric(prediction, target) that picks its tensors."
            )
    found, kept = values(name, prediction, target)
    return sums(name, found, kept, weight)


def sum_of_samples(
    metric: Callable[..., Any], name: str, prediction: Any, target: Any, size: int, weight: Any
) -> Tuple[float, float]:
    """Of a user's callable: one value per sample, or one for the micro-batch."""
    value = metric(prediction, target)
    number = _number(value)
    if number is not None:
        return number * size, size
    if _has_rows(value, size):
        return float(value.double().reshape(size, -1).mean(1).sum()), size
    raise MetricError(
        f"metric {name!r} must give a number, or a tensor of {size} values, one for each sample, "
        f"got {shapes(value)}. Reduce it over all but the samples, for example with .mean()."
    )


def sum_of_weighted_samples(
    metric: Callable[..., Any],
    takes_weight: bool,
    name: str,
    prediction: Any,
    target: Any,
    size: int,
    weight: Any,
) -> Tuple[float, float]:
    """Of a user's callable under weighted_metrics: it takes the weights, or leaves them to us."""
    if not takes_weight:
        value = metric(prediction, target)
        if _has_rows(value, size):
            return sums(name, value, None, weight)
        raise MetricError(
            f"weighted metric {name!r} must give a tensor of {size} values, one for each sample, "
            f"got {shapes(value)}. Return the values before their mean, or take sample_weight as a "
            "third argument and return the weighted mean."
        )
    weight = torch.ones(size) if weight is None else as_weights(weight, MetricError)
    value = metric(prediction, target, sample_weight=weight)
    number = _number(value)
    if number is None:
        raise MetricError(
            f"weighted metric {name!r} takes sample_weight, so it must give one number, the "
            f"weighted mean, got {shapes(value)}. Reduce it with the weights."
        )
    total = float(weight.double().sum())
    return (number * total, total) if total else (0.0, 0.0)


def _number(value: Any) -> Optional[float]:
    if isinstance(value, Tensor):
        return float(value) if not value.dim() and not value.is_complex() else None
    return float(value) if isinstance(value, numbers.Real) else None


def _has_rows(value: Any, size: int) -> bool:
    return (
        isinstance(value, Tensor)
        and not value.is_complex()
        and value.dim() > 0
        and value.shape[0] == size
        and value.numel() > 0
    )
