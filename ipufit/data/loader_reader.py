"""Reads the batches of a DataLoader: with workers, several in one message, or in this process."""

from __future__ import annotations

import collections
import contextlib
import ctypes
import dataclasses
import itertools
import operator
import time
import weakref
from typing import Any, Callable, Iterable, Iterator, List, NamedTuple, Optional, Sequence, Tuple

import torch
from torch import Tensor
from torch._utils import ExceptionWrapper
from torch.utils.data import (
    DataLoader,
    IterableDataset,
    Subset,
    _utils,
    default_collate,
    get_worker_info,
)

from ipufit.core.batch import RawBatch
from ipufit.data.in_memory import ReadAhead, RowBlock, batch_count, is_datasets_table, is_plain
from ipufit.data.loaders import like, sends_groups
from ipufit.utils import tree

# A worker sends so many batches at once at most, and makes them in so many seconds, as others wait
# for the first of them; all messages share so many bytes.
_MOST, _SECONDS, _BYTES = 32, 0.03, 2**24
_Fetcher: Any = _utils.fetch._MapDatasetFetcher
_torchs_worker: Any = _utils.worker
# Readers whose workers stay from one pass to the next.
_READERS: weakref.WeakKeyDictionary[DataLoader[object], LoaderReader] = weakref.WeakKeyDictionary()


def reads_here(loader: object) -> bool:
    """True of a DataLoader of batches by index that this process reads without more ado."""
    return (
        type(loader) is DataLoader
        and not (loader.num_workers or loader.pin_memory or loader.batch_sampler is None)
        and not isinstance(loader.dataset, IterableDataset)
    )


def read_here(
    loader: DataLoader[object], indices: Iterable[List[int]], horizon: ReadAhead
) -> Iterator[RawBatch]:
    """Read batches in this process as torch does, whose iterator tells its profiler of each.

    Args:
        loader: as :func:`reads_here` knows it.
        indices: of the samples of each batch.
        horizon: how many batches are wanted, so that rows of a table can be taken together.
    """
    # As torch's iterator does for workers.
    torch.empty((), dtype=torch.int64).random_(generator=loader.generator)
    fetcher = _Fetcher(loader.dataset, True, loader.collate_fn, False)
    if not _has_rows(loader):
        return map(fetcher.fetch, indices)

    def rows(rest: Iterator[List[int]]) -> Iterator[RawBatch]:
        for first in rest:
            lists = [first, *itertools.islice(rest, min(_MOST, horizon.batches) - 1)]
            block = _columns(loader.dataset, lists)
            yield from [block] if block else map(fetcher.fetch, itertools.chain(lists, rest))

    return rows(iter(indices))


def has_workers(loader: DataLoader[object]) -> bool:
    """True if workers are there from the pass before, which the next one goes on with."""
    if loader in _READERS:
        return _READERS[loader].reader._iterator is not None
    return loader._iterator is not None and not sends_groups(loader)


def forget_workers(loader: DataLoader[object]) -> None:
    """Let the next pass over a loader begin with new workers."""
    loader._iterator = None
    _READERS.pop(loader, None)


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


