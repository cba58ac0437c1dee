"""Reads the batches of a DataLoader: with workers, several in one message, or in this process."""

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
from ipufit.data.read_errors import LocatedFailure
from ipufit.utils import tree

# A worker sends so many batches at once at most, and makes them in so many seconds, as others wait
# for the first of them; all messages share so many bytes, in places of which so many are for
# batches that are still in use.
_MOST, _SECONDS, _BYTES, _IN_USE = 32, 0.03, 2**25, 4
# Kernels may sum in another order where memory begins elsewhere.
_ALIGNMENT = 64
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
            blocks = _row_blocks(loader.dataset, lists)
            yield from blocks or map(fetcher.fetch, itertools.chain(lists, rest))

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


class LoaderReader(Iterator[RawBatch]):
    """Reads as a DataLoader does, but only batches that are named one by one, if it has such.

    Each batch is made by the worker that it would have in the loader, after the same ones: its
    random numbers are the same. Workers that make small batches quickly send several at once, in
    memory that they share with this process: a message of torch's takes longer than an update of a
    small network.

    The messages of all workers that have as many batches are a turn, for which there is one place
    in memory. Batches of a turn stay where they are, and the place is used again when nobody has
    a tensor of it any more.

    Attributes:
        reader: starts the workers, which it has for itself.
        memory: each place.
        iterator: torch's of the pass, over messages if there is memory for them.
    """

    reader: DataLoader[object]
    iterator: Any

    def __init__(self) -> None:
        self._sampler = _NamedBatches()
        self._count, self._most = 1, _MOST
        self.memory: List[Tensor] = []
        # By place, whether somebody still has tensors of it.
        self._users: dict[int, weakref.finalize[[Tensor], object]] = {}
        # Places of which messages are on their way.
        self._sent: set[int] = set()
        # Of the last batches.
        self._form: Optional[_Form] = None
        self._ready: collections.deque[RawBatch] = collections.deque()
        self._horizon = ReadAhead()

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
        reader = _READERS.get(loader) or before or LoaderReader()
        if reader is not before:
            reader._form = None
        if loader in _READERS:
            return reader
        changes: dict[str, object] = {"batch_sampler": reader._sampler}
        if worker is not None:
            changes = {"worker_init_fn": AsWorkerOfAll(*worker, loader.worker_init_fn)}
        elif sends_groups(loader):
            count = loader.prefetch_factor + 1 + _IN_USE
            if len(reader.memory) != count:
                size = _BYTES // count // _ALIGNMENT * _ALIGNMENT
                # Without pages until they are written to.
                storage = torch.UntypedStorage._new_shared(count * size)  # type: ignore[no-untyped-call]
                shared = torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage)
                reader.memory = [*torch.split(shared, size)]
                reader._users = {}
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
        self._sent.clear()
        self._ready.clear()
        self._horizon = horizon
        self._sampler.batches = self._tasks(iter(indices)) if self.memory else indices
        self.iterator = iter(self.reader)
        return self if self.memory else self.iterator

    def __next__(self) -> RawBatch:
        if not self._ready:
            messages = [*itertools.islice(self.iterator, self.reader.num_workers)]
            if not messages:
                raise StopIteration
            self.adapt(messages)
            self._ready += self._received(messages)
        first, most = self._ready.popleft(), max(1, self._horizon.batches)
        if isinstance(first, LocatedFailure):
            first.reraise()  # type: ignore[no-untyped-call]
        if batch_count(first) > most:
            self._ready.appendleft(first.part(most, len(first)))
            return first.part(0, most)
        return first

    def _tasks(self, rest: Iterator[List[int]]) -> Iterator[_Task]:
        """Deal batches out, to each worker the next message in turn, as torch does with batches."""
        workers = self.reader.num_workers
        while True:
            turn = [*itertools.islice(rest, self._count * workers)]
            if not turn:
                return
            place = min({*range(len(self.memory))} - self._in_use() - self._sent)
            self._sent.add(place)
            for worker in range(min(workers, len(turn))):
                slots = range(worker, len(turn), workers)
                yield place, slots, turn[worker::workers]

    def _in_use(self) -> set[int]:
        """Places of which somebody has a tensor."""
        return {place for place, user in self._users.items() if user.alive}

    def adapt(self, messages: Sequence[_Message]) -> None:
        """Choose how many batches are read at once, by the last ones."""
        slowest = max(message.seconds for message in messages)
        self._most = min(self._most, *[message.most for message in messages])
        # torch's timeout is for one batch.
        seconds = 0 if self.reader.timeout else _SECONDS
        self._count = max(1, min(self._most, int(seconds / max(slowest, 1e-6))))

    def _received(self, messages: Sequence[_Message]) -> Iterator[RawBatch]:
        """Yield the batches of a turn in their order, and any error instead of the next one."""
        place, memory = messages[0].place, _slots(self.memory[messages[0].place], messages[0].slots)
        user = (ctypes.c_uint8 * memory.numel()).from_address(memory.data_ptr())
        # Memory stays as long as a tensor of it.
        self._users[place] = weakref.finalize(user, id, memory)
        batches = torch.frombuffer(user, dtype=torch.uint8).view(memory.shape)
        del user
        self._sent.discard(place)
        is_needed = len(self._in_use()) > _IN_USE
        # After an error there is nothing.
        rows = itertools.zip_longest(*[each.batches for each in messages], fillvalue=self)
        entries = enumerate(itertools.chain.from_iterable(rows))
        for form, group in itertools.groupby(entries, _form_of):
            run = [*group]
            if form is None:
                yield from (batch for _, batch in run if batch is not self)
                continue
            # The first batches of a form may be used for long, as examples.
            copies, pins = is_needed or form != self._form, self.iterator._pin_memory
            self._form = form
            yield form.block(batches[run[0][0] : run[-1][0] + 1], copies or pins, pins)


