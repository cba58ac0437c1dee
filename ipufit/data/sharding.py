"""Data of several processes: who cuts it into parts, and which batches each process reads.

The cut is made by ipufit, by the data itself, or by nobody.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import zlib
from types import CodeType
from typing import Any, Callable, Dict, Iterable, Iterator, List, Optional, Sequence

import torch
from torch.utils.data import DataLoader, IterableDataset
from torch.utils.data.distributed import DistributedSampler

from ipufit.core.batch import MicroBatch, RawBatch
from ipufit.core.plan import Plan
from ipufit.data.in_memory import ArrayLoader, is_array, is_datasets_table, is_table
from ipufit.data.loaders import reads_as_torch
from ipufit.errors import DataError
from ipufit.utils.state import samplers_of


class GlobalBatchIndex:
    """The batches of all processes in the order of their updates, as far as they are known.

    They are counted from the first one that is wanted, over all passes that an epoch takes.

    Args:
        skipped: batches of the first pass that come before it.

    Attributes:
        total: how many there are, as far as anybody has looked.
        is_whole: whether there are no more.
        begin: number of the next one, at the beginning of an update.
        waiting: own micro-batches that were read, but not used yet.
        latest: digest of the order of the samples so far, which tells it from another one.
    """

    def __init__(self, skipped: int = 0) -> None:
        self.total = -skipped
        self.is_whole = False
        self.begin = 0
        self.waiting: List[MicroBatch] = []
        self._sizes: List[int] = []
        self.latest = 0
        self._orders: Dict[int, int] = {}

    def note(self, sizes: Iterable[int], order: bytes = b"") -> None:
        """Record the sizes of the next batches of all processes.

        Args:
            sizes: of each.
            order: tells their samples from others.
        """
        new = list(sizes)
        self._sizes += new[max(0, -self.total) :]
        self.total += len(new)
        if order:
            self.latest = zlib.crc32(order, self.latest)
        self._orders[self.total] = self.latest

    def take(self, end: int) -> List[int]:
        """The sizes up to, not including, the batch of this number, which are forgotten."""
        count = end - self.begin
        sizes, self._sizes = self._sizes[:count], self._sizes[count:]
        self.begin = end
        return sizes

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
    drawing: Callable[[], contextlib.AbstractContextManager[None]]
    total: Optional[int] = None
    example: Optional[Callable[[], RawBatch]] = None

    def number(self, index: int) -> int:
        """The number in the pass of the own batch of this index."""
        plan = self.plan
        turn, replica = divmod(index + self.plan.own_before(self.begin), plan.replicas)
        first = plan.process * plan.replicas
        return turn * plan.all_replicas + first + replica - self.begin

    def count(self, batches: int) -> int:
        """Count those of the first batches of the pass that this process reads."""
        return self.plan.own_before(self.begin + batches) - self.plan.own_before(self.begin)

    def is_own(self, number: int) -> bool:
        """True if this process reads the batch of this number in the pass."""
        return self.plan.owner(self.begin + number) == self.plan.process

    def picked(
        self,
        every: Callable[[], Iterable[object]],
        size: Callable[[RawBatch], int],
        read: Callable[[RawBatch], RawBatch],
        most: Optional[int] = None,
        draws_once: bool = False,
        are_indices: bool = True,
    ) -> Iterator[RawBatch]:
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

    def indices(
        self, loader: DataLoader[object], most: Optional[int], draws_once: bool
    ) -> Iterator[List[int]]:
        """Indices of the samples of the batches of a loader that this process reads.

        Args:
            loader: of map-style data.
            most: batches of the pass at most, of all processes.
            draws_once: whether random numbers are drawn for the first batch at most.
        """

        def every() -> Any:
            if loader.generator is None:
                # torch's iterator draws a seed for the workers before the order.
                torch.empty((), dtype=torch.int64).random_()
            return loader.batch_sampler

        def read(indices: List[int]) -> RawBatch:
            return loader.collate_fn([loader.dataset[index] for index in indices])

        return self.picked(every, len, read, most, draws_once)

    def rows(self, rows: ArrayLoader, most: Optional[int] = None) -> ArrayLoader:
        """Select the rows of the batches that this process reads."""
        with self.drawing():
            order = rows.order()
        size = rows.batch_size
        samples = rows.samples if most is None else min(rows.samples, most * size)
        sizes = [min(size, samples - begin) for begin in range(0, samples, size)]
        self.total = len(sizes)
        self.ledger.note(sizes, b"" if order is None else order.numpy().tobytes())
        if samples:
            first = dataclasses.replace(rows, samples=min(samples, size), order=lambda: order)
            self.example = lambda: next(iter(first))
        whole = torch.arange(samples, device="cpu") if order is None else order[:samples]
        numbers = self.begin + torch.arange(samples, device="cpu") // size
        # As Plan.owner has it.
        owners = numbers % self.plan.all_replicas // self.plan.replicas
        indices = whole[owners == self.plan.process]
        return dataclasses.replace(rows, samples=len(indices), order=lambda: indices)


def layout_of(plan: Plan, sizes: Sequence[int]) -> List[List[int]]:
    """By update and place, the sizes of batches that follow one another from its first place on."""
    group = plan.micro_batches_per_update
    filled = [*sizes, *[0] * (-len(sizes) % group)]
    return [filled[i : i + group] for i in range(0, len(filled), group)]


class Sharded:
    """Data that is already divided over the processes.

    ipufit divides tensors, datasets and DataLoaders over the processes by itself. It can't know
    whether your own iterable yields the same samples in every process: divide it yourself, for
    example by ``torch.distributed.get_rank()``, and wrap it in this class. With one process, it has
    no effect. See docs/distributed.md.

    Args:
        loader: an iterable of batches, an IterableDataset, or a DataLoader; it yields samples that
            no other process gets.

    Raises:
        DataError: it is none of these.
    """

    def __init__(self, loader: Iterable[object]) -> None:
        in_memory = is_array(loader) or is_table(loader) or is_datasets_table(loader)
        in_memory = in_memory or isinstance(loader, (str, bytes, dict))
        if in_memory or not hasattr(type(loader), "__iter__"):
            raise DataError(
                "Sharded takes an iterable of this process's batches, such as a DataLoader, got "
                f"{type(loader).__name__}. Pass tensors, arrays and datasets directly: each "
                "process reads its part of them."
            )
        self.loader: Iterable[object] = loader


def asks_for_workers(dataset: object) -> bool:
    """True if the code of a stream asks which worker it is, as torch's documentation has it."""
    for kind in type(dataset).__mro__:
        if kind.__module__.partition(".")[0] == "torch":
            continue
        for member in vars(kind).values():
            code = getattr(member, "__code__", None)
            if code is not None and "get_worker_info" in _names(code):
                return True
    return False


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


