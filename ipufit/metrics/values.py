"""The named metrics: one value for every element, from which an epoch's mean is made."""

from __future__ import annotations

import functools
import math
import numbers
import re
from typing import Callable, Dict, NamedTuple, Optional, Tuple

import torch
from torch import Tensor
from torch.nn import functional

from ipufit.core.objective_arguments import (
    as_weights,
    broadcast_weights,
    describe_tensor,
    fit_indices,
    fit_values,
    shape_advice,
)
from ipufit.errors import MetricError
from ipufit.utils.tree import flatten_with_paths

# The target that cross_entropy leaves out by default; a metric beside it must leave out the same.
IGNORED_CLASS = -100
_EPSILON = 1e-7  # that of Keras

# One value for each element, and which of them count; None: all.
ElementValues = Tuple[Tensor, Optional[Tensor]]
# From the metric's name (for messages), prediction and target.
Values = Callable[[str, Tensor, Tensor], ElementValues]


def same_shape(name: str, prediction: Tensor, target: Tensor) -> Tensor:
    """The target in the prediction's shape."""
    target = fit_values(prediction, target)
    if prediction.shape != target.shape:
        raise MetricError(
            f"metric {name!r} needs prediction and target of one shape, got prediction "
            f"{tuple(prediction.shape)} and target {tuple(target.shape)}. "
            f"{shape_advice(prediction, target)}"
        )
    return target


def _squared_error(prediction: Tensor, target: Tensor) -> Tensor:
    return (prediction - target).square()


def _absolute_error(prediction: Tensor, target: Tensor) -> Tensor:
    return (prediction - target).abs()


def takes_indices(prediction: Tensor, target: Tensor) -> bool:
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
    if not takes_indices(prediction, target):
        raise MetricError(
            f"metric {name!r} needs a prediction of shape (batch, classes, ...) and integer class "
            f"indices of shape (batch, ...), got prediction of {describe_tensor(prediction)} and "
            f"target of {describe_tensor(target)}. {_index_advice(prediction, target)}"
        )
    return target


def _index_advice(prediction: Tensor, target: Tensor) -> str:
    wanted = prediction.shape[:1] + prediction.shape[2:]
    if prediction.dim() > 1 and prediction.shape[1] == 1:
        return "For a single class, use 'binary_accuracy' with equal shapes."
    if target.shape == wanted:
        return "Convert the target with .long()."
    if target.dim() > 1 and target.shape == prediction.shape:
        return "For one-hot targets, pass target.argmax(1)."
    if target.dim() > 1 and target.shape[1] == 1 and target.shape[:1] + target.shape[2:] == wanted:
        return "Pass target.squeeze(1)."
    return "Pass a callable metric(prediction, target) for other shapes."


def _counted(values: Tensor, target: Tensor) -> ElementValues:
    return values, target != IGNORED_CLASS


def _sparse_accuracy(name: str, prediction: Tensor, target: Tensor) -> ElementValues:
    target = _check_indices(name, prediction, target)
    return _counted(prediction.argmax(1) == target, target)


def _categorical_accuracy(name: str, prediction: Tensor, target: Tensor) -> ElementValues:
    target = same_shape(name, prediction, target)
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
    target = same_shape(name, prediction, target)
    if ((prediction < 0) | (prediction > 1)).any():
        raise MetricError(
            f"metric {name!r} needs probabilities between 0 and 1, got values from "
            f"{float(prediction.min()):.3g} to {float(prediction.max()):.3g}. For logits, use "
            "'binary_accuracy_with_logits'."
        )
    return (prediction > 0.5) == (target > 0.5), None


def _binary_accuracy_with_logits(name: str, prediction: Tensor, target: Tensor) -> ElementValues:
    target = same_shape(name, prediction, target)
    return (prediction > 0) == (target > 0.5), None


