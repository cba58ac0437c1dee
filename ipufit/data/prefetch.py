"""The next executions, prepared by a thread while the present one runs."""

from __future__ import annotations

import collections
import contextlib
import contextvars
import threading
from typing import Any, Deque, Generator, Tuple, TypeVar

import torch

from ipufit.interrupts import SameProcess, deferred
from ipufit.randomness import LOCK

__all__ = ["prefetched", "reads_ahead"]

T = TypeVar("T")


def prefetched(items: Generator[T, None, None], depth: int) -> Generator[T, None, None]:
    """The same items in the same order, of which a thread prepares up to ``depth`` ahead.

    An exception of ``items`` is raised here, in its place, with its own traceback. Close what is
    returned to end the thread; it ends by itself after the last item.

    Args:
        items: closed at the end, in the thread that ran them.
        depth: of the queue; 0 works without a thread.
    """
    # Whoever holds the lock waits for the thread, and the thread would wait for the lock.
    if depth == 0 or LOCK._is_owned():  # type: ignore[attr-defined]
        yield from items
        return
    queue: _Queue = _Queue(items, depth)
    process = SameProcess()
    try:
        queue.start()
        while True:
            process.check()
            kind, value = queue.get()
            if kind is _Kind.END:
                return
            if kind is _Kind.ERROR:
                raise value
            yield value
            del value  # of an execution that is over nothing is kept
    finally:
        # Whoever goes on while the thread still reads would find the generator in use.
        with deferred():
            queue.close()


class _Reader(threading.Thread):
    """Prepares executions while another thread runs them."""


def reads_ahead() -> bool:
    """Whether this thread prepares executions while another one runs them."""
    return isinstance(threading.current_thread(), _Reader)


class _Kind:
    ITEM = "item"
    ERROR = "error"
    END = "end"


class _Queue:
    """A bounded queue and the thread that fills it. An item is begun only when there is room."""

    def __init__(self, items: Generator[Any, None, None], depth: int) -> None:
        self._items = items
        self._depth = depth
        self._ready: Deque[Tuple[str, Any]] = collections.deque()
        self._changed = threading.Condition()
        self._closed = False
        self._world = _World()
        run = contextvars.copy_context().run
        self._thread = _Reader(target=run, args=(self._fill,), name="ipufit-prefetch", daemon=True)

    def start(self) -> None:
        """Begin to read. Ctrl-C waits until there is a thread that close can wait for."""
        with deferred():
            self._thread.start()

    def get(self) -> Tuple[str, Any]:
        with self._changed:
            while not self._ready:
                self._changed.wait()
            self._changed.notify_all()
            return self._ready.popleft()

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._ready.clear()
            self._changed.notify_all()
        if self._thread.ident is not None:
            self._thread.join()

    def _fill(self) -> None:
        last: Tuple[str, Any] = (_Kind.END, None)
        try:
            with self._world:
                try:
                    while self._has_room():
                        try:
                            item = next(self._items)
                        except StopIteration:
                            break
                        self._put(_Kind.ITEM, item)
                        del item
                finally:
                    self._items.close()
        except BaseException as error:
            last = (_Kind.ERROR, error)
        self._put(*last)

    def _has_room(self) -> bool:
        with self._changed:
            while len(self._ready) >= self._depth and not self._closed:
                self._changed.wait()
            return not self._closed

    def _put(self, kind: str, value: Any) -> None:
        with self._changed:
            if not self._closed:
                self._ready.append((kind, value))
            self._changed.notify_all()


class _World:
    """What torch keeps for each thread apart, and data code may depend on."""

    def __init__(self) -> None:
        self._grad = torch.is_grad_enabled()
        self._inference = torch.is_inference_mode_enabled()
        self._device = torch.empty(0).device
        self._entered = contextlib.ExitStack()

    def __enter__(self) -> None:
        self._entered.enter_context(torch.inference_mode(self._inference))
        self._entered.enter_context(torch.set_grad_enabled(self._grad))
        if self._device.type != "cpu":
            self._entered.enter_context(self._device)

    def __exit__(self, *_: object) -> None:
        self._entered.close()
