"""Callbacks that end training: no improvement, a value that is not finite, or time that is up."""

from __future__ import annotations

import datetime
import math
import re
import time
from typing import Dict, Literal, Mapping, Optional, Tuple, Type, TypeVar, Union, get_args

from ipufit.callbacks.callback import Callback, Logs, finite, missing_value, one_of, stored, whole
from ipufit.callbacks.history import improves, required_direction
from ipufit.core import Direction, Mention
from ipufit.core.weights_file import WeightsCopy
from ipufit.errors import NAN_ADVICE, NonFiniteLossError, unfit
from ipufit.utils.console import say, warn_user

T = TypeVar("T")


def _stored_or_none(state: Mapping[str, object], name: str, kind: Type[T]) -> Optional[T]:
    """Read a value of a callback's state in a checkpoint, which may be None.

    Raises:
        KeyError, TypeError, ValueError: it is not of that kind.
    """
    return None if state[name] is None else stored(state, name, kind)


class Monitor(Callback):
    """Knows which value is watched, which way is better, and the best value so far.

    Args:
        monitor: name of the value in ``logs``.
        mode: "min", "max", or "auto" to take the direction from ``params["directions"]``.
        min_delta: an improvement by no more than this is none; its sign does not matter.

    Attributes:
        best: the best value so far, or None; a subclass sets it, and forgets it when it likes.
    """

    def __init__(self, monitor: str, mode: Direction, min_delta: float = 0.0) -> None:
        super().__init__()
        self.best: Optional[float] = None
        if not isinstance(monitor, str) or not monitor:
            needed = "the name of a value, such as 'val_loss'"
            raise unfit(f"monitor of {type(self).__name__}", needed, monitor)
        self.monitor = monitor
        self.mode: str = one_of(self, "mode", mode, Direction)
        self.min_delta: float = abs(finite(self, "min_delta", min_delta))
        self.monitors: Tuple[str, ...] = (monitor,)
        self._was_there = False
        self._forget()

    def _find_direction(self) -> str:
        """The better end: min or max.

        Raises:
            ConfigurationError: nobody knows.
        """
        directions = self.params.get("directions")
        return required_direction(self, self.monitor, self.mode, directions)

    def on_train_begin(self, logs: Optional[Logs] = None) -> None:
        """Find out the direction before any work, and forget what an earlier fit has left."""
        self._was_there = False
        self._forget()
        self._direction = self._find_direction()

    def _forget(self) -> None:
        """Forget what an earlier fit has left; a subclass says what that is."""

    def state_dict(self) -> Dict[str, object]:
        """Return whether the value has ever been there, and the best one; a subclass adds more."""
        return {"was_there": self._was_there, "best": self.best}

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Restore what :meth:`state_dict` returned."""
        self._was_there = bool(state["was_there"])
        self.best = _stored_or_none(state, "best", float)

    def _current(self, logs: Logs) -> Optional[float]:
        """The watched value; None in an epoch that has it not, such as one without validation.

        Raises:
            ConfigurationError: no epoch will have it.
        """
        value = logs.get(self.monitor)
        if value is None:
            coming = [*self.params.get("metrics", ()), *self.params.get("adds", ())]
            if not self._was_there and self.monitor not in coming:
                raise missing_value(self, self.monitor, logs)
            return None
        self._was_there = True
        return float(value)

    def _improves(self, value: float, best: Optional[float]) -> bool:
        """Return True if a value beats the best by more than ``min_delta``; NaN never does."""
        return improves(value, best, self._direction, self.min_delta)


class EarlyStopping(Monitor):
    """Ends training when a value has not improved for some epochs, as Keras does.

    Epochs without the value, such as those without validation, are ignored. NaN is never an
    improvement.

    Args:
        monitor: name of the value.
        min_delta: smallest improvement that counts.
        patience: epochs without improvement after which training ends; 0 means the same as 1.
        verbose: 1 to print a message.
        mode: "min", "max", or "auto", as the metric declares; an error if it declares nothing.
        baseline: an epoch counts as an improvement for the patience only if it is better than this.
        restore_best_weights: restore the module's parameters and buffers of the best epoch when
            training ends, also after the last epoch or an error.
        start_from_epoch: index of the first epoch that counts.

    Attributes:
        best: the best value, or None.
        best_epoch: its epoch, or None.
        stopped_epoch: the epoch after which this callback ended training, or None.
        wait: epochs without improvement so far.

    Raises:
        ConfigurationError: an argument can't work; or, in training, the value does not exist.
    """

    adds: Tuple[str, ...] = ()

    def __init__(
        self,
        monitor: str = "val_loss",
        min_delta: float = 0,
        patience: int = 0,
        verbose: Mention = 0,
        mode: Direction = "auto",
        baseline: Optional[float] = None,
        restore_best_weights: bool = False,
        start_from_epoch: int = 0,
    ) -> None:
        super().__init__(monitor, mode, min_delta)
        self.patience: int = whole(self, "patience", patience)
        self.verbose: int = one_of(self, "verbose", verbose, Mention)
        self.baseline: Optional[float] = (
            None if baseline is None else finite(self, "baseline", baseline)
        )
        self.restore_best_weights: bool = one_of(
            self, "restore_best_weights", restore_best_weights, (True, False)
        )
        self.start_from_epoch: int = whole(self, "start_from_epoch", start_from_epoch)

    def _forget(self) -> None:
        self.wait: int = 0
        self.best = None
        self.best_epoch: Optional[int] = None
        self.stopped_epoch: Optional[int] = None
        self._snapshot: Optional[WeightsCopy] = None

    def state_dict(self) -> Dict[str, object]:
        """Return the best value, the remaining patience, and the best weights if they are kept."""
        names = ("wait", "best_epoch", "stopped_epoch")
        progress = {name: getattr(self, name) for name in names}
        snapshot = None if self._snapshot is None else self._snapshot.state_dict()
        return {**super().state_dict(), **progress, "weights": snapshot}

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Restore what :meth:`state_dict` returned."""
        super().load_state_dict(state)
        self.wait = stored(state, "wait", int)
        self.best_epoch = _stored_or_none(state, "best_epoch", int)
        self.stopped_epoch = _stored_or_none(state, "stopped_epoch", int)
        if state["weights"] is not None:
            self._snapshot = WeightsCopy(self.model.module)
            self._snapshot.load_state_dict(stored(state, "weights", dict))

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
        """Restore the weights of the best epoch, if requested."""
        if self.stopped_epoch is not None and self.verbose:
            say(
                f"epoch {self.stopped_epoch + 1}: EarlyStopping ends training because "
                f"{self.monitor} has not improved"
            )
        if self._snapshot is not None:
            best = f"the weights of epoch {(self.best_epoch or 0) + 1}"
            if not self._snapshot.restore():
                warn_user(
                    f"EarlyStopping can't restore {best}: parameters or buffers were replaced, "
                    "added or removed after it. The module keeps the weights of the last epoch."
                )
            elif self.verbose:
                say(f"EarlyStopping restores {best}")
            self._snapshot = None


