"""Interrupts of a run: Ctrl-C, which waits for the execution to finish, and copies by fork.

An exception that a signal's handler raises while a process is forked is lost in one of the hooks
of fork, and that of ``logging`` then keeps its lock for ever: the next fork of another thread waits
for it. So signals wait while processes are started, and the processes don't hear Ctrl-C.
"""

from __future__ import annotations

import contextlib
import multiprocessing.process
import os
import signal
import sys
import threading
from contextvars import ContextVar
from types import FrameType, FunctionType, TracebackType
from typing import Callable, Dict, Iterable, Iterator, List, Optional, Type

from ipufit.errors import ConfigurationError

_START = multiprocessing.process.BaseProcess.start.__code__
_LOADER = "torch.utils.data.dataloader"
_HANDLERS_OF_TORCH = "torch.utils.data._utils.signal_handling"
# Windows has none, and no handler of torch's either.
_SIGCHLD: int = getattr(signal, "SIGCHLD", signal.SIGINT)


class ForkGuard:
    """Knows the process that it was made in."""

    def __init__(self) -> None:
        self._process = os.getpid()

    @property
    def is_here(self) -> bool:
        """True in the process that made this guard, and in no copy of it."""
        return os.getpid() == self._process

    def check(self) -> None:
        """Make sure that nobody goes on in a copy, which has no threads but one.

        Raises:
            ConfigurationError: this is a copy, made by ``os.fork``.
        """
        if not self.is_here:
            raise ConfigurationError(
                f"a run continues in the process that started it ({self._process}), but this is a "
                f"forked copy ({os.getpid()}). End the copy with os._exit, or start other "
                "processes with spawn."
            )


@contextlib.contextmanager
def defer_signals(interrupts: bool = True) -> Iterator[None]:
    """Hold back what signals raise in the main thread until the block ends.

    SIGINT raises then, even if the block ends by an error; a second one interrupts at once. The end
    of a worker process of a DataLoader, which torch raises from SIGCHLD wherever the main thread is
    just then, is raised after a block that ends without an error.

    Does nothing outside the main thread, where Python delivers no signal, and where the user has
    handlers of their own.

    Args:
        interrupts: whether SIGINT is held back, too.
    """
    pending: List[int] = []

    def hold(number: int, frame: Optional[FrameType]) -> None:
        if number == signal.SIGINT and number in pending:
            raise KeyboardInterrupt
        pending.append(number)

    is_main = _is_main()
    has_default = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    holds_sigint = interrupts and is_main and has_default
    of_workers = signal.getsignal(_SIGCHLD)
    is_function = isinstance(of_workers, FunctionType)
    holds_workers = is_main and is_function and of_workers.__module__ == _HANDLERS_OF_TORCH
    if holds_sigint:
        signal.signal(signal.SIGINT, hold)
    try:
        if holds_workers:
            signal.signal(_SIGCHLD, hold)
        yield
    finally:
        try:
            if holds_workers:
                signal.signal(_SIGCHLD, of_workers)
        finally:
            if holds_sigint:
                signal.signal(signal.SIGINT, signal.default_int_handler)
        if signal.SIGINT in pending:
            raise KeyboardInterrupt
    if pending and callable(of_workers):
        of_workers(_SIGCHLD, None)


@contextlib.contextmanager
def summarized_interrupt(describe: Callable[[KeyboardInterrupt], str]) -> Iterator[None]:
    """Give an interrupt that leaves the block a text, which is all that a program prints of it.

    One that nobody catches ends the program as ever, but without the frames of ipufit.

    Args:
        describe: says where the work ends, and what is left of it, unless the interrupt does.
    """
    try:
        yield
    except KeyboardInterrupt as error:
        error.args = error.args or (describe(error),)
        text = f"ipufit: {error}"
        error.__dict__[_TEXT] = lambda: [text]
        if not isinstance(sys.excepthook, _ExceptHook):
            sys.excepthook = _ExceptHook(sys.excepthook)
        raise


# The method by which IPython lets an exception print itself; it is the mark of those above.
_TEXT = "_render_traceback_"


class _ExceptHook:
    """Prints an interrupt with a text of ipufit's as that, and anything else as before."""

    def __init__(self, before: Callable[..., object]) -> None:
        self._before = before

    def __call__(
        self,
        kind: Type[BaseException],
        error: BaseException,
        traceback: Optional[TracebackType],
    ) -> None:
        render = error.__dict__.get(_TEXT) if isinstance(error, KeyboardInterrupt) else None
        if render is None:
            self._before(kind, error, traceback)
        else:
            print(*render(), sep="\n", file=sys.stderr)


