"""A running fit and its model, as callbacks and other observers see them."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, Dict, List, Mapping, Optional, Protocol, Sequence

import torch
from torch import nn

from ipufit.callbacks.epoch_metrics import EpochMetrics
from ipufit.callbacks.history import History
from ipufit.core.batch import DataCursor, MicroBatch, Mode
from ipufit.core.plan import Plan
from ipufit.core.train_config import TrainConfig
from ipufit.data.pipeline import BatchPipeline
from ipufit.engines.program import Engine, Program
from ipufit.losses import Loss
from ipufit.partition.partition import Partition
from ipufit.planner.divided_module import DividedModule
from ipufit.processes import Processes

if TYPE_CHECKING:
    from ipufit.planner.planning import PartitionEstimator


class CallbackModel(Protocol):
    """The part of :class:`ipufit.Model` that the callbacks of this package and the loop rely on.

    Attributes:
        module: the user's module.
        history: of the last ``fit``.
        stop_training: ends ``fit`` with the present execution where it is True.
        outputs: the module's, of the last execution, for callbacks with ``wants_outputs``.
        extras: fields of the batches of the last execution that forward does not take.
    """

    module: nn.Module
    history: History
    stop_training: bool
    outputs: List[Any]
    extras: List[Mapping[str, object]]

    @property
    def optimizer(self) -> Optional[torch.optim.Optimizer]:
        """The torch optimizer with its present state."""

    @property
    def hyperparameters(self) -> Dict[str, Any]:
        """Settings that the module itself says it was made with."""

    @property
    def capture_seconds(self) -> float:
        """Seconds spent on recording so far."""

    def swap_ema_weights(self) -> None:
        """Exchange weights and their moving averages."""

    def save_weights(self, path: str) -> None:
        """Write the weights to a file."""


@dataclasses.dataclass
class Measurement:
    """A program with everything that measures it.

    Attributes:
        program: prepared.
        mode: what the program is for.
        plan: with the micro-batch size that the loader really has.
        meter: its loss and metrics.
        first: the first micro-batch.
    """

    program: Program
    mode: Mode
    plan: Plan
    meter: EpochMetrics
    first: MicroBatch


class ObservedSession(Protocol):
    """The part of a compiled model that observers of a fit read.

    Attributes:
        module: the user's module.
        loss: normal form.
        config: how an update is made.
        divided: the module on IPUs.
        engine: builds the programs.
        sample: shapes of the first micro-batch of the last ``fit``, or None.
    """

    module: nn.Module
    loss: Loss
    config: TrainConfig
    divided: DividedModule
    engine: Engine
    sample: Optional[MicroBatch]

    @property
    def processes(self) -> Processes:
        """The processes that train together."""

    @property
    def optimizer(self) -> Optional[torch.optim.Optimizer]:
        """The torch optimizer with its present state."""

    @property
    def groups(self) -> List[Dict[str, Any]]:
        """The optimizer's parameter groups with their present settings."""

    def plan_estimator(
        self, sample: MicroBatch, partition: Optional[Partition], recompute: Sequence[str]
    ) -> PartitionEstimator:
        """Follow a micro-batch through module and loss, for estimates of its divisions."""

    def choices(self) -> Optional[Dict[str, str]]:
        """Return what decides between ways that round otherwise, for a checkpoint."""

    def explain(self) -> str:
        """Describe in a few lines how the program runs."""


class RunningFit(Protocol):
    """A fit as its observers see it.

    Attributes:
        history: filled epoch by epoch.
        place: where the data stands after the last execution.
    """

    history: History
    place: Optional[DataCursor]

    @property
    def job(self) -> Measurement:
        """The training program and its measures."""

    @property
    def pipeline(self) -> BatchPipeline:
        """The pipeline of the training data."""

    @property
    def shards_data(self) -> bool:
        """True if ipufit shards the data, or one process reads all of it."""

    def ending(self) -> bool:
        """Return True if training ends with the last execution."""
