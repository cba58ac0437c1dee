"""Section about memory: of stages, over the operators, and of the process."""

from __future__ import annotations

import math
from typing import Any, List, Mapping, Optional

from ipufit.planner.costs import by_ipu
from ipufit.report.page import texts
from ipufit.report.page.html import Cell, Column, Html, Row, element, join_parts, table
from ipufit.report.page.pipeline import stage_title
from ipufit.report.page.sections import (
    POINTS,
    Chart,
    Section,
    Series,
    figure,
    lacking,
    note,
    rounded,
)
from ipufit.report.run import Run, binned

__all__ = ["memory"]

_PARTS = ("weights", "gradients", "optimizer", "activations")
_FIXED = ("weights", "buffers", "gradients", "optimizer", "batch")
_POINTS = 400


def memory(run: Run) -> Section:
    """Make the section about memory."""
    charts: List[Chart] = []
    body: List[Optional[Html]] = []
    for title, part in (
        ("By stage, estimated", _of_stages(run.facts, charts)),
        ("Over one micro-batch", _of_operators(run.facts, charts)),
        ("In use during the run", _of_process(run, charts)),
    ):
        body += [element("h3", title), part]
    return Section("memory", "Memory", join_parts(body), charts)


def _parts(plan: Mapping[str, Any], stage: Mapping[str, Any]) -> List[int]:
    """Return the bytes of a stage, in the order of _PARTS."""
    activations = stage["activations_recomputed" if plan["recompute"] else "activations_kept"]
    return [stage["weight_bytes"], stage["gradient_bytes"], stage["optimizer_bytes"], activations]


def _of_stages(facts: Mapping[str, Any], charts: List[Chart]) -> Html:
    why = lacking(facts, "plan")
    if why is not None:
        return why
    plan = facts["plan"]
    titles = [stage_title(i, stage) for i, stage in enumerate(plan["stages"])]
    stage_sizes = [_parts(plan, stage) for stage in plan["stages"]]
    unit, name = texts.scale(max(map(sum, stage_sizes)), "bytes")
    series = [
        Series(part, [[rounded(sizes[i] / unit, 6) for sizes in stage_sizes]], titles, 2 * i, "bar")
        for i, part in enumerate(_PARTS)
    ]
    most = max(map(sum, stage_sizes))
    largest = "The largest stage takes"
    if plan.get("places"):
        shared = by_ipu([sum(sizes) for sizes in stage_sizes], plan["places"])
        most = max(shared)
        largest = f"IPU {shared.index(most)}, with all its stages, takes"
    summary = (
        f"{largest} {texts.size(most)} of the {texts.size(plan['memory'])} of an "
        "IPU. Code, exchange and temporary values come on top."
    )
    limit = plan["memory"] / unit if most > 0.3 * plan["memory"] else None
    chart = Chart(
        "memory-stages",
        "Memory of every stage",
        summary,
        series,
        (name,),
        "",
        is_across=True,
        stacks=True,
        height=130 + 46 * len(titles),
        most=limit,
    )
    charts.append(chart)
    rows = []
    for i, (title, sizes) in enumerate(zip(titles, stage_sizes)):
        whole = sum(sizes)
        rows.append(
            [
                Cell(title, i),
                *(Cell(texts.size(size), size) for size in sizes),
                Cell(texts.size(whole), whole),
            ]
        )
    columns = [Column("stage"), *(Column(part, True) for part in _PARTS), Column("all", True)]
    return join_parts(
        figure(chart), table("table-memory-stages", "Memory of every stage", columns, rows)
    )


def _of_operators(facts: Mapping[str, Any], charts: List[Chart]) -> Html:
    why = lacking(facts, "operators")
    if why is not None:
        return why
    memory = facts["operators"].get("memory")
    if not memory:
        return element("p", "Not shown: it was not counted.", class_="missing")
    fixed = {name: texts.real(memory["fixed"].get(name, 0)) for name in _FIXED}
    curve = memory["curve"]
    unit, name = texts.scale(texts.real(memory["total"]), "bytes")
    places = _highest(curve)
    x = [[place + 1 for place in places]]
    series = [
        Series(part, x, [rounded(size / unit, 6)] * len(places), i, "area")
        for i, (part, size) in enumerate(fixed.items())
        if size
    ]
    series.append(
        Series(
            "values of operators",
            x,
            [rounded(curve[place][3] / unit, 6) for place in places],
            len(_FIXED),
            "area",
            hover=[f"{curve[p][0]}, {curve[p][2]}, {curve[p][1] or 'no module'}" for p in places],
        )
    )
    at = max(range(len(curve)), key=lambda place: float(curve[place][3]), default=None)
    summary = (
        f"{texts.size(memory['total'])} at most: {texts.size(sum(fixed.values()))} all the time "
        f"and {texts.size(memory['peak'])} of values in between"
    )
    if at is not None:
        operator, module, direction, _ = curve[at]
        summary += f", after {operator} ({direction}) of {module or 'the loss and what follows'}"
    chart = Chart(
        "memory-operators",
        "Memory after every operator",
        f"{summary}.",
        series,
        ("operator of the recorded micro-batch, in order",),
        name,
        stacks=True,
        height=340,
    )
    charts.append(chart)
    sizes = [
        *fixed.items(),
        ("values of operators, at most", texts.real(memory["peak"])),
        ("all, at most", texts.real(memory["total"])),
    ]
    rows: List[Row] = [[part, Cell(texts.size(size), size)] for part, size in sizes]
    columns = [Column("part"), Column("memory", True)]
    return join_parts(
        figure(chart), table("table-memory-parts", "Memory of one micro-batch", columns, rows)
    )


def _highest(curve: Any) -> List[int]:
    """Return the places to draw: all, or the highest of every stretch."""
    size = math.ceil(len(curve) / POINTS) if curve else 1
    return [
        max(range(start, min(start + size, len(curve))), key=lambda place: float(curve[place][3]))
        for start in range(0, len(curve), size)
    ]


def _of_process(run: Run, charts: List[Chart]) -> Html:
    stretches = [each for each in binned(run.rows, _POINTS) if not math.isnan(each["memory"])]
    if not stretches:
        return element("p", "Not shown: this system does not say.", class_="missing")
    most = max(each["memory"] for each in stretches)
    unit, name = texts.scale(most, "bytes")
    is_gpu = "cuda" in str(run.facts.get("environment", {}).get("device", ""))
    what = "Memory of the GPU in tensors" if is_gpu else "Memory of the process"
    ways: List[List[Any]] = [
        [int(each["update"]) for each in stretches],
        [rounded(each["end"], 6) for each in stretches],
    ]
    y = [rounded(each["memory"] / unit, 5) for each in stretches]
    summary = (
        f"{texts.size(stretches[0]['memory'])} at first, {texts.size(stretches[-1]['memory'])} at "
        f"last, {texts.size(most)} at most."
    )
    chart = Chart(
        "memory-process",
        what,
        summary,
        [Series(what.lower(), ways, y, 0, "step")],
        ("update", "seconds since the run began"),
        name,
        ("updates", "time"),
        height=260,
    )
    charts.append(chart)
    about = "Looked at twice a second"
    if not is_gpu:
        about += "; the data, Python and its libraries are part of it"
    return join_parts(figure(chart), note(f"{about}."))
