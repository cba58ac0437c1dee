"""Loading of batches ahead of time: the accessor, the process behind it, and its reader."""

from __future__ import annotations

import contextlib
import multiprocessing.connection
import multiprocessing.forkserver
import multiprocessing.process
import multiprocessing.util
import os
import weakref
from multiprocessing.connection import Connection
from typing import Any, Callable, Optional, Tuple, Union

import torch
import torch.multiprocessing
from torch.utils import data

from ipufit.poptorch import _data_worker
from ipufit.poptorch._logging import error, logger
from ipufit.poptorch._ring_buffer import RingBufferReader
from ipufit.poptorch.enums import SharingStrategy


class BatchReader:
    """Reads what a ``DataWorker`` loads, wherever that runs.

    Args:
        commands: where the worker listens.
        events: where it speaks.
    Raises:
        Error: the dataset has no first batch.
    """

    def __init__(self, commands: Connection, events: Connection) -> None:
        self._commands = commands
        self._events = events
        self._epoch = 0
        self._is_used = False
        self._has_ended = False
        event, value = self._receive()
        if event is _data_worker.WorkerEvent.EMPTY:
            raise error(
                "AsynchronousDataAccessor worker thread failed to start: The Dataset is empty. So "
                "is a DataLoader with drop_last=True whose dataset has fewer samples than a "
                "combined batch."
            )
        if event is _data_worker.WorkerEvent.FAILED:
            (summary, text), problem = value
            logger.error("The worker process of an AsynchronousDataAccessor failed:\n%s", text)
            raise error(
                "AsynchronousDataAccessor worker thread failed to start: the dataset raised "
                f"{summary}"
            ) from problem
        self._layout, memory, indices_mem = value
        self._data_buffers = RingBufferReader(memory, indices_mem)

    def begin(self) -> None:
        """Begin an epoch; one that has been begun and not been read from continues."""
        if self._epoch and not self._is_used and not self._has_ended:
            return
        self._data_buffers.release()
        self._epoch += 1
        if self._epoch == 1 or self._has_ended:
            self._tell(_data_worker.Command.BEGIN)
        else:
            self._tell(_data_worker.Command.RESTART)
            # Of this epoch: Ctrl-C may have left one unread.
            while self._receive_or_raise() != (_data_worker.WorkerEvent.RESTARTED, self._epoch):
                pass
            self._data_buffers.clear()
        self._is_used = False
        self._has_ended = False

    def next(self) -> Any:
        """Return the next batch of the epoch, in shared memory that the one after it may overwrite.

        Raises:
            StopIteration: the epoch is over. What the dataset raises comes as it is.
        """
        if self._epoch == 0:
            self.begin()
        if self._data_buffers.release():
            self._tell(_data_worker.Command.RELEASED)
        if self._has_ended:
            raise StopIteration
        event, rows = self._receive_or_raise()
        if event is _data_worker.WorkerEvent.END:
            self._has_ended = True
            raise StopIteration
        self._is_used = True
        tensors = self._data_buffers.take()
        if rows is not None:
            tensors = [tensor[:rows] for tensor in tensors]
        return self._layout.put_together(tensors)

    def _tell(self, command: _data_worker.Command) -> None:
        # A worker that is gone has said why, and its words are still to be read.
        with contextlib.suppress(OSError):
            self._commands.send((command, self._epoch))

    def _receive_or_raise(self) -> Tuple[_data_worker.WorkerEvent, Any]:
        event, value = self._receive()
        if event is _data_worker.WorkerEvent.FAILED:
            _, problem = value
            raise problem
        return event, value

    def _receive(self) -> Tuple[_data_worker.WorkerEvent, Any]:
        """Return the next event, with the exception itself where the dataset has raised one."""
        try:
            self._await_event()
            event, value = self._events.recv()
            if event is _data_worker.WorkerEvent.FAILED:
                return event, (value, self._exception(*value))
        except (EOFError, OSError):
            raise self._gone() from None
        return event, value

    def _await_event(self) -> None:
        self._events.poll(None)

    def _gone(self) -> Exception:
        return error("The worker of an AsynchronousDataAccessor is gone. Make a new accessor.")

    def _exception(self, summary: str, text: str) -> BaseException:
        try:
            problem = self._events.recv()
        except Exception:
            problem = RuntimeError(summary)
        assert isinstance(problem, BaseException)
        problem.__cause__ = _WorkerTraceback(text)
        return problem


