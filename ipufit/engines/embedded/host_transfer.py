"""The one place where tensors leave the device for the host."""

from __future__ import annotations

import math
from typing import Callable, List, Sequence

import torch
from torch import Tensor

__all__ = ["Transfer", "pack", "unpack"]


class Transfer:
    """Copies tensors to the host, all of one execution in a single copy.

    Attributes:
        count: number of copies so far; on a device that is the host, the number of hand-overs.
    """

    def __init__(self) -> None:
        self.count = 0

    def to_host(self, tensors: Sequence[Tensor]) -> List[Tensor]:
        """Copy tensors to the host, in one copy whatever their number and dtypes."""
        if not tensors:
            return []
        self.count += 1
        if tensors[0].device.type == "cpu":
            return list(tensors)
        return unpack(pack(tensors).cpu(), tensors)

    def start(self, packed: Tensor) -> Callable[[], Tensor]:
        """Begin to copy to the host what :func:`pack` made; what comes back waits for it."""
        self.count += 1
        if packed.device.type == "cpu":
            copy = packed.clone()
            return lambda: copy
        host = torch.empty(packed.shape, dtype=packed.dtype, pin_memory=True)
        host.copy_(packed, non_blocking=True)
        arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
        arrived.record(torch.cuda.current_stream(packed.device))

        def wait() -> Tensor:
            arrived.synchronize()
            return host

        return wait


def _order(tensors: Sequence[Tensor]) -> List[int]:
    # Widest elements first, so that every tensor starts at a multiple of its element size.
    return sorted(range(len(tensors)), key=lambda i: -tensors[i].element_size())


def pack(tensors: Sequence[Tensor]) -> Tensor:
    """All tensors in one flat buffer of bytes."""
    flat = [tensors[i].contiguous().reshape(-1).view(torch.uint8) for i in _order(tensors)]
    return torch.cat(flat)


def unpack(buffer: Tensor, like: Sequence[Tensor]) -> List[Tensor]:
    """Cut the buffer that :func:`pack` made of ``like`` into tensors of those shapes and dtypes."""
    result = [torch.empty(0)] * len(like)
    start = 0
    for i in _order(like):
        size = math.prod(like[i].shape) * like[i].element_size()
        result[i] = buffer[start : start + size].view(like[i].dtype).view(like[i].shape)
        start += size
    return result
