"""Freed memory stays in the process while programs run on the CPU.

glibc hands large tensors back to the system when they are freed. A program that makes and frees the
same tensors in every update then spends a quarter of its time on getting zeroed pages again.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
from typing import Iterator, Optional, Tuple

__all__ = ["free_at_once", "give_back_freed_memory", "keep_freed_memory"]

# Parameters of mallopt, from malloc.h.
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3

# What may stay at the end of the heap, and the largest tensor that comes from the heap, in bytes:
# the largest that glibc takes; and what they are where nobody says anything.
_KEEPING, _AT_ONCE = (2**30, 2**25), (2**17, 2**17)

# Who has set these has a will of their own.
_VARIABLES = (
    "MALLOC_TRIM_THRESHOLD_",
    "MALLOC_MMAP_THRESHOLD_",
    "MALLOC_TOP_PAD_",
    "GLIBC_TUNABLES",
)


@functools.lru_cache(maxsize=None)
def _glibc() -> Optional[ctypes.CDLL]:
    """Load the C library; None where it is not glibc."""
    try:
        library = ctypes.CDLL(None)
    except (OSError, TypeError):
        return None
    is_glibc = all(hasattr(library, name) for name in ("gnu_get_libc_version", "mallopt"))
    return library if is_glibc else None


@functools.lru_cache(maxsize=None)
def keep_freed_memory() -> bool:
    """Keep freed memory from now on; return False where the C library can't, or is told not to."""
    library = _glibc()
    if library is None or any(name in os.environ for name in _VARIABLES):
        return False
    return _set(library, _KEEPING)


def _set(library: ctypes.CDLL, limits: Tuple[int, int]) -> bool:
    trim, largest = limits
    results = (library.mallopt(_TRIM_THRESHOLD, trim), library.mallopt(_MMAP_THRESHOLD, largest))
    return results == (1, 1)


@contextlib.contextmanager
def free_at_once() -> Iterator[None]:
    """Hand back what is freed meanwhile: what comes once must not leave holes in the heap.

    They are not filled again: an aligned tensor needs a little more than one of its size has left.
    """
    library = _glibc()
    if library is None or not keep_freed_memory():
        yield
        return
    _set(library, _AT_ONCE)
    try:
        yield
    finally:
        _set(library, _KEEPING)


def give_back_freed_memory() -> None:
    """Hand what is freed by now to the system."""
    library = _glibc()
    if library is not None and keep_freed_memory():
        library.malloc_trim(0)
