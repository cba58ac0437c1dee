"""Callbacks that set the learning rate, and where torch keeps it."""

from __future__ import annotations

import inspect
import math
from typing import Callable, Dict, List, Mapping, Optional, Tuple

from torch import Tensor
from torch.optim import Optimizer

from ipufit.callbacks.callback import Callback, Logs, finite, one_of, stored, whole
from ipufit.callbacks.stopping import Monitor
from ipufit.core import Direction, Mention
from ipufit.errors import ConfigurationError, unfit
from ipufit.utils.console import say
from ipufit.utils.error_collector import as_float


def learning_rates(optimizer: Optimizer) -> List[float]:
    """Return the learning rates of all parameter groups."""
    return [float(group["lr"]) for group in optimizer.param_groups]


def set_rates(optimizer: Optimizer, new: Callable[[float], float]) -> List[float]:
    """Give every parameter group a learning rate made from its present one."""
    rates = [new(rate) for rate in learning_rates(optimizer)]
    for group, rate in zip(optimizer.param_groups, rates):
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate
    return rates


def log_rates(optimizer: Optimizer, logs: Dict[str, float]) -> None:
    """Under "learning_rate" that of the first group, under "learning_rate_1", ... the others'."""
    for index, rate in enumerate(learning_rates(optimizer)):
        logs[f"learning_rate_{index}" if index else "learning_rate"] = rate


class LearningRateScheduler(Callback):
    """Sets the learning rate at the beginning of every epoch, as Keras does.

    The schedule is called for each parameter group with the rate of the group.
    ``logs["learning_rate"]`` is the rate of the epoch for the first group; ``learning_rate_1`` and
    so on are those of the others.

    Args:
        schedule: ``schedule(epoch, rate)`` or ``schedule(epoch)``, with the epoch's index and the
            current rate; returns the new rate.
        verbose: 1 to print a message.

    Raises:
        ConfigurationError: the schedule can't be called in this way; or, in training, it does not
            return a rate.
    """

    adds: Tuple[str, ...] = ("learning_rate",)

    def __init__(self, schedule: Callable[..., float], verbose: Mention = 0) -> None:
        super().__init__()
        self.schedule = schedule
        self.verbose: int = one_of(self, "verbose", verbose, Mention)
        self._arguments = _count_arguments(schedule)

    def _rate(self, epoch: int, rate: float) -> float:
        came = self.schedule(*(epoch, rate)[: self._arguments])
        new = as_float(came)
        if not (math.isfinite(new) and new >= 0):
            raise ConfigurationError(
                "the schedule of LearningRateScheduler must return a finite number of at least 0, "
                f"got {came!r} for epoch {epoch + 1} and the rate {rate}. Correct the function."
            )
        return new

    def on_epoch_begin(self, epoch: int, logs: Optional[Logs] = None) -> None:
        """Set the learning rate of every parameter group for the epoch."""
        rates = set_rates(self.model.optimizer, lambda rate: self._rate(epoch, rate))
        if self.verbose:
            shown = ", ".join(f"{rate:g}" for rate in rates)
            say(f"epoch {epoch + 1}: LearningRateScheduler sets the learning rate to {shown}")

    def on_epoch_end(self, epoch: int, logs: Optional[Dict[str, float]] = None) -> None:
        """Add the learning rates of the epoch to ``logs``."""
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


class ReduceLROnPlateau(Monitor):
    """Multiplies the learning rate when a value has not improved for some epochs, as Keras does.

    The rate of every parameter group is multiplied, which keeps their ratios, down to ``min_lr``.
    ``logs["learning_rate"]`` is the rate of the epoch for the first group; ``learning_rate_1`` and
    so on are those of the others.

    Args:
        monitor: name of the value.
        factor: factor for the rate, between 0 and 1.
        patience: epochs without improvement before a reduction; 0 means the same as 1.
        verbose: 1 to print a message.
        mode: "min", "max", or "auto", as the metric declares; an error if it declares nothing.
        min_delta: smallest improvement that counts.
        cooldown: epochs after a reduction that do not count for the patience.
        min_lr: smallest rate.

    Attributes:
        best: the best value, or None.
        wait: epochs without improvement so far.

    Raises:
        ConfigurationError: an argument can't work; or, in training, the value does not exist.
    """

    adds: Tuple[str, ...] = ("learning_rate",)

    def __init__(
        self,
        monitor: str = "val_loss",
        factor: float = 0.1,
        patience: int = 10,
        verbose: Mention = 0,
        mode: Direction = "auto",
        min_delta: float = 1e-4,
        cooldown: int = 0,
        min_lr: float = 0.0,
    ) -> None:
        super().__init__(monitor, mode, min_delta)
        self.factor: float = finite(self, "factor", factor)
        if not 0 < self.factor < 1:
            needed = "between 0 and 1, so that the learning rate becomes smaller"
            raise unfit("factor of ReduceLROnPlateau", needed, factor, "Try 0.1.")
        self.patience: int = whole(self, "patience", patience)
        self.verbose: int = one_of(self, "verbose", verbose, Mention)
        self.cooldown: int = whole(self, "cooldown", cooldown)
        self.min_lr: float = finite(self, "min_lr", min_lr, 0.0)

    def _forget(self) -> None:
        self.best = None
        self.wait: int = 0
        self._cooling = 0

    def state_dict(self) -> Dict[str, object]:
        """Return the best value, and the epochs since then."""
        return {**super().state_dict(), "wait": self.wait, "cooling": self._cooling}

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Restore what :meth:`state_dict` returned."""
        super().load_state_dict(state)
        self.wait, self._cooling = stored(state, "wait", int), stored(state, "cooling", int)

    def on_epoch_end(self, epoch: int, logs: Optional[Dict[str, float]] = None) -> None:
        """Compare, and reduce the rate if it is time."""
        logs = {} if logs is None else logs
        log_rates(self.model.optimizer, logs)
        current = self._current(logs)
        if current is None:
            return
        if self._cooling:
            self._cooling -= 1
            self.wait = 0
        if self._improves(current, self.best):
            self.best = current
            self.wait = 0
        elif not self._cooling:
            self.wait += 1
            if self.wait >= self.patience:
                self._reduce(epoch)

    def _reduce(self, epoch: int) -> None:
        optimizer = self.model.optimizer
        if all(rate <= self.min_lr for rate in learning_rates(optimizer)):
            return
        # A rate that is below the minimum already stays as it is.
        rates = set_rates(
            optimizer,
            lambda rate: rate if rate <= self.min_lr else max(rate * self.factor, self.min_lr),
        )
        self._cooling, self.wait = self.cooldown, 0
        if self.verbose:
            shown = ", ".join(f"{rate:g}" for rate in rates)
            say(f"epoch {epoch + 1}: ReduceLROnPlateau sets the learning rate to {shown}")
