"""A DataLoader of which one of several processes reads its own batches alone."""

from __future__ import annotations

from typing import Any, Iterator, Optional

import torch

from ipufit.data.loaders import like
from ipufit.data.rank_shards import Portion

__all__ = ["OwnLoader"]


class _OwnIndices:
    """The batch sampler of such a loader: what a portion takes of another one's indices."""

    def __init__(self) -> None:
        self.indices: Iterator[Any] = iter(())

    def __iter__(self) -> Iterator[Any]:
        return self.indices


class OwnLoader:
    """Reads like a DataLoader of map-style data, with workers of its own.

    Args:
        loader: that it reads like.

    Attributes:
        whole: as given.
    """

    def __init__(self, loader: Any) -> None:
        self.whole = loader
        self._sampler = _OwnIndices()
        self._own = like(loader, batch_sampler=self._sampler)

    def batches(self, portion: Portion, most: Optional[int], draws_once: bool) -> Iterator[Any]:
        """One pass over the own batches.

        Args:
            portion: says which they are.
            most: batches of the pass at most, of all processes.
            draws_once: whether random numbers are drawn for the first batch at most.
        """
        whole = self.whole

        def every() -> Any:
            if whole.generator is None:
                # torch's iterator draws a seed for the workers before the order.
                torch.empty((), dtype=torch.int64).random_()
            return whole.batch_sampler

        def read(indices: Any) -> Any:
            return whole.collate_fn([whole.dataset[index] for index in indices])

        self._sampler.indices = portion.picked(every, len, read, most, draws_once)
        return iter(self._own)
