"""Section about time, by phase."""

from __future__ import annotations

import dataclasses
import math
from typing import Dict, List, Mapping, Optional, Sequence

from ipufit.report.page import texts
from ipufit.report.page.figures import Chart, Series, Value, rounded
from ipufit.report.page.sections import Section, lacking
from ipufit.report.run import Run, binned, samples_per_second
from ipufit.utils.phase_timer import PHASES

__all__ = ["LOOKS", "PHASE_NAMES", "phases", "used_phases"]

# What a phase is called.
PHASE_NAMES = {
    "data": "waiting for data",
    "to_device": "host to device",
    "compute": "compute",
    "anchors": "anchors to host",
    "metrics": "loss and metrics",
    "callbacks": "callbacks",
    "checkpoint": "checkpoints",
    "capture": "capture",
    "validation": "validation",
    "report": "this report",
    "other": "the rest",
}
# Of each phase the number of its colour and pattern: what a run is for has the plain one.
LOOKS = ("compute", *(phase for phase in PHASES if phase != "compute"))

# Bars, other stretches, and points of a line, at most.
_BARS, _STRETCHES, _POINTS = 30, 150, 400


def used_phases(seconds: Mapping[str, object]) -> List[str]:
    """Return the phases that took any time, in their order."""
    return [phase for phase in PHASES if seconds.get(phase)]


def phases(run: Run) -> Section:
    """Make the section about where the time of a run goes."""
    why = lacking(run.facts, "phases")
    if why:
        return Section("time", "Time", missing=why)
    charts = [c for c in (_by_epoch(run), _by_execution(run), _throughput(run)) if c is not None]
    seconds = {name: texts.real(run.facts["phases"].get(name, 0.0)) for name in PHASES}
    values = {
        "phases": [(PHASE_NAMES[name], spent) for name, spent in seconds.items()],
        "whole": math.fsum(map(texts.real, run.facts["phases"].values())),
    }
    return Section("time", "Time", values, charts)


def _stacked(
    name: str, title: str, stretches: Sequence[Dict[str, float]], edges: Sequence[int], x: str
) -> Optional[Chart]:
    """Chart seconds by phase over consecutive stretches, as bars or, if many, as areas.

    Args:
        name: of the chart.
        title: of the chart.
        stretches: seconds by phase of each.
        edges: where each begins, and where the last one ends.
        x: what the edges count.
    """
    used = used_phases({p: math.fsum(each[p] for each in stretches) for p in PHASES})
    if not used:
        return None
    sums = [math.fsum(each[phase] for phase in used) for each in stretches]
    unit, unit_name = texts.scale(max(sums), "seconds")
    # The pattern of every bar is drawn by itself, which many of them make slow, above all on paper.
    is_few = len(stretches) <= _BARS
    style = "bar" if is_few else "area"
    places: List[Value] = [texts.count(edge) for edge in edges[:-1]] if is_few else list(edges)
    series = []
    for phase in used:
        y = [rounded(each[phase] / unit, 5) for each in stretches]
        y = y if is_few else [*y, y[-1]]
        series.append(Series(PHASE_NAMES[phase], [places], y, LOOKS.index(phase), style))
    most = max(used, key=lambda phase: math.fsum(each[phase] for each in stretches))
    part = math.fsum(each[most] for each in stretches) / math.fsum(sums)
    summary = f"Most of it, {texts.share(part)}, is {PHASE_NAMES[most]}; the table has all phases."
    return Chart(name, title, summary, series, (x,), unit_name, stacks=True, height=360)


def _by_epoch(run: Run) -> Optional[Chart]:
    epochs = run.facts["epochs"]
    if not epochs:
        return None
    size = math.ceil(len(epochs) / _STRETCHES)
    stretches, edges = [], []
    for start in range(0, len(epochs), size):
        part = epochs[start : start + size]
        stretches.append(
            {
                phase: math.fsum(texts.real(e["phases"].get(phase, 0)) for e in part) / len(part)
                for phase in PHASES
            }
        )
        edges.append(part[0]["epoch"] + 1)
    edges.append(epochs[-1]["epoch"] + 2)
    chart = _stacked("phases-epochs", "Time of every epoch", stretches, edges, "epoch")
    return _note_means(chart, size, "epochs")


def _by_execution(run: Run) -> Optional[Chart]:
    binned_executions = binned(run.rows, _STRETCHES)
    if not binned_executions:
        return None
    stretches = [{p: each[p] / each["executions"] for p in PHASES} for each in binned_executions]
    edges = [int(each["first_update"]) + 1 for each in binned_executions]
    edges.append(int(binned_executions[-1]["update"]) + 1)
    title = "Time of an execution, over the run"
    chart = _stacked("phases-executions", title, stretches, edges, "update")
    return _note_means(chart, max(each["executions"] for each in binned_executions), "executions")


def _note_means(chart: Optional[Chart], size: float, what: str) -> Optional[Chart]:
    """Say in a chart's summary that each place is the mean of several, if it is."""
    if chart is None or size <= 1:
        return chart
    text = f"Every place is the mean of up to {texts.count(size)} {what}. {chart.summary}"
    return dataclasses.replace(chart, summary=text)


def _throughput(run: Run) -> Optional[Chart]:
    stretches = [each for each in binned(run.rows, _POINTS) if each["working"] > 0]
    if not stretches:
        return None
    y = [rounded(each["samples"] / each["working"], 5) for each in stretches]
    finite = [value for value in y if value is not None]
    ways: List[List[Value]] = [
        [int(each["update"]) for each in stretches],
        [rounded(each["end"], 6) for each in stretches],
    ]
    mean = samples_per_second(run)
    summary = (
        f"{texts.speed(min(finite))} samples per second at least, "
        f"{texts.speed(max(finite))} at most; {texts.speed(mean)} over the whole "
        "run. Recording the program, validation and this report are left out."
    )
    series = [Series("samples per second", ways, y)]
    return Chart(
        "throughput",
        "Samples per second, over the run",
        summary,
        series,
        ("update", "seconds since the run began"),
        "samples per second",
        ("updates", "time"),
        height=280,
    )
