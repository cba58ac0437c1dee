"""Estimate that ``Model.plan`` returns: memory, work and time of every stage, as tables too."""

from __future__ import annotations

import dataclasses
import hashlib
import os
from typing import Any, Dict, List, Optional, Sequence, Tuple, Union

from torch import nn

from ipufit.errors import ConfigurationError, PartitionError
from ipufit.partition.request import PartitionRequest, count_of
from ipufit.planner.costs import TILE_MEMORY, TILES, StageCost, by_ipu, memory_of, times_of
from ipufit.planner.pipeline_schedule import (
    SCHEDULES,
    PipelineSchedule,
    Timeline,
    in_flight,
    least_accumulation,
    simulate,
)
from ipufit.planner.rendering import WIDTH, columns, flops, share, size, stage_title
from ipufit.utils.console import TextReport, fold
from ipufit.utils.error_collector import number_in, one_of

_STAGE = "stage begins with"
_MEMORY_COLUMNS = (
    *(_STAGE, "weights", "gradients", "optimizer", "activations", "recomputed", "total", "of IPU"),
)
_WORK_COLUMNS = (_STAGE, "parameters", "forward FLOPs", "backward FLOPs", "time")


@dataclasses.dataclass(frozen=True)
class Planned:
    """Settings that a plan was made for.

    Attributes:
        title: class of the module.
        begins: modules that begin a stage, with its number.
        micro_batch_size: samples.
        gradient_accumulation: micro-batches of an update.
        replicas: copies of the model.
        strategy: "pipelined" or "sharded".
        schedule: of the pipeline: "grouped", "interleaved" or "sequential".
        recompute: whether activations are recomputed.
        memory: bytes of an IPU that may be used.
        unused: names of parameters that the module does not use.
        checkpoints: layers from whose outputs recomputation starts, besides the inputs of stages.
        with_loss: whether the loss is counted, for which the batch must have a target.
        fingerprint: hash of the module's layers and parameters.
        places: IPU of each stage if one of them goes back to an earlier IPU; otherwise empty.
    """

    title: str
    begins: Tuple[Tuple[str, int], ...]
    micro_batch_size: int
    gradient_accumulation: int
    replicas: int
    strategy: str
    schedule: PipelineSchedule
    recompute: bool
    memory: int
    unused: Tuple[str, ...] = ()
    checkpoints: Tuple[str, ...] = ()
    with_loss: bool = True
    fingerprint: str = ""
    places: Tuple[int, ...] = ()


