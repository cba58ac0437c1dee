"""What ``Model.plan`` returns, from its arguments and what ``compile`` left."""

from __future__ import annotations

import dataclasses
from typing import Any, List, Optional, Sequence, Tuple

from ipufit.arguments import one_of
from ipufit.errors import ConfigurationError, PartitionError, UnknownNameError
from ipufit.faults import Faults
from ipufit.parallel.costs import IPU_MEMORY, StageCost
from ipufit.parallel.partition import STRATEGIES, Partition
from ipufit.parallel.partition_plan import PartitionPlan, Planned
from ipufit.parallel.planning import Estimator, schedule_of
from ipufit.parallel.resolving import AUTO, PartitionRequest, resolve_partition
from ipufit.parallel.schedule import SCHEDULES
from ipufit.plan import Plan
from ipufit.plan_checks import round_up
from ipufit.program import MicroBatch
from ipufit.session import Session
from ipufit.summary import sample_of

__all__ = ["planned"]

# IPUs of a replica that are looked for where nobody says how many there are: a whole POD64.
_MOST = 64


def planned(
    session: Session,
    x: Any,
    asked: PartitionRequest,
    work: Tuple[Any, Any],
    how: Tuple[Any, Any, Any],
) -> PartitionPlan:
    """Find or take the partition, and say what it takes.

    Args:
        session: of the model.
        x: a batch or a loader; None for the shapes of the last ``fit``.
        asked: the arguments that divide the module.
        work: ipus, gradient_accumulation.
        how: schedule, recompute, ipu_memory.

    Raises:
        ConfigurationError: arguments that can't work.
    """
    schedule, recompute, memory = _checked(how)
    ipus, accumulation = work
    rounds = session.auto_round_ipus
    Plan.make(  # before the work of a trace
        micro_batch_size=1,
        ipus=ipus,
        gradient_accumulation=1 if accumulation is None else accumulation,
        auto_round_ipus=rounds,
    )
    _check_count(asked.ipus_per_replica, rounds)
    wanted = _wanted(session, asked, ipus)
    strategy = wanted.strategy
    if schedule != SCHEDULES[0] and strategy == "sharded":
        raise ConfigurationError(
            f"schedule is that of a pipeline, but strategy='sharded' runs one stage at a time, got "
            f"{schedule!r}. Leave it out, or use strategy='pipelined'."
        )
    schedule = schedule_of(strategy, schedule)
    sample = _sample(session, x)
    estimator = session.estimator(sample, wanted.given)
    if wanted.counts:
        costs = _smallest(estimator, wanted.counts, schedule, recompute, memory)
    else:
        costs = estimator.given(wanted.given)
    count = len(costs)
    if accumulation is None:
        accumulation = 2 * count - 1 if strategy == "pipelined" else 1
    plan = Plan.make(
        micro_batch_size=sample.size,
        ipus=ipus,
        gradient_accumulation=accumulation,
        stages=count,
        pipelined=strategy == "pipelined" and count > 1,
        auto_round_ipus=rounds,
    )
    begins = tuple((cost.name, stage) for stage, cost in enumerate(costs) if cost.name)
    return PartitionPlan(
        costs,
        Planned(
            title=type(session.module).__name__,
            begins=begins if count > 1 else begins[:1],
            micro_batch_size=sample.size,
            gradient_accumulation=plan.gradient_accumulation,
            replicas=plan.replicas,
            strategy=strategy,
            schedule=schedule,
            recompute=recompute,
            memory=memory,
            unused=estimator.unused,
        ),
    )


def _check_count(count: Any, rounds: bool) -> None:
    """Refuse so many IPUs of a replica that no system has as many of.

    Raises:
        PartitionError: with the number to say instead.
    """
    whole = isinstance(count, int) and not isinstance(count, bool) and count > 0
    if whole and not rounds and count != round_up(count):
        raise PartitionError(
            f"ipus_per_replica must be a power of two, as the number of IPUs must be, got {count}. "
            f"Pass ipus_per_replica={round_up(count)}, or compile with auto_round_ipus=True to "
            f"reserve {round_up(count)} and leave {round_up(count) - count} idle."
        )


