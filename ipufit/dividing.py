"""Stages that need the first micro-batch: found by ipufit, of a plan, of a module's own blocks."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Optional, Set, Tuple

from ipufit.errors import PartitionError
from ipufit.interrupts import deferred
from ipufit.parallel.partition import Partition, Partitions
from ipufit.plan import Plan
from ipufit.plan_checks import check_filling
from ipufit.program import MicroBatch

if TYPE_CHECKING:
    from ipufit.session import Session

__all__ = ["Divider", "settled"]


class Divider:
    """Finds stages that were left open, counts a module's own, holds those of a plan to its memory.

    Again where training has micro-batches of another shape. Inference takes what there is.

    Args:
        memory: bytes per IPU of the plan that ``compile`` was given; None where it was none.
    """

    def __init__(self, memory: Optional[int] = None) -> None:
        self._memory = memory
        self._shapes: Optional[Tuple[object, ...]] = None
        self._counted: Set[bool] = set()

    def divided(self, session: Session, first: MicroBatch, training: bool) -> Partitions:
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
        with deferred():
            if automatic is not None and automatic.stages > 1:
                partitions = _found(session, first, automatic)
            elif self._memory is not None:
                _hold(session, first, partitions.training, self._memory)
        # Those that an inference has found are found again for training.
        self._shapes = shapes if training else None
        return partitions

    def counted(self, session: Session, first: MicroBatch, training: bool) -> Partitions:
        """The partitions, with the stages of a module that divides itself, which show now.

        Raises:
            PartitionError: its blocks contradict the partition.
        """
        partitions = session.partitions
        partition = partitions.of(training)
        if partition is None or not partition.is_own:
            return partitions
        if training not in self._counted:
            with deferred():
                # Imported here, as below: few models are divided.
                from ipufit.parallel.looking import stages_of_blocks

                stages = stages_of_blocks(partition, session.module, session.loss, first, training)
            partition = dataclasses.replace(partition, stages=stages)
            partitions = partitions.counted(training, stages)
            self._counted.add(training)
        return partitions


def settled(plan: Plan, partition: Optional[Partition]) -> Plan:
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


def _found(session: Session, first: MicroBatch, partition: Partition) -> Partitions:
    recompute = session.recomputes(partition.strategy, partition.ipus)
    how = (partition.ipus, partition.strategy, recompute)
    begins, places = session.estimator(first).automatic(*how)
    opened = (
        dataclasses.replace(p, begins=(), stages=p.ipus, places=())
        if p is not None and p.is_automatic
        else p
        for p in (session.partitions.training, session.partitions.inference)
    )
    return Partitions(*opened).found(begins, places)


def _hold(session: Session, first: MicroBatch, partition: Optional[Partition], memory: int) -> None:
    """Refuse micro-batches with which a plan's stages take more than it was made for."""
    from ipufit.parallel.costs import by_ipu, memory_of
    from ipufit.parallel.planning import schedule_of
    from ipufit.parallel.texts import size

    stages = 1 if partition is None else partition.stages
    strategy = "pipelined" if partition is None else partition.strategy
    costs = session.estimator(first, partition).given(partition)
    taken = memory_of(costs, schedule_of(strategy), session.recomputes(strategy, stages))
    most = max(by_ipu(taken, () if partition is None else partition.places))
    if most > memory:
        raise PartitionError(
            f"planned stages must fit in the memory that they were planned for, {size(memory)} "
            f"per IPU, but with micro-batches of {first.size} samples the largest takes about "
            f"{size(most)}. Plan with such a batch, or use a smaller one, or pass "
            "stages=plan.stages, which are not held against the estimate."
        )
