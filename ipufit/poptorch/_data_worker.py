"""The process that loads batches ahead of time and writes them into a ring buffer by a layout."""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import gc
import multiprocessing
import os
import pickle
import random
import signal
import sys
import tempfile
import time
import traceback
from multiprocessing import reduction
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from typing import Any, Callable, Iterator, List, NamedTuple, NoReturn, Optional, Sequence, Tuple

import torch
import torch.utils.data
from torch import Tensor

from ipufit.poptorch._parsers import parser_of, reconstructTensorStructure
from ipufit.poptorch._ring_buffer import RingBufferWriter

_ADVICE = (
    "An AsynchronousDataAccessor carries a tensor, a flat list, tuple or dict of tensors, or an "
    "object whose type has a parser (registerCustomArgParser, where the module is imported). Leave "
    "the rest out in the dataset or in collate_fn, or use DataLoaderMode.Sync."
)
# The kinds of batches, as messages call them.
_TENSOR, _LIST, _DICT, _OBJECT = "a tensor", "a list or tuple", "a dict", "an object"


class Layout:
    """Splits the batches of a dataset into tensors and rebuilds them; all have the same layout.

    A tuple comes back as a list, and a dict in the order of the first batch's keys.

    Args:
        data: the first batch, which :meth:`take_apart` checks too.
    Raises:
        AssertionError: it is of a type that can't be taken apart.
    """

    def __init__(self, data: Any) -> None:
        self._kind, self._keys, parts = _parts(data)
        self._template: object = None
        if self._kind == _OBJECT:
            # Its tensors are in the ring buffer; what travels is everything else.
            empty = [tensor.new_empty(0) for tensor in parts]
            self._template = reconstructTensorStructure(data, empty)

    def take_apart(self, data: Any) -> List[Tensor]:
        """Return the tensors of one batch.

        Raises:
            AssertionError: it is not like the first one, or there is more in it than tensors.
        """
        kind, keys, parts = _parts(data)
        if kind != self._kind:
            raise AssertionError(
                f"The first batch of the dataset is {self._kind}, and a later one is {kind} "
                f"({type(data).__name__}). Make all batches alike."
            )
        if kind == _DICT and set(keys) != set(self._keys):
            raise AssertionError(
                f"The first batch of the dataset has the keys {self._keys}, and a later one has "
                f"{list(data)}. Make all batches alike."
            )
        for key in keys:
            if not isinstance(parts[key], Tensor):
                raise AssertionError(
                    f"Element {key!r} of a batch is of type {type(parts[key]).__name__}. {_ADVICE}"
                )
        if len(keys) != len(self._keys):
            raise AssertionError(
                f"The first batch of the dataset has {len(self._keys)} tensors, and a later one "
                f"has {len(keys)}. Make all batches alike."
            )
        return [parts[key] for key in self._keys]

    def put_together(self, tensors: Sequence[Tensor]) -> Any:
        """A batch of these tensors."""
        if self._kind == _TENSOR:
            return tensors[0]
        if self._kind == _DICT:
            return dict(zip(self._keys, tensors))
        if self._kind == _OBJECT:
            return reconstructTensorStructure(self._template, tensors)
        return list(tensors)


def _parts(data: Any) -> Tuple[str, Sequence[Any], Any]:
    """Return the kind of a batch, its keys or places, and what is in it, to be indexed by these."""
    if isinstance(data, Tensor):
        return _TENSOR, (0,), (data,)
    if isinstance(data, dict):
        return _DICT, list(data), data
    parser = parser_of(data)
    if parser is not None:
        tensors = list(parser.yieldTensors(data))
        return _OBJECT, range(len(tensors)), tensors
    if isinstance(data, (list, tuple)):
        return _LIST, range(len(data)), data
    raise AssertionError(f"A batch of the dataset is of type {type(data).__name__}. {_ADVICE}")


class CombiningLoader(torch.utils.data.DataLoader):  # type: ignore[type-arg]  # as in old torch
    """The part of :class:`ipufit.poptorch.DataLoader` that another process reads it by.

    Attributes:
        rebatched_drop_last: whether rebatching leaves out the samples that don't fill a batch; None
            where nothing is rebatched.
    """

    rebatched_drop_last: Optional[bool] = None
    _accessor: Optional[object]
    _combined_batch_size: Optional[int]
    _is_user_batch_sampler_set: bool
    # Whose order the next iteration uses.
    _next_epoch = 1

    @property
    def combinedBatchSize(self) -> Optional[int]:
        """Samples that one run of the model takes; None with ``batch_size=None``."""
        return self._combined_batch_size


class FiledDataset:
    """A dataset in an unnamed file, which only this process and the one it starts can open.

    Its tensors are in it as bytes, where multiprocessing would move them to shared memory, of which
    there may be too little.
    """

    def __init__(self, dataset: object) -> None:
        self._file = tempfile.TemporaryFile()  # noqa: SIM115  # open until it has been read
        pickle.dump(dataset, self._file, protocol=4)
        self._file.flush()

    def close(self) -> None:
        """Close the file, which the other process has open."""
        self._file.close()

    def __getstate__(self) -> object:
        return {"_handle": reduction.DupFd(self._file.fileno())}

    def __setstate__(self, state: Any) -> None:
        self._handle = state["_handle"]

    def open(self) -> Any:
        """Read the dataset, in the other process."""
        with os.fdopen(self._handle.detach(), "rb") as file:
            file.seek(0)
            return pickle.load(file)


