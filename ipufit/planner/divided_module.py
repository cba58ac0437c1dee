"""Stages that show with a micro-batch: automatic ones, a plan's, those of a module's own blocks."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Callable, Optional, Sequence, Set, Tuple

import torch
from torch import nn

from ipufit.core.batch import MicroBatch, Mode
from ipufit.core.plan import Plan, check_filling
from ipufit.core.train_config import TrainConfig
from ipufit.errors import PartitionError
from ipufit.losses import Loss
from ipufit.partition.own_blocks import OwnBlocks, UncountedError
from ipufit.partition.partition import NOT_DIVIDED, Partition, Partitions
from ipufit.partition.request import kind_of
from ipufit.utils.interrupts import defer_signals

if TYPE_CHECKING:
    from ipufit.planner.planning import PartitionEstimator


@dataclasses.dataclass(eq=False)
class DividedModule:
    """A compiled module and where it lies on IPUs, stages included that show with a micro-batch.

    It finds open stages, counts the module's own blocks, and holds a plan's stages to its memory,
    again where training has micro-batches of another shape. Inference takes the partition that
    there is.

    Attributes:
        module: the user's module.
        optimizer: torch's optimizer over its parameters; None to evaluate and predict only.
        loss: normal form.
        config: how an update is made.
        partitions: how the module is divided over the IPUs of a replica, also as it shows later.
        auto_round_ipus: whether IPUs may be rounded up to a number that can be reserved.
        options: PopTorch's options for training, or None.
        find_strategy: returns the execution strategy that options of PopTorch's have for training
            (True) or inference (False), or None.
        planned_memory: bytes per IPU of a plan that ``compile`` was given; None where it was none.
    """

    module: nn.Module
    optimizer: Optional[torch.optim.Optimizer]
    loss: Loss
    config: TrainConfig
    partitions: Partitions = NOT_DIVIDED
    auto_round_ipus: bool = False
    options: object = None
    find_strategy: Callable[[bool], object] = lambda training: None
    planned_memory: Optional[int] = None

    def __post_init__(self) -> None:
        self._shapes: Optional[Tuple[object, ...]] = None
        self._counted: Set[bool] = set()
        self._searched: Set[bool] = set()

    def divide(self, first: MicroBatch, training: bool) -> None:
        """Find out the partitions for jobs that begin with this micro-batch.

        Raises:
            PartitionError: the stages don't fit.
        """
        partitions = self.partitions
        shapes = tuple((leaf.shape, leaf.dtype) for leaf in first.tensors)
        is_new = training and shapes != self._shapes
        if partitions.open is None and not is_new:
            return
        both = (partitions.training, partitions.inference)
        automatic = next((p for p in both if p is not None and p.is_automatic), None)
        with defer_signals():
            if automatic is not None and automatic.stages > 1:
                self._find_stages(first, automatic)
            elif self.planned_memory is not None:
                self._check_memory(first, self.planned_memory)
        # Those that an inference has found are found again for training.
        self._shapes = shapes if training else None

    def _find_stages(self, first: MicroBatch, partition: Partition) -> None:
        recompute = self.recomputes(partition.strategy, partition.ipus)
        how = (partition.ipus, partition.strategy, recompute)
        begins, places = self.estimator(first).divide_automatically(*how)
        self.partitions = self.partitions.with_stages(begins, places)

    def _check_memory(self, first: MicroBatch, memory: int) -> None:
        """Refuse micro-batches with which a plan's stages take more than it was made for."""
        # Imported here, as below: few models are divided.
        from ipufit.planner.costs import by_ipu, memory_of
        from ipufit.planner.planning import schedule_of
        from ipufit.planner.rendering import size

        partition = self.partitions.training
        stages = 1 if partition is None else partition.stages
        strategy = "pipelined" if partition is None else partition.strategy
        costs = self.estimator(first, partition).estimate(partition)
        taken = memory_of(costs, schedule_of(strategy), self.recomputes(strategy, stages))
        most = max(by_ipu(taken, () if partition is None else partition.places))
        if most > memory:
            raise PartitionError(
                f"planned stages must fit in the memory of the plan, {size(memory)} per IPU, but "
                f"with micro-batches of {first.size} samples the largest needs about {size(most)}. "
                "Plan with such a batch, or use a smaller one, or pass stages=plan.stages, which "
                "is not checked."
            )

    def count_stages(self, first: MicroBatch, training: bool) -> None:
        """Look how many stages the module's own blocks make, where they divide it.

        Raises:
            PartitionError: its blocks contradict the partition.
        """
        partition = self.partitions.of(training)
        if partition is None or not partition.is_own or training in self._counted:
            return
        with defer_signals():
            stages = self._stages_of_blocks(first, training)
        counted = dataclasses.replace(partition, stages=stages)
        self.partitions = self.partitions.replaced(training, counted)
        self._counted.add(training)

    def _stages_of_blocks(self, batch: MicroBatch, training: bool) -> int:
        from ipufit.planner.measure import stages_of_blocks

        partition = self.partitions.of(training)
        return stages_of_blocks(partition, self.module, self.loss, batch, training)

    def count_own_ipus(
        self, read_example: Callable[[Mode], Optional[MicroBatch]], training: bool
    ) -> None:
        """Count the IPUs of the module's own blocks before a plan shares IPUs out to replicas.

        A forward pass of a sample shows them, where nobody has set the IPUs and the data can be
        looked at beforehand.

        Args:
            read_example: returns a micro-batch for a mode; None where the data can't be read as
                one beforehand.
            training: the mode of the pass.
        """
        is_one = self.partitions.of(training) is None
        if (
            self.partitions.is_ipus_set
            or training in self._searched
            or not OwnBlocks(None).can_hear
            or (not training and is_one and True in self._searched)  # there are none
        ):
            return
        self._searched.add(training)
        for mode in (Mode.TRAIN if training else Mode.EVALUATE, Mode.PREDICT):
            example = read_example(mode)
            if example is None:
                continue
            try:
                with defer_signals():
                    self._stages_of_blocks(example, training)
            except UncountedError as error:
                self.follow_blocks(error, training)
            return

    def follow_blocks(self, error: UncountedError, training: bool) -> None:
        """Divide the module as its own blocks do, which have shown now.

        Inference follows training until blocks of its own show.

        Args:
            error: says what the blocks take.
            training: in which mode they have shown.

        Raises:
            UncountedError: the error, where the user has set how many IPUs a replica has.
        """
        partitions = self.partitions
        if partitions.is_ipus_set:
            raise error
        from ipufit.partition.resolve import check_splits

        for mode in (True, False) if training and partitions.inference is None else (training,):
            partition = None
            if error.ipus > 1:
                before = partitions.of(mode) or self._undivided(mode, partitions.training)
                partition = dataclasses.replace(before, stages=error.stages, ipus=error.ipus)
            strategy = "" if partition is None else partition.strategy
            check_splits(self.module, strategy, error.ipus, mode)
            partitions = partitions.replaced(mode, partition)
        self._counted.add(training)
        self.partitions = partitions

    def _undivided(self, training: bool, followed: Optional[Partition]) -> Partition:
        """One IPU, with the strategy that options of PopTorch's have for more of them.

        Args:
            training: whether for training.
            followed: the partition of training, whose strategy inference has by default.
        """
        strategy = self.find_strategy(training)
        if strategy is None and not training and followed is not None:
            return dataclasses.replace(followed, is_chosen=False)
        name = kind_of(strategy) or "pipelined"
        return Partition((), 1, name, strategy is not None, 1, strategy)

    def estimator(
        self,
        sample: MicroBatch,
        partition: Optional[Partition] = None,
        recompute: Optional[Sequence[str]] = None,
    ) -> PartitionEstimator:
        """Says what divisions of the module take; see :class:`PartitionEstimator`.

        Args:
            sample: a micro-batch.
            partition: whose rules are checked on the way.
            recompute: layers from whose outputs recomputation starts; None is those of ``compile``.
        """
        from ipufit.planner.planning import PartitionEstimator

        names = self.config.recompute if recompute is None else recompute
        how = (self.optimizer, self.config, sample, partition, names)
        return PartitionEstimator(self.module, self.loss, *how)

    def recomputes(self, strategy: str, stages: int) -> bool:
        """Return True if training, as compiled, has PopTorch compute activations again.

        It does so in a pipeline, unless the options of its compiler say otherwise.
        """
        if self.optimizer is None:
            return False
        popart = getattr(self.options, "_Popart", None)
        chosen = getattr(popart, "options", {}).get("autoRecomputation")
        return strategy == "pipelined" and stages > 1 if chosen is None else bool(chosen)

    def with_counted_ipus(self, plan: Plan, ipus: Optional[int]) -> Plan:
        """The plan for other IPUs of its one replica, which have shown since it was made.

        Args:
            plan: made before.
            ipus: as the user has passed them to the plan.

        Raises:
            PartitionError: they were shared out to replicas of another size.
            PlanError: a replica has a number of IPUs that can't be reserved.
        """
        partition = self.partitions.of(plan.training)
        stages = 1 if partition is None else partition.ipus
        if ipus is not None:
            raise PartitionError(
                f"ipus={ipus} was divided into replicas before the first batch, which can't be "
                f"read twice, showed that the module's own blocks need {stages} IPUs. Pass "
                f"ipus_per_replica={stages} to compile."
            )
        rounds = self.auto_round_ipus
        checked = Plan.make(micro_batch_size=1, stages=stages, auto_round_ipus=rounds)
        return dataclasses.replace(plan, stages=stages, reserved_ipus=checked.reserved_ipus)

    def with_stage_count(self, plan: Plan) -> Plan:
        """The plan, when all stages are known, with their number where there are more than IPUs.

        Raises:
            PlanError: it can't fill a pipeline whose stages did not show before.
        """
        partition = self.partitions.of(plan.training)
        if partition is None:
            return plan
        shows_now = partition.is_own or partition.is_automatic
        if shows_now and partition.pipelines(plan.training, plan.device_iterations):
            work = (plan.gradient_accumulation, plan.device_iterations, plan.training)
            check_filling(*work, partition.stages)
        return dataclasses.replace(plan, depth=partition.depth)
