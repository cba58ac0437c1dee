"""Where the time went, by phase."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Dict, List, Optional, Sequence

from ipufit.clock import PHASES
from ipufit.report.page import texts
from ipufit.report.page.charts import Chart, Series, figure, rounded
from ipufit.report.page.html import Cell, Column, Html, Part, Row, joined, table
from ipufit.report.page.measured import LOOKS, PHASE_NAMES, binned, samples_per_second, used_phases
from ipufit.report.page.sections import Section, lacking, note
from ipufit.report.run import Run

__all__ = ["phases"]

# Bars that still can be told apart, and points of a line.
_BARS, _POINTS = 80, 400


def phases(run: Run) -> Section:
    """The section."""
    facts = run.facts
    why = lacking(facts, "phases")
    if why is not None:
        return Section("time", "Time", why)
    charts = [c for c in (_by_epoch(run), _by_execution(run), _throughput(run)) if c is not None]
    body: List[Part] = [
        _table(facts["phases"]),
        note(
            "Each moment is counted in one phase. On the embedded engine of a CPU, bringing data "
            "to the device is no step of its own. A GPU works on while the host goes on: its time "
            "is then counted where the host waits for it, under anchors."
        ),
        [figure(chart) for chart in charts],
    ]
    return Section("time", "Time", joined(*body), charts)


def _table(seconds: Dict[str, Any]) -> Html:
    whole = math.fsum(map(texts.real, seconds.values()))
    rows: List[Row] = []
    for phase in PHASES:
        spent = texts.real(seconds.get(phase, 0.0))
        part = spent / whole if whole else 0.0
        rows.append(
            [PHASE_NAMES[phase], Cell(texts.seconds(spent), spent), Cell(texts.share(part), part)]
        )
    foot = ["all", texts.seconds(whole), texts.share(1.0)]
    columns = [Column("phase"), Column("time", True), Column("share", True)]
    return table("table-phases", "Time of the whole run by phase", columns, rows, foot=foot)


def _stacked(
    name: str, title: str, stretches: Sequence[Dict[str, Any]], labels: Sequence[str], x: str
) -> Optional[Chart]:
    """Bars, one for each stretch, of seconds by phase."""
    used = used_phases({p: math.fsum(each[p] for each in stretches) for p in PHASES})
    if not used:
        return None
    unit, unit_name = texts.scale(
        max(math.fsum(each[phase] for phase in used) for each in stretches), "seconds"
    )
    series = [
        Series(
            PHASE_NAMES[phase],
            [labels],
            [rounded(each[phase] / unit, 5) for each in stretches],
            LOOKS.index(phase),
            "bar",
        )
        for phase in used
    ]
    whole = math.fsum(each[phase] for each in stretches for phase in used)
    most = max(used, key=lambda phase: math.fsum(each[phase] for each in stretches))
    part = math.fsum(each[most] for each in stretches) / whole
    summary = f"Most of it, {texts.share(part)}, is {PHASE_NAMES[most]}; the table has all phases."
    return Chart(name, title, summary, series, (x,), unit_name, stacks=True, height=360)


def _by_epoch(run: Run) -> Optional[Chart]:
    epochs = run.facts["epochs"]
    if not epochs:
        return None
    size = math.ceil(len(epochs) / _BARS)
    stretches, labels = [], []
    for start in range(0, len(epochs), size):
        part = epochs[start : start + size]
        stretches.append(
            {
                phase: math.fsum(texts.real(e["phases"].get(phase, 0)) for e in part)
                for phase in PHASES
            }
        )
        first, last = part[0]["epoch"] + 1, part[-1]["epoch"] + 1
        labels.append(str(first) if first == last else f"{first} to {last}")
    return _stacked("phases-epochs", "Time of every epoch", stretches, labels, "epoch")


def _by_execution(run: Run) -> Optional[Chart]:
    found = binned(run.rows, _BARS)
    if not found:
        return None
    stretches = [{p: each[p] / each["executions"] for p in PHASES} for each in found]
    labels = [texts.count(each["update"]) for each in found]
    title = "Time of an execution, over the run"
    chart = _stacked("phases-executions", title, stretches, labels, "up to update")
    if chart is None or len(found) == len(run.rows["begin"]):
        return chart
    size = texts.count(max(each["executions"] for each in found))
    summary = f"Every bar is the mean of up to {size} executions. {chart.summary}"
    return dataclasses.replace(chart, summary=summary)


def _throughput(run: Run) -> Optional[Chart]:
    found = [each for each in binned(run.rows, _POINTS) if each["working"] > 0]
    if not found:
        return None
    y = [rounded(each["samples"] / each["working"], 5) for each in found]
    known = [value for value in y if value is not None]
    ways: List[List[Any]] = [
        [int(each["update"]) for each in found],
        [rounded(each["end"], 6) for each in found],
    ]
    mean = samples_per_second(run)
    summary = (
        f"{texts.speed(min(known))} samples per second at least, "
        f"{texts.speed(max(known))} at most; {texts.speed(mean)} over the whole "
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