def refuse_unshared(loader: Any, role: str, processes: int) -> None:
    """Make sure that it is known which process reads which samples.

    Raises:
        DataError: it is not, or samples would be read twice.
    """
    cure = (
        "Let it yield only the samples of this process and wrap it in ipufit.Sharded(loader), "
        "or pass tensors, a map-style dataset, or a DataLoader over one."
    )
    if isinstance(loader, (ArrayLoader, list, tuple)):
        return
    kind = type(loader).__name__
    if not reads_as_torch(loader):
        raise DataError(
            f"{role}: each of {processes} processes must read different samples, but a {kind} "
            f"may yield the same ones in all of them. {cure}"
        )
    if any(isinstance(sampler, DistributedSampler) for sampler in samplers_of(loader)):
        raise DataError(
            f"{role}: each process already reads its own part of the DataLoader, but its "
            "DistributedSampler divides the samples too, and repeats some to make the parts "
            "equal. Leave the sampler out: DataLoader(dataset, batch_size, shuffle=True)."
        )
    if isinstance(loader.dataset, IterableDataset):
        if not asks_for_workers(loader.dataset):
            raise DataError(
                f"{role}: each of {processes} processes must read different samples, but "
                f"{type(loader.dataset).__name__} does not check which part to yield. Let its "
                "__iter__ call torch.utils.data.get_worker_info(), which counts the workers of "
                f"all processes. {cure}"
            )
    elif loader.batch_sampler is None:
        raise DataError(
            f"{role}: each of {processes} processes must know how large the batches of the others "
            "are, but a DataLoader with batch_size=None makes them in the dataset. Use batch_size "
            "or batch_sampler, or divide it yourself and wrap it in ipufit.Sharded(loader)."
        )