def _checked(how: Tuple[Any, Any, Any]) -> Tuple[str, bool, int]:
    schedule, recompute, memory = how
    faults = Faults()
    with faults.collected():
        one_of("schedule", schedule, SCHEDULES)
    with faults.collected():
        one_of("recompute", recompute, (True, False))
    with faults.collected():
        whole = isinstance(memory, int) and not isinstance(memory, bool)
        if memory is not None and not (whole and memory > 0):
            raise ConfigurationError(
                f"ipu_memory must be a positive number of bytes or None, got {memory!r}. Leave it "
                "out for the memory of an IPU."
            )
    faults.raise_all()
    return schedule, recompute, IPU_MEMORY if memory is None else memory


@dataclasses.dataclass(frozen=True)
class _Wanted:
    """Stages that are given, or how many to look for.

    Attributes:
        given: None for one IPU, and where stages are looked for.
        strategy: how they run.
        counts: numbers of stages to try, ascending; empty where stages are given.
    """

    given: Optional[Partition]
    strategy: str
    counts: Tuple[int, ...] = ()


def _wanted(session: Session, asked: PartitionRequest, ipus: Optional[int]) -> _Wanted:
    compiled = session.partitions.training
    if asked.strategy is not None and asked.strategy not in STRATEGIES:
        raise UnknownNameError("strategy", str(asked.strategy), STRATEGIES)
    if asked.strategy is None and compiled is not None:
        asked = dataclasses.replace(asked, strategy=compiled.strategy)
    is_given = asked.stages not in (None, AUTO) or asked.layers_per_ipu is not None
    if is_given or asked.layers is not None:
        return _estimated(resolve_partition(session.module, asked))
    count = asked.ipus_per_replica
    if asked.stages is None and count is None and compiled is not None:
        if not compiled.is_open:
            return _estimated(dataclasses.replace(compiled, strategy=asked.strategy))
        count = compiled.stages
    request = dataclasses.replace(asked, stages=AUTO, ipus_per_replica=count or 1)
    resolve_partition(session.module, request)
    strategy = asked.strategy or "pipelined"
    if count is not None:
        return _Wanted(None, strategy, (int(count),))
    most = _MOST if ipus is None else int(ipus)
    return _Wanted(None, strategy, tuple(1 << p for p in range(most.bit_length())))


def _estimated(partition: Optional[Partition]) -> _Wanted:
    """Refuse phases.

    Raises:
        PartitionError: the strategy is none whose memory can be told.
    """
    if partition is None:
        return _Wanted(None, "pipelined")
    if partition.strategy not in ("pipelined", "sharded"):
        raise PartitionError(
            "plan estimates stages that run as a pipeline or one after the other, got strategy="
            f"{partition.strategy!r}, whose phases keep little on the IPU. Pass "
            "strategy='pipelined' to see its stages."
        )
    return _Wanted(partition, partition.strategy)


def _smallest(
    estimator: Estimator, counts: Sequence[int], schedule: str, recompute: bool, memory: int
) -> List[StageCost]:
    """The fewest stages that fit, or else the evenest of the largest number that can be made.

    Raises:
        PartitionError: not even the smallest number can be made.
    """
    evenest: Optional[List[StageCost]] = None
    for count in counts:
        try:
            found = estimator.divided(count, schedule, recompute, memory)
        except PartitionError:
            if evenest is None:
                raise
            break
        if found is not None:
            return found
        evenest = estimator.divided(count, schedule, recompute)
    assert evenest is not None
    return evenest


def _sample(session: Session, x: Any) -> MicroBatch:
    if x is not None:
        return sample_of(x, session.loss.in_module, "plan", target=True)
    if session.sample is None:
        raise ConfigurationError(
            "plan needs a batch, plan((inputs, target)), or an earlier fit; got neither."
        )
    return session.sample
