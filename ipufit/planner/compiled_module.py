"""A compiled model as the planner, and all that watches a fit, see it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Optional, Protocol, Sequence

from torch import nn

from ipufit.core.batch import MicroBatch
from ipufit.core.train_config import TrainConfig
from ipufit.losses import Loss
from ipufit.partition.partition import Partition, Partitions

if TYPE_CHECKING:
    from ipufit.planner.planning import PartitionEstimator

__all__ = ["CompiledModule"]


class CompiledModule(Protocol):
    """A module with the settings of ``compile`` that decide where it lies on IPUs."""

    @property
    def module(self) -> nn.Module:
        """The user's module."""
        ...

    @property
    def loss(self) -> Loss:
        """The loss in its normal form."""
        ...

    @property
    def config(self) -> TrainConfig:
        """Configuration of an update."""
        ...

    @property
    def partitions(self) -> Partitions:
        """Partitions of the module for training and inference."""
        ...

    @property
    def auto_round_ipus(self) -> bool:
        """True if IPUs may be rounded up to a number that can be reserved."""
        ...

    def recomputes(self, strategy: str, stages: int) -> bool:
        """Return True if training has PopTorch compute activations again."""
        ...

    def plan_estimator(
        self, sample: MicroBatch, partition: Optional[Partition], recompute: Sequence[str]
    ) -> PartitionEstimator:
        """Follow a micro-batch through module and loss, for estimates of its divisions.

        Raises:
            DataError: the module or the loss can't take it.
        """
        ...
