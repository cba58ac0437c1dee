"""Events of the Trace Event Format, which Perfetto and chrome://tracing read."""

from __future__ import annotations

import json
import math
from typing import Any, List, Mapping, Optional

__all__ = ["Events", "Lane"]


class Lane:
    """One thread of the picture, whose events come in the order of time and never overlap.

    Clocks are read one after another, so that what follows without a gap may seem to begin before
    its forerunner ends, by less than a microsecond: it is drawn from that end on.

    Args:
        events: where they go.
        process, thread: numbers of this one.

    Attributes:
        end: of the last event, in nanoseconds.
    """

    def __init__(self, events: Events, process: int, thread: int) -> None:
        self._events = events
        self._where = f'"pid":{process},"tid":{thread}'
        self.end = 0

    def add(
        self, name: str, begin: int, length: int, args: Optional[Mapping[str, Any]] = None
    ) -> int:
        """One event, in nanoseconds; nothing is drawn of one that takes no time.

        Returns:
            Where it begins: no earlier than the end of the one before.
        """
        begin = max(begin, self.end)
        self.end = begin + length
        if length > 0:
            self.within(name, begin, length, args)
        return begin

    def within(
        self, name: str, begin: int, length: int, args: Optional[Mapping[str, Any]] = None
    ) -> None:
        """One that lies within the last one."""
        more = f',"args":{_text(args)}' if args else ""
        times = f'"ts":{_microseconds(begin)},"dur":{_microseconds(length)}'
        self._events.put(f'{{"name":{_text(name)},"ph":"X",{self._where},{times}{more}}}')


class Events:
    """The events of a trace, as text from the beginning: there may be many."""

    def __init__(self) -> None:
        self._texts: List[str] = []

    def put(self, text: str) -> None:
        """One event in JSON."""
        self._texts.append(text)

    def lane(self, process: int, thread: int, name: str) -> Lane:
        """A thread of a process."""
        self._name("thread_name", process, thread, name=name)
        self._name("thread_sort_index", process, thread, sort_index=thread)
        return Lane(self, process, thread)

    def process(self, process: int, name: str) -> None:
        """Name a process; they are shown in the order of their numbers."""
        self._name("process_name", process, 0, name=name)
        self._name("process_sort_index", process, 0, sort_index=process)

    def _name(self, kind: str, process: int, thread: int, **args: Any) -> None:
        event = {"name": kind, "ph": "M", "pid": process, "tid": thread, "ts": 0, "args": args}
        self.put(_text(event))

    def count(self, process: int, name: str, at: int, value: float) -> None:
        """A value from here on; one that is no finite number is left out."""
        if math.isfinite(value):
            times = f'"ts":{_microseconds(at)},"args":{{"value":{value:.7g}}}'
            self.put(f'{{"name":{_text(name)},"ph":"C","pid":{process},{times}}}')

    def text(self, about: Mapping[str, Any]) -> str:
        """All of them, with what is to be known about them."""
        head = f'{{"displayTimeUnit":"ms","otherData":{_text(about)},"traceEvents":[\n'
        return head + ",\n".join(self._texts) + "\n]}\n"


def _microseconds(nanoseconds: int) -> str:
    """The format's unit, to the nanosecond."""
    whole, rest = divmod(nanoseconds, 1000)
    return f"{whole}.{rest:03d}".rstrip("0") if rest else str(whole)


def _text(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), allow_nan=False)
