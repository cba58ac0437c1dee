"""The named metrics: one value for every element, from which an epoch's mean is made."""

from __future__ import annotations

import functools
import math
import numbers
import re
from typing import Callable, Dict, Optional, Tuple

import torch
from torch import Tensor
from torch.nn import functional

from ipufit.core.objective_arguments import describe_tensor, fit_indices, fit_values, shape_advice
from ipufit.core.sample_weights import as_weights, broadcast_weights
from ipufit.errors import MetricError, UnknownNameError
from ipufit.utils.tree import flatten_with_paths

__all__ = [
    "Part",
    "Values",
    "is_count",
    "is_error",
    "lookup",
    "shapes",
    "sum_of_elements",
    "sum_of_samples",
    "sum_of_weighted_samples",
    "sums",
]

# The target that cross_entropy leaves out by default; a metric beside it must leave out the same.
IGNORED_CLASS = -100

# One value for each element, and which of them count; None: all.
ElementValues = Tuple[Tensor, Optional[Tensor]]
# From the metric's name (for messages), prediction and target.
Values = Callable[[str, Tensor, Tensor], ElementValues]


def _same_shape(name: str, prediction: Tensor, target: Tensor) -> Tensor:
    """The target in the prediction's shape."""
    target = fit_values(prediction, target)
    if prediction.shape != target.shape:
        raise MetricError(
            f"metric {name!r} needs prediction and target of one shape, got prediction "
            f"{tuple(prediction.shape)} and target {tuple(target.shape)}. "
            f"{shape_advice(prediction, target)}"
        )
    return target


def _squared_error(name: str, prediction: Tensor, target: Tensor) -> ElementValues:
    target = _same_shape(name, prediction, target)
    return (prediction.double() - target.double()).square(), None


def _absolute_error(name: str, prediction: Tensor, target: Tensor) -> ElementValues:
    target = _same_shape(name, prediction, target)
    return (prediction.double() - target.double()).abs(), None


def _takes_indices(prediction: Tensor, target: Tensor) -> bool:
    """True if the target holds one class index for each prediction over at least two classes."""
    return (
        prediction.dim() > 1
        and prediction.shape[1] > 1
        and target.shape == prediction.shape[:1] + prediction.shape[2:]
        and not target.is_floating_point()
    )


def _check_indices(name: str, prediction: Tensor, target: Tensor) -> Tensor:
    """The target as one class index for each prediction."""
    target = fit_indices(prediction, target)
    if not _takes_indices(prediction, target):
        raise MetricError(
            f"metric {name!r} needs a prediction of shape (batch, classes, ...) and integer class "
            f"indices of shape (batch, ...), got prediction of {describe_tensor(prediction)} and "
            f"target of {describe_tensor(target)}. {_index_advice(prediction, target)}"
        )
    return target


def _index_advice(prediction: Tensor, target: Tensor) -> str:
    wanted = prediction.shape[:1] + prediction.shape[2:]
    if prediction.dim() > 1 and prediction.shape[1] == 1:
        return "Of one class, use 'binary_accuracy' with both of one shape."
    if target.shape == wanted:
        return "Make the target int64 with .long()."
    if target.dim() > 1 and target.shape == prediction.shape:
        return "Of one-hot targets, give target.argmax(1)."
    if target.dim() > 1 and target.shape[1] == 1 and target.shape[:1] + target.shape[2:] == wanted:
        return "Give target.squeeze(1)."
    return "Pass a callable metric(prediction, target) for other shapes."


def _counted(values: Tensor, target: Tensor) -> ElementValues:
    return values, target != IGNORED_CLASS


def _sparse_accuracy(name: str, prediction: Tensor, target: Tensor) -> ElementValues:
    target = _check_indices(name, prediction, target)
    return _counted(prediction.argmax(1) == target, target)


def _categorical_accuracy(name: str, prediction: Tensor, target: Tensor) -> ElementValues:
    target = _same_shape(name, prediction, target)
    if prediction.dim() < 2 or prediction.shape[1] < 2:
        raise MetricError(
            f"metric {name!r} needs at least two classes in dimension 1, got shape "
            f"{tuple(prediction.shape)}. Use 'binary_accuracy'."
        )
    return prediction.argmax(1) == target.argmax(1), None


