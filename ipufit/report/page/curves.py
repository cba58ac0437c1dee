"""Curves of loss, metrics and settings over the updates and epochs of one run or of several."""

from __future__ import annotations

import itertools
import math
from typing import Dict, Iterator, List, Optional, Sequence, Tuple, Union

from ipufit.report.page import texts
from ipufit.report.page.figures import DRAWN, Chart, Series, Value, rounded, thinned
from ipufit.report.page.sections import Section, lacking
from ipufit.report.run import Run, ends, total

__all__ = ["curves"]

Named = Sequence[Tuple[str, Run]]
# Values of run.json, each with its epoch or update; what is not finite is text.
Pairs = List[Tuple[int, Union[float, str, None]]]

# Charts of values of epochs and of logged ones, and rows of the table of epochs, at most.
_MOST_VALUES, _MOST_LOGGED = 40, 24
_MOST_EPOCHS = 100
_WAYS = ("updates", "time")
_X = ("update", "seconds since the run began")


def curves(runs: Named) -> Section:
    """Make the section of curves.

    Args:
        runs: with their names; the name of a single run is not shown.
    """
    charts = [chart for chart in _execution_charts(runs) if chart is not None]
    names = _names(runs)
    charts += [_epoch_chart(runs, name, i) for i, name in enumerate(names[:_MOST_VALUES])]
    logged = sorted({name for _, run in runs for name in _updates(run)})
    shown = logged[:_MOST_LOGGED]
    charts += [_logged_chart(runs, name, place) for place, name in enumerate(shown)]
    values = {
        "why": lacking(runs[0][1].facts, "history") or "no execution is over",
        "left_out": [
            (names[_MOST_VALUES:], "values of epochs"),
            (logged[_MOST_LOGGED:], "logged values"),
        ],
        **(_table_of_epochs(runs[0][1]) if len(runs) == 1 else {}),
    }
    return Section("curves", "Curves", values, charts)


def _label(runs: Named, name: str, what: str = "") -> str:
    """Return the label of a line; a single run is not named in it."""
    if len(runs) == 1:
        return what or name
    return f"{name}, {what}" if what else name


def _ends(run: Run) -> Tuple[Sequence[Value], Sequence[Value]]:
    """Return the count of updates after every execution, and when it was over."""
    rows = run.rows
    updates = [int(a + b) for a, b in zip(rows["first_update"], rows["updates"])]
    return updates, [rounded(end, 6) for end in ends(rows)]


def _execution_charts(runs: Named) -> Iterator[Optional[Chart]]:
    yield _losses(runs)
    yield _settings(runs, "learning_rate", "Learning rate")
    yield _settings(runs, "loss_scale", "Loss scale")


def _losses(runs: Named) -> Optional[Chart]:
    series, summaries = [], []
    for look, (name, run) in enumerate(runs):
        values = [rounded(value, 6) for value in run.rows["loss"]]
        finite = [value for value in values if value is not None]
        if not finite:
            continue
        series.append(
            Series(_label(runs, name, "" if len(runs) > 1 else "loss"), _ends(run), values, look)
        )
        count = total(run, "executions")
        points = f" in {len(values):,} points" if count > len(values) else ""
        text = (
            f"{count:,.0f} executions{points}: loss {texts.number(finite[0])} at first, "
            f"{texts.number(finite[-1])} at last, {texts.number(min(finite))} at least."
        )
        if len(finite) < len(values):
            text += f" {len(values) - len(finite):,} values are not finite, and left out."
        if len(values) > DRAWN:
            text += " Drawn by the smallest and the largest of every stretch; zooming in shows all."
        summaries.append(text if len(runs) == 1 else f"{name}: {text}")
    if not series:
        return None
    smallest = min(min(each.numbers) for each in series)
    return Chart(
        "loss",
        "Loss of every execution",
        " ".join(summaries),
        series,
        _X,
        "loss",
        _WAYS,
        smooths=True,
        height=380,
        log=smallest > 0,
    )


