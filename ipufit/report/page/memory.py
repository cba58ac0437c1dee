"""Section about memory: of stages, over the operators, and of the process."""

from __future__ import annotations

import math
from typing import Dict, List, Sequence

from ipufit.planner.costs import by_ipu
from ipufit.report.files import Facts
from ipufit.report.page import texts
from ipufit.report.page.figures import POINTS, Chart, Series, Value, rounded
from ipufit.report.page.pipeline import stage_title
from ipufit.report.page.sections import Section, lacking
from ipufit.report.run import Run, binned

__all__ = ["memory"]

_PARTS = ("weights", "gradients", "optimizer", "activations")
_FIXED = ("weights", "buffers", "gradients", "optimizer", "batch")
_POINTS = 400


def memory(run: Run) -> Section:
    """Make the section about memory."""
    parts = {
        "stages": _of_stages(run.facts),
        "operators": _of_operators(run.facts),
        "process": _of_process(run),
    }
    charts = [part.get("chart") for part in parts.values()]
    return Section("memory", "Memory", parts, [c for c in charts if isinstance(c, Chart)])


def _parts(plan: Facts, stage: Facts) -> List[int]:
    """Return the bytes of a stage, in the order of _PARTS."""
    activations = stage["activations_recomputed" if plan["recompute"] else "activations_kept"]
    return [stage["weight_bytes"], stage["gradient_bytes"], stage["optimizer_bytes"], activations]


def _of_stages(facts: Facts) -> Dict[str, object]:
    why = lacking(facts, "plan")
    if why:
        return {"missing": why}
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
    columns = [[part] for part in _PARTS]
    return {"chart": chart, "columns": columns, "rows": list(zip(titles, stage_sizes))}


def _of_operators(facts: Facts) -> Dict[str, object]:
    why = lacking(facts, "operators")
    memory = {} if why else facts["operators"].get("memory")
    if not memory:
        return {"missing": why or "it was not counted"}
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
    sizes = [
        *fixed.items(),
        ("values of operators, at most", texts.real(memory["peak"])),
        ("all, at most", texts.real(memory["total"])),
    ]
    return {"chart": chart, "rows": sizes}


def _highest(curve: Sequence[Sequence[float]]) -> List[int]:
    """Return the places to draw: all, or the highest of every stretch."""
    size = math.ceil(len(curve) / POINTS) if curve else 1
    return [
        max(range(start, min(start + size, len(curve))), key=lambda place: float(curve[place][3]))
        for start in range(0, len(curve), size)
    ]


def _of_process(run: Run) -> Dict[str, object]:
    stretches = [each for each in binned(run.rows, _POINTS) if not math.isnan(each["memory"])]
    if not stretches:
        return {"missing": "this system does not say"}
    most = max(each["memory"] for each in stretches)
    unit, name = texts.scale(most, "bytes")
    is_gpu = "cuda" in str(run.facts.get("environment", {}).get("device", ""))
    what = "Memory of the GPU in tensors" if is_gpu else "Memory of the process"
    ways: List[List[Value]] = [
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
    return {"chart": chart, "is_gpu": is_gpu}
