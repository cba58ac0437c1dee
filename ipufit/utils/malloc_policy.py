"""Freed memory stays in the process while programs run on the CPU.

glibc hands large tensors back to the system when they are freed. A program that makes and frees the
same tensors in every update then spends a quarter of its time on getting zeroed pages again. There
is a size up to which glibc can be told to keep them; flat gradients may be larger.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import threading
from typing import Iterator, List, Optional, Tuple

import torch
from torch import Tensor

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


# How many tensors of one size are kept: a sum over micro-batches, and what is added to it.
_ALIKE = 2

# Torch 2.0 doesn't tell whether anything else uses a tensor's memory.
_COUNTS_USES = hasattr(torch._C, "_storage_Use_Count")


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


def give_back_freed_memory(freed: int = _KEEPING[1]) -> None:
    """Hand what is freed by now to the system.

    Args:
        freed: bytes that were freed since the last time, if known. The heap is not searched for
            fewer than the C library keeps of one tensor: a search of many small pieces takes long.
    """
    library = _glibc()
    if freed >= _KEEPING[1] and library is not None and keep_freed_memory():
        _pool.clear()
        library.malloc_trim(0)


# Memory that is larger than what glibc keeps.
_pool: List[torch.UntypedStorage] = []
_pool_lock = threading.Lock()


def reused_empty(size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a tensor whose values are anything.

    Args:
        size: its elements. Where they take more memory than glibc keeps, it is that of an earlier
            one of this size of which nothing is left, if there is any.
        dtype: of the elements.
        device: of the tensor.
    """
    new = torch.empty(0, dtype=dtype, device=device)
    bytes_ = size * new.element_size()
    is_large = device.type == "cpu" and bytes_ > _KEEPING[1]
    if not (is_large and _COUNTS_USES and keep_freed_memory()):
        return new.resize_(size)
    with _pool_lock:
        alike = [each for each in _pool if each.nbytes() == bytes_]
        # The list's own use is one.
        unused = [each for each in alike if torch._C._storage_Use_Count(each._cdata) == 1]
        if unused:
            new.set_(unused[0], 0, (size,))  # type: ignore[call-overload]
            return new
        new.resize_(size)
        if len(alike) < _ALIKE:
            _pool.append(new.untyped_storage())
    return new