def _top_k_accuracy(k: int, name: str, prediction: Tensor, target: Tensor) -> ElementValues:
    if prediction.dim() > 1 and prediction.shape == target.shape:
        target = target.argmax(1)
    target = _check_indices(name, prediction, target)
    if prediction.shape[1] < k:
        raise MetricError(
            f"metric {name!r} needs at least {k} classes, got {prediction.shape[1]}. Use "
            f"'top_{prediction.shape[1] - 1}_accuracy' or less; over all classes it is always 1."
        )
    best = prediction.topk(k, dim=1).indices
    return _counted((best == target.unsqueeze(1)).any(1), target)


def _binary_accuracy(name: str, prediction: Tensor, target: Tensor) -> ElementValues:
    target = _same_shape(name, prediction, target)
    if ((prediction < 0) | (prediction > 1)).any():
        raise MetricError(
            f"metric {name!r} needs probabilities between 0 and 1, got values from "
            f"{float(prediction.min()):.3g} to {float(prediction.max()):.3g}. Of logits, use "
            "'binary_accuracy_with_logits'."
        )
    return (prediction > 0.5) == (target > 0.5), None


def _binary_accuracy_with_logits(name: str, prediction: Tensor, target: Tensor) -> ElementValues:
    target = _same_shape(name, prediction, target)
    return (prediction > 0) == (target > 0.5), None


def _accuracy(name: str, prediction: Tensor, target: Tensor) -> ElementValues:
    if prediction.dim() == 1 or prediction.shape[1] == 1:
        target = fit_values(prediction, target)
    if prediction.shape == target.shape:
        if prediction.dim() == 1 or (prediction.dim() > 1 and prediction.shape[1] == 1):
            return _binary_accuracy(name, prediction, target)
        raise MetricError(
            f"metric {name!r} needs class indices, or one value per sample, got prediction and "
            f"target of one shape {tuple(prediction.shape)}. Of one-hot targets, use "
            "'categorical_accuracy'; of several labels, 'binary_accuracy'."
        )
    return _sparse_accuracy(name, prediction, target)


def _token_loss(name: str, prediction: Tensor, target: Tensor) -> ElementValues:
    target = _check_indices(name, prediction, target)
    losses = functional.cross_entropy(
        prediction.double(), target.long(), reduction="none", ignore_index=IGNORED_CLASS
    )
    return _counted(losses, target)


def _exp(value: float) -> float:
    try:
        return math.exp(value)
    except OverflowError:
        return math.inf


_NAMED: Dict[str, Tuple[Values, Callable[[float], float]]] = {
    "acc": (_accuracy, float),
    "accuracy": (_accuracy, float),
    "binary_accuracy": (_binary_accuracy, float),
    "binary_accuracy_with_logits": (_binary_accuracy_with_logits, float),
    "categorical_accuracy": (_categorical_accuracy, float),
    "mae": (_absolute_error, float),
    "mean_absolute_error": (_absolute_error, float),
    "mean_squared_error": (_squared_error, float),
    "mse": (_squared_error, float),
    "perplexity": (_token_loss, _exp),
    "rmse": (_squared_error, math.sqrt),
    "root_mean_squared_error": (_squared_error, math.sqrt),
    "sparse_categorical_accuracy": (_sparse_accuracy, float),
    "top_5_accuracy": (functools.partial(_top_k_accuracy, 5), float),
}
_ERRORS = (
    "mae",
    "mean_absolute_error",
    "mean_squared_error",
    "mse",
    "perplexity",
    "rmse",
    "root_mean_squared_error",
)
_NO_MEANS = ("auc", "f1", "f1_score", "precision", "r2", "r2_score", "recall")


def is_error(name: str) -> bool:
    """True of a named metric that is the better the smaller it is."""
    return name.lower() in _ERRORS


def is_count(name: str) -> bool:
    """True of a named metric that is true or false of every element."""
    return not is_error(name)


