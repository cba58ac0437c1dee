"""Lower the learning rate when nothing gets better any more."""

from __future__ import annotations

from typing import Any, Optional, Tuple

from ipufit.callbacks.callback import Logs
from ipufit.callbacks.checks import finite, one_of, say, stored, whole
from ipufit.callbacks.monitor import Monitor
from ipufit.callbacks.rates import learning_rates, log_rates, set_rates
from ipufit.errors import ConfigurationError

__all__ = ["ReduceLROnPlateau"]


class ReduceLROnPlateau(Monitor):
    """Multiplies the learning rate when a value has not improved for some epochs, as Keras does.

    The rate of every parameter group is multiplied, so that their ratios stay, down to ``min_lr``.
    ``logs["learning_rate"]`` is the rate that the epoch was trained with; of several groups, the
    first one's, and ``learning_rate_1`` and so on are the others'.

    Args:
        monitor: name of the value.
        factor: what the rate is multiplied with, between 0 and 1.
        patience: epochs without improvement before that; 0 and 1 are alike.
        verbose: 1 to say what is done.
        mode: "min", "max", or "auto": as the metric says; an error if it does not.
        min_delta: an improvement by no more than this is none.
        cooldown: epochs after a reduction in which none counts as one without improvement.
        min_lr: a rate is not made smaller than this.

    Attributes:
        best: the best value, or None.
        wait: epochs without improvement so far.

    Raises:
        ConfigurationError: an argument can't work; or, in training, there is no such value.
    """

    adds: Tuple[str, ...] = ("learning_rate",)

    def __init__(
        self,
        monitor: str = "val_loss",
        factor: float = 0.1,
        patience: int = 10,
        verbose: int = 0,
        mode: str = "auto",
        min_delta: float = 1e-4,
        cooldown: int = 0,
        min_lr: float = 0.0,
    ) -> None:
        super().__init__(monitor, mode, min_delta)
        self.factor: float = finite(self, "factor", factor)
        if not 0 < self.factor < 1:
            raise ConfigurationError(
                f"factor of ReduceLROnPlateau must be between 0 and 1, so that the learning rate "
                f"becomes smaller, got {factor!r}. Try 0.1."
            )
        self.patience: int = whole(self, "patience", patience)
        self.verbose: int = one_of(self, "verbose", verbose, (0, 1))
        self.cooldown: int = whole(self, "cooldown", cooldown)
        self.min_lr: float = finite(self, "min_lr", min_lr, 0.0)
        self._forget()

    def _forget(self) -> None:
        self.best: Optional[float] = None
        self.wait: int = 0
        self._cooling = 0

    def on_train_begin(self, logs: Optional[Logs] = None) -> None:
        """Forget the best value and the patience of an earlier fit."""
        super().on_train_begin(logs)
        self._forget()

    def state_dict(self) -> Any:
        """The best value, and how long it has been the best."""
        progress = {"best": self.best, "wait": self.wait, "cooling": self._cooling}
        return {**super().state_dict(), **progress}

    def load_state_dict(self, state: Any) -> None:
        """Restore what :meth:`state_dict` returned."""
        super().load_state_dict(state)
        self.best = stored(state, "best", float)
        self.wait, self._cooling = int(state["wait"]), int(state["cooling"])

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Compare, and lower the rate if it is time."""
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
