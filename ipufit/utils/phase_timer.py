"""Where the time of a ``fit`` goes: seconds by phase, each moment counted once."""

from __future__ import annotations

import contextlib
import time
from typing import Any, ContextManager, Dict, Iterator, List, Sequence, TypeVar

T = TypeVar("T")

# By what they are called, in the order in which an execution meets them; the last two stand beside
# executions.
PHASE_NAMES = {
    "data": "waiting for data",
    "to_device": "host to device",
    "compute": "compute",
    "anchors": "outputs to host",
    "metrics": "loss and metrics",
    "callbacks": "callbacks",
    "checkpoint": "checkpoints",
    "capture": "capture",
    "validation": "validation",
    "report": "this report",
    "other": "the rest",
}
PHASES = tuple(PHASE_NAMES)


class NoClock:
    """Measures nothing, and costs next to nothing."""

    def during(self, phase: str) -> ContextManager[object]:
        """Do nothing: time is not measured here."""
        return _NOWHERE

    def turn(self, phase: str) -> None:
        """Count the time that follows for no phase."""

    def reading(self, values: Iterator[T]) -> Iterator[T]:
        """Return the values as they are: time is not measured here."""
        return values


class Clock(NoClock):
    """Counts seconds by phase, of one thread.

    A phase within another one takes its time from it, so that all phases together are the time
    that has passed.

    Attributes:
        since: when it was last looked at or a phase began or ended, by ``time.perf_counter``.
    """

    def __init__(self) -> None:
        self._seconds = [0.0] * len(PHASES)
        self._phase = PHASES.index("other")
        self._around: List[int] = []
        self.since = time.perf_counter()
        self._spans = {name: self._span(place) for place, name in enumerate(PHASES)}

    def _span(self, place: int) -> Span:
        return Span(self, place)

    def during(self, phase: str) -> ContextManager[object]:
        """Count the time of the block for a phase."""
        return self._spans[phase]

    def turn(self, phase: str) -> None:
        """Count the time that follows for this phase, up to the next turn or block.

        It costs half of what a block does, and every execution goes through several.
        """
        now = time.perf_counter()
        self._seconds[self._phase] += now - self.since
        self.since = now
        self._phase = _PLACES[phase]

    def reading(self, values: Iterator[T]) -> Iterator[T]:
        """The values; waiting for each is time of the phase "data".

        Whoever reads turns to another phase for what is done with a value. What follows the last
        one, and an error on the way, belongs to "other".
        """
        try:
            while True:
                self.turn("data")
                value = next(values, _END)
                if value is _END:
                    return
                yield value
                # Whoever has made the value may want its memory back for the next one.
                del value
        finally:
            self.turn("other")

    def look(self) -> Sequence[float]:
        """Seconds so far, in the order of PHASES; they go on."""
        now = time.perf_counter()
        self._seconds[self._phase] += now - self.since
        self.since = now
        return self._seconds

    def read(self) -> List[float]:
        """Read the times as they are now."""
        return list(self.look())

    def seconds(self) -> Dict[str, float]:
        """Return the seconds by name."""
        return dict(zip(PHASES, self.read()))


class Span:
    """Context that counts its time for one phase of a clock; it may be entered again and again."""

    __slots__ = ("_clock", "_place")

    def __init__(self, clock: Clock, place: int) -> None:
        self._clock = clock
        self._place = place

    # Written out here too: every execution goes through one or two.
    def __enter__(self) -> None:
        clock, now = self._clock, time.perf_counter()
        clock._seconds[clock._phase] += now - clock.since
        clock.since = now
        clock._around.append(clock._phase)
        clock._phase = self._place

    def __exit__(self, *_: object) -> None:
        clock, now = self._clock, time.perf_counter()
        clock._seconds[clock._phase] += now - clock.since
        clock.since = now
        clock._phase = clock._around.pop()


_PLACES = {name: place for place, name in enumerate(PHASES)}
_END: Any = object()
_NOWHERE: ContextManager[object] = contextlib.nullcontext()

NO_CLOCK = NoClock()
