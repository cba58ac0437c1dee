"""How micro-batches go through a pipeline, step by step, and how busy its IPUs are."""

from __future__ import annotations

import dataclasses
import math
from typing import List, Optional, Sequence, Tuple, get_args

from ipufit.core import PipelineSchedule as PipelineSchedule

SCHEDULES: Tuple[PipelineSchedule, ...] = get_args(PipelineSchedule)


@dataclasses.dataclass(frozen=True)
class Task:
    """Work of one stage on one micro-batch.

    Attributes:
        stage: number of the stage, from 0.
        micro_batch: number of the micro-batch in the update, from 0.
        is_backward: whether it is the backward pass.
        begin: when it begins; see :meth:`ipufit.PartitionPlan.timeline` for the unit.
        end: when it ends.
    """

    stage: int
    micro_batch: int
    is_backward: bool
    begin: float
    end: float


@dataclasses.dataclass(frozen=True)
class Timeline:
    """Tasks of all stages in one weight update.

    Attributes:
        tasks: all of them, in the order in which they begin.
        total: end of the last one.
        utilisation: share of the time in which an IPU works, over all IPUs of a replica.
    """

    tasks: Tuple[Task, ...]
    total: float
    utilisation: float


def simulate(
    schedule: str,
    forward: Sequence[float],
    backward: Sequence[float],
    micro_batches: int,
    places: Sequence[int] = (),
) -> Timeline:
    """Simulate one weight update, whose steps end on all IPUs at the same time.

    Stages that share an IPU work one after the other in a step.

    Args:
        schedule: "grouped": a stage does a forward and a backward pass in each step, of different
            micro-batches; "interleaved": one of them in turn; "sequential": one stage works at a
            time.
        forward, backward: time of each stage's passes.
        micro_batches: the gradient accumulation.
        places: the IPU of each stage; none where each has one of its own.
    """
    times = (forward, backward)
    places = places or range(len(forward))
    ipus = 1 + max(places)
    tasks: List[Task] = []
    now = 0.0
    for step in _steps(schedule, len(forward), micro_batches):
        ends = [now] * ipus
        for stage, micro_batch, is_backward in step:
            ipu = places[stage]
            begin = ends[ipu]
            ends[ipu] += times[is_backward][stage]
            tasks.append(Task(stage, micro_batch, is_backward, begin, ends[ipu]))
        now = max(ends)
    busy = micro_batches * (sum(forward) + sum(backward))
    tasks.sort(key=lambda task: (task.begin, task.stage))
    return Timeline(tuple(tasks), now, busy / (ipus * now) if now else 1.0)


def _steps(schedule: str, stages: int, micro_batches: int) -> List[List[Tuple[int, int, bool]]]:
    """(stage, micro-batch, is it backward) of every step; a forward pass comes first in it."""
    last = stages - 1
    if schedule == "sequential":
        way = [(s, False) for s in range(stages)] + [(s, True) for s in reversed(range(stages))]
        return [[(s, m, back)] for m in range(micro_batches) for s, back in way]
    apart, turn = (1, 0) if schedule == "grouped" else (2, 1)
    steps: List[List[Tuple[int, int, bool]]] = [
        [] for _ in range(apart * (micro_batches - 1) + 2 * last + 1 + turn)
    ]
    for is_backward in (False, True):
        for m in range(micro_batches):
            for stage in range(stages):
                step = apart * m + (2 * last - stage + turn if is_backward else stage)
                steps[step].append((stage, m, is_backward))
    return steps


def in_flight(schedule: str, stage: int, stages: int) -> int:
    """Micro-batches whose activations a stage holds, at most, in a pipeline that is full."""
    steps = 2 * (stages - 1 - stage) + 1
    if schedule == "grouped":
        return steps
    return (steps + 1) // 2 if schedule == "interleaved" else 1


def least_accumulation(
    schedule: str,
    forward: Sequence[float],
    backward: Sequence[float],
    utilisation: float,
    places: Sequence[int] = (),
) -> Tuple[Optional[int], float]:
    """The smallest accumulation that fills the pipeline and reaches a utilisation.

    Returns:
        It, or None where no number is large enough; and the utilisation that is never exceeded.
    """
    ipus = 1 + max(places) if places else len(forward)
    least = 1 if schedule == "sequential" else 2 * len(forward) - 1
    # From a full pipeline on, every further micro-batch takes the same time.
    total, more = (simulate(schedule, forward, backward, least + n, places).total for n in (0, 1))
    work, period = sum(forward) + sum(backward), more - total
    if not work:
        return least, 1.0
    limit = work / (ipus * period)

    def is_utilised(count: int) -> bool:
        time = total + (count - least) * period
        return count * work / (ipus * time) >= utilisation * (1 - 1e-12)

    if is_utilised(least):
        return least, limit
    if limit <= utilisation:
        return None, limit
    excess = utilisation * ipus * (total - least * period)
    count = max(least, math.floor(excess / (work - utilisation * ipus * period)) - 1)
    while not is_utilised(count):
        count += 1
    return count, limit
