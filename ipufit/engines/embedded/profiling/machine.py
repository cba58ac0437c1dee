"""What a machine reaches at best: a large matrix product, and a large copy."""

from __future__ import annotations

import functools
import math
from typing import Any, Callable, Dict, Optional

import torch

from ipufit.engines.embedded.profiling.timers import timer_for

__all__ = ["peak_of"]

# Rows of the products that are tried, until one takes so long, in seconds.
_SIZES = (128, 256, 512, 1024, 2048, 4096, 8192)
_LONG = 0.02

# Bytes of what is copied: more than caches hold.
_COPIED = {"cpu": 2**26, "cuda": 2**29}

_TIMES = 3


@functools.lru_cache(maxsize=None)
def peak_of(dtype: torch.dtype, device: torch.device) -> Dict[str, Any]:
    """FLOPs and bytes per second that were reached on large tensors, measured once in a process.

    Returns:
        ``dtype``, ``flops`` and ``bytes``; None for what can't be measured.
    """
    return {
        "dtype": str(dtype).replace("torch.", ""),
        "flops": _products(dtype, device),
        "bytes": _copies(dtype, device),
    }


def _products(dtype: torch.dtype, device: torch.device) -> Optional[float]:
    best = 0.0
    for size in _SIZES:
        try:
            a, b, out = (torch.ones(size, size, dtype=dtype, device=device) for _ in range(3))
            seconds = _shortest(functools.partial(torch.mm, a, b, out=out), device)
        except RuntimeError:
            # A processor without products of this type, or without room for them.
            break
        best = max(best, 2 * size**3 / seconds)
        if seconds > _LONG:
            break
    return best or None


def _copies(dtype: torch.dtype, device: torch.device) -> Optional[float]:
    size = _COPIED.get(device.type, _COPIED["cpu"])
    count = size // torch.empty(0, dtype=dtype).element_size()
    try:
        source, target = (torch.ones(count, dtype=dtype, device=device) for _ in range(2))
        seconds = _shortest(lambda: target.copy_(source), device)
    except RuntimeError:
        return None
    return 2 * size / seconds


def _shortest(call: Callable[[], object], device: torch.device) -> float:
    """Seconds of a call."""
    timer = timer_for(device)
    call()
    best = math.inf
    for _ in range(_TIMES):
        begun = timer.begin()
        call()
        timer.end("", begun)
        timer.end_round()
        best = timer.seconds("")
        if best > _LONG:
            break
    return best
