"""Sections over the updates and epochs of one run or of several: curves, and time by phase."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from typing import Callable, Dict, Iterator, List, Mapping, Optional, Sequence, Tuple, Union

from ipufit.report.page import texts
from ipufit.report.page.sections import (
    DRAWN,
    Chart,
    Section,
    Series,
    Value,
    lacking,
    rounded,
    thinned,
)
from ipufit.report.run import NamedRuns, Run, binned, ends, samples_per_second, total
from ipufit.utils.phase_timer import PHASE_NAMES, PHASES

# Values of run.json, each with its epoch or update; what is not finite is text.
Pairs = List[Tuple[int, Union[float, str, None]]]

# Charts of values of epochs and of logged ones, and rows of the table of epochs, at most.
_MOST_VALUES, _MOST_LOGGED = 40, 24
_MOST_EPOCHS = 100
OVER_RUN = ("update", "seconds since the run began")


def curves(runs: NamedRuns) -> Section:
    """Make the section of curves.

    Args:
        runs: with their names; the name of a single run is not shown.
    """
    names = _names(runs)
    logged = sorted({name for _, run in runs for name in run.history["updates"]})
    loss, by_epoch = "Loss of every execution", ("epoch", OVER_RUN[1])
    charts = [_curve(runs, "loss", loss, _losses, OVER_RUN, "loss", smooths=True, height=380)]
    for column in ("learning_rate", "loss_scale"):
        name, what = column.replace("_", "-"), column.replace("_", " ")
        lines = functools.partial(_settings, column)
        charts.append(_curve(runs, name, what.capitalize(), lines, OVER_RUN, what))
    for place, name in enumerate(names[:_MOST_VALUES]):
        lines, title = functools.partial(_epochs, name), f"{name}, by epoch"
        charts.append(_curve(runs, f"epoch-{place}", title, lines, by_epoch, name, True))
    for place, name in enumerate(logged[:_MOST_LOGGED]):
        lines, title = functools.partial(_logged, name), f"{name}, as logged"
        charts.append(_curve(runs, f"logged-{place}", title, lines, ("update",), name))
    values = {
        "why": lacking(runs[0][1].facts, "history") or "no execution has finished",
        "left_out": [
            (names[_MOST_VALUES:], "values of epochs"),
            (logged[_MOST_LOGGED:], "logged values"),
        ],
        **(_table_of_epochs(runs[0][1]) if len(runs) == 1 else {}),
    }
    return Section("curves", "Curves", values, [chart for chart in charts if chart is not None])


def _curve(
    runs: NamedRuns,
    name: str,
    title: str,
    lines: Callable[[Run], Iterator[Tuple[Series, str]]],
    x: Sequence[str],
    y: str,
    has_several: bool = False,
    smooths: bool = False,
    height: int = 260,
) -> Optional[Chart]:
    """Draw values of one run or of several; None if none has any.

    Args:
        runs: with their names.
        name: of the chart.
        title: of the chart.
        lines: of a run, each with what it shows in words.
        x: titles of the horizontal axis.
        y: title of the vertical one.
        has_several: whether a run has several lines.
        smooths: whether they can be made smooth.
        height: in pixels.
    """
    series, summaries = [], []
    for look, (run_name, run) in enumerate(runs):
        for line, text in lines(run):
            if len(runs) > 1:
                label = f"{run_name}, {line.name}" if has_several else run_name
                line = dataclasses.replace(line, name=label, look=look)
                text = text and f"{run_name}{',' if has_several else ':'} {text}"
            series.append(line)
            summaries += [text] if text else []
    if not series:
        return None
    summary = f"{'; '.join(summaries)}." if has_several else " ".join(summaries)
    if len(runs) == 1:
        summary = f"{summary[:1].upper()}{summary[1:]}"
    return Chart(name, title, summary, series, x, y, smooths, height=height, offers_log=True)


def _ends(run: Run) -> Tuple[Sequence[Value], Sequence[Value]]:
    """Return the count of updates after every execution, and when it was over."""
    rows = run.rows
    updates = [int(a + b) for a, b in zip(rows["first_update"], rows["updates"])]
    return updates, [rounded(end, 6) for end in ends(rows)]


def _losses(run: Run) -> Iterator[Tuple[Series, str]]:
    values = [rounded(value, 6) for value in run.rows["loss"]]
    finite = [value for value in values if value is not None]
    if not finite:
        return
    count = total(run, "executions")
    points = f" in {len(values):,} points" if count > len(values) else ""
    text = (
        f"{count:,.0f} executions{points}: loss {texts.number(finite[0])} at first, "
        f"{texts.number(finite[-1])} at last, {texts.number(min(finite))} at least."
    )
    if len(finite) < len(values):
        text += f" {len(values) - len(finite):,} values are not finite and not shown."
    if len(values) > DRAWN:
        text += " Drawn with the smallest and largest value of each interval; zoom in to see all."
    yield Series("loss", _ends(run), values), text


def _settings(column: str, run: Run) -> Iterator[Tuple[Series, str]]:
    values = [rounded(value) for value in run.rows[column]]
    finite = [value for value in values if value is not None]
    if not finite:
        return
    changed = _changes(values)
    places = [[x[place] for place in changed] for x in _ends(run)]
    x, y = _both_thinned(places, [values[place] for place in changed])
    text = f"{texts.number(finite[0])} at first, {texts.number(finite[-1])} at last."
    if min(finite) == max(finite):
        text = f"{texts.number(finite[0])} throughout."
    yield Series(column.replace("_", " "), x, y, style="step"), text


def _changes(values: Sequence[object]) -> List[int]:
    """Return the places where a value differs from a neighbour: the others lie on a line."""
    last = len(values) - 1
    return [
        place
        for place, value in enumerate(values)
        if place in (0, last) or not values[place - 1] == value == values[place + 1]
    ]


def _both_thinned(
    places: Sequence[Sequence[Value]], y: Sequence[Optional[float]]
) -> Tuple[List[List[Value]], List[Optional[float]]]:
    """Thin points whose places are counted in several ways."""
    both = list(zip(*places))
    points, values = thinned(both, y)
    return [[each[way] for each in points] for way in range(len(places))], values


def _epoch_ends(run: Run) -> List[Value]:
    """Return when every epoch of the history was over."""
    over = {each["epoch"]: each["begin"] + each["seconds"] for each in run.facts["epochs"]}
    return [rounded(over.get(epoch), 6) for epoch in run.history["epoch"]]


def _names(runs: NamedRuns) -> List[str]:
    """Return the names of values of epochs; validation shares the name of training."""
    keys = (key for _, run in runs for key in run.history["history"])
    return list(dict.fromkeys(key[4:] if key.startswith("val_") else key for key in keys))


def _epochs(name: str, run: Run) -> Iterator[Tuple[Series, str]]:
    epochs: List[int] = run.history["epoch"]
    values: Dict[str, Pairs] = run.history["history"]
    ends = _epoch_ends(run)
    kinds = ((name, "training", "line"), (f"val_{name}", "validation", "dashed"))
    for look, (key, what, style) in enumerate(kinds):
        if not values.get(key):
            continue
        places = [spot for spot, _ in values[key]]
        ways: List[List[Value]] = [
            [epochs[spot] + 1 for spot in places],
            [ends[spot] for spot in places],
        ]
        x, y = _both_thinned(ways, [rounded(value) for _, value in values[key]])
        finite = [value for value in y if value is not None]
        text = ""
        if finite:
            text = f"{what} {texts.number(finite[0])} at first, {texts.number(finite[-1])} at last"
        yield Series(what, x, y, look, style), text


def _logged(name: str, run: Run) -> Iterator[Tuple[Series, str]]:
    values: Pairs = run.history["updates"].get(name)
    if not values:
        return
    full = [rounded(value) for _, value in values]
    x, y = thinned([update for update, _ in values], full)
    finite = [value for value in full if value is not None]
    text = f"{len(values):,} values"
    if finite:
        text += f" from {texts.number(min(finite))} to {texts.number(max(finite))}"
    if len(y) < len(full):
        text += ", drawn with the smallest and the largest value of each interval"
    yield Series(name, [x], y), f"{text}."


def _table_of_epochs(run: Run) -> Dict[str, object]:
    epochs, values = run.history["epoch"], run.history["history"]
    by_place = [dict(pairs) for pairs in values.values()]
    took = {each["epoch"]: each["seconds"] for each in run.facts["epochs"]}
    first = max(0, len(epochs) - _MOST_EPOCHS)
    rows = [
        {
            "number": epoch + 1,
            "values": [pairs.get(place) for pairs in by_place],
            "seconds": took.get(epoch, math.nan),
        }
        for place, epoch in itertools.islice(enumerate(epochs), first, None)
    ]
    caption = f"The last {_MOST_EPOCHS} of {len(epochs):,} epochs" if first else "Every epoch"
    return {"epochs": rows, "columns": [[name] for name in values], "caption": caption}


# Of each phase the number of its colour and pattern: what a run is for has the plain one.
_LOOKS = ("compute", *(phase for phase in PHASES if phase != "compute"))

# Bars, other stretches, and points of a line, at most.
_BARS, _STRETCHES, _POINTS = 30, 150, 400


def _used_phases(seconds: Mapping[str, object]) -> List[str]:
    """Return the phases that took any time, in their order."""
    return [phase for phase in PHASES if seconds.get(phase)]


def phases(runs: NamedRuns) -> Section:
    """Make the section about where the time goes: of one run in its course, of several as a whole.

    Args:
        runs: with their names; the name of a single run is not shown.
    """
    measured = [(name, run) for name, run in runs if "phases" in run.facts]
    if not measured:
        return Section("time", "Time", missing=lacking(runs[0][1].facts, "phases"))
    by_run = [
        {phase: texts.real(run.facts["phases"].get(phase, 0.0)) for phase in PHASES}
        for _, run in measured
    ]
    wholes = [math.fsum(seconds.values()) for seconds in by_run]
    if len(runs) == 1:
        (_, run), caption = runs[0], "Time of the whole run by phase"
        charts = [_by_epoch(run), _by_execution(run), _throughput(run)]
    else:
        caption = "Time by phase"
        charts = [_side_by_side([name for name, _ in measured], by_run, wholes)]
    values = {
        "caption": caption,
        "is_single": len(runs) == 1,
        "columns": columns(measured, "time", "share"),
        "phases": [(PHASE_NAMES[p], [seconds[p] for seconds in by_run]) for p in PHASES],
        "wholes": wholes,
    }
    return Section("time", "Time", values, [chart for chart in charts if chart is not None])


def columns(runs: NamedRuns, *whats: str) -> List[List[str]]:
    """Return columns of numbers, several for each run; the name of a single run is not shown."""
    return [[f"{name}, {what}" if name else what] for name, _ in runs for what in whats]


def _side_by_side(
    names: Sequence[str], by_run: Sequence[Mapping[str, float]], wholes: Sequence[float]
) -> Chart:
    """Chart seconds by phase, a bar for each run."""
    unit, unit_name = texts.scale(max(wholes), "seconds")
    series = [
        Series(
            PHASE_NAMES[phase],
            [[rounded(seconds[phase] / unit, 5) for seconds in by_run]],
            names,
            _LOOKS.index(phase),
            "bar",
        )
        for phase in PHASES
        if any(phase in _used_phases(seconds) for seconds in by_run)
    ]
    lengths = [f"{name} {texts.seconds(whole)}" for name, whole in zip(names, wholes)]
    return Chart(
        "phases",
        "Time of the whole runs by phase",
        f"{', '.join(lengths)}.",
        series,
        (unit_name,),
        is_across=True,
        stacks=True,
        height=170 + 46 * len(names),
        names=names,
    )


def _stacked(
    name: str,
    title: str,
    stretches: Sequence[Dict[str, float]],
    edges: Sequence[int],
    x: str,
    size: float,
    what: str,
) -> Optional[Chart]:
    """Chart seconds by phase over consecutive stretches, as bars or, if many, as areas.

    Args:
        name: of the chart.
        title: of the chart.
        stretches: seconds by phase of each.
        edges: where each begins, and where the last one ends.
        x: what the edges count.
        size: how many a stretch is the mean of, at most.
        what: what these are.
    """
    used = _used_phases({p: math.fsum(each[p] for each in stretches) for p in PHASES})
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
        series.append(Series(PHASE_NAMES[phase], [places], y, _LOOKS.index(phase), style))
    most = max(used, key=lambda phase: math.fsum(each[phase] for each in stretches))
    part = math.fsum(each[most] for each in stretches) / math.fsum(sums)
    summary = (
        f"Most of it, {texts.share(part)}, is {PHASE_NAMES[most]}; the table lists all phases."
    )
    if size > 1:
        summary = f"Every point is the mean of up to {texts.count(size)} {what}. {summary}"
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
    title = "Time of every epoch"
    return _stacked("phases-epochs", title, stretches, edges, "epoch", size, "epochs")


def _by_execution(run: Run) -> Optional[Chart]:
    binned_executions = binned(run.rows, _STRETCHES)
    if not binned_executions:
        return None
    stretches = [{p: each[p] / each["executions"] for p in PHASES} for each in binned_executions]
    edges = [int(each["first_update"]) + 1 for each in binned_executions]
    edges.append(int(binned_executions[-1]["update"]) + 1)
    title = "Time of an execution, over the run"
    size = max(each["executions"] for each in binned_executions)
    return _stacked("phases-executions", title, stretches, edges, "update", size, "executions")


def places_of(stretches: Sequence[Mapping[str, float]]) -> List[List[Value]]:
    """Return the count of updates after each stretch of a run, and when it was over."""
    return [
        [int(each["update"]) for each in stretches],
        [rounded(each["end"], 6) for each in stretches],
    ]


def _throughput(run: Run) -> Optional[Chart]:
    stretches = [each for each in binned(run.rows, _POINTS) if each["working"] > 0]
    if not stretches:
        return None
    y = [rounded(each["samples"] / each["working"], 5) for each in stretches]
    finite = [value for value in y if value is not None]
    mean = samples_per_second(run)
    summary = (
        f"{texts.speed(min(finite))} samples per second at least, {texts.speed(max(finite))} at "
        f"most; {texts.speed(mean)} over the whole run. Recording, validation and this report are "
        "not included."
    )
    what = "samples per second"
    series = [Series(what, places_of(stretches), y)]
    title = "Samples per second, over the run"
    return Chart("throughput", title, summary, series, OVER_RUN, what, height=280)