@contextlib.contextmanager
def exit_at_sigterm() -> Iterator[None]:
    """Make SIGTERM end the program by SystemExit within the block, so that files are written.

    Does nothing outside the main thread, nor where the user has a handler of their own.
    """

    def end(number: int, frame: Optional[FrameType]) -> None:
        raise SystemExit(128 + number)

    if not _is_main() or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def is_interrupted(error: Optional[BaseException]) -> bool:
    """Say whether an exception ends the program, as Ctrl-C does, or came up while one was handled.

    A generator that is closed sees GeneratorExit, with what its reader was left by as context.
    """
    while isinstance(error, (Exception, GeneratorExit)):
        error = error.__context__
    return error is not None


@contextlib.contextmanager
def starting_processes(silent: bool = False) -> Iterator[None]:
    """Hold signals back while the block starts processes, which will ignore SIGINT.

    In the main thread, where handlers run, a signal waits for the end of the block if a process is
    just being started, or torch is making the iterator of a DataLoader; of one that comes for the
    second time the latter doesn't count. In any other thread nothing has to wait. Processes that
    are not forked inherit no handler: those ignore SIGINT only if the block is ``silent``.

    Args:
        silent: SIGINT does not reach this thread at all before the end of the block.
    """
    with contextlib.ExitStack() as stack:
        mask = None
        if (silent or not _is_main()) and hasattr(signal, "pthread_sigmask"):
            mask = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
            stack.callback(signal.pthread_sigmask, signal.SIG_SETMASK, mask)
        signals = _HeldSignals()
        stack.callback(signals.release)
        stack.callback(_IN_FORK.reset, _IN_FORK.set(lambda: signals.leave_to(mask)))
        if _is_main():
            signals.hold()
        yield


class _HeldSignals:
    """Handlers in the place of those that Python would call, which may raise anywhere."""

    def __init__(self) -> None:
        self._handlers: Dict[int, Callable[..., object]] = {}
        self._pending: List[int] = []

    def hold(self) -> None:
        """Take the place of all handlers written in Python."""
        for number in signal.valid_signals():
            handler = signal.getsignal(number)
            if callable(handler):
                self._handlers[number] = handler
                signal.signal(number, self._note)

    def _note(self, number: int, frame: Optional[FrameType]) -> None:
        if _is_starting(frame, again=number in self._pending):
            self._pending.append(number)
        else:
            # torch calls the handler that it finds for SIGCHLD from its own, for ever.
            self._handlers[number](number, frame)

    def release(self) -> None:
        """Put the handlers back, and let the signals come that came meanwhile."""
        self._put_back()
        self._let_come()

    def _let_come(self) -> None:
        if self._pending:
            try:
                signal.raise_signal(self._pending.pop(0))
            finally:
                self._let_come()

    def _put_back(self) -> None:
        # SIGINT last: where it raises at once, nothing is left to be done.
        for number in sorted(self._handlers, key=lambda number: number == signal.SIGINT):
            if signal.getsignal(number) == self._note:
                signal.signal(number, self._handlers[number])

    def leave_to(self, mask: Optional[Iterable[int]]) -> None:
        """In a process that was forked: have nothing to do with Ctrl-C, which its parent handles.

        Args:
            mask: of the signals that it blocks; None for those that it blocks already.
        """
        signal.signal(signal.SIGINT, _ignore)
        self._put_back()
        if mask is not None:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _is_starting(frame: Optional[FrameType], again: bool) -> bool:
    """Say whether a process is being started here, or an iterator of torch's that starts some."""
    while frame is not None:
        if frame.f_code is _START:
            return True
        module = frame.f_globals.get("__name__")
        if module == _LOADER and frame.f_code.co_name == "__init__" and not again:
            return True
        frame = frame.f_back
    return False


def _ignore(number: int, frame: Optional[FrameType]) -> None:
    """No SIG_IGN, which programs that this process runs would inherit."""


def _is_main() -> bool:
    return threading.current_thread() is threading.main_thread()


def _begin_fork() -> None:
    begin = _IN_FORK.get()
    if begin is not None:
        begin()


# What a process does first that this thread forks.
_IN_FORK: ContextVar[Optional[Callable[[], None]]] = ContextVar("ipufit-fork", default=None)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_begin_fork)
