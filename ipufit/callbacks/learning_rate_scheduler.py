"""A learning rate for every epoch from a function."""

from __future__ import annotations

import inspect
import math
from typing import Any, Callable, Optional, Tuple

from ipufit.callbacks.callback import Callback, Logs
from ipufit.callbacks.checks import one_of, say
from ipufit.callbacks.rates import log_rates, set_rates
from ipufit.errors import ConfigurationError

__all__ = ["LearningRateScheduler"]


class LearningRateScheduler(Callback):
    """Sets the learning rate at the beginning of every epoch, as Keras does.

    Of several parameter groups, each gets what the schedule makes of its own rate.
    ``logs["learning_rate"]`` is the rate of the epoch; of several groups, the first one's, and
    ``learning_rate_1`` and so on are the others'.

    Args:
        schedule: ``schedule(epoch, rate)`` or ``schedule(epoch)``, with the epoch's index and its
            present rate; returns the rate.
        verbose: 1 to say what is done.

    Raises:
        ConfigurationError: the schedule can't be called so; or, in training, it returns no rate.
    """

    adds: Tuple[str, ...] = ("learning_rate",)

    def __init__(self, schedule: Callable[..., float], verbose: int = 0) -> None:
        super().__init__()
        self.schedule = schedule
        self.verbose: int = one_of(self, "verbose", verbose, (0, 1))
        self._arguments = _count_arguments(schedule)

    def _rate(self, epoch: int, rate: float) -> float:
        came: Any = self.schedule(*(epoch, rate)[: self._arguments])
        new = math.nan
        if not isinstance(came, (bool, str, bytes)) and hasattr(came, "__float__"):
            new = float(came)
        if not (math.isfinite(new) and new >= 0):
            raise ConfigurationError(
                "the schedule of LearningRateScheduler must return a finite number of at least 0, "
                f"got {came!r} for epoch {epoch} and the rate {rate}. Correct the function."
            )
        return new

    def on_epoch_begin(self, epoch: int, logs: Optional[Logs] = None) -> None:
        """Set the learning rate of every parameter group for the epoch."""
        rates = set_rates(self.model.optimizer, lambda rate: self._rate(epoch, rate))
        if self.verbose:
            shown = ", ".join(f"{rate:g}" for rate in rates)
            say(f"epoch {epoch + 1}: LearningRateScheduler sets the learning rate to {shown}")

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Put the learning rates of the epoch into ``logs``."""
        if logs is not None:
            log_rates(self.model.optimizer, logs)


def _count_arguments(schedule: object) -> int:
    """2 or 1: how many of (epoch, rate) the schedule takes."""
    if not callable(schedule) or isinstance(schedule, type):
        raise _refusal(schedule)
    try:
        signature = inspect.signature(schedule)
    except (TypeError, ValueError):
        return 2
    for count in (2, 1):
        try:
            signature.bind(*(0, 0.0)[:count])
        except TypeError:
            continue
        return count
    raise _refusal(schedule)


def _refusal(schedule: object) -> ConfigurationError:
    return ConfigurationError(
        "schedule of LearningRateScheduler must be a function of (epoch, rate) or of (epoch), got "
        f"{schedule!r}. Write one, such as lambda epoch, rate: 0.9 * rate."
    )
