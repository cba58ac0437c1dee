"""A plan of a partition as tables."""

from __future__ import annotations

from typing import TYPE_CHECKING, List, Optional

from ipufit.planner.costs import TILE_MEMORY, TILES, StageCost, by_ipu, memory_of, times_of
from ipufit.planner.pipeline_schedule import SCHEDULES, in_flight, least_accumulation
from ipufit.planner.texts import columns, flops, share, size

if TYPE_CHECKING:
    from ipufit.planner.partition_plan import PartitionPlan

__all__ = ["stage_title", "told"]

_COLUMNS = (
    "stage begins with",
    "parameters",
    "weights",
    "gradients",
    "optimizer",
    "activations",
    "recomputed",
    "total",
    "of IPU",
    "forward FLOPs",
    "backward FLOPs",
    "time",
)


def told(plan: PartitionPlan) -> str:
    """The stages, and the pipeline where there are several."""
    return "\n".join([*_head(plan), *_stage_table(plan), *_pipeline_table(plan)])


def stage_title(stage: int, cost: StageCost, ipu: Optional[int] = None) -> str:
    """What a stage is called, with its IPU where that has not its number."""
    where = "" if ipu in (None, stage) else f" on IPU {ipu}"
    return f"{stage}: {cost.name or 'the start'}{where}"


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


def _stage_table(plan: PartitionPlan) -> List[str]:
    planned, count = plan.planned, len(plan.costs)
    rows = [list(_COLUMNS)]
    shares = plan.time_shares
    for stage, (cost, total) in enumerate(zip(plan.costs, plan.stage_memory)):
        flights = in_flight(planned.schedule, stage, count)
        rows.append(
            [
                stage_title(stage, cost, plan.ipu_of(stage)),
                f"{cost.parameters:,}",
                size(cost.weight_bytes),
                size(cost.gradient_bytes),
                size(cost.optimizer_bytes),
                size(cost.activations(flights)),
                size(cost.activations(flights, True)),
                size(total),
                share(total / planned.memory),
                flops(cost.forward_flops),
                flops(cost.backward_flops),
                share(shares[stage]),
            ]
        )
    counted = "as recomputed" if planned.recompute else "as kept"
    lines = [
        *columns(rows),
        f"Total: with activations {counted}, of all micro-batches in flight. FLOPs are those "
        "of one micro-batch.",
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
        f"Memory of an IPU: {size(planned.memory)}{parts}; {_those_on(plan, fullest)}, and "
        f"{verdict}. Code, exchange and temporary tensors are not counted."
    )
    if not planned.with_loss:
        lines.append("Without a target: the loss is not counted.")
    if planned.unused:
        some = ", ".join(planned.unused[:5]) + (", ..." if len(planned.unused) > 5 else "")
        lines.append(f"Not used by forward, and not counted: {some}.")
    return lines


def _those_on(plan: PartitionPlan, ipu: int) -> str:
    """The stage or stages on an IPU, and that they take most."""
    shared = [str(stage) for stage in range(len(plan.costs)) if plan.ipu_of(stage) == ipu]
    if len(shared) == 1:
        return f"stage {shared[0]} takes most"
    *first, last = shared
    return f"stages {', '.join(first)} and {last} on IPU {ipu} take most, {size(plan.memory[ipu])}"


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
        flights = ", ".join(str(in_flight(name, s, count)) for s in range(count))
        rows.append(
            [
                name + (" *" if name == planned.schedule else ""),
                share(utilisation),
                share(1 - utilisation),
                flights,
                size(max(memory)),
                f"{least:,}" if least is not None else f"never ({share(limit)})",
            ]
        )
    lines = columns(rows)
    if planned.places:
        lines.append("Stages on one IPU work one after the other, in every step of the pipeline.")
    return [
        *lines,
        f"* assumed above. Utilisation: with gradient_accumulation="
        f"{planned.gradient_accumulation}; the last column says which reaches 90 %.",
    ]
