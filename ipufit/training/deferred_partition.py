"""Stages that show with a micro-batch: automatic ones, a plan's, those of a module's own blocks."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, Optional, Protocol, Set, Tuple

from torch import nn

from ipufit.core.batch import MicroBatch, Mode
from ipufit.core.plan import Plan, check_filling
from ipufit.data.batches import BatchValidator
from ipufit.data.casting import Casting
from ipufit.data.source import DataAdapter
from ipufit.errors import PartitionError
from ipufit.losses import Loss
from ipufit.partition.own_blocks import OwnBlocks, UncountedError
from ipufit.partition.partition import Partition, Partitions
from ipufit.utils.interrupts import defer_sigint
from ipufit.utils.random_streams import isolated

if TYPE_CHECKING:
    from ipufit.planner.planning import PartitionEstimator

__all__ = ["DeferredPartitioner", "DividedSession", "replan", "with_stage_count"]


class DividedSession(Protocol):
    """The part of a compiled model that its partition depends on."""

    @property
    def module(self) -> nn.Module:
        """The user's module."""
        ...

    @property
    def loss(self) -> Loss:
        """The loss in its normal form."""
        ...

    @property
    def casting(self) -> Casting:
        """Dtypes to which batches are brought."""
        ...

    @property
    def partitions(self) -> Partitions:
        """Where the module lies on the IPUs of a replica."""
        ...

    def recomputes(self, strategy: str, stages: int) -> bool:
        """Return True if training has PopTorch compute activations again."""
        ...

    def estimator(
        self, sample: MicroBatch, partition: Optional[Partition] = None
    ) -> PartitionEstimator:
        """Follow a micro-batch through module and loss, for estimates of its divisions."""
        ...

    def poptorch_strategy(self, training: bool) -> Any:
        """Return the execution strategy of PopTorch's options of a mode; None for none."""
        ...


class DeferredPartitioner:
    """Finds open stages, counts a module's own blocks, and holds a plan's stages to its memory.

    It does so again where training has micro-batches of another shape. Inference takes the
    partition that there is.

    Args:
        memory: bytes per IPU of the plan that ``compile`` was given; None where it was none.
    """

    def __init__(self, memory: Optional[int] = None) -> None:
        self._memory = memory
        self._shapes: Optional[Tuple[object, ...]] = None
        self._counted: Set[bool] = set()
        self._searched: Set[bool] = set()

    def divide(self, session: DividedSession, first: MicroBatch, training: bool) -> Partitions:
        """The partitions for jobs that begin with this micro-batch.

        Raises:
            PartitionError: the stages don't fit.
        """
        partitions = session.partitions
        shapes = tuple((leaf.shape, leaf.dtype) for leaf in first.leaves)
        is_new = training and shapes != self._shapes
        if partitions.open is None and not is_new:
            return partitions
        both = (partitions.training, partitions.inference)
        automatic = next((p for p in both if p is not None and p.is_automatic), None)
        with defer_sigint():
            if automatic is not None and automatic.stages > 1:
                partitions = _find_stages(session, first, automatic)
            elif self._memory is not None:
                _check_memory(session, first, partitions.training, self._memory)
        # Those that an inference has found are found again for training.
        self._shapes = shapes if training else None
        return partitions

    def count_own_stages(
        self, session: DividedSession, first: MicroBatch, training: bool
    ) -> Partitions:
        """The partitions, with the stages of a module that divides itself, which show now.

        Raises:
            PartitionError: its blocks contradict the partition.
        """
        partitions = session.partitions
        partition = partitions.of(training)
        if partition is None or not partition.is_own:
            return partitions
        if training not in self._counted:
            with defer_sigint():
                stages = _count_stages(session, partition, first, training)
            partitions = partitions.with_stage_count(training, stages)
            self._counted.add(training)
        return partitions

    def count_own_ipus(
        self, session: DividedSession, source: DataAdapter, training: bool
    ) -> Partitions:
        """Count the IPUs of the module's own blocks before a plan shares IPUs out to replicas.

        A forward pass of a sample shows them, where the data can be looked at beforehand.

        Args:
            session: with the partitions of which nobody may have set the IPUs.
            source: the data.
            training: the mode of the pass.
        """
        partitions = session.partitions
        is_one = partitions.of(training) is None
        if partitions.is_ipus_set or training in self._searched or not OwnBlocks(None).can_hear:
            return partitions
        if not training and is_one and True in self._searched:
            return partitions  # there are none
        self._searched.add(training)
        for mode in (Mode.TRAIN if training else Mode.EVALUATE, Mode.PREDICT):
            example = _example(session, source, mode)
            if example is None:
                continue
            try:
                with defer_sigint():
                    _count_stages(session, partitions.of(training), example, training)
            except UncountedError as error:
                return self.follow_blocks(session, error, training)
            break
        return partitions

    def follow_blocks(
        self, session: DividedSession, error: UncountedError, training: bool
    ) -> Partitions:
        """Divide the module as its own blocks do, which have shown now.

        Inference follows training until blocks of its own show.

        Args:
            session: of the module.
            error: says what the blocks take.
            training: in which mode they have shown.

        Raises:
            UncountedError: the error, where the user has set how many IPUs a replica has.
        """
        partitions = session.partitions
        if partitions.is_ipus_set:
            raise error
        # Imported here, as below: few models are divided.
        from ipufit.partition.layers_per_ipu import check_splits

        for mode in (True, False) if training and partitions.inference is None else (training,):
            partition = None
            if error.ipus > 1:
                before = partitions.of(mode) or _undivided(session, mode, partitions.training)
                partition = dataclasses.replace(before, stages=error.stages, ipus=error.ipus)
            strategy = "" if partition is None else partition.strategy
            check_splits(session.module, strategy, error.ipus, mode)
            partitions = partitions.replaced(mode, partition)
        self._counted.add(training)
        return partitions