class LoaderReader:
    """Reads as a DataLoader does, but only batches that are named one by one, if it has such.

    Each batch is made by the worker that it would have in the loader, after the same ones: its
    random numbers are the same. Workers that make small batches quickly send several at once, in
    memory that they share with this process: a message of torch's takes longer than an update of a
    small network.

    Attributes:
        reader: starts the workers, which it has for itself.
        memory: of each message that is on its way, or was read last.
    """

    reader: DataLoader[object]

    def __init__(self) -> None:
        self._sampler = _NamedBatches()
        self._count, self._most = 1, _MOST
        self.memory: List[Tensor] = []

    @staticmethod
    def of(
        loader: Any, worker: Optional[Tuple[int, int]], before: Optional[LoaderReader]
    ) -> LoaderReader:
        """Make a reader, or find that of the workers that stay.

        Args:
            loader: that it reads like.
            worker: of a stream, which process this is, and of how many; None for map-style data.
            before: the reader of the last pass, whose memory and pace are gone on with.
        """
        if loader in _READERS:
            return _READERS[loader]
        reader = before or LoaderReader()
        changes: dict[str, object] = {"batch_sampler": reader._sampler}
        if worker is not None:
            changes = {"worker_init_fn": AsWorkerOfAll(*worker, loader.worker_init_fn)}
        elif sends_groups(loader):
            count = (loader.prefetch_factor + 1) * loader.num_workers
            if len(reader.memory) != count:
                size = _BYTES // count
                # Without pages until they are written to.
                storage = torch.UntypedStorage._new_shared(count * size)  # type: ignore[no-untyped-call]
                shared = torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage)
                reader.memory = [*torch.split(shared, size)]
            groups = _Groups(loader.dataset, loader.collate_fn, reader.memory, _has_rows(loader))
            changes = {"dataset": groups, "batch_sampler": None, "sampler": reader._sampler}
            init = AsWorkerOfAll(0, 1, loader.worker_init_fn)
            changes.update(collate_fn=_unchanged, worker_init_fn=init)
        reader.reader = like(loader, **changes)
        if loader.persistent_workers:
            _READERS[loader] = reader
        return reader

    def start(self, indices: Iterable[List[int]], horizon: ReadAhead) -> Iterator[RawBatch]:
        """Start a pass over batches.

        Args:
            indices: of the samples of each; a stream has none.
            horizon: how many batches may come at once, as a ``RowBlock``.
        """
        if not self.memory:
            self._sampler.batches = indices
            return iter(self.reader)
        self._sampler.batches = self._tasks(iter(indices))
        return GroupedBatches(self, iter(self.reader), horizon)

    def _tasks(self, rest: Iterator[List[int]]) -> Iterator[_Task]:
        """Deal batches out, to each worker the next message in turn, as torch does with batches."""
        workers = self.reader.num_workers
        places = itertools.cycle(range(len(self.memory)))
        while True:
            turn = [*itertools.islice(rest, self._count * workers)]
            if not turn:
                return
            for worker in range(min(workers, len(turn))):
                yield next(places), turn[worker::workers]

    def adapt(self, messages: Sequence[_Message]) -> None:
        """Choose how many batches are read at once, by the last ones."""
        slowest = max(message.seconds for message in messages)
        self._most = min(self._most, *[message.most for message in messages])
        self._count = max(1, min(self._most, int(_SECONDS / max(slowest, 1e-6))))


class _NamedBatches:
    """Sampler whose batches are set anew for every pass."""

    def __init__(self) -> None:
        self.batches: Iterable[object] = ()

    def __iter__(self) -> Iterator[object]:
        return iter(self.batches)