class TerminateOnNaN(Callback):
    """Ends training regularly, instead of with an error, when the loss is NaN or infinite.

    ``fit`` detects such a loss before its update and raises ``NonFiniteLossError``. With this
    callback, training stops instead: the weights are those from before that update, and the epoch's
    "loss" is NaN or infinite. Training also ends after an epoch in which another value, such as
    ``val_loss``, is not finite.

    Args:
        raise_error: True raises the error, also for other values.

    Raises:
        ConfigurationError: ``raise_error`` is neither True nor False.
        NonFiniteLossError: in training, with ``raise_error``.
    """

    adds: Tuple[str, ...] = ()

    def __init__(self, raise_error: bool = False) -> None:
        super().__init__()
        self.raise_error: bool = one_of(self, "raise_error", raise_error, (True, False))

    def on_non_finite(self, error: NonFiniteLossError) -> bool:
        """Print that the loss is not finite, and end training."""
        if self.raise_error:
            return False
        say(f"TerminateOnNaN ends training: {error}")
        self.model.stop_training = True
        return True

    def on_train_batch_end(self, batch: int, logs: Optional[Logs] = None) -> None:
        """Check the mean so far, which may overflow even if no loss does."""
        loss = (logs or {}).get("loss", 0.0)
        if not math.isfinite(loss):
            self._end("loss", loss, f"batch {batch}")

    def on_epoch_end(self, epoch: int, logs: Optional[Logs] = None) -> None:
        """Check every value of the epoch."""
        for name, value in (logs or {}).items():
            if not math.isfinite(value) and not self.model.stop_training:
                self._end(name, value, f"epoch {epoch + 1}")

    def _end(self, name: str, value: float, where: str) -> None:
        if self.raise_error:
            text = f"every value must be finite, but {name} became {value} in {where}. {NAN_ADVICE}"
            raise NonFiniteLossError(text, None, value)
        say(f"TerminateOnNaN ends training: {name} became {value} in {where}")
        self.model.stop_training = True


TimedStage = Literal["train", "validate", "evaluate", "predict"]


