"""What cuts into a run: Ctrl-C, which waits for the execution to finish, and copies by fork."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from types import FrameType
from typing import Iterator, Optional

from ipufit.errors import ConfigurationError

__all__ = ["SameProcess", "deferred"]


class SameProcess:
    """Knows the process that it was made in."""

    def __init__(self) -> None:
        self._process = os.getpid()

    @property
    def is_here(self) -> bool:
        """Whether this is that process, and no copy of it."""
        return os.getpid() == self._process

    def check(self) -> None:
        """Make sure that nobody goes on in a copy, which has no threads but one.

        Raises:
            ConfigurationError: this is a copy, made by ``os.fork``.
        """
        if not self.is_here:
            raise ConfigurationError(
                f"a run goes on in the process that it was begun in ({self._process}), but this is "
                f"a copy of it, made by fork ({os.getpid()}). End the copy with os._exit, or "
                "start another process by spawn."
            )


@contextlib.contextmanager
def deferred() -> Iterator[None]:
    """Hold SIGINT back until the block ends; a second one interrupts at once.

    Does nothing outside the main thread, where Python delivers no signal, and where the user has a
    handler of their own.
    """
    main = threading.current_thread() is threading.main_thread()
    if not main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    pending = False

    def hold(number: int, frame: Optional[FrameType]) -> None:
        nonlocal pending
        if pending:
            raise KeyboardInterrupt
        pending = True

    signal.signal(signal.SIGINT, hold)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if pending:
        raise KeyboardInterrupt
