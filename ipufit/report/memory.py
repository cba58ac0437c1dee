"""How much memory a run has in use."""

from __future__ import annotations

import math
import os

import torch

__all__ = ["in_use"]

_STATUS = "/proc/self/statm"


def in_use(device: torch.device) -> float:
    """Bytes that tensors have on a GPU, or that this process has in memory; nan where unknown."""
    if device.type == "cuda":
        return float(torch.cuda.memory_allocated(device))
    try:
        with open(_STATUS, encoding="ascii") as file:
            return float(int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE"))
    except (OSError, ValueError, IndexError, AttributeError):
        return math.nan
