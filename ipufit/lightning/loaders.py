"""A Trainer's batch is the work of one execution: a list of micro-batches."""

from __future__ import annotations

import itertools
from typing import Any, Callable, Iterator, List

from ipufit.utils.phase_timer import NO_CLOCK, NoClock

__all__ = ["Execution", "Executions"]


class Execution(List[Any]):
    """The batches of one execution, in order."""


class Executions:
    """A loader's batches, as many at a time as an execution takes; the last may have fewer.

    Args:
        loader: an iterable of batches.
        count: how many.
        find_clock: what is told that data is read.

    Attributes:
        loader, count: as given.
    """

    def __init__(
        self, loader: Any, count: int, find_clock: Callable[[], NoClock] = lambda: NO_CLOCK
    ) -> None:
        self.loader = loader
        self.count = count
        self._find_clock = find_clock

    @property
    def sampler(self) -> Any:
        """The loader's, which a Trainer tells the epoch."""
        return getattr(self.loader, "sampler", None)

    def __len__(self) -> int:
        return -(-len(self.loader) // self.count)

    def __iter__(self) -> Iterator[Execution]:
        batches = iter(self.loader)
        while True:
            clock = self._find_clock()
            clock.turn("data")
            execution = Execution(itertools.islice(batches, self.count))
            clock.turn("callbacks")
            if not execution:
                return
            yield execution
