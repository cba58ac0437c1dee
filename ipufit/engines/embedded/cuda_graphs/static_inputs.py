"""Tensors that stay where they are: what a captured graph reads is put there before a replay."""

from __future__ import annotations

import dataclasses
from typing import Any, List, Sequence, Tuple

import torch
from torch import Tensor

__all__ = ["Sent", "Static", "keeps_its_form"]

# As CUDA's own allocations: kernels choose wider loads, and cuBLAS other algorithms, by alignment.
_ALIGNMENT = 512


def keeps_its_form(tensor: Tensor, device: torch.device) -> bool:
    """Tell whether a copy on the device has the strides that the tensor has there when traced."""
    return tensor.device != device or tensor.stride() == torch.empty_like(tensor).stride()


@dataclasses.dataclass(frozen=True)
class Sent:
    """Values on their way to static memory.

    Attributes:
        static: where they go.
        memory: where they arrive, on the device.
        arrived: the event of it; None where the device is the host.
    """

    static: Static
    memory: Tensor
    arrived: Any


class Static:
    """Tensors side by side in one piece of the device's memory, filled in one copy.

    Args:
        like: what they look like.
        device: where they are.

    Attributes:
        tensors: they.
    """

    def __init__(self, like: Sequence[Tensor], device: torch.device) -> None:
        self._places: List[Tuple[slice, Tensor]] = []
        size = 0
        for tensor in like:
            form = torch.empty_like(tensor, device="meta")
            end = size + form.numel() * form.element_size()
            self._places.append((slice(size, end), form))
            size = -(-end // _ALIGNMENT) * _ALIGNMENT
        self._size = size
        self._bytes = torch.empty(size, dtype=torch.uint8, device=device)
        self.tensors = self._views(self._bytes)
        self._is_cuda = device.type == "cuda"
        self._aside: Any = None

    def _views(self, memory: Tensor) -> List[Tensor]:
        return [
            memory[place].view(form.dtype).as_strided(form.shape, form.stride())
            for place, form in self._places
        ]

    def fill(self, values: Sequence[Tensor]) -> None:
        """Put values there, without waiting for the device."""
        if any(value.device.type != "cpu" for value in values):
            for tensor, value in zip(self.tensors, values):
                tensor.copy_(value, non_blocking=True)
            return
        self._bytes.copy_(self._packed(values), non_blocking=True)

    def send(self, values: Sequence[Tensor]) -> Sent:
        """Start to bring values from the host while the device works on; from any thread."""
        host = self._packed(values)
        if not self._is_cuda:
            return Sent(self, host, None)
        if self._aside is None:
            device = self._bytes.device
            self._aside = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        with torch.cuda.stream(self._aside):
            memory = torch.empty_like(self._bytes).copy_(host, non_blocking=True)
            return Sent(self, memory, self._aside.record_event())

    def receive(self, sent: Sent) -> None:
        """Put there what was sent, as soon as it has arrived; the host does not wait."""
        if sent.arrived is not None:
            present = torch.cuda.current_stream(self._bytes.device)
            present.wait_event(sent.arrived)
            sent.memory.record_stream(present)
        self._bytes.copy_(sent.memory)

    def _packed(self, values: Sequence[Tensor]) -> Tensor:
        """Values on the host as one tensor, from which the device reads directly."""
        memory = torch.empty(self._size, dtype=torch.uint8, pin_memory=self._is_cuda)
        for tensor, value in zip(self._views(memory), values):
            tensor.copy_(value)
        return memory
