"""Where the optimizer's state is between two updates: with the module, or in host memory."""

from __future__ import annotations

from typing import List, Sequence

import torch
from torch import Tensor

from ipufit.utils.devices import can_pin


class StateMemory:
    """The state stays where the module is.

    Attributes:
        is_apart: whether updates need states elsewhere than where they are kept.
        ended: whether no update follows: what the torch optimizer gets now is for others to work
            with, and its own.
    """

    is_apart = False
    ended = False

    def keep(self, tensor: Tensor) -> Tensor:
        """The tensor that holds a new state from now on."""
        return tensor

    def fetch(self, kept: Sequence[Tensor]) -> Sequence[Tensor]:
        """States as an update needs them."""
        return kept

    def renew(self, kept: Tensor, updated: Tensor) -> Tensor:
        """The tensor that holds a state after an update."""
        return updated

    def for_torch(self, kept: Tensor) -> Tensor:
        """A copy of a state, for the torch optimizer."""
        return kept.clone()

    def end(self) -> None:
        """No update follows."""
        self.ended = True


class HostMemory(StateMemory):
    """The state is in host memory, and on the device during an update alone.

    Args:
        device: of the module.
    """

    is_apart = True

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def keep(self, tensor: Tensor) -> Tensor:
        """A copy in host memory, from which the device reads directly."""
        pinned = can_pin(self._device)
        return torch.empty_like(tensor, device="cpu", pin_memory=pinned).copy_(tensor)

    def fetch(self, kept: Sequence[Tensor]) -> List[Tensor]:
        """Copies on the device."""
        return [tensor.to(self._device, copy=True) for tensor in kept]

    def renew(self, kept: Tensor, updated: Tensor) -> Tensor:
        """Put new values into the memory of the host that is there."""
        return kept.copy_(updated)

    def for_torch(self, kept: Tensor) -> Tensor:
        """A copy, in host memory as well while training goes on, and on the device at its end."""
        return kept.to(self._device, copy=True) if self.ended else kept.clone()
