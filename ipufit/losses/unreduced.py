"""From one value for each element to the loss of a micro-batch, weighted or not."""

from __future__ import annotations

import dataclasses
from typing import Dict, Optional, Tuple, Union

import torch
from torch import Tensor

from ipufit.core.sample_weights import broadcast_weights
from ipufit.errors import LossError

__all__ = ["Elements", "LabelRange", "LossTerm", "constant", "nothing_counts"]


@dataclasses.dataclass(frozen=True)
class LabelRange:
    """Class indices that a loss takes.

    Attributes:
        name: of the loss.
        key: of the target among those of several losses; None of one loss.
        classes: how many there are in the prediction.
        ignore_index: index that is left out.
    """

    name: str
    key: Optional[Union[str, int]]
    classes: int
    ignore_index: int


@dataclasses.dataclass(frozen=True)
class LossTerm:
    """The loss of one micro-batch, with what it is a mean over.

    Attributes:
        value: shape (), differentiable: the mean over the micro-batch, which is optimised.
        count: shape (), float64, detached: how many tokens, or how much weight, ``value`` is the
            mean over; None for the samples.
        parts: of several losses, ``<output>_loss`` to the mean of that one, without its
            ``loss_weights``; shape () each, detached. Empty for one loss.
    """

    value: Tensor
    count: Optional[Tensor] = None
    parts: Dict[str, Tensor] = dataclasses.field(default_factory=dict)


def constant(value: float, like: Tensor) -> Tensor:
    """A number as a tensor of shape (), float64, made so that a recording holds it."""
    return torch.full((), value, dtype=torch.float64, device=like.device)


def nothing_counts(value: Tensor, count: Tensor) -> Tensor:
    """Zero, with zero gradient, in place of a value that is the mean over nothing."""
    return value.masked_fill(count == 0, 0.0)


@dataclasses.dataclass(frozen=True)
class Elements:
    """A loss before it is reduced.

    Attributes:
        values: one for each element, floating-point, shape (batch, ...).
        shares: how much each counts in the mean without sample weights: a tensor of the shape of
            ``values``, or one number for all. Their sum is what the sum is divided by.
    """

    values: Tensor
    shares: Union[Tensor, float] = 1.0

    def weighted_sum(self, weight: Optional[Tensor], where: str) -> Tensor:
        """The sum of values, shape (), at least float32; a weight of zero hides inf and nan."""
        values = self.values.to(torch.promote_types(self.values.dtype, torch.float32))
        if weight is not None:
            spreaded = broadcast_weights(weight, values.shape, where, LossError)
            # Multiplied by zero, inf would be nan.
            values = (values * spreaded.to(values.dtype)).masked_fill(spreaded == 0, 0.0)
        return values.sum()

    def size(self, weight: Optional[Tensor], where: str) -> Tensor:
        """The sum of the shares, each times its weight: shape (), float64."""
        if weight is None:
            if isinstance(self.shares, float):
                return constant(self.values.numel() * self.shares, self.values)
            return self.shares.sum(dtype=torch.float64)
        wide = broadcast_weights(weight, self.values.shape, where, LossError).double()
        if isinstance(self.shares, float):
            return wide.expand(self.values.shape).sum() * self.shares
        return (wide * self.shares).sum()

    def mean(
        self, weight: Optional[Tensor], by_weight: bool, empty_is_zero: bool, where: str
    ) -> Tuple[Tensor, Tensor]:
        """The mean, and what it is the mean over.

        Args:
            weight: of the samples, or None.
            by_weight: divide by the sum of the weights instead of the number of elements.
            empty_is_zero: whether the mean over nothing is 0 rather than nan.
            where: whose values, for messages.

        Returns:
            The mean, shape (), of the values' dtype; the divisor, shape (), float64.
        """
        sum_of_values = self.weighted_sum(weight, where)
        size = self.size(weight if by_weight else None, where).detach()
        divisor = size.masked_fill(size == 0, 1.0) if empty_is_zero else size
        value = sum_of_values / divisor.to(sum_of_values.dtype)
        if empty_is_zero:
            value = nothing_counts(value, size)
        return value.to(self.values.dtype), size