def lookup(name: str) -> Tuple[Values, Callable[[float], float]]:
    """Look up a metric by name: its values, and the function of their mean.

    Raises:
        UnknownNameError: with the nearest known name.
    """
    folded = name.lower()
    if folded in _NAMED:
        return _NAMED[folded]
    top = re.fullmatch(r"top_([1-9]\d*)_accuracy", folded)
    if top:
        return functools.partial(_top_k_accuracy, int(top.group(1))), float
    hint = ""
    if folded in _NO_MEANS:
        hint = "It is no mean over samples: pass an object of torchmetrics. "
    raise UnknownNameError("metric", name, _NAMED, hint, is_typo=not hint)


# Sum and count of one micro-batch, from (prediction, target, size, sample_weight).
Part = Callable[[object, object, int, object], Tuple[float, float]]


def shapes(value: object) -> str:
    """Describe shapes and dtypes of all tensors in a value, for a sentence."""
    leaves, structure = flatten_with_paths(value)
    if structure.kind is None or not leaves:
        return describe_tensor(value)
    inside = "; ".join(f"{path} {describe_tensor(leaf)}" for path, leaf in leaves)
    return f"{type(value).__name__} ({inside})"


def sums(
    name: str, values: Tensor, counted: Optional[Tensor], weight: object
) -> Tuple[float, float]:
    """The sum of the values and how many there are, each times its weight.

    Args:
        name: of the metric, for messages.
        values: shape (batch, ...).
        counted: which of them count, of their shape; None: all.
        weight: shape (batch,) or more leading dimensions of the values; None: 1 each. A weight of
            zero hides inf and nan.
    """
    if weight is None and values.dtype is torch.bool:
        hits = values if counted is None else values & counted
        return float(hits.sum()), values.numel() if counted is None else int(counted.sum())
    values = values.double()
    if weight is None:
        values = values if counted is None else values[counted]
        return float(values.sum()), values.numel()
    spreaded = broadcast_weights(
        as_weights(weight, MetricError), values.shape, f"metric {name!r}", MetricError
    )
    wide = spreaded.double().expand(values.shape)
    counts = wide != 0 if counted is None else counted & (wide != 0)
    return float((values[counts] * wide[counts]).sum()), float(wide[counts].sum())


def sum_of_elements(
    values: Values, name: str, prediction: object, target: object, size: int, weight: object
) -> Tuple[float, float]:
    """Sum a named metric. Every element counts the same, so samples of one shape do as well."""
    for role, value in (("prediction", prediction), ("target", target)):
        if not isinstance(value, Tensor):
            raise MetricError(
                f"metric {name!r} takes one tensor as {role}, got {type(value).__name__}. Pass a "
                "callable metric(prediction, target) that picks its tensors."
            )
    assert isinstance(prediction, Tensor)
    assert isinstance(target, Tensor)
    elements, counted = values(name, prediction, target)
    return sums(name, elements, counted, weight)


def sum_of_samples(
    metric: Callable[..., object],
    name: str,
    prediction: object,
    target: object,
    size: int,
    weight: object,
) -> Tuple[float, float]:
    """Sum a user's callable: one value per sample, or one for the micro-batch."""
    value = metric(prediction, target)
    number = _number(value)
    if number is not None:
        return number * size, size
    rows = _rows(value, size)
    if rows is not None:
        return float(rows.double().reshape(size, -1).mean(1).sum()), size
    raise MetricError(
        f"metric {name!r} must give a number, or a tensor of {size} values, one for each sample, "
        f"got {shapes(value)}. Reduce it over all but the samples, for example with .mean()."
    )


def sum_of_weighted_samples(
    metric: Callable[..., object],
    takes_weight: bool,
    name: str,
    prediction: object,
    target: object,
    size: int,
    weight: object,
) -> Tuple[float, float]:
    """Sum a user's callable under weighted_metrics: it takes the weights, or leaves them to us."""
    if not takes_weight:
        value = metric(prediction, target)
        rows = _rows(value, size)
        if rows is not None:
            return sums(name, rows, None, weight)
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


def _number(value: object) -> Optional[float]:
    if isinstance(value, Tensor):
        return float(value) if not value.dim() and not value.is_complex() else None
    return float(value) if isinstance(value, numbers.Real) else None


def _rows(value: object, size: int) -> Optional[Tensor]:
    """Return a value that is one real tensor with a row for each sample; None of anything else."""
    if not isinstance(value, Tensor) or value.is_complex() or not value.dim():
        return None
    return value if value.shape[0] == size and value.numel() > 0 else None
