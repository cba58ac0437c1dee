"""The picture of a plan: the timeline of one update, and the memory of every stage."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, Union

from ipufit.planner.costs import by_ipu
from ipufit.planner.pipeline_schedule import in_flight
from ipufit.planner.tables import stage_title
from ipufit.planner.texts import share, size
from ipufit.utils.figures import new_figure, saved

if TYPE_CHECKING:
    from ipufit.planner.partition_plan import PartitionPlan

__all__ = ["draw"]

# Dark and light, plain and hatched: apart in grey and for any eye.
_PASSES = (("forward", "#12466b", ""), ("backward", "#e9a13b", "//"))
_PARTS = (
    ("weights", "#12466b", ""),
    ("gradients", "#4d8ab5", "//"),
    ("optimizer", "#a8c8de", ""),
    ("activations", "#e9a13b", "\\\\"),
)
# Numbers of more micro-batches than this would not fit into their bars.
_NUMBERED = 24


def draw(plan: PartitionPlan, path: Union[str, os.PathLike[str], None]) -> Any:
    """Two panels; see :meth:`PartitionPlan.plot`."""
    stages = len(plan.costs)
    figure = new_figure("PartitionPlan.plot", (11, 2.6 + 0.75 * stages))
    above, below = figure.subplots(2, 1)
    _draw_timeline(above, plan)
    _draw_memory(below, plan)
    titles = [
        f"stage {stage_title(stage, cost, plan.ipu_of(stage))}"
        for stage, cost in enumerate(plan.costs)
    ]
    ipus = [f"IPU {ipu}" for ipu in range(plan.ipus)] if plan.planned.places else titles
    for panel, names in ((above, titles), (below, ipus)):
        panel.set_yticks(range(len(names)))
        panel.set_yticklabels(names)
        panel.set_ylim(len(names) - 0.5, -0.5)
        panel.spines[["top", "right"]].set_visible(False)
    return saved(figure, path, "PartitionPlan.plot")


def _draw_timeline(panel: Any, plan: PartitionPlan) -> None:
    line = plan.timeline()
    planned = plan.planned
    count = planned.gradient_accumulation
    for is_backward, (label, color, hatch) in enumerate(_PASSES):
        tasks = [task for task in line.tasks if task.is_backward == bool(is_backward)]
        panel.barh(
            [task.stage for task in tasks],
            [task.end - task.begin for task in tasks],
            left=[task.begin for task in tasks],
            height=0.72,
            color=color,
            hatch=hatch,
            edgecolor="white",
            linewidth=0.6,
            label=label,
        )
    for task in line.tasks if count <= _NUMBERED else ():
        wide = task.end - task.begin > 0.012 * line.total
        if wide:
            middle = (task.begin + task.end) / 2
            color = "black" if task.is_backward else "white"
            panel.text(
                middle,
                task.stage,
                str(task.micro_batch),
                ha="center",
                va="center",
                fontsize=7,
                color=color,
                bbox={"boxstyle": "round,pad=0.1", "fc": _PASSES[task.is_backward][1], "lw": 0},
            )
    title = f"One update of {count} micro-batches"
    if len(plan.costs) > 1:
        title += f", {planned.schedule}: {share(line.utilisation)} busy"
    panel.set_title(title, fontsize="medium", fontweight="bold", loc="left")
    panel.set_xlabel("time, in that of one micro-batch through all stages and back")
    panel.set_xlim(0, line.total or 1)
    _legend(panel)


def _draw_memory(panel: Any, plan: PartitionPlan) -> None:
    planned, stages = plan.planned, len(plan.costs)
    begins = [0.0] * plan.ipus
    unit, name = _unit(max(plan.memory))
    for label, color, hatch in _PARTS:
        taken = []
        for stage, cost in enumerate(plan.costs):
            flights = in_flight(planned.schedule, stage, stages)
            sizes = {
                "weights": cost.weight_bytes,
                "gradients": cost.gradient_bytes,
                "optimizer": cost.optimizer_bytes,
                "activations": cost.activations(flights, planned.recompute),
            }
            taken.append(sizes[label])
        widths = [one / unit for one in by_ipu(taken, planned.places)]
        style = {"color": color, "hatch": hatch, "edgecolor": "white", "linewidth": 0.6}
        panel.barh(range(plan.ipus), widths, left=begins, height=0.72, label=label, **style)
        begins = [begin + width for begin, width in zip(begins, widths)]
    if max(begins) > 0.3 * planned.memory / unit:
        panel.axvline(planned.memory / unit, color="#b00020", linestyle="--", linewidth=1.2)
    ends = max(max(begins), planned.memory / unit if len(panel.lines) else 0.0)
    panel.set_xlim(0, 1.05 * ends or 1)
    panel.set_title(
        f"Memory, estimated, of {size(planned.memory)} per IPU",
        fontsize="medium",
        fontweight="bold",
        loc="left",
    )
    panel.set_xlabel(name)
    _legend(panel)


def _unit(most: int) -> tuple[int, str]:
    for power, name in ((20, "MiB"), (10, "KiB")):
        if most >= 1 << power:
            return 1 << power, name
    return 1, "bytes"


def _legend(panel: Any) -> None:
    panel.legend(
        loc="lower right",
        bbox_to_anchor=(1, 1),
        ncols=len(_PARTS),
        fontsize="small",
        frameon=False,
        borderaxespad=0.1,
    )
