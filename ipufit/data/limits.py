"""How much of the data an epoch reads: limits, fractions, and the same few batches again."""

from __future__ import annotations

import math
import numbers
from typing import Iterable, Iterator, List, Optional, Union

from torch import Tensor

from ipufit.core.batch import RawBatch
from ipufit.data.loaders import without_shuffling
from ipufit.data.source import DataAdapter
from ipufit.errors import ConfigurationError
from ipufit.utils import tree

__all__ = ["batch_count", "first_batches"]


def batch_count(name: str, value: Union[int, float], source: DataAdapter, least: int = 1) -> int:
    """Convert a limit, a number or a fraction, to a number of the source's batches.

    Args:
        name: of the argument.
        value: a count, or a fraction of an epoch as a float; checked by ``Loading``.
        source: what it limits.
        least: the smallest good count.

    Raises:
        ConfigurationError: it is a fraction that leaves nothing, or of an unknown length.
    """
    if isinstance(value, numbers.Integral):
        return int(value)
    if value == 1 and source.micro_batches is None:
        raise ConfigurationError(
            f"{name}=1.0 means all batches of the {source.role}, which is what happens without it. "
            "Leave it out, or write 1 for a single batch."
        )
    if source.micro_batches is None:
        raise ConfigurationError(
            f"{name}={value} is a fraction of the batches of the {source.role}, but nobody knows "
            "how many it has. Pass a number of batches, an integer."
        )
    # 0.29 of 100 batches are 29, though the product is a little less.
    count = math.floor(source.micro_batches * float(value) + 1e-9)
    if count < least:
        raise ConfigurationError(
            f"{name}={value} must leave at least one batch, but of {source.micro_batches} batches "
            f"of the {source.role} it leaves none. Use a larger fraction, or a number of batches."
        )
    return count


class FirstBatches:
    """The first batches of an iterable, read once and kept, so that every epoch has the same.

    Args:
        batches: what to read from.
        count: how many.
    """

    def __init__(self, batches: Iterable[object], count: int) -> None:
        self._batches = batches
        self._count = count
        self._rest: Optional[Iterator[RawBatch]] = None
        self._kept: List[RawBatch] = []

    def __iter__(self) -> Iterator[RawBatch]:
        for index in range(self._count):
            if index == len(self._kept):
                if self._rest is None:
                    self._rest = iter(self._batches)
                try:
                    batch = next(self._rest)
                except StopIteration:
                    return
                self._kept.append(tree.map_leaves(_copy, batch))
            yield self._kept[index]


def _copy(leaf: tree.Leaf) -> tree.Leaf:
    if isinstance(leaf, Tensor):
        return leaf.detach().clone()
    return leaf.copy() if type(leaf).__module__ == "numpy" else leaf


def first_batches(source: DataAdapter, count: int, role: str) -> DataAdapter:
    """A source of the first batches alone, which are kept in memory."""
    batches = FirstBatches(without_shuffling(source.loader), count)
    few = DataAdapter(batches, role, class_weights=source.class_weights)
    few.micro_batch_size, few.samples = source.micro_batch_size, source.samples
    few.micro_batches = source.micro_batches
    few.reuses_memory = False
    few.limit(count)
    return few
