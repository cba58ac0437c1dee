"""A plan as text and as a picture: the timeline of one update, and the memory of every stage."""

from __future__ import annotations

import os
from typing import Any, List, Mapping, Sequence, Union

from ipufit.planner.pipeline_schedule import Timeline
from ipufit.utils.figures import new_figure, save_figure

# Characters of a line, and of the names of stages at least.
WIDTH, _LEAST = 100, 12


def size(count: int) -> str:
    """Bytes in the unit that leaves a short number.

    >>> size(300), size(2048), size(897 * 2**20)
    ('300 B', '2.0 KiB', '897.0 MiB')
    """
    for power, unit in ((30, "GiB"), (20, "MiB"), (10, "KiB")):
        if count >= (1 << power) * (1 if power < 30 else 10):
            return f"{count / (1 << power):,.1f} {unit}"
    return f"{count} B"


def flops(count: int) -> str:
    """Format a number of FLOPs in a unit that suits its size.

    >>> flops(0), flops(1500), flops(2_000_000_000)
    ('0', '1.5 k', '2.0 G')
    """
    for power, unit in ((12, "T"), (9, "G"), (6, "M"), (3, "k")):
        if count >= 10**power:
            return f"{count / 10**power:.1f} {unit}"
    return str(count)


def share(part: float) -> str:
    """Format a share in percent.

    >>> share(0.5), share(0.0001), share(0.0)
    ('50.0 %', '< 0.1 %', '0.0 %')
    """
    return "< 0.1 %" if 0 < part < 0.0005 else f"{100 * part:.1f} %"


def stage_title(stage: int, name: object, ipu: object) -> str:
    """Name a stage by number and first module, with its IPU where that has another number.

    >>> stage_title(0, "", 0), stage_title(2, "head", 0)
    ('0: the start', '2: head on IPU 0')
    """
    where = "" if ipu == stage else f" on IPU {ipu}"
    return f"{stage}: {name or 'the start'}{where}"


def columns(rows: Sequence[Sequence[str]]) -> List[str]:
    """Lay out a head, a rule and the other rows, in :data:`WIDTH` characters.

    The first column is to the left, and shortened in the middle where it has no room; the others
    are to the right.
    """
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    widths[0] = min(widths[0], max(_LEAST, WIDTH - sum(widths[1:]) - 2 * len(widths[1:])))
    lines = [
        "  ".join(
            [_shortened(row[0], widths[0]).ljust(widths[0])]
            + [cell.rjust(width) for cell, width in zip(row[1:], widths[1:])]
        ).rstrip()
        for row in rows
    ]
    return [lines[0], "-" * max(map(len, lines)), *lines[1:]]


def _shortened(text: str, width: int) -> str:
    return text if len(text) <= width else f"{text[:5]}...{text[len(text) + 8 - width :]}"


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


def draw(
    title: str,
    timeline: Timeline,
    stages: Sequence[str],
    ipus: Sequence[str],
    parts: Mapping[str, Sequence[int]],
    limit: int,
    path: Union[str, os.PathLike[str], None],
) -> Any:
    """Draw the timeline of one update above the memory of every IPU.

    Args:
        title: of the timeline.
        timeline: of one update.
        stages: titles of the timeline's rows.
        ipus: titles of the rows of memory.
        parts: bytes on each IPU, by what they hold.
        limit: bytes of an IPU that may be used.
        path: where to save the picture; None to show it.
    """
    figure = new_figure("PartitionPlan.plot", (11, 2.6 + 0.75 * len(stages)))
    above, below = figure.subplots(2, 1)
    _draw_timeline(above, title, timeline)
    _draw_memory(below, parts, limit)
    for panel, names in ((above, stages), (below, ipus)):
        panel.set_yticks(range(len(names)))
        panel.set_yticklabels(names)
        panel.set_ylim(len(names) - 0.5, -0.5)
        panel.spines[["top", "right"]].set_visible(False)
    return save_figure(figure, path, "PartitionPlan.plot")


def _draw_timeline(panel: Any, title: str, timeline: Timeline) -> None:
    for is_backward, (label, color, hatch) in enumerate(_PASSES):
        tasks = [task for task in timeline.tasks if task.is_backward == bool(is_backward)]
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
    count = 1 + max((task.micro_batch for task in timeline.tasks), default=0)
    for task in timeline.tasks if count <= _NUMBERED else ():
        wide = task.end - task.begin > 0.012 * timeline.total
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
    panel.set_title(title, fontsize="medium", fontweight="bold", loc="left")
    panel.set_xlabel("time; 1 is one micro-batch through all stages and back")
    panel.set_xlim(0, timeline.total or 1)
    _legend(panel)


def _draw_memory(panel: Any, parts: Mapping[str, Sequence[int]], limit: int) -> None:
    totals = [sum(sizes) for sizes in zip(*parts.values())]
    begins = [0.0] * len(totals)
    unit, name = _unit(max(totals))
    for label, color, hatch in _PARTS:
        widths = [part / unit for part in parts[label]]
        style = {"color": color, "hatch": hatch, "edgecolor": "white", "linewidth": 0.6}
        panel.barh(range(len(widths)), widths, left=begins, height=0.72, label=label, **style)
        begins = [begin + width for begin, width in zip(begins, widths)]
    if max(begins) > 0.3 * limit / unit:
        panel.axvline(limit / unit, color="#b00020", linestyle="--", linewidth=1.2)
    ends = max(max(begins), limit / unit if len(panel.lines) else 0.0)
    panel.set_xlim(0, 1.05 * ends or 1)
    panel.set_title(
        f"Memory, estimated, of {size(limit)} per IPU",
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
