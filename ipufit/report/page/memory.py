"""Where the memory goes: by stage, by operator, and of the process."""

from __future__ import annotations

import math
from typing import Any, List, Mapping, Optional

from ipufit.planner.costs import by_ipu
from ipufit.report.page import texts
from ipufit.report.page.charts import POINTS, Chart, Series, figure, rounded
from ipufit.report.page.html import Cell, Column, Html, Row, element, joined, table
from ipufit.report.page.measurements import binned
from ipufit.report.page.pipeline import stage_title
from ipufit.report.page.sections import Section, lacking, note
from ipufit.report.run import Run

__all__ = ["memory"]

_PARTS = ("weights", "gradients", "optimizer", "activations")
_FIXED = ("weights", "buffers", "gradients", "optimizer", "batch")
_POINTS = 400


def memory(run: Run) -> Section:
    """The section."""
    charts: List[Chart] = []
    body: List[Optional[Html]] = []
    for title, part in (
        ("By stage, estimated", _of_stages(run.facts, charts)),
        ("Over one micro-batch", _of_operators(run.facts, charts)),
        ("In use during the run", _of_process(run, charts)),
    ):
        body += [element("h3", title), part]
    return Section("memory", "Memory", joined(body), charts)


def _parts(plan: Mapping[str, Any], stage: Mapping[str, Any]) -> List[int]:
    """Bytes of a stage, in the order of _PARTS."""
    kept = stage["activations_recomputed" if plan["recompute"] else "activations_kept"]
    return [stage["weight_bytes"], stage["gradient_bytes"], stage["optimizer_bytes"], kept]


def _of_stages(facts: Mapping[str, Any], charts: List[Chart]) -> Html:
    why = lacking(facts, "plan")
    if why is not None:
        return why
    plan = facts["plan"]
    titles = [stage_title(i, stage) for i, stage in enumerate(plan["stages"])]
    found = [_parts(plan, stage) for stage in plan["stages"]]
    unit, name = texts.scale(max(map(sum, found)), "bytes")
    series = [
        Series(part, [[rounded(sizes[i] / unit, 6) for sizes in found]], titles, 2 * i, "bar")
        for i, part in enumerate(_PARTS)
    ]
    most = max(map(sum, found))
    largest = "The largest stage takes"
    if plan.get("places"):
        shared = by_ipu([sum(sizes) for sizes in found], plan["places"])
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
    for i, (title, sizes) in enumerate(zip(titles, found)):
        whole = sum(sizes)
        rows.append(
            [
                Cell(title, i),
                *(Cell(texts.size(size), size) for size in sizes),
                Cell(texts.size(whole), whole),
            ]
        )
    columns = [Column("stage"), *(Column(part, True) for part in _PARTS), Column("all", True)]
    return joined(
        figure(chart), table("table-memory-stages", "Memory of every stage", columns, rows)
    )


def _of_operators(facts: Mapping[str, Any], charts: List[Chart]) -> Html:
    why = lacking(facts, "operators")
    if why is not None:
        return why
    found = facts["operators"].get("memory")
    if not found:
        return element("p", "Not shown: it was not counted.", class_="missing")
    fixed = {name: texts.real(found["fixed"].get(name, 0)) for name in _FIXED}
    curve = found["curve"]
    unit, name = texts.scale(texts.real(found["total"]), "bytes")
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
        f"{texts.size(found['total'])} at most: {texts.size(sum(fixed.values()))} all the time and "
        f"{texts.size(found['peak'])} of values in between"
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
        ("values of operators, at most", texts.real(found["peak"])),
        ("all, at most", texts.real(found["total"])),
    ]
    rows: List[Row] = [[part, Cell(texts.size(size), size)] for part, size in sizes]
    columns = [Column("part"), Column("memory", True)]
    return joined(
        figure(chart), table("table-memory-parts", "Memory of one micro-batch", columns, rows)
    )


def _highest(curve: Any) -> List[int]:
    """Places to draw: all, or of every stretch the highest."""
    size = math.ceil(len(curve) / POINTS) if curve else 1
    return [
        max(range(start, min(start + size, len(curve))), key=lambda place: float(curve[place][3]))
        for start in range(0, len(curve), size)
    ]


def _of_process(run: Run, charts: List[Chart]) -> Html:
    found = [each for each in binned(run.rows, _POINTS) if not math.isnan(each["memory"])]
    if not found:
        return element("p", "Not shown: this system does not say.", class_="missing")
    most = max(each["memory"] for each in found)
    unit, name = texts.scale(most, "bytes")
    is_gpu = "cuda" in str(run.facts.get("environment", {}).get("device", ""))
    what = "Memory of the GPU in tensors" if is_gpu else "Memory of the process"
    ways: List[List[Any]] = [
        [int(each["update"]) for each in found],
        [rounded(each["end"], 6) for each in found],
    ]
    y = [rounded(each["memory"] / unit, 5) for each in found]
    summary = (
        f"{texts.size(found[0]['memory'])} at first, {texts.size(found[-1]['memory'])} at last, "
        f"{texts.size(most)} at most."
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
    return joined(figure(chart), note(f"{about}."))
