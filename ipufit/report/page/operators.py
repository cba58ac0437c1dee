"""Sections about operators by time, and about the time of every layer."""

from __future__ import annotations

import dataclasses
import os
from typing import Any, Callable, Dict, List, Mapping, Optional, Sequence, Tuple

from ipufit.report.page import texts
from ipufit.report.page.html import Cell, Column, Html, Part, Row, element, join_parts, table
from ipufit.report.page.sections import (
    Chart,
    Section,
    Series,
    choices,
    figure,
    lacking,
    note,
    rounded,
)

__all__ = ["TOGETHER", "OperatorTotals", "grouped", "layers", "operators", "place_of"]

TOGETHER = "How operators are put together"

# Rows of a table, and bars, at most.
_MOST, _BARS, _LAYERS = 600, 20, 2000

_COLUMNS = (
    Column("calls", True),
    Column("time", True),
    Column("share", True, "Of the time of all operators"),
    Column("FLOPs", True),
    Column("FLOP/s", True),
    Column("of peak", True, "Share of the FLOP/s that this machine reached on a large product"),
    Column("moved", True, "Bytes read and written"),
    Column("of peak bandwidth", True, "Share of the bytes per second of a large copy"),
)


@dataclasses.dataclass
class OperatorTotals:
    """Sums over some operators."""

    calls: float = 0.0
    seconds: float = 0.0
    flops: float = 0.0
    bytes: float = 0.0

    def add(self, row: Mapping[str, Any]) -> None:
        """Add the numbers of one operator."""
        for field in dataclasses.fields(self):
            value = texts.real(row.get(field.name))
            if value == value:
                setattr(self, field.name, getattr(self, field.name) + value)


Key = Tuple[str, ...]


def place_of(row: Mapping[str, object]) -> str:
    """Return the file name and line of an operator or layer; "" if unknown."""
    file, line = row.get("file"), row.get("line")
    if not file:
        return ""
    name = os.path.basename(str(file))
    return name if line is None else f"{name}:{line}"


def _each(row: Mapping[str, object]) -> Key:
    return str(row["operator"]), str(row["direction"]), _module(row), place_of(row)


def _module(row: Mapping[str, object]) -> str:
    module, kind = row.get("module"), row.get("kind")
    if not module:
        return f"the module itself ({kind})" if kind else "outside of modules"
    return f"{module} ({kind})" if kind else str(module)


def _line(row: Mapping[str, object]) -> Key:
    return place_of(row) or "not known", str(row.get("source") or "").strip()


# As the passes of the pipeline look.
_LOOKS = {"forward": 0, "backward": 4}
# Ways to put operators together: name, heads of the columns, and what rows have in common.
_GROUPS: Tuple[Tuple[str, Tuple[str, ...], Callable[[Mapping[str, Any]], Key]], ...] = (
    ("each", ("operator", "direction", "module", "line"), _each),
    ("operator", ("operator", "direction"), lambda r: (str(r["operator"]), str(r["direction"]))),
    ("module", ("module", "direction"), lambda r: (_module(r), str(r["direction"]))),
    ("line", ("line", "source"), _line),
)


def grouped(
    rows: Sequence[Mapping[str, object]], key: Callable[[Mapping[str, Any]], Key]
) -> List[Tuple[Key, OperatorTotals]]:
    """Sum operators by key, sorted by descending time."""
    by_key: Dict[Key, OperatorTotals] = {}
    for row in rows:
        by_key.setdefault(key(row), OperatorTotals()).add(row)
    return sorted(by_key.items(), key=lambda item: -item[1].seconds)


