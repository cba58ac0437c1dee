"""One loader as the executions of each epoch."""

from __future__ import annotations

import itertools
from typing import Any, Iterator, Optional

from ipufit.data.batches import Unpacker, executions
from ipufit.data.source import Source
from ipufit.plan import Plan
from ipufit.program import CombinedBatch, MicroBatch, Mode
from ipufit.randomness import DataStream

__all__ = ["Feed"]

_NO_BATCH = object()


class Feed:
    """One loader, cut into the executions of a plan.

    Args:
        source: the loader.
        mode: train, evaluate or predict.
        own_loss: whether the module computes its own loss.
        seed: of the random numbers that the loader draws from torch in this process.
        domain: keeps them apart from those of other loaders.
    """

    def __init__(self, source: Source, mode: Mode, own_loss: bool, seed: int, domain: str) -> None:
        self._source = source
        self._unpack = Unpacker(source, mode, own_loss)
        self._seed = seed
        self._domain = domain
        self._ahead: Optional[Iterator[Any]] = None
        self._ahead_epoch = -1

    def _open(self, epoch: int) -> Iterator[Any]:
        return self._source.epoch(DataStream(self._seed, self._domain, epoch))

    def peek(self, epoch: int) -> MicroBatch:
        """The first micro-batch of an epoch, which starts here and goes on where it is read next.

        Raises:
            DataError: there is none, or the program can't take it.
        """
        batches = self._open(epoch)
        first = next(batches, _NO_BATCH)
        if first is _NO_BATCH:
            raise self._source.no_batches(epoch)
        micro_batch = self._unpack(first, 0)
        self._ahead = itertools.chain([first], batches)
        self._ahead_epoch = epoch
        return micro_batch

    @property
    def micro_batch_size(self) -> Optional[int]:
        """The loader's, or that of the first batch seen."""
        return self._unpack.micro_batch_size

    def executions(self, epoch: int, plan: Plan) -> Iterator[CombinedBatch]:
        """All of an epoch's executions, the smaller last one included.

        Raises:
            DataError: the epoch has no batch, or one that the program can't take.
        """
        batches, self._ahead = self._ahead, None
        if batches is None or self._ahead_epoch != epoch:
            batches = self._open(epoch)
        empty = True
        for batch in executions(batches, self._unpack, plan, self._source.reuses_memory):
            empty = False
            yield batch
        if empty:
            raise self._source.no_batches(epoch)
