"""Heartbeats and errors of the processes, in torch's key-value store beside their collectives.

A collective says nothing of why it fails. So whoever ends by an error writes it down here, and
whoever notices that another does not answer asks here who is still alive.
"""

from __future__ import annotations

import contextlib
import dataclasses
import queue
import threading
import time
from concurrent.futures import Future, wait
from typing import TYPE_CHECKING, Callable, Dict, List, Optional, Tuple, TypeVar

if TYPE_CHECKING:
    # Public as torch.distributed.Store, but torch does not say so to type checkers.
    from torch._C._distributed_c10d import Store


T = TypeVar("T")

POLL = 0.25  # seconds between two looks
_LIMIT = 3.0  # seconds for an answer of the store
_LEAVING = 5.0  # seconds for the last one, when a program ends
_SILENCE = 1.0  # seconds; a connection that is closed says so at once


class StoreLostError(Exception):
    """The store does not answer, or is gone."""


@dataclasses.dataclass
class Heartbeats:
    """State of every process, as the store has it.

    Attributes:
        alive: of each process, whether it has answered since the alarm.
        noticed: whether it has come to a collective since the alarm, and given it up.
        left: whether its program has ended.
        is_closed: whether somebody found a connection closed.
    """

    alive: List[bool]
    noticed: List[bool]
    left: List[bool]
    is_closed: bool


class HeartbeatStore:
    """Access of one process to the store, by a thread, as the store may block for ever.

    Attributes:
        alarm: whether somebody has ended by an error, or misses another.
        ended: the errors that processes ended with, by their numbers.
        concluded: what processes found that others' ends led to, by their numbers.
        lost: the error by which the store is no longer there, or None.
        is_silent: whether it did not answer, rather than close the connection.
    """

    def __init__(self, store: Store, process_id: int, num_processes: int) -> None:
        self.alarm = False
        self.ended: Dict[int, str] = {}
        self.concluded: Dict[int, str] = {}
        self.lost: Optional[Exception] = None
        self.is_silent = False
        self._store = store
        self._me = process_id
        self._all = range(num_processes)
        self._alarms = 0
        self._next_look = 0.0
        self._tasks: queue.Queue[Optional[Callable[[], object]]] = queue.Queue()
        self._thread = threading.Thread(target=self._live, name="ipufit-heartbeats", daemon=True)
        self._thread.start()

    def arrive(self, num_processes: int) -> int:
        """Write down that this process is there; returns how many came under its number."""

        def make() -> int:
            self._store.set(f"size/{self._me}", str(num_processes))
            self._count("sizes", num_processes)
            return self._count(f"here/{self._me}", 1)

        return self._ask(make)

    def absent(self) -> List[int]:
        """Return the ranks of the processes that have not arrived."""
        return self._ask(lambda: [each for each in self._all if not self._count(f"here/{each}")])

    def sizes(self) -> Tuple[int, int]:
        """Number of processes in the eyes of process 0, and the sum of that number over all.

        Process 0 must have arrived.
        """
        return self._ask(lambda: (int(self._store.get("size/0")), self._count("sizes")))

    def tell_error(self, text: str) -> None:
        """Write down the error that this process ends with, and wait until the others know."""
        self._tell("ended", lambda: self._store.set(f"ended-text/{self._me}", text))
        self.wait_for("alive", _LIMIT)

    def tell_conclusion(self, text: str) -> None:
        """Write down what this process found."""
        self._tell("concluded", lambda: self._store.set(f"concluded-text/{self._me}", text))

    def notice(self, is_closed: bool) -> None:
        """Write down that this process has given up a collective."""
        self._tell("noticed", lambda: self._count("closed", int(is_closed)))

    def leave(self) -> None:
        """Write down that this program ends, and look no longer."""
        if self.lost is None:
            with contextlib.suppress(StoreLostError):
                self._ask(lambda: self._count(f"left/{self._me}", 1), 1.0)
        self._tasks.put(None)
        # A thread that is still in the store when Python ends would take the process down; on a
        # busy machine an answer takes its time.
        self._thread.join(_LEAVING)

    def look(self) -> Heartbeats:
        """Read the state of every process."""

        def make() -> Heartbeats:
            self._look()
            alive, noticed, left = (
                [self._count(f"{kind}/{each}") > 0 for each in self._all]
                for kind in ("alive", "noticed", "left")
            )
            return Heartbeats(alive, noticed, left, self._count("closed") > 0)

        return self._ask(make)

    def wait_for(self, kind: str, seconds: float) -> None:
        """Wait until all have written something of that kind, but not for ever."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            if all(self._ask(lambda: [self._count(f"{kind}/{each}") for each in self._all])):
                return
            time.sleep(POLL / 5)

    def _tell(self, kind: str, write: Callable[[], object]) -> None:
        def make() -> None:
            write()
            self._count(f"{kind}/{self._me}", 1)
            self._count("alarms", 1)
            self._look()

        self._ask(make)

    def _ask(self, make: Callable[[], T], limit: float = _LIMIT) -> T:
        """Run ``make`` in the thread that owns the store, and return its result."""
        answer: Future[T] = Future()
        self._tasks.put(lambda: answer.set_result(make()))
        until = time.monotonic() + limit
        while not wait([answer], POLL / 5).done:
            if self.lost is not None:
                raise StoreLostError(str(self.lost)) from self.lost
            if time.monotonic() > until:
                raise StoreLostError(f"no answer within {limit:g} s")
        return answer.result()

    def _live(self) -> None:
        while True:
            task = None
            try:
                task = self._tasks.get(timeout=POLL)
                if task is None:
                    return
            except queue.Empty:
                pass
            begun = time.monotonic()
            try:
                if task is not None:
                    task()
                if time.monotonic() >= self._next_look:
                    self._look()
                    self._next_look = time.monotonic() + POLL
            except Exception as error:
                # The connection to the store: it does not come back.
                self.is_silent = time.monotonic() - begun > _SILENCE
                self.lost = error
                return

    def _look(self) -> None:
        alarms = self._count("alarms")
        if alarms == self._alarms:
            return
        self._alarms = alarms
        for kind, texts in (("ended", self.ended), ("concluded", self.concluded)):
            for each in self._all:
                if each not in texts and self._count(f"{kind}/{each}"):
                    texts[each] = self._store.get(f"{kind}-text/{each}").decode(errors="replace")
        self._count(f"alive/{self._me}", 1)
        self.alarm = True

    def _count(self, key: str, more: int = 0) -> int:
        # The one question that every store of every torch answers at once, known key or not.
        return int(self._store.add(key, more))
