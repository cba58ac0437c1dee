"""How much of the data an epoch reads: limits, fractions, and the same few batches again."""

from __future__ import annotations

import math
import numbers
from typing import Any, Collection, Iterable, Iterator, List, Optional

from torch import Tensor

from ipufit.core.batch import RawBatch
from ipufit.data.loaders import unshuffled
from ipufit.data.source import DataAdapter
from ipufit.errors import ConfigurationError
from ipufit.utils import tree
from ipufit.utils.error_collector import at_least

__all__ = ["batch_count", "dev_run_length", "first_batches", "validation_epochs"]


def batch_count(name: str, value: Any, source: DataAdapter, least: int = 1) -> int:
    """Convert a limit, a number or a fraction, to a number of the source's batches.

    Args:
        name: of the argument.
        value: a count, or a fraction of an epoch as a float.
        source: what it limits.
        least: the smallest good count.

    Raises:
        ConfigurationError: it is neither, leaves nothing, or is a fraction of an unknown length.
    """
    whole = isinstance(value, numbers.Integral)
    if whole and not isinstance(value, bool) and int(value) >= least:
        return int(value)
    if whole or not isinstance(value, numbers.Real) or not 0 < float(value) <= 1:
        raise ConfigurationError(
            f"{name} must be a number of batches, an integer of at least {least}, or a fraction of "
            f"the epoch, a float above 0 and up to 1.0, got {value!r}."
        )
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


def dev_run_length(value: object) -> int:
    """Executions of a dry run; 0 for none.

    Raises:
        ConfigurationError: it is neither a bool nor a count.
    """
    if isinstance(value, bool):
        return int(value)
    return at_least("fast_dev_run", value, 1, " executions, True or False")


def validation_epochs(value: object, first: int, last: int) -> List[int]:
    """Indices of the epochs after which there is a validation.

    Args:
        value: every so many epochs; or a collection of epochs counted from 1, as in Keras.
        first: index of the first epoch.
        last: index of the epoch to stop before.

    Raises:
        ConfigurationError: it is neither, or names no epoch of this run.
    """
    if not isinstance(value, Collection) or isinstance(value, (str, bytes)):
        every = at_least("validation_freq", value, 1, " or a collection of epochs")
        return [epoch for epoch in range(first, last) if (epoch + 1) % every == 0]
    chosen = {at_least("an epoch in validation_freq", epoch, 1) - 1 for epoch in value}
    due = [epoch for epoch in range(first, last) if epoch in chosen]
    if not due:
        raise ConfigurationError(
            f"validation_freq must name an epoch from {first + 1} to {last}, counted from 1, got "
            f"{value!r}."
        )
    return due


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
    batches = FirstBatches(unshuffled(source.loader), count)
    few = DataAdapter(batches, role, class_weights=source.class_weights)
    few.micro_batch_size, few.samples = source.micro_batch_size, source.samples
    few.micro_batches = source.micro_batches
    few.reuses_memory = False
    few.limit(count)
    return few