class Timer(Callback):
    """Measures the time of each stage, and ends training when a time limit is reached.

    The time of training starts with the first epoch, and includes validation but not recording. It
    is checked after every execution and every epoch, so training ends after the execution in which
    the limit is reached.

    Args:
        duration: seconds, a ``datetime.timedelta``, or "days:hours:minutes:seconds" such as
            "00:12:00:00"; None only measures.
        verbose: 1 to print a message when the limit is reached.

    Raises:
        ConfigurationError: the duration is not valid.
    """

    adds: Tuple[str, ...] = ()

    def __init__(
        self,
        duration: Union[float, str, datetime.timedelta, None] = None,
        verbose: Mention = 0,
    ) -> None:
        super().__init__()
        self.duration: Optional[float] = None if duration is None else _seconds(self, duration)
        self.verbose: int = one_of(self, "verbose", verbose, Mention)
        self._spent: Dict[str, float] = dict.fromkeys(get_args(TimedStage), 0.0)
        self._since: Dict[TimedStage, float] = {}

    def time_elapsed(self, stage: TimedStage = "train") -> float:
        """Return the seconds of the last ``fit``, its validation, or the last inference.

        Args:
            stage: "train", "validate", "evaluate" or "predict".
        """
        one_of(self, "stage", stage, TimedStage)
        running = time.monotonic() - self._since[stage] if stage in self._since else 0.0
        return self._spent[stage] + running

    def time_remaining(self) -> Optional[float]:
        """Return the seconds left for training, at least 0; None without a duration."""
        if self.duration is None:
            return None
        return max(0.0, self.duration - self.time_elapsed())

    def _begin(self, stage: TimedStage) -> None:
        if stage != "validate":
            self._spent[stage] = 0.0
        self._since[stage] = time.monotonic()

    def _end(self, stage: TimedStage) -> None:
        if stage in self._since:
            self._spent[stage] = self.time_elapsed(stage)
            del self._since[stage]

    def _look(self) -> None:
        if self.duration is None or self.model.stop_training:
            return
        if self.time_elapsed() >= self.duration:
            self.model.stop_training = True
            if self.verbose:
                say(f"Timer ends training after {self.time_elapsed():.1f} s")

    def on_train_begin(self, logs: Optional[Logs] = None) -> None:
        """Start the clock of training."""
        self._spent["validate"] = 0.0
        self._begin("train")

    def state_dict(self) -> Dict[str, object]:
        """Return the seconds spent so far in each stage."""
        return {stage: self.time_elapsed(stage) for stage in ("train", "validate")}

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Continue from the seconds that :meth:`state_dict` returned."""
        for stage in ("train", "validate"):
            self._spent[stage] = stored(state, stage, float)

    def on_train_batch_end(self, batch: int, logs: Optional[Logs] = None) -> None:
        """End training if the limit is reached."""
        self._look()

    def on_epoch_end(self, epoch: int, logs: Optional[Logs] = None) -> None:
        """End training if the limit was reached in the validation."""
        self._look()

    def on_train_end(self, logs: Optional[Logs] = None) -> None:
        """Stop the clock of training."""
        self._end("train")

    def on_test_begin(self, logs: Optional[Logs] = None) -> None:
        """Start the clock of evaluation."""
        self._begin("validate" if "train" in self._since else "evaluate")

    def on_test_end(self, logs: Optional[Logs] = None) -> None:
        """Stop the clock of evaluation."""
        self._end("validate" if "train" in self._since else "evaluate")

    def on_predict_begin(self, logs: Optional[Logs] = None) -> None:
        """Start the clock of prediction."""
        self._begin("predict")

    def on_predict_end(self, logs: Optional[Logs] = None) -> None:
        """Stop the clock of prediction."""
        self._end("predict")

    def close(self) -> None:
        """Stop clocks that are still running after an error."""
        for stage in [*self._since]:
            self._end(stage)


def _seconds(owner: Timer, duration: object) -> float:
    if isinstance(duration, datetime.timedelta):
        duration = duration.total_seconds()
    if isinstance(duration, str):
        parts = re.fullmatch(r"(\d+):(\d\d):(\d\d):(\d\d)", duration)
        if parts is None:
            needed = "'days:hours:minutes:seconds'"
            advice = "Twelve hours are '00:12:00:00'."
            raise unfit("duration of Timer as a text", needed, duration, advice)
        days, hours, minutes, seconds = map(int, parts.groups())
        return float(((days * 24 + hours) * 60 + minutes) * 60 + seconds)
    return finite(owner, "duration", duration, 0.0)
