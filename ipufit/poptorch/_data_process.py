"""Start and end of the process that loads batches ahead of time."""

from __future__ import annotations

import multiprocessing.connection
import multiprocessing.forkserver
import multiprocessing.process
import multiprocessing.util
import os
import weakref
from typing import Any

import torch.multiprocessing

from ipufit.poptorch._batch_reader import BatchReader
from ipufit.poptorch._data_worker import Command, FiledDataset, WorkerSettings, serve
from ipufit.poptorch._errors import error
from ipufit.poptorch._logging import logger
from ipufit.poptorch.enums import SharingStrategy

__all__ = ["DataProcess"]

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
        self, dataset: object, settings: WorkerSettings, strategy: SharingStrategy
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
                dataset = FiledDataset(dataset)
            ends = (its_commands, its_events, _start_method(), others)
            process = context.Process(target=serve, args=(dataset, settings, *ends))
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
            if isinstance(dataset, FiledDataset):
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
        self._tell(Command.STOP)
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
    if isinstance(names, list) and serve.__module__ not in names:
        server.set_forkserver_preload([*names, serve.__module__])
