"""How long one call takes, on the host and on a GPU."""

from __future__ import annotations

import math
import time
from typing import Any, Dict, List, Protocol, Tuple

import torch

__all__ = ["DeviceTimer", "HostTimer", "Timer", "timer_for"]


class Timer(Protocol):
    """Times calls by name, round after round; of each name the shortest time is kept.

    Attributes:
        method: how, in half a sentence.
    """

    method: str

    def begin(self) -> Any:
        """A call begins; what :meth:`end` takes."""
        ...

    def end(self, name: str, begun: Any) -> None:
        """It is over."""
        ...

    def end_round(self) -> None:
        """Everything was called once."""
        ...

    def seconds(self, name: str) -> float:
        """The shortest time of a name; 0 for one that was never called."""
        ...


class HostTimer:
    """By the host's clock, where a call that returns is over."""

    method = "by the clock of the host"

    def __init__(self) -> None:
        self._best: Dict[str, float] = {}

    def begin(self) -> float:
        """Now."""
        return time.perf_counter()

    def end(self, name: str, begun: float) -> None:
        """Compare with the best so far."""
        seconds = time.perf_counter() - begun
        if seconds < self._best.get(name, math.inf):
            self._best[name] = seconds

    def end_round(self) -> None:
        """Nothing is left to do."""

    def seconds(self, name: str) -> float:
        """The shortest time of a name."""
        return self._best.get(name, 0.0)


class DeviceTimer:
    """By events on the stream of a GPU, so that the host need not wait for each call.

    Args:
        device: the GPU.
    """

    method = "by events on the GPU"

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._best: Dict[str, float] = {}
        self._pairs: List[Tuple[str, Any, Any]] = []

    def begin(self) -> Any:
        """An event that is reached when all before it is done."""
        return self._event()

    def end(self, name: str, begun: Any) -> None:
        """Another one."""
        self._pairs.append((name, begun, self._event()))

    def _event(self) -> Any:
        make: Any = torch.cuda.Event
        event = make(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def end_round(self) -> None:
        """Wait, and look at the events."""
        torch.cuda.synchronize(self._device)
        for name, begun, ended in self._pairs:
            seconds = begun.elapsed_time(ended) / 1e3
            self._best[name] = min(self._best.get(name, math.inf), seconds)
        self._pairs = []

    def seconds(self, name: str) -> float:
        """The shortest time of a name."""
        return self._best.get(name, 0.0)


def timer_for(device: torch.device) -> Timer:
    """The one for calls on a device."""
    return DeviceTimer(device) if device.type == "cuda" else HostTimer()