class PartitionPlan(TextReport):
    """Estimate of the memory and time that the stages of a model need; ``print`` shows tables.

    Memory is counted tensor by tensor: weights, accumulated gradients, the optimizer's state and
    what autograd keeps. Code, exchange buffers and temporary results come on top, which only the
    compiler knows. Times are shares, from the FLOPs and the bytes of every operator, not cycles.
    :meth:`ipufit.Model.plan` makes it. See docs/planner.md.

    Args:
        costs: a :class:`ipufit.planner.costs.StageCost` for every stage.
        planned: a :class:`ipufit.planner.partition_plan.Planned`: settings of the estimate.

    Attributes:
        costs: of every stage.
        planned: settings that the estimate is for.
        stages: modules that begin a stage, by name, with its number, or a pair of that and its IPU
            where a stage goes back to an earlier one. ``compile(parallel=plan)`` takes the plan
            itself, ``Parallel(stages=plan.stages)`` leaves out its checks.
    """

    def __init__(self, costs: Sequence[StageCost], planned: Planned) -> None:
        self.costs: Tuple[StageCost, ...] = tuple(costs)
        self.planned = planned
        self.stages: Dict[str, Union[int, Tuple[int, int]]] = {
            name: (stage, self.ipu_of(stage)) if planned.places else stage
            for name, stage in planned.begins
        }

    @property
    def ipus(self) -> int:
        """IPUs of a replica."""
        return 1 + max(self.planned.places) if self.planned.places else len(self.costs)

    def ipu_of(self, stage: int) -> int:
        """Find the IPU of a stage: its own number, unless stages go back to an earlier IPU.

        Args:
            stage: its number, from 0.
        """
        return self.planned.places[stage] if self.planned.places else stage

    @property
    def stage_memory(self) -> List[int]:
        """Bytes that each stage needs."""
        return memory_of(self.costs, self.planned.schedule, self.planned.recompute)

    @property
    def memory(self) -> List[int]:
        """Bytes on each IPU of a replica; the same as for the stages, unless two share an IPU."""
        return by_ipu(self.stage_memory, self.planned.places)

    @property
    def fits(self) -> bool:
        """True if every IPU has enough memory."""
        return max(self.memory) <= self.planned.memory

    @property
    def time_shares(self) -> List[float]:
        """Estimated time of each stage as a share of the total; they add up to 1."""
        forward, backward = times_of(self.costs, self.planned.schedule, self.planned.recompute)
        whole = sum(forward) + sum(backward)
        return [(f + b) / whole if whole else 0.0 for f, b in zip(forward, backward)]

    def utilisation(
        self,
        gradient_accumulation: Optional[int] = None,
        schedule: Optional[PipelineSchedule] = None,
    ) -> float:
        """Share of the time of an update in which an IPU works, over all IPUs.

        The rest is the pipeline's bubble: stages that wait for the first micro-batch, for the last
        one, or for a slower stage.

        Args:
            gradient_accumulation: micro-batches of an update; None is the number of the plan.
            schedule: "grouped", "interleaved" or "sequential"; None is that of the plan.

        Raises:
            ConfigurationError: an unknown schedule, or a number that is not positive.
        """
        return self.timeline(gradient_accumulation, schedule).utilisation

    def least_accumulation(
        self, utilisation: float, schedule: Optional[PipelineSchedule] = None
    ) -> int:
        """The smallest ``gradient_accumulation`` that reaches a utilisation.

        It also fills the pipeline, as PopTorch requires.

        Args:
            utilisation: above 0, at most 1.
            schedule: as for :meth:`utilisation`.

        Raises:
            ConfigurationError: no number reaches it, because stages wait for the slowest one; names
                the limit.
        """
        schedule = self._schedule(schedule)
        words = ("utilisation", utilisation, "a number above 0 and at most 1")
        utilisation = number_in(*words, lambda number: 0 < number <= 1, "Write 0.9 for 90 %.")
        accumulation, limit = least_accumulation(
            schedule,
            *times_of(self.costs, schedule, self.planned.recompute),
            utilisation,
            self.planned.places,
        )
        if accumulation is None:
            raise ConfigurationError(
                f"a utilisation of {share(utilisation)} can't be reached with the {schedule} "
                f"schedule: these stages stay below {share(limit)} for any number of "
                "micro-batches. Choose a lower value, or divide the work more evenly."
            )
        return accumulation

    def timeline(
        self,
        gradient_accumulation: Optional[int] = None,
        schedule: Optional[PipelineSchedule] = None,
    ) -> Timeline:
        """Compute when each stage works on which micro-batch, in one update.

        Args:
            gradient_accumulation: as for :meth:`utilisation`.
            schedule: as for :meth:`utilisation`.

        Returns:
            A :class:`ipufit.planner.pipeline_schedule.Timeline`; its unit of time is
            that of one micro-batch through all stages and back.
        """
        count = count_of("gradient_accumulation", gradient_accumulation)
        count = count or self.planned.gradient_accumulation
        schedule = self._schedule(schedule)
        forward, backward = times_of(self.costs, schedule, self.planned.recompute)
        unit = sum(forward) + sum(backward) or 1.0
        forward, backward = ([time / unit for time in times] for times in (forward, backward))
        return simulate(schedule, forward, backward, count, self.planned.places)

    def to_dict(self) -> Dict[str, object]:
        """Return the whole plan as plain values, which JSON can hold."""
        planned = dataclasses.asdict(self.planned)
        planned.update(
            begins=dict(self.planned.begins),
            unused=list(self.planned.unused),
            checkpoints=list(self.planned.checkpoints),
            places=list(self.planned.places),
        )
        schedule = self.planned.schedule
        stages = []
        for stage, (cost, memory) in enumerate(zip(self.costs, self.stage_memory)):
            flights = in_flight(schedule, stage, len(self.costs))
            stages.append(
                {
                    **dataclasses.asdict(cost),
                    "in_flight": flights,
                    "ipu": self.ipu_of(stage),
                    "memory": memory,
                    "activations_kept": cost.activations(flights),
                    "activations_recomputed": cost.activations(flights, True),
                    "time_share": self.time_shares[stage],
                }
            )
        names = SCHEDULES if len(self.costs) > 1 else ()
        return {
            **planned,
            "fits": self.fits,
            "utilisation": {name: self.utilisation(schedule=name) for name in names},
            "stages": stages,
        }

    def plot(self, path: Union[str, os.PathLike[str], None] = None) -> Any:
        """Draw the timeline of one update, and the memory of every stage.

        Args:
            path: where to save the picture (the suffix chooses the format); None only returns it,
                which shows it in a notebook.

        Returns:
            The matplotlib ``Figure``.

        Raises:
            ConfigurationError: matplotlib is not installed (``pip install ipufit[plot]``), or the
                path can't be written.
        """
        from ipufit.planner.rendering import draw

        planned, timeline = self.planned, self.timeline()
        title = f"One update of {planned.gradient_accumulation} micro-batches"
        if len(self.costs) > 1:
            title += f", {planned.schedule}: {share(timeline.utilisation)} busy"
        stages = [
            f"stage {stage_title(stage, cost.name, self.ipu_of(stage))}"
            for stage, cost in enumerate(self.costs)
        ]
        ipus = [f"IPU {ipu}" for ipu in range(self.ipus)] if planned.places else stages
        return draw(title, timeline, stages, ipus, self._memory_parts(), planned.memory, path)

    def _memory_parts(self) -> Dict[str, List[int]]:
        """Bytes on each IPU by what they hold; they add up to :attr:`memory`."""
        planned, stages = self.planned, len(self.costs)
        flights = [in_flight(planned.schedule, stage, stages) for stage in range(stages)]
        parts = {
            "weights": [cost.weight_bytes for cost in self.costs],
            "gradients": [cost.gradient_bytes for cost in self.costs],
            "optimizer": [cost.optimizer_bytes for cost in self.costs],
            "activations": [
                cost.activations(count, planned.recompute)
                for cost, count in zip(self.costs, flights)
            ],
        }
        return {name: by_ipu(sizes, planned.places) for name, sizes in parts.items()}

    def __str__(self) -> str:
        lines = [*_head(self), *_stage_tables(self), *_pipeline_table(self)]
        return fold("\n".join(lines), WIDTH)

    def __repr__(self) -> str:
        planned = self.planned
        stages = "1 stage" if len(self.costs) == 1 else f"{len(self.costs)} stages"
        fits = "fits" if self.fits else "does not fit"
        return f"PartitionPlan({planned.title}, {stages}, {planned.strategy}, {fits})"

    def _schedule(self, schedule: Optional[PipelineSchedule]) -> PipelineSchedule:
        if schedule is None:
            return self.planned.schedule
        return one_of("schedule", schedule, PipelineSchedule)


