"""Sums of gradients over the processes: bucket by bucket, while the backward pass goes on.

Both ways send the same buckets in the same order, so the numbers are the same; which one is faster
depends on the network, and on whether the device computes and sends at the same time. So both are
tried, and the faster one is kept.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from typing import TYPE_CHECKING, Callable, List, Optional, Sequence, Set, Tuple

import torch
from torch import Tensor, distributed, nn

from ipufit.engines.gradient_reduction import GradientSum
from ipufit.processes import Processes
from ipufit.processes.group import PendingReduceScatter, give_back, summable

if TYPE_CHECKING:
    from ipufit.processes.connection import PendingWork

# Bytes of a bucket, as torch's DistributedDataParallel has them.
BUCKET = 25 * 2**20

# Updates of each way that are measured, after a first one of each.
_ROUNDS = 5


def buckets_of(named: Sequence[Tuple[str, nn.Parameter]]) -> List[List[Tuple[str, nn.Parameter]]]:
    """Neighbouring parameters, about :data:`BUCKET` bytes of them a time."""
    buckets: List[List[Tuple[str, nn.Parameter]]] = [[]]
    size = 0
    for name, parameter in named:
        if size >= BUCKET:
            buckets.append([])
            size = 0
        buckets[-1].append((name, parameter))
        size += parameter.numel() * parameter.element_size()
    return buckets


@dataclasses.dataclass(eq=False)
class Overlap:
    """Finds out whether sums go along with the backward pass or follow it.

    Attributes:
        processes: all of them, which make the same updates.
        order: in which the backward pass gives the buckets' gradients.
        clock: in seconds.
    """

    processes: Processes
    order: Sequence[int]
    clock: Callable[[], float] = time.perf_counter

    def __post_init__(self) -> None:
        self._updates = 0
        # Seconds of updates whose sums follow, and of those whose sums go along.
        self._seconds: List[List[float]] = [[], []]
        self._goes_along: Optional[bool] = None
        self._ratio = 1.0
        self._begun = 0.0

    def begin(self) -> bool:
        """An update begins; whether its sums go along."""
        self._begun = self.clock()
        if self._goes_along is not None:
            return self._goes_along
        return bool(self._updates % 2)

    def end(self) -> None:
        """Its sums are there."""
        if self._goes_along is not None:
            return
        if self._updates >= 2:
            self._seconds[self._updates % 2].append(self.clock() - self._begun)
        self._updates += 1
        if self._updates == 2 * (_ROUNDS + 1):
            medians = self.processes.gather([statistics.median(each) for each in self._seconds])
            after, along = (sum(each) for each in zip(*medians))
            self._ratio = along / after
            self._goes_along = along < after

    def explain(self) -> str:
        """A sentence on what was found."""
        how = f"Gradients are added in {len(self.order)} buckets"
        if self._goes_along is None:
            return f"{how}, alternately during and after the backward pass, to see which is faster."
        when = "during the backward pass" if self._goes_along else "after the backward pass"
        return (
            f"{how}, {when}: updates up to that point took {self._ratio:.2f} of the time when "
            "they were added during it."
        )


@dataclasses.dataclass(eq=False)
class BucketSums:
    """The sums of one update; the host of its last micro-batch's graph where they go along.

    Attributes:
        processes: all of them.
        order: in which sums are started, in all of them.
        total: of the gradients of this process.
        cuts: of each block, where each process gets a part of the sum; None: all get it whole.
    """

    processes: Processes
    order: Sequence[int]
    total: GradientSum
    cuts: Optional[Sequence[Sequence[int]]]

    def __post_init__(self) -> None:
        self._factor = 1.0
        self._is_counted = False
        self._ready: Set[int] = set()
        self._started = 0
        self._sums: List[Optional[Tensor]] = [None] * len(self.order)
        self._works: List[Tuple[int, PendingWork, Tensor]] = []
        self._parts: List[Tuple[int, PendingReduceScatter]] = []

    def expect(self, factor: float, is_counted: bool) -> None:
        """The last micro-batch comes, with this factor, or with what its loss is a mean over."""
        self._factor, self._is_counted = factor, is_counted

    def sum(self, block: int, numbers: Tensor, gradient: Tensor) -> Tensor:
        """The last gradient of a block: its sum begins, if it is its turn."""
        count = numbers[1] if self._is_counted else None
        self._sums[block] = self.total.joined(block, gradient, self._factor, count)
        self._ready.add(block)
        while self._started < len(self.order) and self.order[self._started] in self._ready:
            self._start(self.order[self._started])
        return gradient

    def finish(self, flats: Sequence[Tensor]) -> None:
        """Start what has not been, and wait for all; the total is that of all processes.

        Args:
            flats: tensors like the sum, for a process without a micro-batch in this update.
        """
        if not self._ready:
            self._sums = list(self.total.like(flats))
        while self._started < len(self.order):
            self._start(self.order[self._started])
        for block, works, sent in self._works:
            works.wait()
            part_sum = self._sums[block]
            assert part_sum is not None
            give_back(part_sum, sent)
        for block, part in self._parts:
            part.end()
            self._sums[block] = part.result
        self.total.replace([each for each in self._sums if each is not None])

    def _start(self, block: int) -> None:
        self._started += 1
        total = self._sums[block]
        assert total is not None
        with torch.no_grad():
            if self.cuts is not None:
                sum_of_parts = PendingReduceScatter(self.processes, total, self.cuts[block])
                self._parts.append((block, sum_of_parts))
                return
            works, sent = self.processes.pending_work(), summable(total)
            works.start(distributed.all_reduce, sent, like=sent)
            self._works.append((block, works, sent))
