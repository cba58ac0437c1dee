"""The base of callbacks that wait for a value to improve."""

from __future__ import annotations

import math
from typing import Any, Optional, Tuple

from ipufit.callbacks.callback import Callback, Logs
from ipufit.callbacks.callback_list import missing
from ipufit.callbacks.checks import finite, one_of
from ipufit.callbacks.monitor_mode import direction_of
from ipufit.errors import ConfigurationError

__all__ = ["Monitor"]


class Monitor(Callback):
    """Knows which value is watched, which way is better, and whether a value is an improvement.

    Args:
        monitor: name of the value in ``logs``.
        mode: "min", "max", or "auto" to take the direction from ``params["directions"]``.
        min_delta: an improvement by no more than this is none; its sign does not matter.
    """

    def __init__(self, monitor: str, mode: str, min_delta: float = 0.0) -> None:
        super().__init__()
        if not isinstance(monitor, str) or not monitor:
            raise ConfigurationError(
                f"monitor of {type(self).__name__} must be the name of a value, such as "
                f"'val_loss', got {monitor!r}."
            )
        self.monitor = monitor
        self.mode: str = one_of(self, "mode", mode, ("auto", "min", "max"))
        self.min_delta: float = abs(finite(self, "min_delta", min_delta))
        self.monitors: Tuple[str, ...] = (monitor,)
        self._was_there = False

    def _find_direction(self) -> str:
        """The better end: min or max.

        Raises:
            ConfigurationError: nobody knows, so a guess might keep the worst instead of the best.
        """
        if self.mode != "auto":
            return str(self.mode)
        direction = direction_of(self.monitor, self.params.get("directions"), guess=False)
        if direction is not None:
            return direction
        raise ConfigurationError(
            f"{type(self).__name__} must know whether {self.monitor!r} is better when it is small "
            "or when it is large, but nothing says so. Pass mode='min' or mode='max'."
        )

    def on_train_begin(self, logs: Optional[Logs] = None) -> None:
        """Find out the direction before any work."""
        self._was_there = False
        self._direction = self._find_direction()

    def state_dict(self) -> Any:
        """Return whether the value has ever been there; a subclass adds more."""
        return {"was_there": self._was_there}

    def load_state_dict(self, state: Any) -> None:
        """Restore what :meth:`state_dict` returned."""
        self._was_there = bool(state["was_there"])

    def _current(self, logs: Logs) -> Optional[float]:
        """The watched value; None in an epoch that has it not, such as one without validation.

        Raises:
            ConfigurationError: no epoch will have it.
        """
        value: Any = logs.get(self.monitor)
        if value is None:
            coming = [*self.params.get("metrics", ()), *self.params.get("adds", ())]
            if not self._was_there and self.monitor not in coming:
                raise missing(self, self.monitor, logs)
            return None
        self._was_there = True
        return float(value)

    def _improves(self, value: float, best: Optional[float]) -> bool:
        """Return True if a value beats the best by more than ``min_delta``; NaN never does."""
        if best is None:
            return not math.isnan(value)
        if self._direction == "min":
            return value + self.min_delta < best
        return value - self.min_delta > best
