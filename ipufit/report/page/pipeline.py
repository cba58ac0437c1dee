"""Sections about the stages of one update, as the plan estimates them, and about memory."""

from __future__ import annotations

import math
from typing import Dict, List, Mapping, Sequence, Tuple

from ipufit.planner.costs import by_ipu
from ipufit.planner.pipeline_schedule import simulate
from ipufit.planner.rendering import stage_title
from ipufit.report.page import texts
from ipufit.report.page.curves import OVER_RUN, places_of
from ipufit.report.page.sections import POINTS, Chart, Section, Series, lacking, rounded
from ipufit.report.run import OF_TENSORS, Facts, Run, binned

# Bars of more tasks than these would be thinner than a line.
_MOST = 1600
_PASSES = ("forward", "backward")


def title_of(number: int, stage: Mapping[str, object]) -> str:
    """Return the title of a stage, as the plan's table has it."""
    return stage_title(number, stage["name"], stage.get("ipu", number))


def pipeline(facts: Facts) -> Section:
    """Make the section about the stages of a pipeline."""
    why = lacking(facts, "plan")
    if why:
        return Section("pipeline", "Pipeline", missing=why)
    plan = facts["plan"]
    is_single = len(plan["stages"]) == 1
    chart = _timeline(plan)
    values = {
        "plan": plan,
        "numbers": _numbers(plan),
        "exact": _exact(plan),
        "least": {} if is_single else plan.get("least_accumulation") or {},
        "hint": "There is only one stage, so no stage waits for another."
        if is_single
        else _hint(plan),
        "stages": [_times(plan, number) for number in range(len(plan["stages"]))],
    }
    return Section("pipeline", "Pipeline", values, [chart])


def _numbers(plan: Facts) -> List[Tuple[str, object]]:
    places = plan.get("places")
    return [
        (
            f"Stages, on {1 + max(places)} IPUs" if places else "Stages, an IPU each",
            len(plan["stages"]),
        ),
        ("Replicas", plan["replicas"]),
        ("Micro-batches of an update", plan["gradient_accumulation"]),
        ("Schedule", f"{plan['strategy']}, {plan['timeline']['schedule']}"),
    ]


def _exact(plan: Facts) -> List[Tuple[str, str, float, str]]:
    """List numbers of the plan with all their digits: id, title, value and text of each."""
    used, length = plan["timeline"]["utilisation"], plan["timeline"]["total"]
    return [
        ("utilisation", "Utilisation", used, texts.share(used)),
        ("bubble", "Bubble", 1 - used, texts.share(1 - used)),
        ("total", "Length of an update", length, texts.number(length)),
    ]


def _hint(plan: Facts) -> str:
    """Compare the utilisation with that of equal stages and with the closed form."""
    stages, count = len(plan["stages"]), plan["gradient_accumulation"]
    if plan.get("places"):
        return (
            "A stage that goes back to the IPU of another one, to share a weight, takes turns with "
            "it: in every step of the pipeline, this IPU needs the time of both."
        )
    spent = [
        math.fsum(task[4] - task[3] for task in plan["timeline"]["tasks"] if task[2] == back)
        / (stages * count)
        for back in (False, True)
    ]
    schedule = plan["timeline"]["schedule"]
    equal = simulate(schedule, [spent[0]] * stages, [spent[1]] * stages, count).utilisation
    bubble = (stages - 1) / (count + stages - 1)
    text = (
        f"The same work in {stages} equal stages would be busy {texts.share(equal)} of the time "
        "with this schedule; the rest is lost because stages wait for slower ones. "
    )
    if schedule == "sequential":
        return text + f"One stage works at a time: 1 / {stages} = {texts.share(1 / stages)}."
    return text + (
        "If all passes take the same time, filling and emptying the pipeline costs (stages - 1) / "
        f"(micro-batches + stages - 1) = {texts.share(bubble)}; more micro-batches per update "
        "reduce it."
    )


