"""The losses of several micro-batches from the elements of all of them at once."""

from __future__ import annotations

import functools
from typing import Any, Optional

from torch import Tensor, nn

from ipufit.losses.loss import Loss
from ipufit.losses.named import Named
from ipufit.losses.rules import Layout, torch_rule

__all__ = ["losses_together"]


def losses_together(loss: Loss, prediction: Any, target: Any, count: int) -> Optional[Tensor]:
    """Compute a loss for each of several micro-batches of one size at once.

    Args:
        loss: any.
        prediction, target: of all, one after another along the first dimension.
        count: how many there are.

    Returns:
        A value for each, shape (micro-batches,), differentiable: what the loss itself gives for
        them one by one. None of a loss that is not known to be a mean or sum over elements, and
        where it must be asked for counts.
    """
    plain = type(loss) is Loss and not loss.takes_weight and loss.normalize != "tokens"
    are_rows = (isinstance(each, Tensor) and each.dim() > 0 for each in (prediction, target))
    if not (plain and all(are_rows)):
        return None
    call = loss.module if loss.module is not None else loss.function
    named = call if isinstance(call, Named) else None
    call = named.function if named is not None else call
    rule, reduction = torch_rule(call) if call is not None else None, _reduction(call)
    if rule is None or reduction not in ("mean", "sum", "batchmean"):
        return None
    if not _by_rows(rule.layout, call, prediction, target):
        return None
    if named is not None:
        named.accept(prediction, target)
    elements = rule.elements(prediction, target, None)
    values = elements.values.reshape(count, -1)
    if reduction == "sum":
        return values.sum(1)
    if isinstance(elements.shares, Tensor):
        return values.sum(1) / elements.shares.reshape(count, -1).sum(1)
    if reduction == "batchmean":
        return values.sum(1) / (elements.values.shape[0] // count)
    return values.mean(1)


def _by_rows(layout: Layout, call: Any, prediction: Tensor, target: Tensor) -> bool:
    """True if each row of the elements comes of the same row of prediction and target alone."""
    if prediction.shape[0] != target.shape[0]:
        return False
    if layout == "classes" and not target.is_floating_point():
        return target.shape == prediction.shape[:1] + prediction.shape[2:]
    settings = call.keywords if isinstance(call, functools.partial) else vars(call)
    settings = {**settings, **settings.get("_buffers", {})}
    weights = [settings.get(name) for name in ("weight", "pos_weight")]
    wide = any(
        isinstance(weight, Tensor) and weight.dim() >= prediction.dim() for weight in weights
    )
    return layout == "rows" or (target.shape == prediction.shape and not wide)


def _reduction(call: object) -> Any:
    """How one of torch's losses joins its elements."""
    if isinstance(call, nn.Module):
        return getattr(call, "reduction", None)
    if isinstance(call, functools.partial):
        return call.keywords.get("reduction", "mean")
    return "mean"
