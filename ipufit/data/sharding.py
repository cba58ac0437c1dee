"""Data of several processes: who cuts it into parts, and which batches each process reads.

The cut is made by ipufit, by the data itself, or by nobody.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import itertools
import time
import weakref
import zlib
from types import CodeType
from typing import (
    Any,
    Callable,
    Dict,
    Iterable,
    Iterator,
    List,
    NamedTuple,
    Optional,
    Sequence,
    Tuple,
)

import torch
from torch import Tensor
from torch._utils import ExceptionWrapper
from torch.utils.data import DataLoader, IterableDataset, _utils, get_worker_info
from torch.utils.data.distributed import DistributedSampler

from ipufit.core.batch import MicroBatch, RawBatch
from ipufit.core.plan import Plan
from ipufit.data.in_memory import (
    ArrayLoader,
    ReadAhead,
    RowBlock,
    batch_count,
    is_array,
    is_datasets_table,
    is_plain,
    is_table,
)
from ipufit.data.loaders import like, reads_as_torch, sends_groups
from ipufit.errors import DataError
from ipufit.utils import tree

__all__ = [
    "AsWorkerOfAll",
    "GlobalBatchIndex",
    "GroupedBatches",
    "LoaderReader",
    "RankShard",
    "Sharded",
    "as_worker",
    "forget_workers",
    "has_workers",
    "layout_of",
    "refuse_unshared",
]


# A worker sends so many batches at once at most, and makes them in so many seconds, as others wait
# for the first of them; all messages share so many bytes.
_MOST, _SECONDS, _BYTES = 32, 0.03, 2**24
_ALIGNED = 16
# Dtype, shape and bytes.
_Tensor = Tuple[torch.dtype, Sequence[int], int]
_NOTHING = object()
_torchs_worker: Any = _utils.worker
# Readers whose workers stay from one pass to the next.
_READERS: weakref.WeakKeyDictionary[DataLoader[object], LoaderReader] = weakref.WeakKeyDictionary()


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
    """

    def __init__(self, skipped: int = 0) -> None:
        self.total = -skipped
        self.is_whole = False
        self.begin = 0
        self.waiting: List[MicroBatch] = []
        self._sizes: List[int] = []
        self._order = 0
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
            self._order = zlib.crc32(order, self._order)
        self._orders[self.total] = self._order

    def take(self, end: int) -> List[int]:
        """The sizes up to, not including, the batch of this number, which are forgotten."""
        count = end - self.begin
        sizes, self._sizes = self._sizes[:count], self._sizes[count:]
        self.begin = end
        return sizes

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
        size: Callable[[Any], int],
        read: Callable[[object], RawBatch],
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
    ) -> Iterator[object]:
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

        def read(indices: Any) -> RawBatch:
            return loader.collate_fn([loader.dataset[index] for index in indices])

        return self.picked(every, len, read, most, draws_once)

    def rows(self, rows: ArrayLoader, most: Optional[int] = None) -> ArrayLoader:
        """Select the rows of the batches that this process reads."""
        with self.drawing():
            order = rows.order()
        size = rows.batch_size
        samples = rows.samples if most is None else min(rows.samples, most * size)
        self.total = -(-samples // size)
        sizes = [size] * (samples // size) + ([samples % size] if samples % size else [])
        self.ledger.note(sizes, b"" if order is None else order.numpy().tobytes())
        if samples:
            self.example = functools.partial(_first_of, rows, order, samples)
        indices = self._own_rows(order, samples, size)
        return dataclasses.replace(rows, samples=len(indices), order=lambda: indices)

    def _own_rows(self, order: Optional[Tensor], samples: int, size: int) -> Tensor:
        whole = torch.arange(samples, device="cpu") if order is None else order[:samples]
        assert self.total is not None
        numbers = [self.number(index) for index in range(self.count(self.total))]
        full = samples // size
        begins = [number * size for number in numbers if number < full]
        starts = torch.tensor(begins, dtype=torch.int64, device="cpu")
        places = (starts[:, None] + torch.arange(size, device="cpu")).reshape(-1)
        rows = whole[places]
        if numbers and numbers[-1] == full:
            rows = torch.cat([rows, whole[full * size :]])
        return rows


def _first_of(rows: ArrayLoader, order: Optional[Tensor], samples: int) -> RawBatch:
    first = torch.arange(samples, device="cpu") if order is None else order
    one = dataclasses.replace(rows, samples=min(samples, rows.batch_size), order=lambda: first)
    return next(iter(one))


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
    samplers = (loader.sampler, loader.batch_sampler, getattr(loader.batch_sampler, "sampler", 0))
    if any(isinstance(sampler, DistributedSampler) for sampler in samplers):
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


@contextlib.contextmanager
def as_worker(dataset: object, process: int, processes: int) -> Iterator[None]:
    """Within the block the data that is read in this process takes it for a worker of its own."""
    before = _torchs_worker._worker_info
    _torchs_worker._worker_info = _torchs_worker.WorkerInfo(
        id=process, num_workers=processes, seed=torch.initial_seed(), dataset=dataset
    )
    try:
        yield
    finally:
        _torchs_worker._worker_info = before


@dataclasses.dataclass(frozen=True)
class AsWorkerOfAll:
    """Starts a worker that takes itself for one of those of all processes.

    Attributes:
        process: of this worker.
        processes: how many there are.
        then: the user's own ``worker_init_fn``, or None.
    """

    process: int
    processes: int
    then: Optional[Callable[[int], object]]

    def __call__(self, worker: int) -> None:
        """Called by torch in the worker."""
        info = get_worker_info()
        assert info is not None
        number, count = self.process * info.num_workers + info.id, info.num_workers
        dataset = info.dataset.dataset if isinstance(info.dataset, _Groups) else info.dataset
        # torch has no other place for it.
        _torchs_worker._worker_info = _torchs_worker.WorkerInfo(
            id=number, num_workers=self.processes * count, seed=info.seed, dataset=dataset
        )
        if self.then is not None:
            self.then(worker)


def has_workers(loader: DataLoader[object]) -> bool:
    """True if workers are there from the pass before, which the next one goes on with."""
    if loader in _READERS:
        return _READERS[loader].reader._iterator is not None
    return loader._iterator is not None and not sends_groups(loader)


def forget_workers(loader: DataLoader[object]) -> None:
    """Let the next pass over a loader begin with new workers."""
    loader._iterator = None
    _READERS.pop(loader, None)


class LoaderReader:
    """Reads as a DataLoader does, but only batches that are named one by one, if it has such.

    Each batch is made by the worker that it would have in the loader, after the same ones: its
    random numbers are the same. Workers that make small batches quickly send several at once, in
    memory that they share with this process: a message of torch's takes longer than an update of a
    small network.

    Args:
        loader: that it reads like.
        worker: of a stream, which process this is, and of how many; None for map-style data.

    Attributes:
        reader: starts the workers, which it has for itself.
        memory: of each message that is on its way, or was read last.
    """

    def __init__(self, loader: Any, worker: Optional[Tuple[int, int]] = None) -> None:
        self._sampler = _NamedBatches()
        self._count, self._most = 1, _MOST
        self.memory: List[Tensor] = []
        if worker is not None:
            starts = AsWorkerOfAll(*worker, loader.worker_init_fn)
            self.reader = like(loader, worker_init_fn=starts)
        elif not sends_groups(loader):
            self.reader = like(loader, batch_sampler=self._sampler)
        else:
            count = (loader.prefetch_factor + 1) * loader.num_workers
            size = _BYTES // count // _ALIGNED * _ALIGNED
            # Without pages until they are written to.
            storage = torch.UntypedStorage._new_shared(count * size)  # type: ignore[no-untyped-call]
            shared = torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage)
            self.memory = [*torch.split(shared, size)]
            self.reader = like(
                loader,
                dataset=_Groups(loader.dataset, loader.collate_fn, self.memory),
                batch_sampler=None,
                sampler=self._sampler,
                collate_fn=_unchanged,
                worker_init_fn=AsWorkerOfAll(0, 1, loader.worker_init_fn),
            )

    @staticmethod
    def of(loader: DataLoader[object], worker: Optional[Tuple[int, int]] = None) -> LoaderReader:
        """Make a reader, or find that of the workers that stay."""
        stays = loader in _READERS
        reader: LoaderReader = _READERS[loader] if stays else LoaderReader(loader, worker)
        if loader.persistent_workers:
            _READERS[loader] = reader
        return reader

    def start(self, indices: Iterable[object], horizon: ReadAhead) -> Iterator[RawBatch]:
        """Start a pass over batches.

        Args:
            indices: of the samples of each; a stream has none.
            horizon: how many batches may come at once, as a ``RowBlock``.
        """
        self._sampler.batches = self._tasks(indices) if self.memory else indices
        iterator = iter(self.reader)
        return GroupedBatches(self, iterator, horizon) if self.memory else iterator

    def _tasks(self, indices: Iterable[object]) -> Iterator[Tuple[int, List[object]]]:
        """Deal batches out, to each worker the next message in turn, as torch does with batches."""
        workers, rest = self.reader.num_workers, iter(indices)
        places = itertools.cycle(range(len(self.memory)))
        while True:
            turn = [*itertools.islice(rest, self._count * workers)]
            if not turn:
                return
            for worker in range(min(workers, len(turn))):
                yield next(places), turn[worker::workers]

    def adapt(self, messages: Sequence[_Message]) -> None:
        """Choose how many batches make a message, by the last ones."""
        slowest = max(message.seconds for message in messages)
        for message in messages:
            fitting = _capacity(message.tensors, self.memory[0])
            # A last batch may be smaller; others are of several shapes.
            self._most = min(self._most, fitting) if len(message.rest) <= 1 else 1
        self._count = max(1, min(self._most, int(_SECONDS / max(slowest, 1e-6))))


class _NamedBatches:
    """Sampler whose batches are set anew for every pass."""

    def __init__(self) -> None:
        self.batches: Iterable[object] = ()

    def __iter__(self) -> Iterator[object]:
        return iter(self.batches)


class GroupedBatches(Iterator[RawBatch]):
    """Pass over messages of workers, of which each has every so many-th batch.

    Args:
        reader: whose workers they are.
        iterator: torch's, over the messages.
        horizon: how many batches may come at once.

    Attributes:
        iterator: torch's.
    """

    def __init__(self, reader: LoaderReader, iterator: Any, horizon: ReadAhead) -> None:
        self.iterator = iterator
        self._reader = reader
        self._horizon = horizon
        self._ready: collections.deque[RawBatch] = collections.deque()

    def __next__(self) -> RawBatch:
        if not self._ready:
            self._ready.extend(self._receive())
        first, most = self._ready.popleft(), max(1, self._horizon.batches)
        if isinstance(first, ExceptionWrapper):
            first.reraise()  # type: ignore[no-untyped-call]
        if batch_count(first) > most:
            self._ready.appendleft(first.part(most, len(first)))
            return first.part(0, most)
        return first

    def _receive(self) -> List[RawBatch]:
        """The batches of the next message of each worker, in their order."""
        messages = [*itertools.islice(self.iterator, self._reader.reader.num_workers)]
        if not messages:
            raise StopIteration
        self._reader.adapt(messages)
        first = messages[0]
        forms = [(each.packed, each.structure, each.tensors, each.rest) for each in messages]
        if first.packed and all(form == (*forms[0][:3], []) for form in forms):
            return [self._copied(messages)]
        columns = [
            [*(self._copied([each]).apart() if each.packed else ()), *each.rest]
            for each in messages
        ]
        rows = itertools.zip_longest(*columns, fillvalue=_NOTHING)
        return [batch for row in rows for batch in row if batch is not _NOTHING]

    def _copied(self, messages: Sequence[_Message]) -> RowBlock:
        """Batches of each message in turn, out of the memory, which is written to again."""
        blocks = [message.rows(self._reader.memory) for message in messages]
        return RowBlock.interleaved(blocks, self.iterator._pin_memory)


class _Message(NamedTuple):
    """Batches that a worker sends.

    Attributes:
        place: of the memory that has the first ones, which are rows of plain tensors and alike.
        packed: how many these are.
        structure: of each of them.
        tensors: dtype, shape and bytes of each tensor of a batch.
        rest: the batches after them, as they are; the last one may be an error instead.
        seconds: that a batch took.
    """

    place: int
    packed: int
    structure: tree.Structure
    tensors: List[_Tensor]
    rest: List[RawBatch]
    seconds: float

    def rows(self, memory: Sequence[Tensor]) -> RowBlock:
        """The batches that are in shared memory."""
        views = _views(memory[self.place], self.tensors, self.packed)
        leaves = [leaf.flatten(0, 1) for leaf in views]
        return RowBlock(leaves, self.structure, self.tensors[0][1][0])


@dataclasses.dataclass(frozen=True)
class _Groups:
    """Dataset of a worker, which reads several batches for one message.

    Attributes:
        dataset: the user's.
        collate_fn: the user's.
        memory: for each message that is on its way.
    """

    dataset: object
    collate_fn: Callable[[List[object]], RawBatch]
    memory: Sequence[Tensor]

    def __getitem__(self, task: Tuple[int, List[object]]) -> _Message:
        """Make batches, of which each has the indices of its samples, as torch's worker does."""
        start = time.perf_counter()
        place, indices = task
        fetcher = _utils.fetch._MapDatasetFetcher(self.dataset, True, self.collate_fn, False)
        batches: List[RawBatch] = []
        try:
            for each in indices:
                batches.append(fetcher.fetch(each))  # type: ignore[no-untyped-call]
        except Exception:
            # As torch's worker does.
            where = f"in DataLoader worker process {_torchs_worker._worker_info.id}"
            batches.append(ExceptionWrapper(where=where))  # type: ignore[no-untyped-call]
        seconds = (time.perf_counter() - start) / len(batches)
        flat = [tree.flatten(batch) for batch in batches]
        forms = [(structure, _tensors_of(leaves)) for leaves, structure in flat]
        structure, tensors = forms[0]
        count = sum(1 for _ in itertools.takewhile(forms[0].__eq__, forms))
        if not structure.is_builtin or count > _capacity(tensors, self.memory[0]):
            count, tensors = 0, []
        columns = zip(*[leaves for leaves, _ in flat[:count]])
        for column, view in zip(columns, _views(self.memory[place], tensors, count)):
            torch.stack(column, out=view)
        return _Message(place, count, structure, tensors, batches[count:], seconds)


def _tensors_of(leaves: Sequence[tree.Leaf]) -> List[_Tensor]:
    """Describe the tensors of a batch, if all are plain and have a row for each sample; else []."""
    sizes = {leaf.shape[:1] if is_plain(leaf) and leaf.numel() else () for leaf in leaves}
    if len(sizes) != 1 or () in sizes:
        return []
    return [(leaf.dtype, leaf.shape, leaf.numel() * leaf.element_size()) for leaf in leaves]


def _capacity(tensors: Sequence[_Tensor], memory: Tensor) -> int:
    """How many batches of these tensors fit into memory."""
    return len(memory) // sum(size + _ALIGNED for _, _, size in tensors) if tensors else 0


def _views(memory: Tensor, tensors: Sequence[_Tensor], count: int) -> Iterator[Tensor]:
    """Tensors of so many batches, which lie in memory one after the other."""
    begin = 0
    for dtype, shape, size in tensors:
        yield memory[begin : begin + count * size].view(dtype).view(count, *shape)
        # A view of another dtype begins at a multiple of its size.
        begin += -(-count * size // _ALIGNED) * _ALIGNED


def _unchanged(message: object) -> object:
    return message