class _WorkerTraceback(Exception):
    """Shows, as the cause of an exception, where in the worker it was raised."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._text = text

    def __str__(self) -> str:
        return f"\n\nIn the worker process of the AsynchronousDataAccessor:\n{self._text}"


_START_METHODS = {
    SharingStrategy.SharedMemory: "spawn",
    SharingStrategy.FileSystem: "spawn",
    SharingStrategy.Fork: "fork",
    SharingStrategy.ForkServer: "forkserver",
}
# How long to wait, in seconds, for the process to end by itself, after SIGTERM and after SIGKILL.
# Torch's own processes, which it ends in turn, may take five.
_PATIENCE = (1.0, 10.0, 10.0)


class DataProcess(BatchReader):
    """A worker process and the batches that it has loaded.

    Args:
        dataset: any iterable of batches.
        settings: of the worker.
        strategy: how the process is started and gets the dataset.
    Raises:
        Error: the process doesn't start, or the dataset has no first batch.
    """

    def __init__(
        self, dataset: object, settings: _data_worker.WorkerSettings, strategy: SharingStrategy
    ) -> None:
        self._owner = os.getpid()
        self._process: Any = None
        context: Any = torch.multiprocessing.get_context(_START_METHODS[strategy])
        events, its_events = context.Pipe(duplex=False)
        its_commands, commands = context.Pipe(duplex=False)
        others = (events, commands) if strategy is SharingStrategy.Fork else ()
        if strategy is SharingStrategy.ForkServer:
            _preload()
        try:
            if strategy is SharingStrategy.FileSystem:
                dataset = _data_worker.FiledDataset(dataset)
            ends = (its_commands, its_events, _start_method(), others)
            process = context.Process(target=_data_worker.serve, args=(dataset, settings, *ends))
            process.start()
        except Exception as problem:
            events.close()
            commands.close()
            if getattr(multiprocessing.current_process(), "_inheriting", False):
                # A script without a guard of its main code, run again by the process that it has
                # started: multiprocessing says what to do.
                raise
            raise error(
                "AsynchronousDataAccessor worker thread failed to start: its dataset could not be "
                f"handed to the process ({type(problem).__name__}: {problem}). Everything in it, "
                "collate_fn and worker_init_fn included, must be picklable: define functions and "
                "classes at the top of a module, or use SharingStrategy.Fork."
            ) from problem
        finally:
            if isinstance(dataset, _data_worker.FiledDataset):
                dataset.close()
            its_events.close()
            its_commands.close()
        self._process = process
        # Runs when the interpreter ends, before it waits for its processes; in a process of
        # multiprocessing's too, where atexit does not.
        self._at_exit = multiprocessing.util.Finalize(
            None, _stop, args=(weakref.ref(self),), exitpriority=10
        )
        logger.debug("AsynchronousDataAccessor worker process: %d", process.pid)
        try:
            super().__init__(commands, events)
        except BaseException:
            self.stop()
            raise

    def _await_event(self) -> None:
        ready = multiprocessing.connection.wait([self._events, self._process.sentinel])
        if self._events not in ready and not self._events.poll():
            raise EOFError

    def _gone(self) -> Exception:
        self._process.join(_PATIENCE[0])
        return error(
            "AsynchronousDataAccessor worker thread failed to start or died: its process ended "
            f"with exit code {self._process.exitcode}. A negative one is the signal that ended it; "
            "-9 often means that memory ran out: use a smaller buffer_size or fewer workers. One "
            "that ended on starting has printed why; a script needs its main code under "
            'if __name__ == "__main__".'
        )

    def stop(self) -> None:
        """End the process, wait for it, and give its memory back; does nothing a second time."""
        process, self._process = self._process, None
        # What a fork has copied belongs to the process that made it.
        if process is None or os.getpid() != self._owner:
            return
        self._at_exit.cancel()
        # A worker that waits for room in the pipe of events is told that nobody reads it.
        self._events.close()
        self._tell(_data_worker.Command.STOP)
        self._commands.close()
        for act, patience in zip((None, process.terminate, process.kill), _PATIENCE):
            if act is not None:
                act()
            process.join(patience)
            if process.exitcode is not None:
                process.close()
                break


def _stop(reference: weakref.ref[DataProcess]) -> None:
    process = reference()
    if process is not None:
        process.stop()


def _start_method() -> str:
    """Return the program's way of starting processes, without fixing it."""
    method = multiprocessing.get_start_method(allow_none=True)
    return method or multiprocessing.get_all_start_methods()[0]


