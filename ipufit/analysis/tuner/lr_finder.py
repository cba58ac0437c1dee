"""Learning rate range test: one short training with a rate that grows.

The range test of Smith, "Cyclical learning rates for training neural networks" (2017), section 3.3,
with an exponential range and a smoothed loss.
"""

from __future__ import annotations

import dataclasses
import math
import os
from typing import Any, List, Mapping, Optional, Tuple, Union

from ipufit.callbacks import Callback
from ipufit.callbacks.epoch_metrics import EpochMetrics
from ipufit.errors import ConfigurationError
from ipufit.utils.figures import new_figure, save_figure

__all__ = ["LearningRates", "RangeTest", "check_range", "exponential_range"]

# Share of the old value in the smoothed loss.
_SMOOTHING = 0.9
# A smoothed loss of so many times its best one has left the road.
_DIVERGED = 4.0


@dataclasses.dataclass(frozen=True)
class LearningRates:
    """Result of a learning rate range test.

    Attributes:
        learning_rates: of the first parameter group that learns, by update.
        losses: of each update, before it.
        smoothed: the losses, exponentially averaged without bias.
        diverged: whether the test ended because the loss had grown to four times its best.
    """

    learning_rates: Tuple[float, ...]
    losses: Tuple[float, ...]
    smoothed: Tuple[float, ...]
    diverged: bool

    @property
    def suggestion(self) -> Optional[float]:
        """The rate around which the smoothed loss fell fastest; None where it never fell.

        Differences are taken over a fifth of the test, so that the noise of single updates does not
        decide.
        """
        reach = max(1, len(self.smoothed) // 10)
        falls = [
            (self.smoothed[i + reach] - self.smoothed[i - reach], self.learning_rates[i])
            for i in range(reach, len(self.smoothed) - reach)
        ]
        best = min(falls, default=(0.0, 0.0))
        return best[1] if best[0] < 0 else None

    def plot(self, path: Optional[Union[str, os.PathLike[str]]] = None) -> Any:
        """Draw the loss over the learning rate.

        Args:
            path: where to save the picture (the suffix chooses the format); None to show it in
                a notebook, and return it.

        Returns:
            The matplotlib ``Figure``.

        Raises:
            ConfigurationError: matplotlib is not installed, or the path can't be written.
        """
        figure = new_figure("LearningRates.plot", (6.0, 3.8))
        panel = figure.subplots()
        panel.plot(self.learning_rates, self.losses, color="0.75", linewidth=1, label="each update")
        panel.plot(self.learning_rates, self.smoothed, color="C0", linewidth=2, label="smoothed")
        suggestion = self.suggestion
        if suggestion is not None:
            label = f"steepest, {suggestion:.2g}"
            panel.axvline(suggestion, color="C1", linestyle="--", label=label)
        panel.set_xscale("log")
        # The last points of a test that diverged would flatten all others.
        low, first = min(self.smoothed), self.smoothed[0]
        if self.diverged and low < first:
            panel.set_ylim(low - 0.1 * (first - low), first + 0.3 * (first - low))
        panel.set_xlabel("learning rate")
        panel.set_ylabel("loss")
        panel.grid(alpha=0.3)
        panel.legend(frameon=False)
        return save_figure(figure, path, "LearningRates.plot")

    def __repr__(self) -> str:
        suggestion = self.suggestion
        hint = "no suggestion" if suggestion is None else f"suggestion {suggestion:.3g}"
        first, last = self.learning_rates[0], self.learning_rates[-1]
        return f"LearningRates({len(self.losses)} updates from {first:.3g} to {last:.3g}, {hint})"


def check_range(min_lr: Any, max_lr: Any, updates: Any) -> None:
    """Refuse a range that can't be tested.

    Raises:
        ConfigurationError: rates that are not positive and growing, or too few updates.
    """
    for name, value in (("min_lr", min_lr), ("max_lr", max_lr)):
        usable = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not usable or not math.isfinite(value) or value <= 0:
            raise ConfigurationError(f"{name} must be a positive number, got {value!r}.")
    if min_lr >= max_lr:
        raise ConfigurationError(
            f"max_lr must be more than min_lr, got {max_lr!r} and {min_lr!r}. Try min_lr=1e-7, "
            "max_lr=10."
        )
    if isinstance(updates, bool) or not isinstance(updates, int) or updates < 3:
        raise ConfigurationError(
            f"updates must be an integer of at least 3, got {updates!r}. 100 gives a clear curve."
        )


def exponential_range(first: float, last: float, count: int) -> List[float]:
    """Return a geometric sequence from the first to the last number."""
    return [first * (last / first) ** (i / (count - 1)) for i in range(count)]


class RangeTest(Callback):
    """Watches the losses, and ends the test when they diverge.

    Args:
        rates: learning rate of every update.
        meter: measures the training.

    Attributes:
        done: whether the test has ended.
    """

    def __init__(self, rates: List[float], meter: EpochMetrics) -> None:
        super().__init__()
        self.done = False
        self._rates = rates
        self._meter = meter
        self._losses: List[float] = []
        self._smoothed: List[float] = []
        self._average = 0.0
        self._diverged = False

    def on_train_batch_end(self, batch: int, logs: Optional[Mapping[str, float]] = None) -> None:
        """Record the loss of the update and end the test if it diverged."""
        self._losses.append(self._meter.last_loss)
        self._average = _SMOOTHING * self._average + (1 - _SMOOTHING) * self._losses[-1]
        self._smoothed.append(self._average / (1 - _SMOOTHING ** len(self._losses)))
        best = min(self._smoothed)
        self._diverged = self._smoothed[-1] > best + (_DIVERGED - 1) * abs(best)
        self.done = self._diverged or len(self._losses) >= len(self._rates)

    def result(self, blew_up: bool) -> LearningRates:
        """Return the learning rates so far with their losses.

        Args:
            blew_up: whether the loss became infinite or NaN.
        """
        return LearningRates(
            tuple(self._rates[: len(self._losses)]),
            tuple(self._losses),
            tuple(self._smoothed),
            self._diverged or blew_up,
        )
