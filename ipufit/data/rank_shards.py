"""The batches that one of several processes reads, and the sizes of those that the others do."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import zlib
from typing import Any, Callable, ContextManager, Dict, Iterable, Iterator, List, Optional, Sequence

import torch
from torch import Tensor

from ipufit.core.batch import MicroBatch
from ipufit.core.plan import Plan
from ipufit.data.rows import Rows

__all__ = ["GlobalBatchIndex", "RankShard", "layout_of"]


class GlobalBatchIndex:
    """The batches of all processes in the order of their updates, as far as they are known.

    They are counted from the first one that is wanted, over all passes that an epoch takes.

    Args:
        skipped: batches of the first pass that come before it.

    Attributes:
        known: how many there are, as far as anybody has looked.
        is_whole: whether there are no more.
        begin: number of the next one, at the beginning of an update.
        waiting: own micro-batches that were read, but not used yet.
    """

    def __init__(self, skipped: int = 0) -> None:
        self.known = -skipped
        self.is_whole = False
        self.begin = 0
        self.waiting: List[MicroBatch] = []
        self._sizes: List[int] = []
        self._order = 0
        self._orders: Dict[int, int] = {}

    def note(self, sizes: Iterable[int], order: bytes = b"") -> None:
        """The next batches.

        Args:
            sizes: of each.
            order: tells their samples from others.
        """
        new = list(sizes)
        self._sizes += new[max(0, -self.known) :]
        self.known += len(new)
        if order:
            self._order = zlib.crc32(order, self._order)
        self._orders[self.known] = self._order

    def take(self, end: int) -> List[int]:
        """The sizes up to, not including, the batch of this number, which are forgotten."""
        count = end - self.begin
        taken, self._sizes = self._sizes[:count], self._sizes[count:]
        self.begin = end
        return taken

    @property
    def latest(self) -> int:
        """Digest of the order of the samples so far, which tells it from another one."""
        return self._order

    def order(self) -> int:
        """Digest of the order of the samples so far, which tells it from another one."""
        counts = sorted(count for count in self._orders if count <= self.begin)
        for count in counts[:-1]:
            del self._orders[count]
        return self._orders[counts[-1]] if counts else 0


@dataclasses.dataclass
class RankShard:
    """Part of one pass over the data that this process reads.

    Attributes:
        plan: says which batches are whose.
        ledger: told of all of them.
        begin: number of the first batch of the pass, as the ledger counts.
        drawing: torch's random numbers while the order is made, the same ones in all processes.
        total: batches of the pass; None until they are known.
        example: makes the first batch of the pass, whosever it is; None where there is none.
    """

    plan: Plan
    ledger: GlobalBatchIndex
    begin: int
    drawing: Callable[[], ContextManager[None]]
    total: Optional[int] = None
    example: Optional[Callable[[], Any]] = None

    def number(self, index: int) -> int:
        """The number in the pass of the own batch of this index."""
        plan = self.plan
        turn, replica = divmod(index + self.plan.own_before(self.begin), plan.replicas)
        first = plan.process * plan.replicas
        return turn * plan.all_replicas + first + replica - self.begin

    def count(self, batches: int) -> int:
        """How many of the first batches of the pass are own ones."""
        return self.plan.own_before(self.begin + batches) - self.plan.own_before(self.begin)

    def is_own(self, number: int) -> bool:
        """True if this process reads the batch of this number in the pass."""
        return self.plan.owner(self.begin + number) == self.plan.process

    def picked(
        self,
        every: Callable[[], Iterable[Any]],
        size: Callable[[Any], int],
        read: Callable[[Any], Any],
        most: Optional[int] = None,
        draws_once: bool = False,
        are_indices: bool = True,
    ) -> Iterator[Any]:
        """The own ones of all batches, or of what stands for them.

        What belongs to an update is looked at together, so that the sizes of all its batches are
        known when the first of them is yielded.

        Args:
            every: starts the pass.
            size: of a batch.
            read: makes a batch of what stands for it.
            most: batches of the pass at most.
            draws_once: whether random numbers are drawn for the first batch at most.
            are_indices: whether lists of indices stand for batches.
        """
        per_update = self.plan.micro_batches_per_update
        with self.drawing():
            batches = itertools.islice(iter(every()), most)
        number = 0
        while self.total is None:
            wanted = per_update - (self.begin + number) % per_update
            with contextlib.nullcontext() if draws_once and number else self.drawing():
                group = list(itertools.islice(batches, wanted))
            self.ledger.note(map(size, group), repr(group).encode() if are_indices else b"")
            if group and not number:
                self.example = functools.partial(read, group[0])
            if len(group) < wanted:
                self.total = number + len(group)
            for i, each in enumerate(group):
                if self.is_own(number + i):
                    yield each
            number += len(group)

    def rows(self, rows: Rows, most: Optional[int] = None) -> Rows:
        """The rows of the own batches."""
        with self.drawing():
            order = rows.order()
        size = rows.batch_size
        samples = rows.samples if most is None else min(rows.samples, most * size)
        self.total = -(-samples // size)
        sizes = [size] * (samples // size) + ([samples % size] if samples % size else [])
        self.ledger.note(sizes, b"" if order is None else order.numpy().tobytes())
        if samples:
            self.example = functools.partial(_first_of, rows, order, samples)
        own = self._own_rows(order, samples, size)
        return dataclasses.replace(rows, samples=len(own), order=lambda: own)

    def _own_rows(self, order: Optional[Tensor], samples: int, size: int) -> Tensor:
        whole = torch.arange(samples, device="cpu") if order is None else order[:samples]
        assert self.total is not None
        numbers = [self.number(index) for index in range(self.count(self.total))]
        full = samples // size
        begins = [number * size for number in numbers if number < full]
        starts = torch.tensor(begins, dtype=torch.int64, device="cpu")
        places = (starts[:, None] + torch.arange(size, device="cpu")).reshape(-1)
        own = whole[places]
        if numbers and numbers[-1] == full:
            own = torch.cat([own, whole[full * size :]])
        return own


def _first_of(rows: Rows, order: Optional[Tensor], samples: int) -> Any:
    first = torch.arange(samples, device="cpu") if order is None else order
    one = dataclasses.replace(rows, samples=min(samples, rows.batch_size), order=lambda: first)
    return next(iter(one))


def layout_of(plan: Plan, sizes: Sequence[int]) -> List[List[int]]:
    """By update and place, the sizes of batches that follow one another from its first place on."""
    group = plan.micro_batches_per_update
    filled = [*sizes, *[0] * (-len(sizes) % group)]
    return [filled[i : i + group] for i in range(0, len(filled), group)]
