"""PopTorch, of the SDK or the stand-in, without importing it: its classes, and who is tracing."""

from __future__ import annotations

import contextlib
import contextvars
from typing import Any, Callable, Container, Iterator, Optional

__all__ = ["begin_block", "blocks_watched", "sdk_in_use", "sdk_kind", "trace_with"]


def sdk_kind(thing: object, names: Container[str]) -> Optional[str]:
    """Which of PopTorch's classes something is an instance of; None if it is of none of these.

    Args:
        thing: anything.
        names: of the classes.
    """
    for kind in type(thing).__mro__:
        if kind.__name__ in names and "poptorch" in kind.__module__:
            return kind.__name__
    return None


_OnBegin = Callable[[str, Optional[int]], None]

_SDK: contextvars.ContextVar[Optional[Any]] = contextvars.ContextVar("sdk", default=None)
_WATCHER: contextvars.ContextVar[Optional[_OnBegin]] = contextvars.ContextVar(
    "watcher", default=None
)


def sdk_in_use() -> Optional[Any]:
    """PopTorch, or the stand-in, while a program for IPUs is traced; None elsewhere."""
    return _SDK.get()


@contextlib.contextmanager
def trace_with(sdk: object) -> Iterator[None]:
    """Tell code in the block that this PopTorch traces it."""
    before = _SDK.set(sdk)
    try:
        yield
    finally:
        _SDK.reset(before)


def begin_block(name: str, ipu: Optional[int]) -> None:
    """Place what runs from now on on this IPU of a replica."""
    sdk, watcher = _SDK.get(), _WATCHER.get()
    if sdk is not None:
        sdk.Block.start(name, ipu_id=ipu)
    if watcher is not None:
        watcher(name, ipu)


@contextlib.contextmanager
def blocks_watched(on_begin: _OnBegin) -> Iterator[None]:
    """Tell of each :func:`begin_block` in the block."""
    before = _WATCHER.set(on_begin)
    try:
        yield
    finally:
        _WATCHER.reset(before)
