"""SIGINT and SIGTERM let an execution end, and a checkpoint be written, before the process does."""

from __future__ import annotations

import contextlib
import signal
import threading
from types import FrameType
from typing import Dict, Iterator, Optional

from ipufit.processes import Processes, common

__all__ = ["PreemptionHandler"]


class PreemptionHandler:
    """Listens while a ``fit`` runs; a second signal ends it at once, by KeyboardInterrupt.

    A handler of the user's own stays in place, and so it does outside the main thread, where
    Python delivers no signal.

    Attributes:
        signal: the one that came, or None.
        agreed_on: the one by which all processes end, or None.
    """

    def __init__(self) -> None:
        self.signal: Optional[signal.Signals] = None
        self.agreed_on: Optional[signal.Signals] = None

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Within the block a signal is noted."""
        before: Dict[signal.Signals, object] = {}
        if threading.current_thread() is threading.main_thread():
            usual = {
                signal.SIGINT: signal.default_int_handler,
                signal.SIGTERM: signal.SIG_DFL,
            }
            before = {
                number: handler
                for number, handler in usual.items()
                if signal.getsignal(number) is handler or signal.getsignal(number) == handler
            }
        for number in before:
            signal.signal(number, self._record)
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)  # type: ignore[arg-type]

    def _record(self, number: int, frame: Optional[FrameType]) -> None:
        if self.signal is not None:
            raise KeyboardInterrupt
        self.signal = signal.Signals(number)

    def agree(self, processes: Processes) -> bool:
        """Return True if a signal came to any process; then it counts for all.

        They ask at the same time. What comes later counts when they ask next.
        """
        local = None if self.signal is None else int(self.signal)
        numbers = [number for number in processes.gather(local, "signals") if number is not None]
        if numbers:
            self.agreed_on = signal.Signals(numbers[0])
        return bool(numbers)

    def end(self, saved: str) -> None:
        """Leave as the signal wants it, if one came.

        Raises:
            KeyboardInterrupt: after SIGINT.
            SystemExit: after SIGTERM, with the exit code of a process that it has ended.
        """
        if self.agreed_on is None:
            return
        text = f"{self.agreed_on.name}: {saved}"
        error: BaseException = SystemExit(128 + int(self.agreed_on))
        if self.agreed_on is signal.SIGINT:
            error = KeyboardInterrupt(text)
        # All processes end here.
        raise common(error)
