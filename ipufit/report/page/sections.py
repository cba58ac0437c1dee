"""Parts of the page: sections, and charts in plain values, which ``charts.js`` draws."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Dict, List, Mapping, Optional, Sequence, Tuple

from ipufit.report.files import Facts

__all__ = [
    "DRAWN",
    "POINTS",
    "Chart",
    "Section",
    "Series",
    "lacking",
    "rounded",
    "thinned",
]

# Points of a line at most, but for the losses of executions, which are bounded already.
POINTS = 4000
# Points of a line in a picture, about: more would share the columns of a screen. All are in the
# page, and what is zoomed into has as many of its own.
DRAWN = 2000


@dataclasses.dataclass(frozen=True)
class Series:
    """One line, or one colour of bars.

    Attributes:
        name: for the legend.
        x: places, for each of the chart's ways to count them.
        y: values; None where there is none.
        look: number of its colour and pattern.
        style: "line", "dashed", "step", "bar", "area" or "task".
        label: text of every bar.
        base: where every bar begins.
        hover: more to say of every value.
    """

    name: str
    x: Sequence[Sequence[Any]]
    y: Sequence[Any]
    look: int = 0
    style: str = "line"
    label: Optional[Sequence[str]] = None
    base: Optional[Sequence[Any]] = None
    hover: Optional[Sequence[str]] = None


@dataclasses.dataclass(frozen=True)
class Chart:
    """A chart as plain values, from which a script draws it.

    Attributes:
        name: of its element.
        title: above it.
        summary: its content in words, also for readers who can't see it.
        series: lines or bars.
        x: titles of the horizontal axis, one for each way to count places.
        y: title of the vertical axis.
        ways: names of the ways, where there are several.
        smooths: whether lines can be made smooth.
        is_across: whether bars lie.
        stacks: whether bars and areas stand on each other.
        height: in pixels.
        most: a limit of y, drawn as a line.
        log: whether a logarithmic axis is offered.
        names: titles of the rows of a timeline.
    """

    name: str
    title: str
    summary: str
    series: Sequence[Series]
    x: Sequence[str]
    y: str
    ways: Sequence[str] = ()
    smooths: bool = False
    is_across: bool = False
    stacks: bool = False
    height: int = 320
    most: Optional[float] = None
    log: bool = False
    names: Sequence[str] = ()

    def to_dict(self) -> Dict[str, Any]:
        """Return the chart as the page's data has it."""
        fields = {
            field.name: getattr(self, field.name)
            for field in dataclasses.fields(self)
            if field.name not in ("name", "summary", "series")
        }
        fields["series"] = [
            {key: value for key, value in vars(each).items() if value is not None}
            for each in self.series
        ]
        return fields


def rounded(value: Any, digits: int = 7) -> Optional[float]:
    """Round to so many significant digits; None, a gap, where a value is not finite."""
    try:
        number = float(value)
    except (TypeError, ValueError):
        return None
    if not math.isfinite(number):
        return None
    short = float(f"{number:.{digits}g}")
    return int(short) if short == int(short) and abs(short) < 1e15 else short


def thinned(
    x: Sequence[object], y: Sequence[Optional[float]], most: int = POINTS
) -> Tuple[List[Any], List[Optional[float]]]:
    """Keep at most so many points: the smallest and the largest of every stretch."""
    if len(y) <= most:
        return list(x), list(y)
    stretch = math.ceil(2 * len(y) / most)
    indices: List[int] = []
    for begin in range(0, len(y), stretch):
        places = range(begin, min(begin + stretch, len(y)))
        finite = [(value, place) for place in places for value in (y[place],) if value is not None]
        if finite:
            indices += sorted({min(finite)[1], max(finite)[1]})
    return [x[place] for place in indices], [y[place] for place in indices]


@dataclasses.dataclass(frozen=True)
class Section:
    """A part of the page with a heading.

    Attributes:
        anchor: its address in the page.
        title: its heading, and its name in the navigation.
        values: what its template shows.
        charts: the charts in it.
        missing: why there is nothing to show; empty if there is.
        kind: name of its template, if that is not the anchor.
    """

    anchor: str
    title: str
    values: Mapping[str, object] = dataclasses.field(default_factory=dict)
    charts: Sequence[Chart] = ()
    missing: str = ""
    kind: str = ""


def lacking(facts: Facts, name: str) -> str:
    """Tell why a fact is not there, without a full stop; empty if it is.

    Args:
        facts: facts of the run.
        name: key of the fact.
    """
    if name not in facts:
        if facts.get("status") != "running":
            return "the run ended before it was known"
        return "the run has not come so far"
    if isinstance(facts[name], dict) and "missing" in facts[name]:
        return str(facts[name]["missing"]).rstrip(".")
    return ""