class _NamedBatches:
    """Sampler whose batches are set anew for every pass."""

    def __init__(self) -> None:
        self.batches: Iterable[object] = ()

    def __iter__(self) -> Iterator[object]:
        return iter(self.batches)


class _Form(NamedTuple):
    """Structure and tensors of batches, which lie one after the other in a slot.

    Attributes:
        structure: of a batch.
        tensors: dtype, shape and bytes of each tensor.
        size: bytes of a slot that has room for them.
    """

    structure: tree.Structure
    tensors: List[Tuple[torch.dtype, Sequence[int], int]]
    size: int

    @staticmethod
    def of(leaves: Sequence[tree.Leaf], structure: tree.Structure) -> Optional[_Form]:
        """Find the form of a batch of plain tensors with a row for each sample; None of others."""
        rows = {leaf.shape[:1] if is_plain(leaf) and leaf.numel() else () for leaf in leaves}
        if len(rows) != 1 or () in rows or not structure.is_builtin:
            return None
        tensors = [(leaf.dtype, leaf.shape, leaf.numel() * leaf.element_size()) for leaf in leaves]
        return _Form(structure, tensors, sum(_aligned(size) for *_, size in tensors))

    def pack(self, leaves: Sequence[Tensor], address: int) -> None:
        """Copy a batch into the slot at this address."""
        for leaf, (*_, size) in zip(leaves, self.tensors):
            ctypes.memmove(address, leaf.data_ptr(), size)
            address += _aligned(size)

    def block(self, slots: Tensor, copies: bool, pin_memory: bool) -> RowBlock:
        """Make batches of what lies in slots, copied or not."""
        leaves, begin = [], 0
        for dtype, shape, size in self.tensors:
            part = slots[:, begin : begin + size]
            begin += _aligned(size)
            if copies:
                source = part
                part = torch.empty(
                    part.shape, dtype=torch.uint8, device="cpu", pin_memory=pin_memory
                )
                # In this thread alone, unlike torch.
                part.numpy()[:] = source.numpy()
            leaves.append(part.view(dtype).view(len(part), *shape))
        return RowBlock(leaves, self.structure)


