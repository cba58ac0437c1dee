"""Reader of the batches that a ``DataWorker`` loads, epoch after epoch."""

from __future__ import annotations

import contextlib
from multiprocessing.connection import Connection
from typing import Any, Tuple

from ipufit.poptorch._data_worker import Command, WorkerEvent
from ipufit.poptorch._errors import error
from ipufit.poptorch._logging import logger
from ipufit.poptorch._ring_buffer import RingBufferReader

__all__ = ["BatchReader"]


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
        if event is WorkerEvent.EMPTY:
            raise error(
                "AsynchronousDataAccessor worker thread failed to start: The Dataset is empty. So "
                "is a DataLoader with drop_last=True whose dataset has fewer samples than a "
                "combined batch."
            )
        if event is WorkerEvent.FAILED:
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
            self._tell(Command.BEGIN)
        else:
            self._tell(Command.RESTART)
            # Of this epoch: Ctrl-C may have left one unread.
            while self._receive_or_raise() != (WorkerEvent.RESTARTED, self._epoch):
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
            self._tell(Command.RELEASED)
        if self._has_ended:
            raise StopIteration
        event, rows = self._receive_or_raise()
        if event is WorkerEvent.END:
            self._has_ended = True
            raise StopIteration
        self._is_used = True
        tensors = self._data_buffers.take()
        if rows is not None:
            tensors = [tensor[:rows] for tensor in tensors]
        return self._layout.put_together(tensors)

    def _tell(self, command: Command) -> None:
        # A worker that is gone has said why, and its words are still to be read.
        with contextlib.suppress(OSError):
            self._commands.send((command, self._epoch))

    def _receive_or_raise(self) -> Tuple[WorkerEvent, Any]:
        event, value = self._receive()
        if event is WorkerEvent.FAILED:
            _, problem = value
            raise problem
        return event, value

    def _receive(self) -> Tuple[WorkerEvent, Any]:
        """Return the next event, with the exception itself where the dataset has raised one."""
        try:
            self._await_event()
            event, value = self._events.recv()
            if event is WorkerEvent.FAILED:
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
