"""Sections of the page, and charts in plain values, of which plotly.py makes figures."""

from __future__ import annotations

import dataclasses
import html
import math
from typing import Dict, List, Mapping, Optional, Sequence, Tuple, TypeVar, Union

from ipufit.report.page import texts
from ipufit.report.run import Facts

# Points of a line at most, but for the losses of executions, which are bounded already.
POINTS = 4000
# Points of a line in a picture, about: more would share the columns of a screen. All are in the
# page, and what is zoomed into has as many of its own.
DRAWN = 2000

# How plotly.js behaves.
CONFIG = {
    "displayModeBar": False,
    "responsive": False,
    "doubleClick": "reset",
    "scrollZoom": False,
    "showTips": False,
}

_DASHES = ("solid", "dash", "dot", "dashdot", "longdash", "longdashdot")
_SYMBOLS = ("circle", "square", "diamond", "triangle-up", "cross", "x", "star", "pentagon")
_PATTERNS = ("", "/", ".", "x", "\\", "-", "+", "|")
# Colours are those of the style sheet, by name: which it is depends on the look of the page.
_PAPER = "var(--paper)"
# Points from which on markers would hide a line, and letters of a name beside an axis, also where
# the page is narrow.
_MARKED, _LONGEST_NAME, _LONGEST_NARROW = 40, 44, 16
# Ticks at whole numbers are too many beyond this reach.
_WHOLE = 12

# A value of an axis: a number, a name, or a gap.
Value = Union[float, str, None]
Trace = Dict[str, object]
Place = TypeVar("Place")


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
    x: Sequence[Sequence[Value]]
    y: Sequence[Value]
    look: int = 0
    style: str = "line"
    label: Sequence[str] = ()
    base: Sequence[Value] = ()
    hover: Sequence[str] = ()

    @property
    def colour(self) -> str:
        """The colour, by its name in the style sheet."""
        return f"var(--c{self.look % 8})"


@dataclasses.dataclass(frozen=True)
class Chart:
    """A chart as plain values, of which plotly.py makes a figure.

    Attributes:
        name: of its element.
        title: above it.
        summary: its content in words, also for readers who can't see it.
        series: lines or bars.
        x: titles of the horizontal axis, one for each way to count places.
        y: title of the vertical axis; none of bars that lie.
        smooths: whether lines can be made smooth.
        is_across: whether bars lie.
        stacks: whether bars and areas stand on each other.
        height: in pixels.
        most: a limit of y, drawn as a line.
        offers_log: whether a logarithmic axis is offered, if all values are positive.
        names: titles of the rows of a timeline.
    """

    name: str
    title: str
    summary: str
    series: Sequence[Series]
    x: Sequence[str]
    y: str = ""
    smooths: bool = False
    is_across: bool = False
    stacks: bool = False
    height: int = 320
    most: Optional[float] = None
    offers_log: bool = False
    names: Sequence[str] = ()

    @property
    def span(self) -> int:
        """Values over which lines are smooth at first; 1 is none."""
        count = max((len(series.y) for series in self.series), default=0)
        # A tenth of the curve hides what it does; a hundredth shows it.
        return round(count / 100) if self.smooths and count > 200 else 1

    @property
    def log(self) -> bool:
        """True if the vertical axis can be made logarithmic."""
        values = [y for series in self.series for y in series.y if isinstance(y, (int, float))]
        return self.offers_log and bool(values) and min(values) > 0

    def figure(self) -> Dict[str, object]:
        """Make the figure, as JSON of plotly.py, without what all charts share: see :func:`look`.

        ``meta`` of its layout has changes by axis: ``narrow`` where there is little room, ``log``
        for a logarithmic axis, and ``time`` for the second way to count places, which ``meta.time``
        of a trace has.
        """
        # Imported here: there is none where no page is made.
        import plotly.graph_objects as go

        # In a go.Figure every value would be checked a second time.
        traces = [
            go.Bar(_bars(self, series))
            if series.style in ("bar", "task")
            else go.Scatter(_area(series) if series.style == "area" else _line(series))
            for series in self.series
        ]
        data = [trace.to_plotly_json() for trace in traces]
        return {"data": data, "layout": go.Layout(_layout(self)).to_plotly_json()}


