"""The loss of a micro-batch of which only some samples count: the rest is padding."""

from __future__ import annotations

from typing import Any, Optional

from torch import Tensor

from ipufit.core.outputs import children, pick
from ipufit.core.sample_weights import as_weights, total
from ipufit.errors import LossError
from ipufit.losses.loss import Loss
from ipufit.losses.multi_output import SeveralLosses
from ipufit.losses.unreduced import Elements, LossTerm, nothing_counts

__all__ = ["loss_of_valid"]


def loss_of_valid(
    loss: Loss, prediction: object, target: object, sample_weight: object, valid: Tensor
) -> Optional[LossTerm]:
    """Compute the loss without the samples that do not count.

    Args:
        loss: normal form.
        prediction, target, sample_weight: as for the loss.
        valid: shape (batch,), 1 for samples that count and 0 for padding.

    Returns:
        The loss, zero where no sample counts; None of a loss that can't be told sample by sample.
    """
    if isinstance(loss, SeveralLosses):
        return _of_several(loss, prediction, target, sample_weight, valid)
    weight = None if sample_weight is None else as_weights(sample_weight, LossError)
    hidden = valid if weight is None else _times(weight, valid)
    elements = loss.separated(prediction, target, hidden)
    if elements is None:
        return None
    where = f"loss {loss.name!r}"
    value = elements.weighted_sum(hidden, where)
    if loss.reduction == "sum":
        return LossTerm(value.to(elements.values.dtype))
    by_weight = weight is not None and loss.sample_weight_reduction == "mean_with_sample_weight"
    count = _size(elements, hidden if by_weight else valid, where)
    value = nothing_counts(value / count.masked_fill(count == 0, 1.0).to(value.dtype), count)
    counted = loss.normalize == "tokens" or (by_weight and loss.normalize == "samples")
    return LossTerm(value.to(elements.values.dtype), count if counted else None)


def _size(elements: Elements, weight: Tensor, where: str) -> Tensor:
    return elements.size(weight, where).detach()


def _times(weight: Tensor, valid: Tensor) -> Tensor:
    return weight * valid.reshape((-1,) + (1,) * (weight.dim() - 1)).to(weight.dtype)


def _of_several(
    loss: SeveralLosses, prediction: object, target: object, sample_weight: object, valid: Tensor
) -> Optional[LossTerm]:
    value: Optional[Tensor] = None
    means = {}
    for part in loss.parts:
        term = loss_of_valid(
            part.loss,
            pick(prediction, part.key, "the module's outputs", LossError),
            pick(target, part.key, "the target", LossError),
            _weight_of(sample_weight, part.key),
            valid,
        )
        if term is None:
            return None
        means[part.name] = term.value.detach()
        share = term.value if part.weight == 1.0 else term.value * part.weight
        value = share if value is None else value + share
    assert value is not None, "there is at least one part"
    count = None
    counted = isinstance(sample_weight, Tensor) and loss.normalize != "micro_batches"
    if counted and loss.sample_weight_reduction != "sum_over_batch_size":
        count = total(_times(as_weights(sample_weight, LossError), valid))
    return LossTerm(value, count, means)


def _weight_of(sample_weight: Any, key: Any) -> Any:
    if sample_weight is None or isinstance(sample_weight, Tensor):
        return sample_weight
    if isinstance(key, str) and key not in children(sample_weight):
        return None
    return pick(sample_weight, key, "sample_weight", LossError)