def _head(plan: PartitionPlan) -> List[str]:
    planned, count = plan.planned, len(plan.costs)
    ipus = f"{plan.ipus} IPUs, {planned.strategy}" if count > 1 else "1 IPU"
    ipus += f" in {count} stages" if planned.places else ""
    copies = f"{planned.replicas} replicas of {ipus}" if planned.replicas > 1 else ipus
    return [
        f"Estimate for training {planned.title} on {copies}",
        f"micro-batches of {planned.micro_batch_size}, {planned.gradient_accumulation} of "
        "them per update",
    ]


def _stage_tables(plan: PartitionPlan) -> List[str]:
    planned, count = plan.planned, len(plan.costs)
    memory, work = [list(_MEMORY_COLUMNS)], [list(_WORK_COLUMNS)]
    shares = plan.time_shares
    for stage, (cost, total) in enumerate(zip(plan.costs, plan.stage_memory)):
        flights = in_flight(planned.schedule, stage, count)
        title = stage_title(stage, cost.name, plan.ipu_of(stage))
        sizes = (
            cost.weight_bytes,
            cost.gradient_bytes,
            cost.optimizer_bytes,
            cost.activations(flights),
            cost.activations(flights, True),
            total,
        )
        memory.append([title, *map(size, sizes), share(total / planned.memory)])
        passes = (flops(cost.forward_flops), flops(cost.backward_flops))
        work.append([title, f"{cost.parameters:,}", *passes, share(shares[stage])])
    counted = "as recomputed" if planned.recompute else "as kept"
    lines = [
        *columns(memory),
        f"Total: with activations {counted}, for all micro-batches in flight.",
    ]
    if planned.checkpoints:
        count_of = len(planned.checkpoints)
        outputs = "output of 1 layer" if count_of == 1 else f"outputs of {count_of} layers"
        lines.append(f"Recomputed: from the inputs of the stages and the {outputs}.")
    whole = planned.memory == TILES * TILE_MEMORY
    parts = f" = {TILES:,} tiles x {TILE_MEMORY // 1024} KiB" if whole else ""
    fullest = max(range(plan.ipus), key=plan.memory.__getitem__)
    many = planned.places.count(fullest) > 1
    verdict = ("fit" if many else "fits") if plan.fits else f"{'do' if many else 'does'} not fit"
    lines.append(
        f"Memory of an IPU: {size(planned.memory)}{parts}; {_fullest_stages(plan, fullest)}, and "
        f"{verdict}."
    )
    lines.append("Code, exchange and temporary tensors are not counted.")
    lines += [*columns(work), "FLOPs are for one micro-batch."]
    if not planned.with_loss:
        lines.append("Without a target: the loss is not counted.")
    if planned.unused:
        some = ", ".join(planned.unused[:5]) + (", ..." if len(planned.unused) > 5 else "")
        lines.append(f"Not used by forward, and not counted: {some}.")
    return lines