# Rows of an epoch, and the row of a slot where they belong; None for a whole batch.
_Piece = Tuple[Optional[int], List[Tensor]]


def _rebatched(batches: Iterator[List[Tensor]], rows: int) -> Iterator[_Piece]:
    """Cut batches where a batch of ``rows`` rows is full.

    Yields:
        the row of the new batch at which a piece belongs, and the piece. Every row comes once, in
        order; a piece that ends at ``rows`` completes its batch.
    """
    filled = 0
    for tensors in batches:
        begin, end = 0, _rows_of(tensors)
        while begin < end:
            size = min(end - begin, rows - filled)
            yield filled, [tensor.narrow(0, begin, size) for tensor in tensors]
            begin += size
            filled = (filled + size) % rows


def _rows_of(tensors: List[Tensor]) -> int:
    rows = [tensor.shape[0] if tensor.dim() else None for tensor in tensors]
    first = rows[0] if rows else None
    if first is None or any(other != first for other in rows):
        shapes = [tuple(tensor.shape) for tensor in tensors]
        raise AssertionError(
            "rebatched_size joins batches along dimension 0, which must be of one size in all "
            f"tensors of a batch; their shapes are {shapes}. Give every tensor a batch dimension, "
            "or leave rebatched_size out."
        )
    return first


class Command(enum.Enum):
    """Messages of the reader, each with a number: the epoch where there is one."""

    BEGIN = "begin"  # it has begun this epoch, the one after the last
    RESTART = "restart"  # it has given its epoch up, and has begun this one
    RELEASED = "released"  # it has given a slot back
    STOP = "stop"  # it wants no more


class WorkerEvent(enum.Enum):
    """Messages of the worker, each with a value."""

    READY = "ready"  # (layout, memory, indices_mem), once
    ITEM = "item"  # rows of a batch that has fewer than its slot, or None
    END = "end"  # of the epoch
    RESTARTED = "restarted"  # an epoch; the ring buffer is empty
    EMPTY = "empty"  # the dataset, in the first epoch: the last event
    FAILED = "failed"  # (summary, traceback), before the exception itself: the last event


class WorkerSettings(NamedTuple):
    """How batches are loaded.

    Attributes:
        slots: number of slots of the ring buffer.
        pause: seconds between two looks at a ring buffer that is full.
        loads_on: whether the next epoch is loaded before the reader begins it.
        loads_first: whether the first epoch is loaded before the reader begins it.
        rows: rows of a rebatched batch; None passes on the dataset's batches.
        keeps_rest: whether a last batch with fewer rows is passed on.
        seed: seed of the worker's random numbers, to which the epoch is added.
    """

    slots: int
    pause: float
    loads_on: bool
    loads_first: bool
    rows: Optional[int]
    keeps_rest: bool
    seed: int


class Stopped(BaseException):
    """The reader wants no more, or is gone."""


class _Restart(Exception):
    """The reader has given its epoch up."""

    def __init__(self, epoch: int) -> None:
        super().__init__(epoch)
        self.epoch = epoch