def _timeline(plan: Facts) -> Chart:
    line = plan["timeline"]
    tasks = line["tasks"][:_MOST]
    titles = [title_of(i, stage) for i, stage in enumerate(plan["stages"])]
    series = []
    for back, name in enumerate(_PASSES):
        of_pass = [task for task in tasks if bool(task[2]) == bool(back)]
        series.append(
            Series(
                name,
                [[rounded(task[4] - task[3], 9) for task in of_pass]],
                [task[0] for task in of_pass],
                4 * back,
                "task",
                [str(task[1]) for task in of_pass],
                [rounded(task[3], 9) for task in of_pass],
                [f"{name} of micro-batch {task[1]} on stage {titles[task[0]]}" for task in of_pass],
            )
        )
    summary = (
        f"{len(line['tasks']):,} tasks in {texts.number(line['total'])} units of time; the numbers "
        "in the bars are those of the micro-batches."
    )
    if len(tasks) < len(line["tasks"]):
        summary += f" The first {len(tasks):,} are drawn; all numbers refer to the whole update."
    return Chart(
        "timeline",
        "One update, stage by stage",
        summary,
        series,
        ("time; 1 is one micro-batch through all stages and back",),
        is_across=True,
        height=130 + 46 * len(titles),
        names=titles,
    )


def _times(plan: Facts, number: int) -> Dict[str, object]:
    """Tell when a stage works, for readers who can't see the picture."""
    line = plan["timeline"]
    tasks = [task for task in line["tasks"] if task[0] == number]
    spent = [
        math.fsum(task[4] - task[3] for task in tasks if bool(task[2]) == back)
        for back in (False, True)
    ]
    begin = min((task[3] for task in tasks), default=0.0)
    end = max((task[4] for task in tasks), default=0.0)
    return {
        "title": title_of(number, plan["stages"][number]),
        "times": [*spent, begin, end],
        "busy": math.fsum(spent) / line["total"] if line["total"] else 1.0,
    }


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
    titles = [title_of(i, stage) for i, stage in enumerate(plan["stages"])]
    stage_sizes = [_parts(plan, stage) for stage in plan["stages"]]
    unit, name = texts.scale(max(map(sum, stage_sizes)), "bytes")
    series = [
        Series(part, [[rounded(sizes[i] / unit, 6) for sizes in stage_sizes]], titles, 2 * i, "bar")
        for i, part in enumerate(_PARTS)
    ]
    most = max(map(sum, stage_sizes))
    largest = "The largest stage needs"
    if plan.get("places"):
        shared = by_ipu([sum(sizes) for sizes in stage_sizes], plan["places"])
        most = max(shared)
        largest = f"IPU {shared.index(most)}, with all its stages, needs"
    summary = (
        f"{largest} {texts.size(most)} of the {texts.size(plan['memory'])} of an IPU. Code, "
        "exchange and temporary values are not included."
    )
    limit = plan["memory"] / unit if most > 0.3 * plan["memory"] else None
    chart = Chart(
        "memory-stages",
        "Memory of every stage",
        summary,
        series,
        (name,),
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
        f"{texts.size(memory['total'])} at most: {texts.size(sum(fixed.values()))} permanently and "
        f"{texts.size(memory['peak'])} of temporary values"
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
        return {"missing": "not available on this system"}
    most = max(each["memory"] for each in stretches)
    unit, name = texts.scale(most, "bytes")
    is_of_tensors = run.facts.get("environment", {}).get("memory") == OF_TENSORS
    what = "Memory of the device in tensors" if is_of_tensors else "Memory of the process"
    y = [rounded(each["memory"] / unit, 5) for each in stretches]
    summary = (
        f"{texts.size(stretches[0]['memory'])} at first, {texts.size(stretches[-1]['memory'])} at "
        f"last, {texts.size(most)} at most."
    )
    chart = Chart(
        "memory-process",
        what,
        summary,
        [Series(what.lower(), places_of(stretches), y, 0, "step")],
        OVER_RUN,
        name,
        height=260,
    )
    return {"chart": chart, "is_of_tensors": is_of_tensors}