def _aligned(size: int) -> int:
    """Bytes of a tensor and the gap before the next one."""
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def _slots(memory: Tensor, count: int) -> Tensor:
    """Divide a place, which becomes (slots, bytes of each)."""
    size = len(memory) // count // _ALIGNMENT * _ALIGNMENT
    return memory[: count * size].view(count, size)


def _form_of(entry: Tuple[int, object]) -> Optional[_Form]:
    return entry[1] if isinstance(entry[1], _Form) else None


class _Message(NamedTuple):
    """Batches that were read at once.

    Attributes:
        place: of the memory that has some of them.
        slots: so many are there, one for each batch of all workers.
        batches: each as it is, or the form of one that lies in its slot; the last one may be an
            error instead.
        seconds: that a batch took.
        most: how many such batches to read at once.
    """

    place: int
    slots: int
    batches: List[RawBatch]
    seconds: float
    most: int


# Place in memory, slots of it, and indices of the samples of each batch.
_Task = Tuple[int, range, List[List[int]]]


@dataclasses.dataclass
class _Groups:
    """Dataset that reads several batches for one message.

    Attributes:
        dataset: the user's.
        collate_fn: the user's.
        memory: each place for messages.
        has_rows: whether rows of a table make batches; False as soon as some do not.
    """

    dataset: object
    collate_fn: Callable[[List[object]], RawBatch]
    memory: Sequence[Tensor]
    has_rows: bool

    def __getitem__(self, task: _Task) -> _Message:
        """Make batches, of which each has the indices of its samples, as torch does."""
        start = time.perf_counter()
        place, slots, lists = task
        batches: List[RawBatch] = []
        failures: List[RawBatch] = []
        fetcher = _Fetcher(self.dataset, True, self.collate_fn, False)
        try:
            blocks = _row_blocks(self.dataset, lists) if self.has_rows else []
            self.has_rows = bool(blocks)
            for block in blocks:
                batches += block.batches()
            for indices in () if blocks else lists:
                batches.append(fetcher.fetch(indices))
        except Exception as error:
            worker = _torchs_worker._worker_info.id
            failures.append(LocatedFailure(error, self.dataset, worker))
        seconds = (time.perf_counter() - start) / max(1, len(batches))
        batches, most = _packed(batches, self.memory[place], slots)
        return _Message(place, slots.stop, batches + failures, seconds, most)


def _has_rows(loader: Any) -> bool:
    """True if batches are rows of a ``datasets.Dataset`` of tensors, or of a subset of one."""
    dataset = loader.dataset
    while type(dataset) is Subset:
        dataset = dataset.dataset
    is_plain_table = is_datasets_table(dataset) and dataset.format["type"] == "torch"
    return is_plain_table and loader.collate_fn is default_collate


def _row_blocks(dataset: Any, lists: Sequence[List[int]]) -> List[RowBlock]:
    """Rows of such a dataset for several batches; [] where each may be of another kind."""
    sizes = [*map(len, lists)]
    if max(sizes) != sizes[0] or len(set(sizes[:-1])) > 1:
        return []
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
    leaves, structure = tree.flatten(columns)
    return [*RowBlock.of(leaves, structure, sizes[0])]


def _packed(
    batches: Sequence[RawBatch], memory: Tensor, slots: range
) -> Tuple[List[RawBatch], int]:
    """Copy batches into slots of a place in memory.

    Returns:
        Their forms, or batches that have none or no room, and how many of a worker have room.
    """
    entries: List[RawBatch] = []
    form: Optional[_Form] = None
    most, targets = _MOST, _slots(memory, slots.stop)
    for batch, slot in zip(batches, slots):
        leaves, structure = tree.flatten(batch)
        new = _Form.of(leaves, structure)
        # What is the same object is sent once.
        form = form if new == form else new
        most = min(most, len(memory) // slots.step // form.size if form else 1)
        if form is None or form.size > targets.shape[1]:
            entries.append(batch)
        else:
            form.pack(leaves, targets[slot].data_ptr())
            entries.append(form)
    return entries, most


def _unchanged(message: _Message) -> _Message:
    return message
