"""Refusals of what only an IPU can do, met while a program of this engine is made."""

from __future__ import annotations

import contextlib
import contextvars
from typing import Iterator, Optional

__all__ = ["for_this_engine", "is_for_this_engine", "only_on_ipus"]

_MAKING: contextvars.ContextVar[bool] = contextvars.ContextVar("making", default=False)


def only_on_ipus(error: Optional[BaseException]) -> Optional[str]:
    """Return the text of an error about what only an IPU can do, advice last; None of others."""
    return getattr(error, "message", None) if getattr(error, "_is_only_on_ipus", False) else None


@contextlib.contextmanager
def for_this_engine() -> Iterator[None]:
    """Make what is called in the block part of what this engine runs."""
    token = _MAKING.set(True)
    try:
        yield
    finally:
        _MAKING.reset(token)


def is_for_this_engine() -> bool:
    """Tell whether this engine is to run the caller; no where a model is only looked at."""
    return _MAKING.get()
