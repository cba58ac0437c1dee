"""Stop when nothing gets better any more."""

from __future__ import annotations

from typing import Any, Optional, Tuple

from ipufit.callbacks.callback import Logs
from ipufit.callbacks.checks import finite, one_of, say, stored, whole
from ipufit.callbacks.monitor import Monitor
from ipufit.core.weights_file import WeightsCopy

__all__ = ["EarlyStopping"]


class EarlyStopping(Monitor):
    """Ends training when a value has not improved for some epochs, as Keras does.

    An epoch in which the value is absent, such as one without validation, is no epoch to this
    callback. NaN is never an improvement.

    Args:
        monitor: name of the value.
        min_delta: an improvement by no more than this is none.
        patience: epochs without improvement after which training ends; 0 and 1 are alike.
        verbose: 1 to say what is done.
        mode: "min", "max", or "auto": as the metric says; an error if it does not.
        baseline: improvements count against the patience until one is better than this.
        restore_best_weights: put the module's parameters and buffers of the best epoch back when
            training ends, also when it reached the last epoch or failed.
        start_from_epoch: index of the first epoch to look at.

    Attributes:
        best: the best value, or None.
        best_epoch: its epoch, or None.
        stopped_epoch: the epoch that this callback made the last one, or None.
        wait: epochs without improvement so far.

    Raises:
        ConfigurationError: an argument can't work; or, in training, there is no such value.
    """

    adds: Tuple[str, ...] = ()

    def __init__(
        self,
        monitor: str = "val_loss",
        min_delta: float = 0,
        patience: int = 0,
        verbose: int = 0,
        mode: str = "auto",
        baseline: Optional[float] = None,
        restore_best_weights: bool = False,
        start_from_epoch: int = 0,
    ) -> None:
        super().__init__(monitor, mode, min_delta)
        self.patience: int = whole(self, "patience", patience)
        self.verbose: int = one_of(self, "verbose", verbose, (0, 1))
        self.baseline: Optional[float] = (
            None if baseline is None else finite(self, "baseline", baseline)
        )
        self.restore_best_weights: bool = one_of(
            self, "restore_best_weights", restore_best_weights, (True, False)
        )
        self.start_from_epoch: int = whole(self, "start_from_epoch", start_from_epoch)
        self._forget()

    def _forget(self) -> None:
        self.wait: int = 0
        self.best: Optional[float] = None
        self.best_epoch: Optional[int] = None
        self.stopped_epoch: Optional[int] = None
        self._snapshot: Optional[WeightsCopy] = None

    def on_train_begin(self, logs: Optional[Logs] = None) -> None:
        """Forget the best value and the weights of an earlier fit."""
        super().on_train_begin(logs)
        self._forget()

    def state_dict(self) -> Any:
        """The best value, the patience that is left, and the best weights if they are kept."""
        names = ("wait", "best", "best_epoch", "stopped_epoch")
        progress = {name: getattr(self, name) for name in names}
        snapshot = None if self._snapshot is None else self._snapshot.state_dict()
        return {**super().state_dict(), **progress, "weights": snapshot}

    def load_state_dict(self, state: Any) -> None:
        """Restore what :meth:`state_dict` returned."""
        super().load_state_dict(state)
        self.wait, self.best = int(state["wait"]), stored(state, "best", float)
        self.best_epoch = stored(state, "best_epoch", int)
        self.stopped_epoch = stored(state, "stopped_epoch", int)
        if state["weights"] is not None:
            self._snapshot = WeightsCopy(self.model.module)
            self._snapshot.load_state_dict(state["weights"])

    def on_epoch_end(self, epoch: int, logs: Optional[Logs] = None) -> None:
        """Compare, remember the best weights, or ask to stop."""
        current = self._current(logs or {})
        if current is None or epoch < self.start_from_epoch:
            return
        improved = self._improves(current, self.best)
        if improved or self.best_epoch is None:
            self.best_epoch = epoch
            if self.restore_best_weights:
                self._snapshot = WeightsCopy(self.model.module)
        self.wait += 1
        if improved:
            self.best = current
            if self.baseline is None or self._improves(current, self.baseline):
                self.wait = 0
        elif self.wait >= self.patience and epoch > 0:
            self.stopped_epoch = epoch
            self.model.stop_training = True

    def on_train_end(self, logs: Optional[Logs] = None) -> None:
        """Put the weights of the best epoch back, if they are to be restored."""
        if self.stopped_epoch is not None and self.verbose:
            say(
                f"epoch {self.stopped_epoch + 1}: EarlyStopping ends training, {self.monitor} has "
                "not improved"
            )
        if self._snapshot is not None:
            if self.verbose:
                say(f"EarlyStopping puts the weights of epoch {(self.best_epoch or 0) + 1} back")
            self._snapshot.restore()
            self._snapshot = None