def _preload() -> None:
    """Let the fork server import torch once, in place of every process that it starts."""
    server = multiprocessing.forkserver._forkserver
    names = getattr(server, "_preload_modules", None)
    if isinstance(names, list) and _data_worker.serve.__module__ not in names:
        server.set_forkserver_preload([*names, _data_worker.serve.__module__])


class AsynchronousDataAccessor:
    """Loads the batches of a dataset ahead, in another process, into a ring buffer.

    The tensors are the ring buffer's shared memory: asking for the next batch, or for the end of
    the epoch, lets the process overwrite them. ``clone()`` what you keep.

    The process begins with the first batch at once. Batches must be alike in structure, shapes and
    dtypes; a list or a tuple comes back as a list. What the dataset raises is raised by ``next``,
    in its place, and ends the process. Random numbers in it depend on ``torch.manual_seed`` before
    it was made, and on the epoch.

    Args:
        dataset: any iterable of batches: a tensor each, a flat list, tuple or dict of tensors, or
            an object with a registered parser. A map-style dataset is read from 0 to its length.
        buffer_size: batches that are loaded ahead, the one in use included.
        miss_sleep_time_in_ms: when the buffer is full, milliseconds between two looks at it.
        load_indefinitely: begin the next epoch when one has been loaded. Otherwise ``iter`` does.
        early_preload: fill the buffer at once, not from the first ``iter`` on.
        sharing_strategy: how the process is started and gets the dataset, a member or its name.
            ``ForkServer`` and
            ``SharedMemory`` hand it over with its tensors in shared memory, ``FileSystem`` through
            a file; ``Fork`` copies nothing, and is unsafe where threads run.
        rebatched_size: rows of the batches, which are joined along dimension 0 and cut anew. The
            last ``rows % rebatched_size`` are left out of an epoch, unless the dataset is a
            DataLoader with ``drop_last=False``.
    Raises:
        Error: the DataLoader already has one; the dataset is empty or raises; the process doesn't
            start.
        AssertionError: no such ``sharing_strategy``; a DataLoader with ``drop_last=False`` and
            batches of several samples
            without ``rebatched_size``; ``rebatched_size`` or ``buffer_size`` is too small.
    """

    def __init__(
        self,
        dataset: Any,
        buffer_size: int = 3,
        miss_sleep_time_in_ms: float = 0.1,
        load_indefinitely: bool = True,
        early_preload: bool = False,
        sharing_strategy: SharingStrategy = SharingStrategy.ForkServer,
        rebatched_size: Optional[int] = None,
    ) -> None:
        self._worker: Optional[DataProcess] = None
        _check_loader(dataset, rebatched_size)
        if rebatched_size is not None and rebatched_size <= 1:
            raise AssertionError(
                f"rebatched_size must be None or greater than 1, got {rebatched_size}. A combined "
                "batch of one sample needs no rebatching: use DataLoaderMode.Async for it."
            )
        if buffer_size < 1:
            raise AssertionError(
                f"buffer_size must be at least 1, got {buffer_size}. Each slot holds one batch."
            )
        if miss_sleep_time_in_ms < 0:
            raise AssertionError(
                f"miss_sleep_time_in_ms must not be negative, got {miss_sleep_time_in_ms}. Use 0 "
                "for no pause."
            )
        self._dataset = dataset
        self.rebatched_size = rebatched_size
        self._worker = DataProcess(
            dataset,
            _data_worker.WorkerSettings(
                slots=buffer_size,
                pause=miss_sleep_time_in_ms / 1000,
                loads_on=bool(load_indefinitely),
                loads_first=bool(early_preload),
                rows=rebatched_size,
                keeps_rest=self._keeps_rest,
                # Read and not drawn: making a loader leaves the program's random numbers alone.
                seed=torch.initial_seed(),
            ),
            _strategy_of(sharing_strategy),
        )

    @property
    def _keeps_rest(self) -> bool:
        loader = self._dataset
        if not isinstance(loader, _data_worker.CombiningLoader):
            return False
        drop_last = loader.rebatched_drop_last
        return not (loader.drop_last if drop_last is None else drop_last)

    def terminate(self) -> None:
        """End the process and give its memory back. Tensors that are still in use stay valid."""
        if self._worker is not None:
            self._worker.stop()
            self._worker = None

    def __del__(self) -> None:
        """End the process with the last reference."""
        self.terminate()

    def __len__(self) -> int:
        """Return the number of batches in an epoch.

        Raises:
            TypeError: the dataset has no length.
        """
        if not self.rebatched_size:
            return len(self._dataset)
        batches, rest = divmod(_rows_of(self._dataset), self.rebatched_size)
        return batches + bool(rest and self._keeps_rest)

    def __iter__(self) -> AsynchronousDataAccessor:
        """Start an epoch, unless one has started and nothing has been read from it."""
        self._or_end(self._alive().begin)
        return self

    def __next__(self) -> Any:
        """The next batch."""
        return self._or_end(self._alive().next)

    def _or_end(self, act: Callable[[], object]) -> object:
        try:
            return act()
        except StopIteration:
            raise
        except Exception:
            self.terminate()
            raise

    def _alive(self) -> DataProcess:
        if self._worker is None:
            raise AssertionError(
                "This AsynchronousDataAccessor has no worker process any more: it was terminated, "
                "or its dataset raised an exception. Make a new one."
            )
        return self._worker


