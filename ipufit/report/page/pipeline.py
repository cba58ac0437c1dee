"""Section about the pipeline of one update, IPU by IPU, as the plan estimates it."""

from __future__ import annotations

import math
from typing import Dict, List, Mapping, Tuple

from ipufit.planner.pipeline_schedule import simulate
from ipufit.report.files import Facts
from ipufit.report.page import texts
from ipufit.report.page.figures import Chart, Series, rounded
from ipufit.report.page.sections import Section, lacking

__all__ = ["pipeline", "stage_title"]

# Bars of more tasks than these would be thinner than a line.
_MOST = 1600
_PASSES = ("forward", "backward")


def stage_title(number: int, stage: Mapping[str, object]) -> str:
    """Return the title of a stage, as the plan's table has it."""
    ipu = stage.get("ipu", number)
    where = "" if ipu == number else f" on IPU {ipu}"
    return f"{number}: {stage['name'] or 'the start'}{where}"


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
        "hint": "There is one stage, so nothing waits for another one."
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


def _timeline(plan: Facts) -> Chart:
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
        "title": stage_title(number, plan["stages"][number]),
        "times": [*spent, begin, end],
        "busy": math.fsum(spent) / line["total"] if line["total"] else 1.0,
    }
