"""Bytes that the values of a run hold while it goes on."""

from __future__ import annotations

from typing import Any, Dict, Iterable, Iterator, Sequence

from torch import Tensor

from ipufit.tracing.flat_storage import storage_id
from ipufit.utils import tree

__all__ = ["LiveBytes", "bytes_in"]


def bytes_in(tensors: Iterable[Tensor]) -> int:
    """Bytes of the memory that tensors lie in, what several share counted once."""
    sizes = {storage_id(t): t.untyped_storage().nbytes() for t in tensors if storage_id(t)}
    return sum(sizes.values())


class LiveBytes:
    """Counts the memory of values that come and go, what several share once.

    Args:
        given: tensors that are there all the time, and do not count.

    Attributes:
        now: bytes that are held.
    """

    def __init__(self, given: Sequence[Tensor]) -> None:
        self._given = {storage_id(tensor) for tensor in given} | {0}
        self._holders: Dict[int, int] = {}
        self.now = 0

    def take(self, value: Any) -> None:
        """A value is there: a tensor, or what has some."""
        for key, size in self._memories(value):
            if key not in self._holders:
                self._holders[key] = 0
                self.now += size
            self._holders[key] += 1

    def drop(self, value: Any) -> None:
        """A value that was taken is wanted no more."""
        for key, size in self._memories(value):
            self._holders[key] -= 1
            if not self._holders[key]:
                # Its address may be that of other memory from now on.
                del self._holders[key]
                self.now -= size

    def _memories(self, value: Any) -> Iterator[Any]:
        for leaf in tree.flatten(value)[0]:
            if isinstance(leaf, Tensor) and storage_id(leaf) not in self._given:
                yield storage_id(leaf), leaf.untyped_storage().nbytes()
