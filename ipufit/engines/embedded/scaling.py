"""The loss scale: how it follows the gradients."""

from __future__ import annotations

import dataclasses

from ipufit.recipe import LossScale

__all__ = ["ScaleState"]


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
        # Beyond this the scaled loss itself leaves the range of float32.
        return ScaleState(min(self.value * 2, 2.0**100))
