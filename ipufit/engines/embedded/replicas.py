"""Replicas in one process: the same weights, buffers of their own."""

from __future__ import annotations

from typing import Dict, List, Mapping

from torch import Tensor

__all__ = ["ReplicaMemory", "copy_of", "put_back", "same"]

Buffers = Dict[str, Tensor]


def copy_of(buffers: Mapping[str, Tensor]) -> Buffers:
    """Independent copies."""
    return {name: tensor.detach().clone() for name, tensor in buffers.items()}


def put_back(buffers: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> None:
    """Write values into the buffers, in place."""
    for name, tensor in buffers.items():
        tensor.copy_(values[name])


def same(first: Tensor, second: Tensor) -> bool:
    """Equal in every element, where NaN equals NaN."""
    if first.shape != second.shape or first.dtype != second.dtype:
        return False
    return bool(((first == second) | ((first != first) & (second != second))).all())


class ReplicaMemory:
    """Buffers of every replica as a training program left them.

    The module holds those of replica 0 of all processes. A later program with as many replicas
    goes on where the others stopped, unless the module's own buffers have been changed in between.
    """

    def __init__(self) -> None:
        self._buffers: List[Buffers] = []
        self._module: Buffers = {}

    def keep(self, buffers: List[Buffers], module: Buffers) -> None:
        """Remember those of this process's replicas, and of the module."""
        self._buffers = [copy_of(own) for own in buffers]
        self._module = copy_of(module)

    def recall(self, replicas: int, module: Buffers, apart: bool = False) -> List[Buffers]:
        """Buffers for each replica.

        Args:
            replicas: how many there are in this process.
            module: the module's own.
            apart: whether these belong to another process's replica; if not, to the first here.
        """
        known = self._module
        unchanged = (
            len(self._buffers) == replicas
            and known.keys() == module.keys()
            and all(same(known[name], module[name]) for name in module)
        )
        own = [copy_of(each) for each in (self._buffers if unchanged else [module] * replicas)]
        return own if apart else [module, *own[1:]]
