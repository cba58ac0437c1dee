"""The next executions, prepared by a thread while the present one runs."""

from __future__ import annotations

import contextlib
import contextvars
import queue
import sys
import threading
from typing import Any, Callable, Generator, Optional, Tuple, TypeVar

import torch

from ipufit.utils.interrupts import ForkGuard, defer_sigint, is_interrupted
from ipufit.utils.random_streams import LOCK

T = TypeVar("T")
# How long an interrupt waits for the thread, in seconds, and then once more without what it reads.
_PATIENCE = 1.0


def fetch_ahead(
    items: Generator[T, None, None], depth: int, give_up: Callable[[], None] = lambda: None
) -> Generator[T, None, None]:
    """Yield items in their order, of which a thread prepares up to ``depth`` ahead.

    An exception of ``items`` is raised here, in its place, with its own traceback. Close what is
    returned to end the thread; it ends by itself after the last item. An interrupt does not wait
    for a thread that reads something slow.

    Args:
        items: closed at the end, in the thread that ran them.
        depth: of the queue; 0 works without a thread.
        give_up: ends what the thread reads, as nobody waits for it any more.
    """
    # Whoever holds the lock waits for the thread, and the thread would wait for the lock.
    if depth == 0 or LOCK._is_owned():  # type: ignore[attr-defined]
        yield from items
        return
    ahead = _Queue(items, depth)
    process = ForkGuard()
    try:
        ahead.start()
        while True:
            process.check()
            kind, value = ahead.get()
            if kind is _Kind.END:
                return
            if kind is _Kind.ERROR:
                raise value
            yield value
            del value  # of an execution that is over nothing is kept
    finally:
        left_by = sys.exc_info()[1]
        # Whoever goes on while the thread still reads would find the generator in use.
        with defer_sigint():
            ahead.close(give_up if is_interrupted(left_by) else None)


class _Reader(threading.Thread):
    """Prepares executions while another thread runs them."""


def reads_ahead() -> bool:
    """True if this thread prepares executions while another one runs them."""
    return isinstance(threading.current_thread(), _Reader)


class _Kind:
    ITEM = "item"
    ERROR = "error"
    END = "end"


class _Queue:
    """A bounded queue and the thread that fills it. An item is begun only when there is room.

    Of queues written in C, which an exception from a signal's handler can't leave locked.
    """

    def __init__(self, items: Generator[object, None, None], depth: int) -> None:
        self._items = items
        self._ready: queue.SimpleQueue[Tuple[str, object]] = queue.SimpleQueue()
        self._room: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._closed = False
        for _ in range(depth):
            self._room.put(None)
        self._world = _ThreadContext()
        run = contextvars.copy_context().run
        self._thread = _Reader(target=run, args=(self._fill,), name="ipufit-prefetch", daemon=True)

    def start(self) -> None:
        """Begin to read. Ctrl-C waits until there is a thread that close can wait for."""
        with defer_sigint():
            self._thread.start()

    def get(self) -> Tuple[str, Any]:
        entry = self._ready.get()
        self._room.put(None)
        return entry

    def close(self, give_up: Optional[Callable[[], None]]) -> None:
        """End the thread and wait for it.

        Args:
            give_up: called when it does not end soon, and then it is left to itself; None to wait.
        """
        self._closed = True
        self._room.put(None)
        self._drop()
        if self._thread.ident is None:
            return
        if give_up is not None:
            self._thread.join(_PATIENCE)
            if self._thread.is_alive():
                give_up()
        self._thread.join(None if give_up is None else _PATIENCE)
        self._drop()

    def _drop(self) -> None:
        """Let go of the items that nobody takes any more."""
        with contextlib.suppress(queue.Empty):
            while True:
                self._ready.get_nowait()

    def _fill(self) -> None:
        last: Tuple[str, object] = (_Kind.END, None)
        try:
            with self._world:
                try:
                    while self._has_room():
                        try:
                            item = next(self._items)
                        except StopIteration:
                            break
                        self._ready.put((_Kind.ITEM, item))
                        del item
                finally:
                    self._items.close()
        except BaseException as error:
            last = (_Kind.ERROR, error)
        self._ready.put(last)

    def _has_room(self) -> bool:
        self._room.get()
        return not self._closed


class _ThreadContext:
    """Settings that torch keeps for each thread, and on which data code may depend."""

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