def look() -> Dict[str, object]:
    """Make the template of plotly.py that all figures share."""
    # Imported here: there is none where no page is made.
    import plotly.graph_objects as go

    ink, line = "var(--ink)", "var(--line)"
    axis = {
        "title": {"standoff": 8},
        **dict.fromkeys(("gridcolor", "linecolor", "zerolinecolor", "tickcolor"), line),
        # Colours alone do not show them in a template.
        **dict.fromkeys(("showgrid", "showline", "zeroline"), True),
        "ticks": "outside",
        "automargin": True,
        "exponentformat": "power",
        "minexponent": 6,
        "separatethousands": True,
    }
    layout = {
        "autosize": False,
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "font": {"family": "system-ui, sans-serif", "size": 12, "color": ink},
        "margin": {"l": 48, "r": 12, "t": 8, "b": 36},
        "xaxis": axis,
        "yaxis": axis,
        "legend": {
            **{"orientation": "h", "x": 0, "y": 1.02, "yanchor": "bottom"},
            "font": {"size": 11},
        },
        "bargap": 0.25,
        "uniformtext": {"mode": "hide", "minsize": 8},
        "hoverlabel": {
            **{"bgcolor": _PAPER, "font": {"color": ink}, "bordercolor": line, "align": "left"}
        },
    }
    template: Dict[str, object] = go.layout.Template(layout=layout).to_plotly_json()
    return template


def _escaped(value: object) -> str:
    """Escape what plotly would take for markup."""
    return html.escape(str(value), quote=False)


def _short(name: str, most: int) -> str:
    return _escaped(name if len(name) <= most else f"{name[: most - 1]}…")


def _line(series: Series) -> Trace:
    name, is_step = _escaped(series.name), series.style == "step"
    dash = _DASHES[series.look % len(_DASHES)]
    first = "dash" if series.style == "dashed" else _DASHES[1 if series.look >= 8 else 0]
    meta: Dict[str, object] = {"dash": dash}
    if len(series.x) > 1:
        meta["time"] = list(series.x[1])
    return {
        "mode": "lines+markers" if len(series.y) <= _MARKED and not is_step else "lines",
        "name": name,
        "x": series.x[0],
        "y": series.y,
        "line": {
            "color": series.colour,
            "width": 2,
            "dash": dash if is_step else first,
            "shape": "hv" if is_step else "linear",
        },
        "marker": {
            "symbol": _SYMBOLS[series.look % len(_SYMBOLS)],
            "size": 6,
            "color": series.colour,
        },
        "hovertemplate": f"%{{x}}: %{{y:.5g}}<extra>{name}</extra>",
        "meta": meta,
    }


