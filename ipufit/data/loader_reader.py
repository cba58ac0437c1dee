"""Reads the batches of a DataLoader several at once: in its workers, or in this process."""

from __future__ import annotations

import collections
import contextlib
import ctypes
import dataclasses
import itertools
import time
import weakref
from typing import Any, Callable, Iterable, Iterator, List, NamedTuple, Optional, Sequence, Tuple

import torch
from torch import Tensor
from torch._utils import ExceptionWrapper
from torch.utils.data import DataLoader, Subset, _utils, default_collate, get_worker_info

from ipufit.core.batch import RawBatch
from ipufit.data.in_memory import ReadAhead, RowBlock, batch_count, is_datasets_table, is_plain
from ipufit.data.loaders import like, reads_together
from ipufit.utils import tree

# So many batches are read at once at most, and in so many seconds, as others wait for the first of
# them; all messages of workers share so many bytes, and batches in this process are joined up to so
# many.
_MOST, _SECONDS, _BYTES, _JOINED = 32, 0.03, 2**24, 2**20
_Fetcher: Any = _utils.fetch._MapDatasetFetcher
_torchs_worker: Any = _utils.worker
# Readers whose workers stay from one pass to the next.
_READERS: weakref.WeakKeyDictionary[DataLoader[object], LoaderReader] = weakref.WeakKeyDictionary()