def operators(facts: Mapping[str, Any]) -> Section:
    """Make the section of operators."""
    why = lacking(facts, "operators")
    if why is not None:
        return Section("operators", "Operators", why)
    timing = facts["operators"]
    rows = timing["rows"]
    if not rows:
        none = element("p", "Not shown: the micro-batch has no operators.", class_="missing")
        return Section("operators", "Operators", none)
    whole = sum(texts.real(row["seconds"]) for row in rows)
    chart = _bars(rows, whole)
    tables = {}
    for name, heads, key in _GROUPS:
        columns = [*(Column(head) for head in heads), *_COLUMNS]
        groups = grouped(rows, key)
        body: List[Row] = [[*of, *_cells(work, whole, timing)] for of, work in groups[:_MOST]]
        caption = {"each": "Every operator"}.get(name, f"Operators by {name}")
        left_out = groups[_MOST:]
        if left_out:
            rest = sum(work.seconds for _, work in left_out)
            caption += (
                f": the first {_MOST} of {len(groups):,}; the others take "
                f"{texts.share(rest / whole if whole else 0.0)} of the time"
            )
        button = {"each": "each alone"}.get(name, f"by {name}")
        tables[button] = table(f"table-operators-{name}", caption, columns, body)
    parts: List[Part] = [
        _about(timing, whole),
        figure(chart),
        choices("operators", TOGETHER, tables),
    ]
    return Section("operators", "Operators", join_parts(*parts), [chart])


def _about(timing: Mapping[str, Any], whole: float) -> Html:
    peak = timing.get("peak") or {}
    parts = [
        f"One micro-batch of {texts.count(timing.get('micro_batch_size'))} samples, operator by "
        f"operator, on {timing.get('device', 'this machine')}"
        + (f" with jit={timing['way']!r}" if timing.get("way") else "")
        + f": {texts.seconds(whole)} in all."
    ]
    if timing.get("timed"):
        parts.append(f"Timed {str(timing['timed']).rstrip('.')}.")
    if timing.get("note"):
        parts.append(str(timing["note"]).rstrip(".") + ".")
    if peak:
        parts.append(
            f"The peaks are {texts.rate(peak.get('flops'), 'FLOP')} and "
            f"{texts.rate(peak.get('bytes'), 'B')}, which this machine reached on large tensors"
            + (f" of {peak['dtype']}." if peak.get("dtype") else ".")
        )
    return note(" ".join(parts))


def _cells(work: OperatorTotals, whole: float, timing: Mapping[str, Any]) -> List[Cell]:
    peak = timing.get("peak") or {}
    spent = work.seconds
    flops = work.flops / spent if spent and work.flops else None
    moved = work.bytes / spent if spent and work.bytes else None
    part = spent / whole if whole else 0.0
    return [
        Cell(texts.count(work.calls), work.calls),
        Cell(texts.seconds(spent), spent),
        Cell(texts.share(part), part),
        Cell(texts.work(work.flops), work.flops),
        Cell(texts.rate(flops, "FLOP"), flops or 0.0),
        _of_peak(flops, peak.get("flops")),
        Cell(texts.size(work.bytes), work.bytes),
        _of_peak(moved, peak.get("bytes")),
    ]


def _of_peak(rate: Optional[float], peak: object) -> Cell:
    most = texts.real(peak)
    if rate is None or not most > 0:
        return Cell(texts.DASH, 0.0)
    return Cell(texts.share(rate / most), rate / most)


def _bars(rows: Sequence[Mapping[str, object]], whole: float) -> Chart:
    groups = grouped(rows, _each)[:_BARS]
    unit, name = texts.scale(max((work.seconds for _, work in groups), default=0.0), "seconds")
    titles = [f"{key[0]}, {key[2]}, {key[1]}" for key, _ in groups]
    # Two that look the same would become one bar.
    titles = [f"{i + 1}. {title}" for i, title in enumerate(titles)]
    directions = list(dict.fromkeys(key[1] for key, _ in groups))
    series = []
    for direction in directions:
        look = _LOOKS.get(direction, 2)
        indices = [i for i, (key, _) in enumerate(groups) if key[1] == direction]
        values = [rounded(groups[i][1].seconds / unit, 5) for i in indices]
        series.append(Series(direction, [values], [titles[i] for i in indices], look, "bar"))
    first = sum(work.seconds for _, work in groups)
    summary = (
        f"These {len(groups)} take {texts.share(first / whole if whole else 0.0)} of the time of "
        "all operators; the table has the others."
    )
    return Chart(
        "operators",
        f"The first {len(groups)} operators by time",
        summary,
        series,
        (name,),
        "",
        is_across=True,
        stacks=True,
        height=110 + 24 * len(groups),
        names=titles,
    )


