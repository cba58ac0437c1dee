"""torch.autocast around a program: part of the recording, and off while the recording runs."""

from __future__ import annotations

from typing import Any, Callable, List, Sequence, Tuple

import torch
from torch import Tensor

__all__ = ["autocast_state", "without_autocast"]


def autocast_state(device: torch.device) -> Tuple[Any, ...]:
    """Whether autocast is on for a device, and in which dtype."""
    if hasattr(torch, "get_autocast_dtype"):
        kind = device.type
        return (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
    if device.type == "cpu":
        return (torch.is_autocast_cpu_enabled(), torch.get_autocast_cpu_dtype())
    return (torch.is_autocast_enabled(), torch.get_autocast_gpu_dtype())


def without_autocast(
    graph: Callable[..., List[Tensor]], arguments: Sequence[Tensor]
) -> Callable[..., List[Tensor]]:
    """The recorded graph as it is: the casts of its own autocast are operators in it."""
    device = arguments[-1].device

    def run(*tensors: Tensor) -> List[Tensor]:
        if not autocast_state(device)[0]:
            return graph(*tensors)
        with torch.autocast(device.type, enabled=False):
            return graph(*tensors)

    return run
