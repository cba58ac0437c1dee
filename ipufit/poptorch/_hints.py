"""Who wants to know of marks in forward that change no value: hints to a compiler for IPUs."""

from __future__ import annotations

import contextlib
from typing import Any, Callable, Iterator, List

__all__ = ["hints_watched", "noticed"]

# Called with the name of the operator and its first argument.
OnHint = Callable[[str, Any], None]

_watchers: List[OnHint] = []


@contextlib.contextmanager
def hints_watched(on_hint: OnHint) -> Iterator[None]:
    """Tell of every hint in this context, compiling or not."""
    _watchers.append(on_hint)
    try:
        yield
    finally:
        _watchers.pop()


def noticed(name: str, given: Any) -> None:
    """A hint was given."""
    for watcher in _watchers:
        watcher(name, given)
