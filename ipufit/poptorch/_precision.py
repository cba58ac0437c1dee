"""Preserve float64, which no device has, for comparisons at double precision."""

from __future__ import annotations

import contextlib
from typing import Iterator

__all__ = ["keep_float64", "keeps_float64"]

_preserved = False


def keeps_float64() -> bool:
    """Return True if models that are compiled now compute in float64 where the user does."""
    return _preserved


@contextlib.contextmanager
def keep_float64() -> Iterator[None]:
    """Preserve float64 and int64 in programs compiled inside, to compare with other engines."""
    global _preserved
    before, _preserved = _preserved, True
    try:
        yield
    finally:
        _preserved = before