def _strategy_of(value: Union[SharingStrategy, int, str]) -> SharingStrategy:
    """Return the sharing strategy with this value or name."""
    if isinstance(value, str) and value in SharingStrategy.__members__:
        return SharingStrategy[value]
    if isinstance(value, int) and value in list(SharingStrategy):
        return SharingStrategy(value)
    raise AssertionError(
        "sharing_strategy must be a poptorch.SharingStrategy or the name of one, "
        f"{', '.join(SharingStrategy.__members__)}, got {value!r}. Name one of them."
    )


def _check_loader(dataset: object, rebatched_size: Optional[int]) -> None:
    if not isinstance(dataset, _data_worker.CombiningLoader):
        return
    if dataset._accessor is not None:
        raise error(
            "The DataLoader already uses an AsynchronousDataAccessor internally. Iterate over the "
            "DataLoader itself, or make it with mode=DataLoaderMode.Sync."
        )
    if dataset._is_user_batch_sampler_set or dataset.drop_last or rebatched_size is not None:
        return
    if dataset.combinedBatchSize not in (None, 1):
        raise AssertionError(
            "The 'drop_last=False' option from the DataLoader only works if 'rebatched_size' is "
            "specified too: its last batch may be shorter than the slots of the buffer. Pass "
            f"rebatched_size={dataset.combinedBatchSize}, or drop_last=True."
        )


def _rows_of(dataset: Any) -> int:
    """Return the number of samples in an epoch."""
    if not isinstance(dataset, data.DataLoader):
        return len(dataset) * int(getattr(dataset, "batch_size", None) or 1)
    if dataset.batch_size is None:
        return len(dataset.dataset)  # type: ignore[arg-type]
    is_stream = isinstance(dataset.dataset, data.IterableDataset)
    rows = len(dataset.dataset if is_stream else dataset.sampler)  # type: ignore[arg-type]
    return rows // dataset.batch_size * dataset.batch_size if dataset.drop_last else rows
