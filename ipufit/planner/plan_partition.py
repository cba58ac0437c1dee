"""The plan of a model on IPUs, from the arguments of ``Model.plan`` and those of ``compile``."""

from __future__ import annotations

import dataclasses
from typing import Callable, Optional, Sequence, Tuple

from torch import nn

from ipufit.core.batch import MicroBatch
from ipufit.core.compile_arguments import GRAPH
from ipufit.core.plan import Plan, round_up
from ipufit.errors import ConfigurationError, PartitionError
from ipufit.partition.partition import AFTER, Partition
from ipufit.partition.recomputation import resolve_recompute
from ipufit.partition.request import PartitionRequest, strategy_of
from ipufit.partition.resolve import AUTO, resolve_partition
from ipufit.planner.costs import IPU_MEMORY, StageCost
from ipufit.planner.divided_module import DividedModule
from ipufit.planner.partition_plan import PartitionPlan, Planned, fingerprint
from ipufit.planner.pipeline_schedule import SCHEDULES, PipelineSchedule
from ipufit.planner.planning import Divided, PartitionEstimator, schedule_of
from ipufit.utils.error_collector import ErrorCollector, at_least_or_none, one_of

# From a micro-batch, the partition whose rules are checked, and the layers from whose outputs
# recomputation starts.
EstimatorMaker = Callable[[MicroBatch, Optional[Partition], Sequence[str]], PartitionEstimator]

# IPUs of a replica that are looked for where nobody says how many there are: a whole POD64.
_MOST = 64


def plan_partition(
    divided: DividedModule,
    make_estimator: EstimatorMaker,
    read_sample: Callable[[], MicroBatch],
    request: PartitionRequest,
    ipus: Optional[int] = None,
    gradient_accumulation: Optional[int] = None,
    schedule: PipelineSchedule = SCHEDULES[0],
    recompute: object = None,
    ipu_memory: Optional[int] = None,
) -> PartitionPlan:
    """Search for a partition, or take the one that is passed, and estimate its costs.

    Args:
        divided: the compiled module.
        make_estimator: follows a micro-batch through module and loss, or says why they can't take
            it.
        read_sample: returns the micro-batch whose shapes the plan is for, once arguments are
            checked.
        request: the arguments that divide the module.
        ipus, gradient_accumulation, schedule, recompute, ipu_memory: as ``Model.plan`` has them.

    Raises:
        ConfigurationError: arguments that can't work.
    """
    faults, rounds = ErrorCollector(of_call=True), divided.auto_round_ipus
    with faults.collect():
        one_of("schedule", schedule, PipelineSchedule)
    with faults.collect():
        advice = "It is in bytes. Leave it out for the memory of an IPU."
        memory = at_least_or_none("ipu_memory", ipu_memory, 1, advice) or IPU_MEMORY
    with faults.collect():
        checkpoints, recomputes = _recomputation(divided, recompute)
    with faults.collect():
        Plan.make(micro_batch_size=1, ipus=ipus, auto_round_ipus=rounds)
    faults.raise_all()
    wanted = _wanted(divided, request, ipus)
    _check_work(wanted, ipus, gradient_accumulation, rounds)  # before the work of a trace
    strategy = wanted.strategy
    if schedule != SCHEDULES[0] and strategy == "sharded":
        raise ConfigurationError(
            "schedule is for pipelines, but strategy='sharded' runs one stage at a time, got "
            f"{schedule!r}. Leave it out, or use strategy='pipelined'."
        )
    schedule = schedule_of(strategy, schedule)
    sample = read_sample()
    estimator = make_estimator(sample, wanted.partition, checkpoints)
    if wanted.counts:
        costs, places = _smallest(estimator, wanted, schedule, recomputes, memory)
    else:
        costs = estimator.estimate(wanted.partition)
        places = () if wanted.partition is None else wanted.partition.places
    count = len(costs)
    if gradient_accumulation is None:
        gradient_accumulation = 2 * count - 1 if strategy == "pipelined" else 1
    plan = Plan.make(
        micro_batch_size=sample.size,
        ipus=ipus,
        gradient_accumulation=gradient_accumulation,
        stages=1 + max(places) if places else count,
        depth=count,
        pipelined=strategy == "pipelined" and count > 1,
        auto_round_ipus=rounds,
    )
    begins = _begins(costs, divided.module)
    return PartitionPlan(
        costs,
        Planned(
            title=type(divided.module).__name__,
            begins=begins if count > 1 else begins[:1],
            micro_batch_size=sample.size,
            gradient_accumulation=plan.gradient_accumulation,
            replicas=plan.replicas,
            strategy=strategy,
            schedule=schedule,
            recompute=recomputes(strategy, count),
            memory=memory,
            unused=estimator.unused,
            checkpoints=checkpoints,
            fingerprint=fingerprint(divided.module),
            places=places,
            with_loss=bool(divided.loss.in_module) or sample.unpack()[2] is not None,
        ),
    )


