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
import traceback
from contextvars import ContextVar
from types import FrameType, FunctionType, MethodType, TracebackType
from typing import Callable, Dict, Iterator, List, Optional, Type, TypeVar, Union

from ipufit.errors import ConfigurationError
from ipufit.utils.console import fold, terminal_size

T = TypeVar("T")
_Handler = Callable[[int, Optional[FrameType]], object]
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
def defer_signals(interrupts: bool = True, handlers: bool = False) -> Iterator[None]:
    """Hold back what signals raise in the main thread until the block ends.

    SIGINT raises then, even if the block ends by an error; when it comes a second time, it
    interrupts at once. The end of a worker process of a DataLoader, which torch raises from SIGCHLD
    wherever the main thread is just then, is raised after a block that ends without an error.

    Does nothing outside the main thread, where Python delivers no signal.

    Args:
        interrupts: whether SIGINT is held back, unless the user has a handler for it.
        handlers: whether handlers of the user's wait like SIGINT, since what they raise would look
            like a failure of the block.
    """
    pending: List[int] = []
    replaced: Dict[int, _Handler] = {}

    def hold(number: int, frame: Optional[FrameType]) -> None:
        if number in pending and replaced[number] is not of_workers:
            replaced[number](number, frame)
        else:
            pending.append(number)

    of_workers: object = signal.getsignal(_SIGCHLD)
    if not isinstance(of_workers, FunctionType) or of_workers.__module__ != _HANDLERS_OF_TORCH:
        of_workers = None
    try:
        with contextlib.ExitStack() as originals:
            every = signal.valid_signals() if handlers else {signal.SIGINT, _SIGCHLD}
            for number in every if _is_main() else ():
                handler = signal.getsignal(number)
                is_default = handler is signal.default_int_handler
                waits = interrupts if is_default else handlers or handler is of_workers
                if callable(handler) and waits:
                    originals.callback(signal.signal, number, handler)
                    replaced[number] = handler
                    signal.signal(number, hold)
            yield
    finally:
        if pending:
            waiting = [number for number in pending if replaced[number] is not of_workers]
            call_each(signal.raise_signal, iter(waiting))
    if _SIGCHLD in pending and callable(of_workers):
        of_workers(_SIGCHLD, None)


def call_each(function: Callable[[T], object], values: Iterator[T]) -> None:
    """Call a function with each value, whatever it raises; several errors are chained."""
    for value in values:
        try:
            function(value)
        finally:
            call_each(function, values)


def is_of_handler(error: BaseException) -> bool:
    """Say whether an exception was raised by a signal's handler, a function or a method."""
    handlers = map(signal.getsignal, signal.valid_signals())
    codes = [each.__code__ for each in handlers if isinstance(each, (FunctionType, MethodType))]
    return any(frame.f_code in codes for frame, _ in traceback.walk_tb(error.__traceback__))


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
        error.__dict__[_TEXT] = lambda: [fold(text, terminal_size(sys.stderr)[0])]
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
def replaced_handler(
    number: int, usual: Union[signal.Handlers, _Handler], handler: _Handler
) -> Iterator[None]:
    """Give a signal another handler within the block, if it has the usual one.

    Does nothing outside the main thread, where Python delivers no signal.
    """
    with contextlib.ExitStack() as stack:
        if _is_main() and signal.getsignal(number) == usual:
            signal.signal(number, handler)
            stack.callback(signal.signal, number, usual)
        yield


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
    pending: List[int] = []
    replaced: Dict[int, _Handler] = {}

    def hold(number: int, frame: Optional[FrameType]) -> None:
        if _is_starting(frame, again=number in pending):
            pending.append(number)
        else:
            # torch calls the handler that it finds for SIGCHLD from its own, for ever.
            replaced[number](number, frame)

    def put_back() -> None:
        # SIGINT last: where it raises at once, nothing is left to be done.
        for number in sorted(replaced, key=lambda number: number == signal.SIGINT):
            if signal.getsignal(number) is hold:
                signal.signal(number, replaced[number])

    def begin_fork() -> None:
        # A forked process has nothing to do with Ctrl-C, which its parent handles. SIG_IGN would be
        # inherited by programs that it runs.
        signal.signal(signal.SIGINT, lambda number, frame: None)
        put_back()
        if mask is not None:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    with contextlib.ExitStack() as stack:
        mask = None
        if (silent or not _is_main()) and hasattr(signal, "pthread_sigmask"):
            mask = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
            stack.callback(signal.pthread_sigmask, signal.SIG_SETMASK, mask)
        stack.callback(call_each, signal.raise_signal, iter(pending))
        stack.callback(put_back)
        stack.callback(_IN_FORK.reset, _IN_FORK.set(begin_fork))
        for number in signal.valid_signals() if _is_main() else ():
            handler = signal.getsignal(number)
            if callable(handler):
                replaced[number] = handler
                signal.signal(number, hold)
        yield


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
