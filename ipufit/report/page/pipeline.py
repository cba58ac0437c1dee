"""Section about the pipeline of one update, IPU by IPU, as the plan estimates it."""

from __future__ import annotations

import math
from typing import Any, List, Mapping, Sequence

from ipufit.planner.pipeline_schedule import simulate
from ipufit.report.page import texts
from ipufit.report.page.html import Cell, Column, Html, element, join_parts, table
from ipufit.report.page.sections import Chart, Section, Series, figure, lacking, note, rounded
from ipufit.report.page.summary import pairs

__all__ = ["pipeline", "stage_title"]

# Bars of more tasks than these would be thinner than a line.
_MOST = 1600
_PASSES = ("forward", "backward")


def stage_title(number: int, stage: Mapping[str, object]) -> str:
    """Return the title of a stage, as the plan's table has it."""
    ipu = stage.get("ipu", number)
    where = "" if ipu == number else f" on IPU {ipu}"
    return f"{number}: {stage['name'] or 'the start'}{where}"


def pipeline(facts: Mapping[str, Any]) -> Section:
    """Make the section about the stages of a pipeline."""
    title = "Pipeline"
    why = lacking(facts, "plan")
    if why is not None:
        return Section("pipeline", title, why)
    plan = facts["plan"]
    chart = _timeline(plan)
    body = [
        note(
            "An estimate from the work of every operator, not a measurement: no IPU has run it. "
            "The unit of time is one micro-batch through all stages and back."
        ),
        pairs(_numbers(plan), "headline"),
        note(_hint(plan)),
        figure(chart),
        _tasks(plan),
        _stages(plan),
    ]
    if len(plan["stages"]) == 1:
        body[2] = note("There is one stage, so nothing waits for another one.")
    return Section("pipeline", title, join_parts(body), [chart])


def _numbers(plan: Mapping[str, Any]) -> List[Any]:
    line = plan["timeline"]
    used = line["utilisation"]
    places = plan.get("places")
    of_stages = f"Stages, on {1 + max(places)} IPUs" if places else "Stages, an IPU each"
    entries = [
        (of_stages, str(len(plan["stages"]))),
        ("Replicas", str(plan["replicas"])),
        ("Micro-batches of an update", str(plan["gradient_accumulation"])),
        ("Schedule", f"{plan['strategy']}, {line['schedule']}"),
        ("Utilisation", _exact("utilisation", used, texts.share(used))),
        ("Bubble", _exact("bubble", 1 - used, texts.share(1 - used))),
        ("Length of an update", _exact("total", line["total"], texts.number(line["total"]))),
    ]
    least = plan.get("least_accumulation") or {}
    for wish, count in least.items():
        if len(plan["stages"]) > 1:
            text = "never" if count is None else f"gradient_accumulation={count}"
            entries.append((f"{texts.share(wish)} busy from", text))
    return entries


def _exact(name: str, value: float, text: str) -> Html:
    """Render a number of the plan, with all its digits for programs."""
    return element("data", text, value=repr(float(value)), id=f"plan-{name}")


def _hint(plan: Mapping[str, Any]) -> str:
    """Compare the utilisation with that of equal stages and with the closed form."""
    stages, count = len(plan["stages"]), plan["gradient_accumulation"]
    if plan.get("places"):
        return (
            "A stage that goes back to the IPU of another one, for a weight that is there, works "
            "in turn with it: in every step of the pipeline such an IPU takes the time of both."
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
        f"with this schedule; what is missing to that is lost to stages that wait for slower ones. "
    )
    if schedule == "sequential":
        return text + f"One stage works at a time: 1 / {stages} = {texts.share(1 / stages)}."
    return text + (
        f"The closed form of the bubble that filling and emptying leave where all passes take the "
        f"same time is (stages - 1) / (micro-batches + stages - 1) = {texts.share(bubble)}; more "
        "micro-batches in an update make it smaller."
    )


def _timeline(plan: Mapping[str, Any]) -> Chart:
    line = plan["timeline"]
    tasks = line["tasks"][:_MOST]
    titles = [stage_title(i, stage) for i, stage in enumerate(plan["stages"])]
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
        summary += f" The first {len(tasks):,} are drawn; all numbers are of the whole update."
    return Chart(
        "timeline",
        "One update, stage by stage",
        summary,
        series,
        ("time, in that of one micro-batch through all stages and back",),
        "",
        is_across=True,
        height=130 + 46 * len(titles),
        names=titles,
    )


def _tasks(plan: Mapping[str, Any]) -> Html:
    """Tabulate when every stage works, for readers who can't see the picture."""
    line = plan["timeline"]
    rows = []
    for number, stage in enumerate(plan["stages"]):
        of_stage: Sequence[Any] = [task for task in line["tasks"] if task[0] == number]
        forward, backward = (
            math.fsum(task[4] - task[3] for task in of_stage if bool(task[2]) == back)
            for back in (False, True)
        )
        busy = (forward + backward) / line["total"] if line["total"] else 1.0
        begin = min((task[3] for task in of_stage), default=0.0)
        end = max((task[4] for task in of_stage), default=0.0)
        cells = [Cell(texts.number(value), value) for value in (forward, backward, begin, end)]
        rows.append(
            [
                Cell(stage_title(number, stage), number),
                *cells,
                Cell(texts.share(busy), busy),
                Cell(texts.share(1 - busy), 1 - busy),
            ]
        )
    columns = [
        Column("stage"),
        Column("forward", True, "Time of its forward passes in one update"),
        Column("backward", True, "Time of its backward passes in one update"),
        Column("begins", True, "When its first task begins"),
        Column("ends", True, "When its last task ends"),
        Column("busy", True, "Share of the update in which it works"),
        Column("waits", True, "Share of the update in which it does not"),
    ]
    return table("table-timeline", "When each stage works", columns, rows)


def _stages(plan: Mapping[str, Any]) -> Html:
    rows = []
    for number, stage in enumerate(plan["stages"]):
        flops = stage["forward_flops"], stage["backward_flops"]
        rows.append(
            [
                Cell(stage_title(number, stage), number),
                Cell(texts.count(stage["parameters"]), stage["parameters"]),
                *(Cell(texts.work(value), value) for value in flops),
                Cell(texts.share(stage["time_share"]), stage["time_share"]),
                Cell(str(stage["in_flight"]), stage["in_flight"]),
                Cell(texts.size(stage["memory"]), stage["memory"]),
                Cell(
                    texts.share(stage["memory"] / plan["memory"]), stage["memory"] / plan["memory"]
                ),
            ]
        )
    columns = [
        Column("stage"),
        Column("parameters", True),
        Column("forward FLOPs", True, "Of one micro-batch"),
        Column("backward FLOPs", True, "Of one micro-batch"),
        Column("share of time", True),
        Column("in flight", True, "Micro-batches whose activations it holds at most"),
        Column("memory", True),
        Column("of its IPU", True),
    ]
    return table("table-stages", "What each stage takes", columns, rows)
