"""Automatic loss scaling: a factor that follows the size of half-precision gradients."""

from __future__ import annotations

import dataclasses
import enum
from typing import Any, Mapping, Optional

from torch import Tensor

from ipufit.poptorch._errors import error

__all__ = ["FINAL", "NAME", "AutomaticLossScale", "ScalingSettings", "Tracked"]

NAME = "lossScaleUpdateFactor"

# The factor by the optimizer's loss scaling.
FINAL = "finalLossScale"

_PREFIX = "automaticLossScalingSettings."


class Tracked(enum.IntEnum):
    """Methods of choosing the gradients to track, as PopART numbers them."""

    All = 0
    Products = 1
    Named = 2


@dataclasses.dataclass(frozen=True)
class ScalingSettings:
    """The compiler's options ``automaticLossScalingSettings``.

    Attributes:
        edge: from which part of float16's largest number an element counts as large
            (``binEdgeLocation``).
        threshold: the part of all elements that may be large (``thresholdUpperCountProportion``).
        period: from one update that the factor changes after to the next (``updatePeriod``).
        tracked: which gradients are looked at (``gradientTensorTrackingMethod``).
    """

    edge: float = 0.125
    threshold: float = 1e-7
    period: int = 1
    tracked: Tracked = Tracked.All

    @staticmethod
    def enabled(options: Mapping[str, object]) -> bool:
        """Return True if the options turn automatic loss scaling on."""
        return bool(options.get(f"{_PREFIX}enabled", False))

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> Optional[ScalingSettings]:
        """Return the settings of automatic loss scaling; None if it is off.

        Args:
            options: the compiler's, by name.
        Raises:
            Error: a value that the compiler refuses.
        """
        if not cls.enabled(options):
            return None
        for name in ("binEdgeLocation", "thresholdUpperCountProportion"):
            value = options.get(_PREFIX + name, 0.0)
            if not isinstance(value, float) or not 0 <= value <= 1:
                raise error(
                    f"Out of range value for '{name}'. The current value is {value}, but it should "
                    f'be in the range [0, 1]. Set it with options._Popart.set("{_PREFIX}{name}", '
                    "value)."
                )
        method = options.get(f"{_PREFIX}gradientTensorTrackingMethod", Tracked.All)
        if method not in (Tracked.All, Tracked.Products):
            raise error(
                "gradientTensorTrackingMethod must be 0 (all gradients) or 1 (those of matrix "
                f"products and convolutions), got {int(method)}: the tensors that 2 stands for "
                "can't be named through PopTorch. Leave it out for 0."
            )
        return cls(
            float(options.get(f"{_PREFIX}binEdgeLocation", cls.edge)),
            float(options.get(f"{_PREFIX}thresholdUpperCountProportion", cls.threshold)),
            max(1, int(options.get(f"{_PREFIX}updatePeriod", cls.period))),
            Tracked(method),
        )


class AutomaticLossScale:
    """A factor that doubles after updates, and halves when many elements are large.

    No update is skipped: the factor keeps gradients within float16's range. Of every ``period``
    updates the first is observed, and changes the factor.

    Args:
        settings: thresholds and period.
        elements: number of elements that are tracked in a micro-batch.

    Attributes:
        factor: by which the optimizer's loss scaling is multiplied in the coming update.
    """

    def __init__(self, settings: Optional[ScalingSettings] = None, elements: int = 1) -> None:
        self.factor = 1.0
        self._settings = settings or ScalingSettings()
        self._elements = elements
        self._updates = 0
        self._large: Optional[Tensor] = None
        self._counted = 0

    def observe(self, large: Tensor) -> None:
        """Record a micro-batch, without synchronising.

        Args:
            large: shape (), number of elements that are large.
        """
        self._large = large if self._large is None else self._large + large
        self._counted += self._elements

    def update(self) -> None:
        """Change the factor, after the update in which it was used."""
        if self._updates % self._settings.period == 0:
            large = 0 if self._large is None else int(self._large)
            crowded = large > self._settings.threshold * self._counted
            self.factor *= 0.5 if crowded else 2.0
        self._updates += 1
        self._large, self._counted = None, 0
