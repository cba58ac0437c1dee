"""Whether float64 is kept, which no device has: for comparisons at double precision."""

from __future__ import annotations

import contextlib
from typing import Iterator

__all__ = ["float64_kept", "keeps_float64"]

_kept = False


def keeps_float64() -> bool:
    """Whether models that are compiled now compute in float64 where the user does."""
    return _kept


@contextlib.contextmanager
def float64_kept() -> Iterator[None]:
    """Let what is compiled within keep float64 and int64, for comparisons with other engines."""
    global _kept
    before, _kept = _kept, True
    try:
        yield
    finally:
        _kept = before