def layers(facts: Mapping[str, Any]) -> Section:
    """Make the section of layers: their tree, each with the operators inside it."""
    why = lacking(facts, "layers")
    if why is not None:
        return Section("layers", "Layers", why)
    tree = facts["layers"][:_LAYERS]
    rows = facts.get("operators", {}).get("rows")
    work = _by_layer(rows) if rows is not None else {}
    body = []
    for place, layer in enumerate(tree):
        follows = tree[place + 1]["depth"] if place + 1 < len(tree) else 0
        body.append(_row(layer, work.get(layer["name"]), rows is not None, follows))
    heads = ["layer", "class", "output", "parameters", "time", "FLOPs", "written in", "notes"]
    numbers = ("parameters", "time", "FLOPs")
    caption = "The tree of layers"
    if len(facts["layers"]) > len(tree):
        caption += f": the first {len(tree):,} of {len(facts['layers']):,}"
    head = [
        element("th", name, scope="col", class_="number" if name in numbers else None)
        for name in heads
    ]
    shown = element(
        "div",
        element(
            "table",
            element("caption", caption),
            element("thead", element("tr", head)),
            element("tbody", body),
            id="table-layers",
            class_="tree",
        ),
        class_="scroll",
        tabindex="0",
        role="region",
        aria_label=caption,
    )
    about = note(
        "Time and FLOPs are those of one micro-batch, forward and back, of the layer and all that "
        "is in it."
        if rows is not None
        else "Time and FLOPs are not shown, because single operators were not timed."
    )
    return Section("layers", "Layers", join_parts(about, shown))


def _by_layer(rows: Sequence[Mapping[str, object]]) -> Dict[str, OperatorTotals]:
    """Sum operators by layer, those of inner layers included."""
    by_layer: Dict[str, OperatorTotals] = {"": OperatorTotals()}
    for row in rows:
        by_layer[""].add(row)
        parts = str(row.get("module") or "").split(".")
        for end in range(1, len(parts) + 1):
            name = ".".join(parts[:end])
            if name:
                by_layer.setdefault(name, OperatorTotals()).add(row)
    return by_layer


def _row(
    layer: Mapping[str, Any], work: Optional[OperatorTotals], timed: bool, follows: int
) -> Html:
    depth = int(layer["depth"])
    name = str(layer["name"]) or "the module"
    last_name = name.rpartition(".")[2] if depth > 1 else name
    head: List[Optional[Html]] = []
    if follows > depth:
        head.append(
            element(
                "button",
                element("span", f"Layers in {name}", class_="unseen"),
                type="button",
                class_="fold",
                id=f"fold-{name}",
                aria_expanded="true",
            )
        )
    head.append(element("span", last_name, title=name))
    place = place_of(layer)
    counted = work or OperatorTotals()
    trained = layer["trainable"]
    parameters = texts.count(layer["parameters"])
    if trained != layer["parameters"]:
        parameters += f", {texts.count(trained)} trained"
    notes = [str(each) for each in layer.get("notes", ())]
    return element(
        "tr",
        element("th", head, scope="row", class_="layer", style=f"--depth:{min(depth, 12)}"),
        element("td", str(layer["kind"])),
        element("td", str(layer["shape"])),
        element("td", parameters, class_="number"),
        element("td", texts.seconds(counted.seconds) if timed else texts.DASH, class_="number"),
        element("td", texts.work(counted.flops) if timed else texts.DASH, class_="number"),
        element("td", place or "torch", title=str(layer.get("file") or "") or None),
        element("td", "; ".join(notes)),
        data_depth=depth,
    )