def _pattern(series: Series, solidity: float = 0.16) -> Dict[str, object]:
    return {
        # Those that share a colour differ in their pattern.
        "shape": _PATTERNS[(series.look + 3 * (series.look // 8)) % len(_PATTERNS)],
        "size": 7,
        "solidity": solidity,
        "bgcolor": series.colour,
        "fgcolor": _PAPER,
    }


def _area(series: Series) -> Trace:
    name = _escaped(series.name)
    trace: Trace = {
        "mode": "lines",
        "stackgroup": "all",
        "name": name,
        "x": series.x[0],
        "y": series.y,
        "line": {"color": series.colour, "width": 1, "shape": "hv"},
        "fillcolor": series.colour,
        "fillpattern": _pattern(series),
        "hovertemplate": f"%{{y:.5g}}<extra>{name}</extra>",
    }
    if series.hover:
        trace["text"] = [*map(_escaped, series.hover)]
        trace["hovertemplate"] = f"%{{y:.5g}} after %{{text}}<extra>{name}</extra>"
    return trace


def _bars(chart: Chart, series: Series) -> Trace:
    name = _escaped(series.name)
    lengths, is_task = series.x[0], series.style == "task"
    labels = [_escaped(value) if isinstance(value, str) else value for value in series.y]
    value, unit = ("x", chart.x[0]) if chart.is_across else ("y", chart.y)
    place = "customdata" if chart.is_across else "x"
    trace: Trace = {
        "name": name,
        "orientation": "h" if chart.is_across else "v",
        "x": lengths if chart.is_across else [*map(_escaped, lengths)],
        "y": labels,
        "customdata": labels,
        "marker": {
            "color": series.colour,
            "line": {"color": _PAPER, "width": _edges(lengths) if is_task else 0},
            "pattern": _pattern(series, 0.12 if series.label else 0.16),
        },
        "hovertemplate": f"%{{{place}}}<br>%{{{value}:.5g}} {_escaped(unit)}<extra>{name}</extra>",
    }
    if is_task:
        trace["base"] = series.base
        trace["text"] = [*map(_escaped, series.label)]
        trace.update(textposition="inside", insidetextanchor="middle", textangle=0)
        trace.update(constraintext="inside", textfont={"color": _PAPER, "size": 11})
        trace["hovertext"] = [*map(_escaped, series.hover)]
        trace["hovertemplate"] = "%{hovertext}: %{x:.4g}, from %{base:.4g}<extra></extra>"
    return trace


def _edges(lengths: Sequence[Value]) -> List[int]:
    """Return widths of edges between tasks, where there is room for one."""
    numbers = [length if isinstance(length, (int, float)) else 0.0 for length in lengths]
    whole = math.fsum(numbers)
    return [1 if length > whole / 500 else 0 for length in numbers]


def _layout(chart: Chart) -> Dict[str, object]:
    kinds = {series.style for series in chart.series}
    x: Dict[str, object] = {"title": {"text": _escaped(chart.x[0])}, **_whole_ticks(chart)}
    y: Dict[str, object] = {"title": {"text": _escaped(chart.y)}}
    what = _escaped(chart.x[0].partition(",")[0])
    narrow: Dict[str, Dict[str, object]] = {"xaxis": {"title": {"text": what}}}
    if chart.is_across:
        names = [str(name) for name in chart.names or chart.series[0].y]
        y = _named_axis(names, is_timeline="task" in kinds)
        # On a phone there is room for what it is, but not for in what.
        narrow["yaxis"] = {"ticktext": [_short(name, _LONGEST_NARROW) for name in names]}
    elif "bar" in kinds:
        x.update(type="category", nticks=12)
    if chart.stacks and not chart.is_across:
        y["rangemode"] = "tozero"
    only = _only_value(chart)
    if only:
        # Around a single value plotly would show a wide axis with nothing to read off.
        y["range"] = sorted([0, 2 * only])
    meta: Dict[str, object] = {"narrow": narrow}
    if len(chart.x) > 1:
        meta["time"] = {"xaxis": {"title": {"text": _escaped(chart.x[1])}, "dtick": None}}
    if chart.log:
        meta["log"] = {"yaxis": {"type": "log", "range": None}}
    alarm = {"color": "var(--alarm)", "width": 2, "dash": "dash"}
    limit = {"type": "line", "y0": 0, "y1": 1, "yref": "paper", "line": alarm}
    return {
        "height": chart.height,
        "xaxis": x,
        "yaxis": y,
        "showlegend": len(chart.series) > 1,
        "barmode": "stack" if chart.stacks else "overlay",
        "shapes": [] if chart.most is None else [{**limit, "x0": chart.most, "x1": chart.most}],
        "meta": meta,
    }


def _named_axis(names: Sequence[str], is_timeline: bool) -> Dict[str, object]:
    """Return the axis of stages or operators by name, from above."""
    titles = [*map(_escaped, names)]
    return {
        "type": "linear" if is_timeline else "category",
        "autorange": False if is_timeline else "reversed",
        "range": [len(names) - 0.5, -0.5] if is_timeline else None,
        "tickmode": "array",
        "tickvals": [*range(len(names))] if is_timeline else titles,
        "ticktext": [_short(name, _LONGEST_NAME) for name in names],
        "categoryorder": "array",
        "categoryarray": titles,
        "fixedrange": True,
        "showgrid": False,
    }


def _only_value(chart: Chart) -> Optional[float]:
    """Return the value that lines never leave; None if there is no such value."""
    if chart.is_across or chart.stacks:
        return None
    values = {value for series in chart.series for value in series.y if value is not None}
    only = values.pop() if len(values) == 1 else None
    return only if isinstance(only, (int, float)) else None


def _whole_ticks(chart: Chart) -> Mapping[str, object]:
    """Return the ticks of epochs and updates, which have no halves, where they are few."""
    if chart.x[0] not in ("epoch", "update"):
        return {}
    places = [p for each in chart.series for p in each.x[0] if isinstance(p, (int, float))]
    reach = max(places, default=0) - min(places, default=0)
    return {"dtick": 1} if reach <= _WHOLE else {}


def rounded(value: object, digits: int = 7) -> Optional[float]:
    """Round to so many significant digits; None, a gap, where a value is not finite."""
    number = texts.real(value)
    if not math.isfinite(number):
        return None
    short = float(f"{number:.{digits}g}")
    return int(short) if short == int(short) and abs(short) < 1e15 else short


def thinned(
    x: Sequence[Place], y: Sequence[Optional[float]], most: int = POINTS
) -> Tuple[List[Place], List[Optional[float]]]:
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
            return "the run ended before this was known"
        return "the run has not reached this point yet"
    if isinstance(facts[name], dict) and "missing" in facts[name]:
        return str(facts[name]["missing"]).rstrip(".")
    return ""