class GroupedBatches(Iterator[RawBatch]):
    """Pass over messages, of which with several workers each has every so many-th batch.

    Args:
        reader: whose pass it is.
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
            self._receive()
        first, most = self._ready.popleft(), max(1, self._horizon.batches)
        if isinstance(first, ExceptionWrapper):
            first.reraise()  # type: ignore[no-untyped-call]
        if batch_count(first) > most:
            self._ready.appendleft(first.part(most, len(first)))
            return first.part(0, most)
        return first

    def _receive(self) -> None:
        """Read the next message of each worker, and put their batches in order."""
        messages = [*itertools.islice(self.iterator, self._reader.reader.num_workers)]
        if not messages:
            raise StopIteration
        self._reader.adapt(messages)
        rows = itertools.zip_longest(*[each.entries(self._reader.memory) for each in messages])
        entries = (entry for row in rows for entry in row if entry is not None)
        for form, run in itertools.groupby(entries, operator.itemgetter(0)):
            values = [value for _, value in run]
            if form is None:
                self._ready += values
            else:
                self._ready.append(form.copied(values, self.iterator._pin_memory))


class _Form(NamedTuple):
    """Structure and tensors of batches whose bytes lie one after the other.

    Attributes:
        structure: of a batch.
        tensors: dtype and shape of each tensor.
        size: bytes of all of them.
    """

    structure: tree.Structure
    tensors: List[Tuple[torch.dtype, Sequence[int]]]
    size: int

    @staticmethod
    def of(leaves: Sequence[tree.Leaf], structure: tree.Structure) -> Optional[_Form]:
        """Find the form of a batch of plain tensors with a row for each sample; None of others."""
        rows = {leaf.shape[:1] if is_plain(leaf) and leaf.numel() else () for leaf in leaves}
        if len(rows) != 1 or () in rows or not structure.is_builtin:
            return None
        tensors = [(leaf.dtype, leaf.shape) for leaf in leaves]
        return _Form(structure, tensors, sum(map(_bytes, leaves)))

    def copied(self, addresses: Sequence[int], pin_memory: bool) -> RowBlock:
        """Copy batches that lie at these addresses, without other threads."""
        leaves, begin = [], 0
        for dtype, (rows, *shape) in self.tensors:
            size = (len(addresses) * rows, *shape)
            whole = torch.empty(size, dtype=dtype, device="cpu", pin_memory=pin_memory)
            step, target = _bytes(whole) // len(addresses), whole.data_ptr()
            for number, address in enumerate(addresses):
                ctypes.memmove(target + number * step, address + begin, step)
            begin += step
            leaves.append(whole)
        return RowBlock(leaves, self.structure, self.tensors[0][1][0])


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


class _Message(NamedTuple):
    """Batches that were read at once.

    Attributes:
        place: of the memory that has some of them.
        batches: each as it is, or the form of one that lies in memory, after those before it;
            the last one may be an error instead.
        seconds: that a batch took.
        most: how many such batches to read at once.
    """

    place: int
    batches: List[RawBatch]
    seconds: float
    most: int

    def entries(self, memory: Sequence[Tensor]) -> Iterator[Tuple[Optional[_Form], RawBatch]]:
        """Yield the form and the address of each batch in memory; None and the batch of others."""
        address = memory[self.place].data_ptr()
        for batch in self.batches:
            if isinstance(batch, _Form):
                yield batch, address
                address += batch.size
            else:
                yield None, batch


# Place in memory, and indices of the samples of each batch.
_Task = Tuple[int, List[List[int]]]


@dataclasses.dataclass
class _Groups:
    """Dataset that reads several batches for one message.

    Attributes:
        dataset: the user's.
        collate_fn: the user's.
        memory: for each message that is on its way.
        has_rows: whether rows of a table make batches; False as soon as some do not.
    """

    dataset: object
    collate_fn: Callable[[List[object]], RawBatch]
    memory: Sequence[Tensor]
    has_rows: bool

    def __getitem__(self, task: _Task) -> _Message:
        """Make batches, of which each has the indices of its samples, as torch does."""
        start = time.perf_counter()
        place, lists = task
        batches: List[RawBatch] = []
        failures: List[object] = []
        fetcher = _Fetcher(self.dataset, True, self.collate_fn, False)
        try:
            block = _columns(self.dataset, lists) if self.has_rows else None
            self.has_rows = block is not None
            batches += block.batches() if block else ()
            for indices in () if block else lists:
                batches.append(fetcher.fetch(indices))
        except Exception:
            # As torch's worker does.
            where = f"in DataLoader worker process {_torchs_worker._worker_info.id}"
            failures.append(ExceptionWrapper(where=where))  # type: ignore[no-untyped-call]
        seconds = (time.perf_counter() - start) / max(1, len(batches))
        batches, most = _packed(batches, self.memory[place])
        return _Message(place, batches + failures, seconds, most)


def _has_rows(loader: Any) -> bool:
    """True if batches are rows of a ``datasets.Dataset`` of tensors, or of a subset of one."""
    dataset = loader.dataset
    while type(dataset) is Subset:
        dataset = dataset.dataset
    is_plain_table = is_datasets_table(dataset) and dataset.format["type"] == "torch"
    return is_plain_table and loader.collate_fn is default_collate


def _columns(dataset: Any, lists: Sequence[List[int]]) -> Optional[RowBlock]:
    """Rows of such a dataset for several batches; None where each may be of another kind."""
    sizes = [*map(len, lists)]
    if max(sizes) != sizes[0] or len(set(sizes[:-1])) > 1:
        return None
    rows = [*itertools.chain.from_iterable(lists)]
    while type(dataset) is Subset:
        rows, dataset = [dataset.indices[row] for row in rows], dataset.dataset
    try:
        columns = dataset[rows]
    except Exception:
        return None  # which batch, and which row, is found out when each is read
    for name, column in columns.items():
        feature = dataset.features[name]
        while hasattr(feature, "feature"):
            feature = feature.feature
        is_tensor = isinstance(column, Tensor)
        # Where a number is missing, whole numbers are not whole ones any more.
        if not is_tensor or (column.is_floating_point() and "float" not in feature.dtype):
            return None
    leaves, structure = tree.flatten(columns)
    return RowBlock(leaves, structure, sizes[0])


def _packed(batches: Sequence[RawBatch], memory: Tensor) -> Tuple[List[RawBatch], int]:
    """Copy batches into memory.

    Returns:
        Their forms, or batches that have none or no room, and how many have room.
    """
    entries: List[RawBatch] = []
    form: Optional[_Form] = None
    begin, most = 0, _MOST
    for batch in batches:
        leaves, structure = tree.flatten(batch)
        new = _Form.of(leaves, structure)
        # What is the same object is sent once.
        form = form if new == form else new
        most = min(most, len(memory) // form.size if form else 1)
        if form is None or begin + form.size > len(memory):
            entries.append(batch)
            continue
        for leaf in leaves:
            ctypes.memmove(memory.data_ptr() + begin, leaf.data_ptr(), _bytes(leaf))
            begin += _bytes(leaf)
        entries.append(form)
    return entries, most


def _unchanged(message: _Message) -> _Message:
    return message