def _begins(costs: Sequence[StageCost], module: nn.Module) -> Tuple[Tuple[str, int], ...]:
    """Return the argument ``stages`` of ``compile`` for these stages.

    Parts of serialised layers begin stages by themselves and are left out.
    """
    names = {name for name, _ in module.named_modules() if name}
    return tuple(
        (cost.name, stage)
        for stage, cost in enumerate(costs)
        if cost.name in names or cost.name.startswith(AFTER)
    )


def _recomputation(
    divided: DividedModule, recompute: object
) -> Tuple[Tuple[str, ...], Callable[[str, int], bool]]:
    """Resolve the argument ``recompute``; None is what was compiled.

    Returns:
        The layers from whose outputs recomputation starts, besides the inputs of the stages; and
        whether there is any, by strategy and number of stages.

    Raises:
        UnknownNameError: a layer that there is not.
        ConfigurationError: anything else that can't work.
    """
    compiled = divided.config.recompute
    if recompute is None:
        return compiled, divided.recomputes
    if isinstance(recompute, bool):
        return compiled if recompute else (), lambda strategy, count: recompute
    return resolve_recompute(divided.module, recompute, GRAPH), lambda strategy, count: True


@dataclasses.dataclass(frozen=True)
class _Wanted:
    """Stages to estimate, or how many of them to search for.

    Attributes:
        partition: the stages; None for one IPU, and where stages are looked for.
        strategy: how they run.
        counts: numbers of stages to try, ascending; empty where the stages are fixed.
    """

    partition: Optional[Partition]
    strategy: str
    counts: Tuple[int, ...] = ()


def _wanted(divided: DividedModule, request: PartitionRequest, ipus: Optional[int]) -> _Wanted:
    compiled = divided.partitions.training
    strategy = None if request.strategy is None else strategy_of(request)[0]
    if strategy is None and compiled is not None:
        strategy = compiled.strategy
    request = dataclasses.replace(request, strategy=strategy)
    is_given = request.stages not in (None, AUTO) or request.layers_per_ipu is not None
    if is_given or request.layers is not None:
        return _estimated(resolve_partition(divided.module, request))
    count = request.ipus_per_replica
    if request.stages is None and count is None and compiled is not None:
        if not compiled.is_open:
            return _estimated(dataclasses.replace(compiled, strategy=strategy or compiled.strategy))
        count = compiled.ipus
    request = dataclasses.replace(request, stages=AUTO, ipus_per_replica=count or 1)
    resolve_partition(divided.module, request)
    strategy = strategy or "pipelined"
    if count is not None:
        return _Wanted(None, strategy, (int(count),))
    most = _MOST if ipus is None else int(ipus)
    return _Wanted(None, strategy, tuple(1 << p for p in range(most.bit_length())))


def _check_work(
    wanted: _Wanted, ipus: Optional[int], accumulation: Optional[int], rounds: bool
) -> None:
    """Check the number of stages, where it is fixed, against the IPUs.

    Raises:
        PartitionError: so many IPUs can't be reserved.
        PlanError: they are no replicas of so many.
    """
    count = wanted.partition.ipus if wanted.partition is not None else 1
    count = wanted.counts[0] if wanted.counts else count
    least, most = round_up(count) // 2, round_up(count)
    if ipus is None and count != most and not rounds:
        raise PartitionError(
            "the number of stages of a replica, each on an IPU, must be a power of two, got "
            f"{count}. Plan with {least} or {most}, such as ipus_per_replica={most}, or compile "
            "with Parallel(auto_round_ipus=True) to leave IPUs idle."
        )
    filling = accumulation is not None and wanted.strategy == "pipelined"
    Plan.make(
        micro_batch_size=1,
        ipus=ipus,
        gradient_accumulation=1 if accumulation is None else accumulation,
        stages=count,
        depth=wanted.partition.stages if wanted.partition is not None else count,
        pipelined=filling,
        auto_round_ipus=rounds,
    )


def _estimated(partition: Optional[Partition]) -> _Wanted:
    """Return the stages to estimate, which must not run in phases.

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
    estimator: PartitionEstimator,
    wanted: _Wanted,
    schedule: PipelineSchedule,
    recomputes: Callable[[str, int], bool],
    memory: int,
) -> Divided:
    """Return the fewest stages that fit, else the evenest of the largest possible number.

    Raises:
        PartitionError: not even the smallest number can be made.
    """
    evenest: Optional[Divided] = None
    for count in wanted.counts:
        recompute = recomputes(wanted.strategy, count)
        try:
            stages = estimator.divide(count, schedule, recompute, memory)
        except PartitionError:
            if evenest is None:
                raise
            break
        if stages is not None:
            return stages
        evenest = estimator.divide(count, schedule, recompute)
    assert evenest is not None
    return evenest