def _accuracy(name: str, prediction: Tensor, target: Tensor) -> ElementValues:
    if prediction.dim() == 1 or prediction.shape[1] == 1:
        target = fit_values(prediction, target)
    if prediction.shape == target.shape:
        if prediction.dim() == 1 or (prediction.dim() > 1 and prediction.shape[1] == 1):
            return _binary_accuracy(name, prediction, target)
        raise MetricError(
            f"metric {name!r} needs class indices, or one value per sample, got prediction and "
            f"target of one shape {tuple(prediction.shape)}. For one-hot targets, use "
            "'categorical_accuracy'; for several labels, 'binary_accuracy_with_logits', or "
            "'binary_accuracy' where the module returns probabilities."
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


def _percentage_error(prediction: Tensor, target: Tensor) -> Tensor:
    return 100 * (prediction - target).abs() / target.abs().clamp(min=_EPSILON)


def _logarithmic_error(prediction: Tensor, target: Tensor) -> Tensor:
    logs = [each.clamp(min=_EPSILON).log1p() for each in (prediction, target)]
    return (logs[0] - logs[1]).square()


def _log_cosh(prediction: Tensor, target: Tensor) -> Tensor:
    error = prediction - target
    return error + functional.softplus(-2 * error) - math.log(2)


def _hinge(prediction: Tensor, target: Tensor) -> Tensor:
    # Of labels 0 and 1, as Keras.
    signs = 2 * target - 1 if ((target == 0) | (target == 1)).all() else target
    return (1 - signs * prediction).clamp(min=0)


def _divergence(prediction: Tensor, target: Tensor) -> Tensor:
    shares = [each.clamp(_EPSILON, 1) for each in (target, prediction)]
    return (shares[0] * (shares[0] / shares[1]).log()).sum(-1)


def cosine(prediction: Tensor, target: Tensor) -> Tensor:
    """Cosine along the last dimension; zero where one of the vectors is."""
    squares = (prediction.square().sum(-1) * target.square().sum(-1)).clamp(min=1e-24)
    return (prediction * target).sum(-1) / squares.sqrt()


class NamedMetric(NamedTuple):
    """A metric that is made of one value for each element.

    Attributes:
        values: of a micro-batch.
        finish: applied once to their mean.
        is_error: whether it is the better the smaller it is.
        is_count: whether the values are true or false.
    """

    values: Values
    finish: Callable[[float], float] = float
    is_error: bool = True
    is_count: bool = False


def _share(values: Values) -> NamedMetric:
    return NamedMetric(values, is_error=False, is_count=True)


def _of_pairs(
    compute: Callable[[Tensor, Tensor], Tensor],
    finish: Callable[[float], float] = float,
    is_error: bool = True,
) -> NamedMetric:
    """Make a metric of a function of prediction and target, of one shape and in float64."""

    def values(name: str, prediction: Tensor, target: Tensor) -> ElementValues:
        target = same_shape(name, prediction, target)
        return compute(prediction.double(), target.double()), None

    return NamedMetric(values, finish, is_error)


_TOP_5 = ("sparse_top_k_categorical_accuracy", "top_5_accuracy", "top_k_categorical_accuracy")
NAMED: Dict[str, NamedMetric] = {
    **dict.fromkeys(("acc", "accuracy"), _share(_accuracy)),
    "binary_accuracy": _share(_binary_accuracy),
    "binary_accuracy_with_logits": _share(_binary_accuracy_with_logits),
    "categorical_accuracy": _share(_categorical_accuracy),
    "cosine_similarity": _of_pairs(cosine, is_error=False),
    "hinge": _of_pairs(_hinge),
    "kl_divergence": _of_pairs(_divergence),
    **dict.fromkeys(("log_cosh", "logcosh"), _of_pairs(_log_cosh)),
    **dict.fromkeys(("mae", "mean_absolute_error"), _of_pairs(_absolute_error)),
    **dict.fromkeys(("mape", "mean_absolute_percentage_error"), _of_pairs(_percentage_error)),
    **dict.fromkeys(("mse", "mean_squared_error"), _of_pairs(_squared_error)),
    **dict.fromkeys(("msle", "mean_squared_logarithmic_error"), _of_pairs(_logarithmic_error)),
    "perplexity": NamedMetric(_token_loss, _exp),
    **dict.fromkeys(("rmse", "root_mean_squared_error"), _of_pairs(_squared_error, math.sqrt)),
    "sparse_categorical_accuracy": _share(_sparse_accuracy),
    "squared_hinge": _of_pairs(lambda prediction, target: _hinge(prediction, target).square()),
    **dict.fromkeys(_TOP_5, _share(functools.partial(_top_k_accuracy, 5))),
}


def lookup(name: str) -> Optional[NamedMetric]:
    """Look up a metric that is a mean over elements by its name; None if there is none."""
    folded = name.lower()
    if folded in NAMED:
        return NAMED[folded]
    top = re.fullmatch(r"top_([1-9]\d*)_accuracy", folded)
    return _share(functools.partial(_top_k_accuracy, int(top.group(1)))) if top else None


# Sum and count of one micro-batch, from (prediction, target, size, sample_weight), and the fields
# that a metric takes by name.
Part = Callable[..., Tuple[float, float]]


def shapes(value: object) -> str:
    """Describe shapes and dtypes of all tensors in a value, for a sentence."""
    leaves, structure = flatten_with_paths(value)
    if structure.kind is None or not leaves:
        return describe_tensor(value)
    inside = "; ".join(f"{path} {describe_tensor(leaf)}" for path, leaf in leaves)
    return f"{type(value).__name__} ({inside})"


def number_of(name: str, value: object, otherwise: str = "wrap it in a metric that does") -> float:
    """Convert the value of a metric to one real number.

    Args:
        name: of the metric.
        value: that it computed.
        otherwise: what else to do about several numbers, for the end of the message.

    Raises:
        MetricError: it is not one real number.
    """
    if isinstance(value, Tensor) and value.numel() == 1 and not value.is_complex():
        return float(value)
    if isinstance(value, numbers.Real):
        return float(value)
    raise MetricError(
        f"metric {name!r} must give a scalar, got {shapes(value)}. Average it, for example with "
        f"average='macro', or {otherwise}."
    )


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


def tensors_of(name: str, prediction: object, target: object) -> Tuple[Tensor, Tensor]:
    """Make sure that a named metric gets one tensor as each of its arguments; return both."""
    for role, value in (("prediction", prediction), ("target", target)):
        if not isinstance(value, Tensor):
            raise MetricError(
                f"metric {name!r} takes one tensor as {role}, got {type(value).__name__}. Pass a "
                "callable metric(prediction, target) that picks its tensors."
            )
    assert isinstance(prediction, Tensor)
    assert isinstance(target, Tensor)
    return prediction, target


def sum_of_elements(
    values: Values, name: str, prediction: object, target: object, size: int, weight: object
) -> Tuple[float, float]:
    """Sum a named metric. Every element counts the same, so samples of one shape do as well."""
    elements, counted = values(name, *tensors_of(name, prediction, target))
    return sums(name, elements, counted, weight)


def sum_of_samples(
    metric: Callable[..., object],
    name: str,
    prediction: object,
    target: object,
    size: int,
    weight: object,
    /,
    **fields: object,
) -> Tuple[float, float]:
    """Sum a user's callable: one value per sample, or one for the micro-batch."""
    value = metric(prediction, target, **fields)
    number = _number(value)
    if number is not None:
        return number * size, size
    rows = _rows(value, size)
    if rows is not None:
        return float(rows.double().reshape(size, -1).mean(1).sum()), size
    raise MetricError(
        f"metric {name!r} must give a number, or a tensor of {size} values, one for each sample, "
        f"got {shapes(value)}. Return a torch tensor, with all other dimensions reduced by .mean()."
    )


def sum_of_weighted_samples(
    metric: Callable[..., object],
    takes_weight: bool,
    name: str,
    prediction: object,
    target: object,
    size: int,
    weight: object,
    /,
    **fields: object,
) -> Tuple[float, float]:
    """Sum a user's callable under weighted_metrics: it takes the weights, or leaves them to us."""
    if not takes_weight:
        value = metric(prediction, target, **fields)
        rows = _rows(value, size)
        if rows is not None:
            return sums(name, rows, None, weight)
        raise MetricError(
            f"weighted metric {name!r} must give a tensor of {size} values, one for each sample, "
            f"got {shapes(value)}. Return the values before their mean, or take sample_weight as a "
            "third argument and return the weighted mean."
        )
    weight = torch.ones(size) if weight is None else as_weights(weight, MetricError)
    value = metric(prediction, target, sample_weight=weight, **fields)
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