def _fullest_stages(plan: PartitionPlan, ipu: int) -> str:
    """Name the stage or stages of the fullest IPU, as the beginning of a sentence."""
    shared = [str(stage) for stage in range(len(plan.costs)) if plan.ipu_of(stage) == ipu]
    if len(shared) == 1:
        return f"stage {shared[0]} takes most"
    *first, last = shared
    return f"stages {', '.join(first)} and {last} on IPU {ipu} need most, {size(plan.memory[ipu])}"


def _pipeline_table(plan: PartitionPlan) -> List[str]:
    count, planned = len(plan.costs), plan.planned
    if count == 1:
        return []
    largest = "largest IPU" if planned.places else "largest stage"
    rows = [["schedule", "utilisation", "bubble", "in flight", largest, "90 % from"]]
    for name in SCHEDULES:
        utilisation = plan.utilisation(schedule=name)
        times = times_of(plan.costs, name, planned.recompute)
        least, limit = least_accumulation(name, *times, 0.9, planned.places)
        memory = by_ipu(memory_of(plan.costs, name, planned.recompute), planned.places)
        flights = [str(in_flight(name, s, count)) for s in range(count)]
        if count > 4:
            flights[2:-1] = ["..."]
        rows.append(
            [
                name + (" *" if name == planned.schedule else ""),
                share(utilisation),
                share(1 - utilisation),
                ", ".join(flights),
                size(max(memory)),
                f"{least:,}" if least is not None else f"never ({share(limit)})",
            ]
        )
    lines = columns(rows)
    if planned.places:
        lines.append(
            "Stages on the same IPU run one after the other in every step of the pipeline."
        )
    return [
        *lines,
        f"* assumed above. Utilisation: with gradient_accumulation="
        f"{planned.gradient_accumulation}; the last column reaches 90 %.",
    ]


def fingerprint(module: nn.Module) -> str:
    """Hash a module's layers and the shapes of its parameters."""
    parts = [f"{name} {type(part).__qualname__}" for name, part in module.named_modules()]
    shapes = [f"{name} {tuple(p.shape)}" for name, p in module.named_parameters()]
    return hashlib.sha256("\n".join([*parts, *shapes]).encode()).hexdigest()


def apply_plan(module: nn.Module, request: PartitionRequest) -> PartitionRequest:
    """The request with the stages and the strategy of a plan, where its stages are one.

    Raises:
        PartitionError: the plan is one of another module or strategy, or does not fit.
    """
    plan = request.stages
    if not isinstance(plan, PartitionPlan):
        return request
    name, strategy = request.name("stages"), plan.planned.strategy
    if plan.planned.fingerprint != fingerprint(module):
        raise PartitionError(
            f"{name} as a plan must be for the compiled module, {type(module).__name__}, but this "
            f"one is for a {plan.planned.title} with other layers or parameters. Call model.plan "
            "again."
        )
    if not plan.fits:
        most = max(plan.memory)
        raise PartitionError(
            f"{name} as a plan must fit in its memory, {size(plan.planned.memory)} per IPU, but "
            f"its largest stage needs about {size(most)}. Plan with more IPUs or a smaller batch, "
            f"or pass {name}=plan.stages, which is not checked."
        )
    if request.strategy not in (None, strategy):
        raise PartitionError(
            f"{request.name('strategy')} must be that of the plan, {strategy!r}, got "
            f"{request.strategy!r}. Leave it out, or plan with the other strategy."
        )
    if len(plan.costs) == 1:
        return dataclasses.replace(request, stages=None, strategy=None)
    # Inference runs sharded where it does not fill the pipeline, unless someone says otherwise.
    chosen = request.strategy if request.prefix else strategy
    return dataclasses.replace(request, stages=plan.stages, strategy=chosen)