def has_workers(loader: DataLoader[object]) -> bool:
    """True if workers are there from the pass before, which the next one goes on with."""
    if loader in _READERS:
        return _READERS[loader].reader._iterator is not None
    return loader._iterator is not None and not reads_together(loader)


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
    small network. Without workers, this process makes as many at once as an execution takes.

    Attributes:
        reader: starts the workers, which it has for itself.
        memory: of each message that is on its way, or was read last.
    """

    def __init__(self) -> None:
        self._sampler = _NamedBatches()
        self._count, self._most = 1, _MOST
        self._groups = False
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
        reader._look_at(loader, worker)
        if loader.persistent_workers:
            _READERS[loader] = reader
        return reader

    def _look_at(self, loader: Any, worker: Optional[Tuple[int, int]]) -> None:
        self._groups = worker is None and reads_together(loader)
        if worker is not None:
            starts = AsWorkerOfAll(*worker, loader.worker_init_fn)
            self.reader = like(loader, worker_init_fn=starts)
        elif not self._groups:
            self.reader = like(loader, batch_sampler=self._sampler)
        else:
            count = ((loader.prefetch_factor or 0) + 1) * loader.num_workers
            if len(self.memory) != count:
                self.memory = _shared(count)
            self.reader = like(
                loader,
                dataset=_Groups(loader.dataset, loader.collate_fn, self.memory),
                batch_sampler=None,
                sampler=self._sampler,
                collate_fn=_unchanged,
                worker_init_fn=AsWorkerOfAll(0, 1, loader.worker_init_fn),
            )

    def start(self, indices: Iterable[List[int]], horizon: ReadAhead) -> Iterator[RawBatch]:
        """Start a pass over batches.

        Args:
            indices: of the samples of each; a stream has none.
            horizon: how many batches may come at once, as a ``RowBlock``.
        """
        if not self._groups:
            self._sampler.batches = indices
            return iter(self.reader)
        tasks = self._tasks if self.reader.num_workers else self._next_ones
        self._sampler.batches = tasks(iter(indices), horizon)
        return GroupedBatches(self, iter(self.reader), horizon)

    def _tasks(self, rest: Iterator[List[int]], _: ReadAhead) -> Iterator[_Task]:
        """Deal batches out, to each worker the next message in turn, as torch does with batches."""
        workers = self.reader.num_workers
        places = itertools.cycle(range(len(self.memory)))
        while True:
            turn = [*itertools.islice(rest, self._count * workers)]
            if not turn:
                return
            for worker in range(min(workers, len(turn))):
                yield next(places), turn[worker::workers]

    def _next_ones(self, rest: Iterator[List[int]], horizon: ReadAhead) -> Iterator[_Task]:
        """Read as many batches at once as are wanted, each after the samples of the one before."""
        for first in rest:
            more = min(self._count, horizon.batches) - 1
            yield 0, itertools.chain([first], itertools.islice(rest, max(0, more)))

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


def _shared(count: int) -> List[Tensor]:
    """Make memory for so many messages, which workers that are forked share."""
    size = _BYTES // max(1, count)
    storage = torch.UntypedStorage._new_shared(count * size)  # type: ignore[no-untyped-call]
    whole = torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage)
    return [*torch.split(whole, size)]


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
        if isinstance(first, Exception):
            raise first
        if isinstance(first, ExceptionWrapper):
            first.reraise()  # type: ignore[no-untyped-call]
        if batch_count(first) > most:
            self._ready.appendleft(first.part(most, len(first)))
            return first.part(0, most)
        return first

    def _receive(self) -> None:
        """Read the next message of each worker, and put their batches in order."""
        messages = [*itertools.islice(self.iterator, self._reader.reader.num_workers or 1)]
        if not messages:
            raise StopIteration
        self._reader.adapt(messages)
        rows = itertools.zip_longest(*[each.entries(self._reader.memory) for each in messages])
        entries = (entry for row in rows for entry in row if entry is not None)
        for (form, is_here), run in itertools.groupby(entries, lambda e: (e[0], e[2] is _HERE)):
            _, addresses, batches = zip(*run)
            # A copy of large ones would take longer than to look at each.
            if is_here or (form and 1 < len(batches) <= _JOINED // form.size):
                self._ready.append(form.copied(addresses, self.iterator._pin_memory))
            else:
                self._ready += batches


class _Form(NamedTuple):
    """Structure and tensors of batches whose bytes lie one after the other.

    Attributes:
        structure: of a batch.
        tensors: dtype and shape of each tensor.
        begins: bytes before each of them.
        size: bytes of all of them.
    """

    structure: tree.Structure
    tensors: List[Tuple[torch.dtype, Sequence[int]]]
    begins: List[int]
    size: int

    @staticmethod
    def of(leaves: Sequence[tree.Leaf], structure: tree.Structure) -> Optional[_Form]:
        """Find the form of a batch of plain tensors with a row for each sample; None of others."""
        rows = {leaf.shape[:1] if is_plain(leaf) and leaf.numel() else () for leaf in leaves}
        if len(rows) != 1 or () in rows or not structure.is_builtin:
            return None
        tensors = [(leaf.dtype, leaf.shape) for leaf in leaves]
        *begins, size = itertools.accumulate(map(_bytes, leaves), initial=0)
        return _Form(structure, tensors, begins, size)

    def copied(self, batches: Sequence[Sequence[int]], pin_memory: bool) -> RowBlock:
        """Copy batches, whose tensors lie at these addresses, in this thread alone."""
        leaves = []
        for column, (dtype, (rows, *shape)) in enumerate(self.tensors):
            size = (len(batches) * rows, *shape)
            whole = torch.empty(size, dtype=dtype, device="cpu", pin_memory=pin_memory)
            step, target = _bytes(whole) // len(batches), whole.data_ptr()
            for number, addresses in enumerate(batches):
                ctypes.memmove(target + number * step, addresses[column], step)
            leaves.append(whole)
        return RowBlock(leaves, self.structure, self.tensors[0][1][0])


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


# Form of a batch, addresses of its tensors, and the batch itself, if it is not in memory.
_HERE = object()
_Entry = Tuple[Optional[_Form], Sequence[int], RawBatch]


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

    def entries(self, memory: Sequence[Tensor]) -> Iterator[_Entry]:
        """Yield the form, the addresses of the tensors, and the object of each batch."""
        address = memory[self.place].data_ptr() if memory else 0
        for batch in self.batches:
            if isinstance(batch, _Form):
                yield batch, [address + begin for begin in batch.begins], _HERE
                address += batch.size
            else:
                # One alone is not looked at more closely.
                leaves, structure = tree.flatten(batch if len(self.batches) > 1 else None)
                form = _Form.of(leaves, structure)
                yield form, [leaf.data_ptr() for leaf in leaves] if form else [], batch


# Place in memory, and indices of the samples of each batch.
_Task = Tuple[int, Iterable[List[int]]]


@dataclasses.dataclass
class _Groups:
    """Dataset that reads several batches for one message.

    Attributes:
        dataset: the user's.
        collate_fn: the user's.
        memory: of workers, for each message that is on its way.
        has_rows: whether rows of a table make batches; True until some do not.
    """

    dataset: object
    collate_fn: Callable[[List[object]], RawBatch]
    memory: Sequence[Tensor]
    has_rows: bool = True

    def __getitem__(self, task: _Task) -> _Message:
        """Make batches, of which each has the indices of its samples, as torch does."""
        start = time.perf_counter()
        place, lists = task
        batches: List[RawBatch] = []
        failures: List[object] = []
        try:
            self._read(lists, batches)
        except Exception as error:
            failures = [error]
            if self.memory:
                # As torch's worker does.
                where = f"in DataLoader worker process {_torchs_worker._worker_info.id}"
                failures = [ExceptionWrapper(where=where)]  # type: ignore[no-untyped-call]
        seconds = (time.perf_counter() - start) / max(1, len(batches))
        most = _MOST
        if self.memory:
            batches, most = _packed(batches, self.memory[place])
        return _Message(place, batches + failures, seconds, most)

    def _read(self, lists: Iterable[List[int]], batches: List[RawBatch]) -> None:
        """Read the batches of these indices, up to an error."""
        if self.has_rows and self.collate_fn is default_collate and _has_tensors(self.dataset):
            lists = [*lists]
            batches += _columns(self.dataset, lists)
            self.has_rows = bool(batches)
            if batches:
                return
        fetcher = _Fetcher(self.dataset, True, self.collate_fn, False)
        for indices in lists:
            batches.append(fetcher.fetch(indices))


def _has_tensors(dataset: Any) -> bool:
    """True of a ``datasets.Dataset`` whose rows are tensors, or a subset of one."""
    while type(dataset) is Subset:
        dataset = dataset.dataset
    return is_datasets_table(dataset) and dataset.format["type"] == "torch"


def _columns(dataset: Any, lists: Sequence[List[int]]) -> List[RawBatch]:
    """Rows of such a dataset for several batches; none where each may be of another kind."""
    rows = [*itertools.chain.from_iterable(lists)]
    while type(dataset) is Subset:
        rows, dataset = [dataset.indices[row] for row in rows], dataset.dataset
    try:
        columns = dataset[rows]
    except Exception:
        return []  # which batch, and which row, is found out when each is read
    for name, column in columns.items():
        feature = dataset.features[name]
        while hasattr(feature, "feature"):
            feature = feature.feature
        is_tensor = isinstance(column, Tensor)
        # Where a number is missing, whole numbers are not whole ones any more.
        if not is_tensor or (column.is_floating_point() and "float" not in feature.dtype):
            return []
    parts = zip(*[torch.split(column, [*map(len, lists)]) for column in columns.values()])
    return [dict(zip(columns, part)) for part in parts]


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
