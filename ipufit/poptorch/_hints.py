"""Listeners for hints in forward to a compiler for IPUs, which change no value."""

from __future__ import annotations

import contextlib
from typing import Any, Callable, Iterator, List

__all__ = ["hints_watched", "noticed"]

# Called with the name of the operator and its first argument.
OnHint = Callable[[str, Any], None]

_watchers: List[OnHint] = []


@contextlib.contextmanager
def hints_watched(on_hint: OnHint) -> Iterator[None]:
    """Call a function for every hint inside the context, compiling or not."""
    _watchers.append(on_hint)
    try:
        yield
    finally:
        _watchers.pop()


def noticed(name: str, argument: object) -> None:
    """Pass a hint on to all listeners."""
    for watcher in _watchers:
        watcher(name, argument)