def _settings(runs: Named, column: str, title: str) -> Optional[Chart]:
    series, summaries = [], []
    for look, (name, run) in enumerate(runs):
        values = [rounded(value) for value in run.rows[column]]
        if all(value is None for value in values):
            continue
        changed = _changes(values)
        places = [[x[place] for place in changed] for x in _ends(run)]
        y = [values[place] for place in changed]
        x, y = _both_thinned(places, y)
        series.append(
            Series(_label(runs, name, title.lower() if len(runs) == 1 else ""), x, y, look, "step")
        )
        finite = [value for value in values if value is not None]
        text = f"{texts.number(finite[0])} at first, {texts.number(finite[-1])} at last."
        if min(finite) == max(finite):
            text = f"{texts.number(finite[0])} all the time."
        summaries.append(text if len(runs) == 1 else f"{name}: {text}")
    if not series:
        return None
    positive = all(value > 0 for each in series for value in each.numbers)
    return Chart(
        column.replace("_", "-"),
        title,
        " ".join(summaries),
        series,
        _X,
        title.lower(),
        _WAYS,
        height=260,
        log=positive,
    )


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


def _history(run: Run) -> Tuple[List[int], Dict[str, Pairs]]:
    history = run.facts.get("history", {"epoch": [], "history": {}})
    return history["epoch"], history["history"]


def _epoch_ends(run: Run) -> List[Value]:
    """Return when every epoch of the history was over."""
    over = {each["epoch"]: each["begin"] + each["seconds"] for each in run.facts["epochs"]}
    return [rounded(over.get(epoch), 6) for epoch in _history(run)[0]]


def _names(runs: Named) -> List[str]:
    """Return the names of values of epochs; validation shares the name of training."""
    keys = (key for _, run in runs for key in _history(run)[1])
    return list(dict.fromkeys(key[4:] if key.startswith("val_") else key for key in keys))


def _epoch_chart(runs: Named, name: str, place: int) -> Chart:
    series, summaries = [], []
    for look, (run_name, run) in enumerate(runs):
        epochs, values = _history(run)
        ends = _epoch_ends(run)
        for is_validation, key in enumerate((name, f"val_{name}")):
            if not values.get(key):
                continue
            what = "validation" if is_validation else "training"
            places = [spot for spot, _ in values[key]]
            y = [rounded(value) for _, value in values[key]]
            ways: List[List[Value]] = [
                [epochs[spot] + 1 for spot in places],
                [ends[spot] for spot in places],
            ]
            x, y = _both_thinned(ways, y)
            look_of_line = look if len(runs) > 1 else is_validation
            style = "dashed" if is_validation else "line"
            series.append(Series(_label(runs, run_name, what), x, y, look_of_line, style))
            finite = [value for value in y if value is not None]
            if finite:
                text = (
                    f"{what} {texts.number(finite[0])} at first, {texts.number(finite[-1])} at last"
                )
                summaries.append(text if len(runs) == 1 else f"{run_name}, {text}")
    finite = [value for each in series for value in each.numbers]
    log = bool(finite) and min(finite) > 0
    text = "; ".join(summaries)
    return Chart(
        f"epoch-{place}",
        f"{name}, by epoch",
        f"{text[:1].upper()}{text[1:]}." if len(runs) == 1 else f"{text}.",
        series,
        ("epoch", _X[1]),
        name,
        ("epochs", "time"),
        height=260,
        log=log,
    )


def _updates(run: Run) -> Dict[str, Pairs]:
    updates: Dict[str, Pairs] = run.facts.get("history", {}).get("updates", {})
    return updates


def _logged_chart(runs: Named, name: str, place: int) -> Chart:
    series, summaries = [], []
    for look, (run_name, run) in enumerate(runs):
        values = _updates(run).get(name)
        if not values:
            continue
        full = [rounded(value) for _, value in values]
        x, y = thinned([update for update, _ in values], full)
        series.append(Series(_label(runs, run_name, "" if len(runs) > 1 else name), [x], y, look))
        finite = [value for value in full if value is not None]
        text = f"{len(values):,} values"
        if finite:
            text += f" from {texts.number(min(finite))} to {texts.number(max(finite))}"
        if len(y) < len(full):
            text += ", drawn by the smallest and the largest of every stretch"
        summaries.append(f"{text}." if len(runs) == 1 else f"{run_name}: {text}.")
    finite = [value for each in series for value in each.numbers]
    log = bool(finite) and min(finite) > 0
    return Chart(
        f"logged-{place}",
        f"{name}, as logged",
        " ".join(summaries),
        series,
        ("update",),
        name,
        height=260,
        log=log,
    )


def _table_of_epochs(run: Run) -> Dict[str, object]:
    epochs, values = _history(run)
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
