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
    """What the buffers of every replica were when a training program ended.

    The module holds those of replica 0. A later program with as many replicas goes on where the
    others stopped, unless the module's own buffers have been changed in between.
    """

    def __init__(self) -> None:
        self._buffers: List[Buffers] = []

    def keep(self, buffers: List[Buffers]) -> None:
        """Remember these, replica 0 included."""
        self._buffers = [copy_of(own) for own in buffers]

    def recall(self, replicas: int, module: Buffers) -> List[Buffers]:
        """Buffers for each replica; those of replica 0 are the module's own tensors."""
        known = self._buffers
        unchanged = (
            len(known) == replicas
            and known[0].keys() == module.keys()
            and all(same(known[0][name], module[name]) for name in module)
        )
        others = known[1:] if unchanged else [module] * (replicas - 1)
        return [module, *(copy_of(own) for own in others)]
