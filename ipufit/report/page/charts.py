"""What a chart shows, in plain values; ``charts.js`` draws it."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Dict, List, Optional, Sequence, Tuple

from ipufit.report.page.html import Html, element

__all__ = ["DRAWN", "POINTS", "Chart", "Series", "figure", "rounded", "thinned"]

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
    """A picture.

    Attributes:
        name: of its element.
        title: above it.
        summary: what it shows in words, for who can't see it too.
        series: lines or bars.
        x: titles of the horizontal axis, one for each way to count places.
        y: title of the vertical axis.
        ways: names of the ways, where there are several.
        smooths: whether lines can be made smooth.
        is_across: whether bars lie.
        stacks: whether bars and areas stand on each other.
        height: in pixels.
        most: of y, drawn as a line.
        log: whether a logarithmic axis is offered.
        names: of the rows of a timeline.
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
        """For the page's data."""
        found = {
            field.name: getattr(self, field.name)
            for field in dataclasses.fields(self)
            if field.name not in ("name", "summary", "series")
        }
        found["series"] = [
            {key: value for key, value in vars(each).items() if value is not None}
            for each in self.series
        ]
        return found


def figure(chart: Chart) -> Html:
    """Where a chart is drawn."""
    name = f"chart-{chart.name}"
    return element(
        "figure",
        element(
            "div",
            element("h3", chart.title, id=f"{name}-title"),
            element("div", class_="tools", id=f"{name}-tools"),
            class_="top",
        ),
        # Who can't see it has the words below; the letters of its axes say nothing alone.
        element(
            "div",
            class_="plot",
            id=f"{name}-plot",
            style=f"min-height:{chart.height}px",
            aria_hidden="true",
        ),
        element("figcaption", chart.summary, id=f"{name}-summary"),
        id=name,
        class_="chart",
        data_chart=chart.name,
        tabindex="0",
        role="group",
        aria_labelledby=f"{name}-title",
        aria_describedby=f"{name}-summary",
    )


def rounded(value: Any, digits: int = 7) -> Optional[float]:
    """With so many digits that count; None where it is not finite, which leaves a gap."""
    try:
        found = float(value)
    except (TypeError, ValueError):
        return None
    if not math.isfinite(found):
        return None
    short = float(f"{found:.{digits}g}")
    return int(short) if short == int(short) and abs(short) < 1e15 else short


def thinned(
    x: Sequence[Any], y: Sequence[Optional[float]], most: int = POINTS
) -> Tuple[List[Any], List[Optional[float]]]:
    """At most so many points: of every stretch the smallest and the largest, in their order."""
    if len(y) <= most:
        return list(x), list(y)
    stretch = math.ceil(2 * len(y) / most)
    kept: List[int] = []
    for begin in range(0, len(y), stretch):
        places = range(begin, min(begin + stretch, len(y)))
        known = [(value, place) for place in places for value in (y[place],) if value is not None]
        if known:
            kept += sorted({min(known)[1], max(known)[1]})
    return [x[place] for place in kept], [y[place] for place in kept]