@dataclasses.dataclass(eq=False)
class DataWorker:
    """Loads epoch after epoch, as far ahead as it may and the ring buffer has room.

    The end of an epoch is told only to a reader that has begun it, so that a dataset which is
    empty the second time is not asked again and again.
    """

    dataset: object
    settings: WorkerSettings
    commands: Connection
    events: Connection

    def __post_init__(self) -> None:
        self._layout: Optional[Layout] = None
        self._ring: RingBufferWriter
        self._begun = 0
        self._filled = 0

    def run(self) -> NoReturn:
        """Load until the reader wants no more.

        Raises:
            Stopped: that moment; anything else comes from the dataset.
        """
        epoch = 1
        pieces = self._pieces(epoch)
        first = next(pieces, None)
        if first is None:
            self._tell(WorkerEvent.EMPTY, None)
            raise Stopped
        self._ring = RingBufferWriter(first[1], self.settings.slots, self.settings.rows)
        self._tell(WorkerEvent.READY, (self._layout, self._ring.memory, self._ring.indices_mem))
        self._put(*first)
        while True:
            try:
                self._load(pieces, epoch)
                epoch += 1
                self._wait_for(epoch)
            except _Restart as restart:
                epoch = restart.epoch
                self._ring.clear()
                self._tell(WorkerEvent.RESTARTED, epoch)
            pieces = self._pieces(epoch)

    def _load(self, pieces: Iterator[_Piece], epoch: int) -> None:
        while True:
            while self.commands.poll():
                self._obey()
            self._wait_for(epoch)
            piece = next(pieces, None)
            if piece is None:
                break
            self._wait(self._ring.is_writable, self.settings.pause)
            self._put(*piece)
        self._wait(lambda: self._begun >= epoch)
        if self._filled and self.settings.keeps_rest:
            self._publish(self._filled)
        self._filled = 0
        self._tell(WorkerEvent.END, None)

    def _wait_for(self, epoch: int) -> None:
        """Wait until the reader has begun the epoch, or until it may be loaded ahead."""
        self._wait(lambda: epoch <= self._begun + self._ahead())

    def _ahead(self) -> int:
        return int(self.settings.loads_on if self._begun else self.settings.loads_first)

    def _pieces(self, epoch: int) -> Iterator[_Piece]:
        self._filled = 0
        if self.settings.rows is None:
            return ((None, tensors) for tensors in self._batches(epoch))
        return _rebatched(self._batches(epoch), self.settings.rows)

    def _batches(self, epoch: int) -> Iterator[List[Tensor]]:
        self._seed(epoch)
        if isinstance(self.dataset, CombiningLoader):
            # Its order depends on how often it has been iterated over. The epochs
            # that count are the reader's, not those that were begun here and given up.
            self.dataset._next_epoch = epoch
        for batch in _iterated(self.dataset):
            if self._layout is None:
                self._layout = Layout(batch)
            yield self._layout.take_apart(batch)

    def _seed(self, epoch: int) -> None:
        # For every epoch anew: how much of an epoch that was given up has been loaded depends on
        # the clock, and the random numbers of the next one must not.
        seed = (self.settings.seed + epoch) % 2**63
        torch.manual_seed(seed)
        random.seed(seed)
        if "numpy" in sys.modules:
            sys.modules["numpy"].random.seed(seed % 2**32)

    def _put(self, start: Optional[int], tensors: List[Tensor]) -> None:
        self._ring.write(tensors, start)
        if start is not None and self.settings.rows is not None:
            self._filled = (start + len(tensors[0])) % self.settings.rows
        if self._filled == 0:
            self._publish(None)

    def _publish(self, rows: Optional[int]) -> None:
        self._ring.publish()
        self._tell(WorkerEvent.ITEM, rows)

    def _tell(self, event: WorkerEvent, value: object) -> None:
        try:
            self.events.send((event, value))
        except (BrokenPipeError, ConnectionResetError):
            raise Stopped from None

    def _wait(self, condition: Callable[[], bool], pause: float = 0.0) -> None:
        while not condition():
            self._obey()
            if pause:
                time.sleep(pause)

    def _obey(self) -> None:
        try:
            command, epoch = self.commands.recv()
        except (EOFError, OSError):
            raise Stopped from None
        if command is Command.STOP:
            raise Stopped
        if command is Command.BEGIN:
            self._begun = epoch
        elif command is Command.RESTART:
            self._begun = epoch
            raise _Restart(epoch)


def _iterated(dataset: Any) -> Iterator[Any]:
    """Iterate over a dataset's batches; a map-style dataset ends at its length."""
    kind = type(dataset)
    if not hasattr(kind, "__iter__") and hasattr(kind, "__getitem__") and hasattr(kind, "__len__"):
        return (dataset[index] for index in range(len(dataset)))
    return iter(dataset)


def serve(
    dataset: Any,
    settings: WorkerSettings,
    commands: Connection,
    events: Connection,
    start_method: str,
    others: Tuple[Connection, ...] = (),
) -> None:
    """Run the worker process.

    Args:
        start_method: of the processes that the dataset starts: the program's own. Left alone they
            would be started as this one was, by one more fork server that imports torch again.
        others: the reader's ends of the pipes, where a fork has copied them: as long as one is
            open here, nobody learns that the reader is gone.
    """
    # Ctrl-C is for the program; it says when this process is to end, or goes on reading.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, _stop)
    # As in the processes of torch's DataLoader: the cores are the model's.
    torch.set_num_threads(1)
    multiprocessing.set_start_method(start_method, force=True)
    for other in others:
        other.close()
    dataset = dataset.open() if isinstance(dataset, FiledDataset) else dataset
    worker = DataWorker(dataset, settings, commands, events)
    with contextlib.suppress(Stopped):
        try:
            worker.run()
        except Exception as problem:
            _report(problem, events)
            # Torch's exceptions refer to themselves through their frames, which hold the iterator.
            # Left to the garbage collector it couldn't tell its processes any more that it ends.
            traceback.clear_frames(problem.__traceback__)
    # What is left is to end in order, which SIGTERM would ask for, and must not cut short.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    # Processes of torch's own end with their iterator, if it goes before the interpreter does.
    del worker
    if getattr(dataset, "_iterator", None) is not None:
        dataset._iterator = None
    del dataset
    gc.collect()


def _stop(number: int, frame: object) -> NoReturn:
    raise Stopped


def _report(problem: Exception, events: Connection) -> None:
    summary = traceback.format_exception_only(type(problem), problem)[-1].strip()
    text = "".join(traceback.format_exception(type(problem), problem, problem.__traceback__))
    with contextlib.suppress(OSError):
        events.send((WorkerEvent.FAILED, (summary, text)))
        try:
            # Some exceptions can be sent, and not be received.
            ForkingPickler.loads(ForkingPickler.dumps(problem))
        except Exception:
            problem = RuntimeError(summary)
        events.send(problem)
