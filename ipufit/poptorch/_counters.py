"""Times at which inputs and outputs of the last call were there."""

from __future__ import annotations

from typing import Callable, Dict, List, Sequence, Tuple

__all__ = ["Counters", "latency"]

# By event: for every tensor, the time of every micro-batch, in seconds.
Times = Dict[str, List[List[float]]]

_EVENTS = ("input", "input_complete", "output", "output_complete")


class Counters:
    """Times of the last call, in seconds since an arbitrary moment.

    Attributes:
        enabled: off where no data moves.
    """

    def __init__(self) -> None:
        self.enabled = True
        self._times: Times = {event: [] for event in _EVENTS}

    def begin(self, inputs: int, outputs: int) -> None:
        """Start a call with this many tensors."""
        counts = (inputs, inputs, outputs, outputs)
        self._times = {event: [[] for _ in range(n)] for event, n in zip(_EVENTS, counts)}

    def input(self, requested: float, complete: float) -> None:
        """Record when the inputs of a micro-batch were requested, and when they were there."""
        self._note("input", requested)
        self._note("input_complete", complete)

    def output(self, ready: float, complete: float) -> None:
        """Record when the outputs of a micro-batch were ready, and when they were on the host."""
        self._note("output", ready)
        self._note("output_complete", complete)

    def _note(self, event: str, time: float) -> None:
        if self.enabled:
            for times in self._times[event]:
                times.append(time)

    def times(self) -> Times:
        """Return copies of the times by event; ``[[]]`` where there is no tensor."""
        return {event: [list(t) for t in self._times[event]] or [[]] for event in _EVENTS}


def latency(
    starts: Sequence[Sequence[float]],
    ends: Sequence[Sequence[float]],
    first: Callable[[Sequence[float]], float],
    last: Callable[[Sequence[float]], float],
) -> Tuple[float, float, float]:
    """Return smallest, largest and mean seconds between two events; zeros without one of them.

    Args:
        starts: for every tensor, when it began; a multiple of the number of ends.
        ends: for every tensor, when it ended.
        first: of the tensors' beginnings, which counts.
        last: of the tensors' ends, which counts.
    """
    begun = [first(step) for step in zip(*starts)]
    ended = [last(step) for step in zip(*ends)]
    if not begun or not ended:
        return 0.0, 0.0, 0.0
    # Several inputs may go into one output.
    share = len(begun) // len(ended)
    took = [end - min(begun[i * share : (i + 1) * share]) for i, end in enumerate(ended)]
    return min(took), max(took), sum(took) / len(took)
