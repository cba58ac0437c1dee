"""The loss scale: how it follows the gradients."""

from __future__ import annotations

import dataclasses
import math
from typing import List, Optional

import torch
from torch import Tensor

from ipufit.core.train_config import LossScale
from ipufit.errors import NonFiniteLossError

# Halved from 2**15 so far, the scale has nothing to do with the trouble any more.
_SMALLEST = 2.0**-24
# Doubled beyond this, the scaled loss itself leaves the range of float32.
_LARGEST = 2.0**100


@dataclasses.dataclass(frozen=True)
class ScaleState:
    """The present factor.

    Attributes:
        value: what the loss is multiplied with.
        good: updates since it last changed.
    """

    value: float
    good: int = 0

    def after(self, finite: bool, rule: LossScale) -> ScaleState:
        """The state after an update whose gradient was finite or not."""
        if rule.growth_interval is None:
            return self
        if not finite:
            return ScaleState(self.value / 2)
        if self.good + 1 < rule.growth_interval:
            return ScaleState(self.value, self.good + 1)
        return ScaleState(self.value * 2 if self.value < _LARGEST else self.value)


class Scaler:
    """Decides which updates are skipped.

    Args:
        rule: how the factor changes.
        state: where an earlier program left it; None starts anew.

    Attributes:
        state: the present factor.
    """

    def __init__(self, rule: LossScale, state: Optional[ScaleState]) -> None:
        self._rule = rule
        self.state = state or ScaleState(rule.initial)

    @property
    def value(self) -> float:
        """The present factor."""
        return self.state.value

    def tensor(self, device: torch.device) -> Tensor:
        """The present factor, shape (), float64: exact whatever the loss's dtype."""
        return torch.full((), self.state.value, dtype=torch.float64, device=device)

    def coming(self, updates: int) -> List[ScaleState]:
        """Foresee the scale of so many updates, and the one after, if no gradient is lost."""
        states = [self.state]
        for _ in range(updates):
            states.append(states[-1].after(True, self._rule))
        return states

    def judge(
        self, finite: Tensor, left_out: Optional[bool], seen: List[Tensor], update: int
    ) -> bool:
        """Decide whether an update is skipped; the factor follows.

        Args:
            finite: whether its gradients are.
            left_out: whether it is known to be skipped; None to look at its gradients at once.
            seen: takes whether they are finite, for whoever looks later.
            update: its index.

        Raises:
            NonFiniteLossError: no factor, however small, makes the gradients finite.
        """
        if left_out is None:
            left_out = not bool(finite)
        else:
            seen.append(finite)
        state = self.state.after(not left_out, self._rule)
        if left_out and self._rule.dynamic and state.value < _SMALLEST:
            raise NonFiniteLossError(
                "the gradient must be finite at some loss scale, but it was not down to "
                f"{self.state.value:g} in update {update}. The weights, buffers and optimizer "
                "state are those from before that update. Look for a division by zero or a root at "
                "zero in the backward pass.",
                update,
                math.nan,
            )
        self.state = state
        return left_out