def _undivided(session: DividedSession, training: bool, followed: Optional[Partition]) -> Partition:
    """One IPU, with the strategy that options of PopTorch's have for more of them.

    Args:
        session: with the options.
        training: whether for training.
        followed: the partition of training, whose strategy inference has by default.
    """
    from ipufit.partition.request import kind_of

    strategy = session.poptorch_strategy(training)
    if strategy is None and not training and followed is not None:
        return dataclasses.replace(followed, is_chosen=False)
    name = kind_of(strategy) or "pipelined"
    return Partition((), 1, name, strategy is not None, 1, strategy)


def replan(
    plan: Plan, partition: Optional[Partition], ipus: Optional[int], auto_round_ipus: bool
) -> Plan:
    """The plan for other IPUs of its one replica, which have shown since it was made.

    Args:
        plan: made before.
        partition: of the module now.
        ipus: as the user has passed them to the plan.
        auto_round_ipus: whether IPUs may be rounded up.

    Raises:
        PartitionError: they were shared out to replicas of another size.
        PlanError: a replica has a number of IPUs that can't be reserved.
    """
    stages = 1 if partition is None else partition.ipus
    if ipus is not None:
        raise PartitionError(
            f"ipus={ipus} was shared out among replicas before the first batch, which can't be "
            f"read twice, showed that the module's own blocks take {stages} IPUs. Pass "
            f"ipus_per_replica={stages} to compile."
        )
    checked = Plan.make(micro_batch_size=1, stages=stages, auto_round_ipus=auto_round_ipus)
    return dataclasses.replace(plan, stages=stages, reserved_ipus=checked.reserved_ipus)


def _example(session: DividedSession, source: DataAdapter, mode: Mode) -> Optional[MicroBatch]:
    """A micro-batch like those of a source; None where none can be made of it beforehand."""
    try:
        with isolated():
            raw = source.preview()
            unpack = BatchValidator(source, mode, session.loss.in_module, session.casting)
            return unpack(raw[0], 0) if raw else None
    except Exception:
        return None  # whoever reads the data says what is wrong with it


def _count_stages(
    session: DividedSession, partition: Optional[Partition], batch: MicroBatch, training: bool
) -> int:
    from ipufit.planner.measure import stages_of_blocks

    return stages_of_blocks(partition, session.module, session.loss, batch, training)


def with_stage_count(plan: Plan, partition: Optional[Partition]) -> Plan:
    """The plan, when all stages are known, with their number where there are more than IPUs.

    Raises:
        PlanError: it can't fill a pipeline whose stages did not show before.
    """
    if partition is None:
        return plan
    shows_now = partition.is_own or partition.is_automatic
    if shows_now and partition.pipelines(plan.training, plan.device_iterations):
        work = (plan.gradient_accumulation, plan.device_iterations, plan.training)
        check_filling(*work, partition.stages)
    return dataclasses.replace(plan, depth=partition.depth)


def _find_stages(session: DividedSession, first: MicroBatch, partition: Partition) -> Partitions:
    recompute = session.recomputes(partition.strategy, partition.ipus)
    how = (partition.ipus, partition.strategy, recompute)
    begins, places = session.estimator(first).divide_automatically(*how)
    training, inference = (
        dataclasses.replace(p, begins=(), stages=p.ipus, places=())
        if p is not None and p.is_automatic
        else p
        for p in (session.partitions.training, session.partitions.inference)
    )
    opened = dataclasses.replace(session.partitions, training=training, inference=inference)
    return opened.with_stages(begins, places)


def _check_memory(
    session: DividedSession, first: MicroBatch, partition: Optional[Partition], memory: int
) -> None:
    """Refuse micro-batches with which a plan's stages take more than it was made for."""
    from ipufit.planner.costs import by_ipu, memory_of
    from ipufit.planner.planning import schedule_of
    from ipufit.planner.rendering import size

    stages = 1 if partition is None else partition.stages
    strategy = "pipelined" if partition is None else partition.strategy
    costs = session.estimator(first, partition).estimate(partition)
    taken = memory_of(costs, schedule_of(strategy), session.recomputes(strategy, stages))
    most = max(by_ipu(taken, () if partition is None else partition.places))
    if most > memory:
        raise PartitionError(
            f"planned stages must fit in the memory that they were planned for, {size(memory)} "
            f"per IPU, but with micro-batches of {first.size} samples the largest takes about "
            f"{size(most)}. Plan with such a batch, or use a smaller one, or pass "
            "stages=plan.stages, which are not held against the estimate."
        )
