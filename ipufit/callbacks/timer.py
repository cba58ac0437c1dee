"""How long it took, and no longer than that."""

from __future__ import annotations

import datetime
import re
import time
from typing import Any, Dict, Optional, Tuple, Union

from ipufit.callbacks.callback import Callback, Logs
from ipufit.callbacks.checks import finite, one_of, say
from ipufit.errors import ConfigurationError

__all__ = ["Timer"]

_STAGES = ("train", "validate", "evaluate", "predict")


class Timer(Callback):
    """Measures each stage, and ends training when its time is up.

    The time of training is that since the first epoch began, validation included and recording
    left out. It is looked at after every execution and every epoch, so training ends with the
    execution in which it ran out.

    Args:
        duration: seconds, a ``datetime.timedelta``, or "days:hours:minutes:seconds" such as
            "00:12:00:00"; None only measures.
        verbose: 1 to say that the time is up.

    Raises:
        ConfigurationError: the duration is none.
    """

    adds: Tuple[str, ...] = ()

    def __init__(
        self, duration: Union[float, str, datetime.timedelta, None] = None, verbose: int = 0
    ) -> None:
        super().__init__()
        self.duration: Optional[float] = None if duration is None else _seconds(self, duration)
        self.verbose: int = one_of(self, "verbose", verbose, (0, 1))
        self._spent: Dict[str, float] = dict.fromkeys(_STAGES, 0.0)
        self._since: Dict[str, float] = {}

    def time_elapsed(self, stage: str = "train") -> float:
        """Seconds spent on a stage: of the last ``fit``, its validation, or the last inference.

        Args:
            stage: "train", "validate", "evaluate" or "predict".
        """
        one_of(self, "stage", stage, _STAGES)
        running = time.monotonic() - self._since[stage] if stage in self._since else 0.0
        return self._spent[stage] + running

    def time_remaining(self) -> Optional[float]:
        """Seconds left for training, not below 0; None without a duration."""
        if self.duration is None:
            return None
        return max(0.0, self.duration - self.time_elapsed())

    def _begin(self, stage: str) -> None:
        if stage != "validate":
            self._spent[stage] = 0.0
        self._since[stage] = time.monotonic()

    def _end(self, stage: str) -> None:
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

    def state_dict(self) -> Any:
        """Return the seconds spent so far in each stage."""
        return {stage: self.time_elapsed(stage) for stage in ("train", "validate")}

    def load_state_dict(self, state: Any) -> None:
        """Go on counting from the seconds that :meth:`state_dict` returned."""
        for stage in ("train", "validate"):
            self._spent[stage] = float(state[stage])

    def on_train_batch_end(self, batch: int, logs: Optional[Logs] = None) -> None:
        """End training if the time is up."""
        self._look()

    def on_epoch_end(self, epoch: int, logs: Optional[Logs] = None) -> None:
        """End training if the validation has used up the time."""
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
        """Stop every clock that an error has left running."""
        for stage in _STAGES:
            self._end(stage)


def _seconds(owner: Timer, duration: object) -> float:
    if isinstance(duration, datetime.timedelta):
        duration = duration.total_seconds()
    if isinstance(duration, str):
        parts = re.fullmatch(r"(\d+):(\d\d):(\d\d):(\d\d)", duration)
        if parts is None:
            raise ConfigurationError(
                "duration of Timer as a text must be 'days:hours:minutes:seconds', got "
                f"{duration!r}. Twelve hours are '00:12:00:00'."
            )
        days, hours, minutes, seconds = map(int, parts.groups())
        return float(((days * 24 + hours) * 60 + minutes) * 60 + seconds)
    return finite(owner, "duration", duration, 0.0)
