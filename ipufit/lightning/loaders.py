"""A Trainer's batch is the work of one execution: a list of micro-batches."""

from __future__ import annotations

import itertools
from typing import Any, Iterator, List

__all__ = ["Execution", "Executions"]


class Execution(List[Any]):
    """The batches of one execution, in order."""


class Executions:
    """A loader's batches, as many at a time as an execution takes; the last may have fewer.

    Args:
        loader: an iterable of batches.
        count: how many.

    Attributes:
        loader, count: as given.
    """

    def __init__(self, loader: Any, count: int) -> None:
        self.loader = loader
        self.count = count

    @property
    def sampler(self) -> Any:
        """The loader's, which a Trainer tells the epoch."""
        return getattr(self.loader, "sampler", None)

    def __len__(self) -> int:
        return -(-len(self.loader) // self.count)

    def __iter__(self) -> Iterator[Execution]:
        batches = iter(self.loader)
        while True:
            found = Execution(itertools.islice(batches, self.count))
            if not found:
                return
            yield found
