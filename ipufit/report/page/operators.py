"""Sections about operators by time, and about the time of every layer."""

from __future__ import annotations

import dataclasses
import os
from typing import Callable, Dict, Iterator, List, Mapping, Optional, Sequence, Tuple

from ipufit.report.page import texts
from ipufit.report.page.sections import Chart, Section, Series, lacking, rounded
from ipufit.report.run import Facts

# Rows of a table, and bars, at most.
_MOST, _BARS, _LAYERS = 600, 20, 2000


@dataclasses.dataclass
class OperatorTotals:
    """Sums over some operators."""

    calls: float = 0.0
    seconds: float = 0.0
    flops: float = 0.0
    bytes: float = 0.0

    def add(self, row: Facts) -> None:
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
_GROUPS: Tuple[Tuple[str, Tuple[str, ...], Callable[[Facts], Key]], ...] = (
    ("each", ("operator", "direction", "module", "line"), _each),
    ("operator", ("operator", "direction"), lambda r: (str(r["operator"]), str(r["direction"]))),
    ("module", ("module", "direction"), lambda r: (_module(r), str(r["direction"]))),
    ("line", ("line", "source"), _line),
)


def grouped(
    rows: Sequence[Mapping[str, object]], key: Callable[[Facts], Key]
) -> List[Tuple[Key, OperatorTotals]]:
    """Sum operators by key, sorted by descending time."""
    by_key: Dict[Key, OperatorTotals] = {}
    for row in rows:
        by_key.setdefault(key(row), OperatorTotals()).add(row)
    return sorted(by_key.items(), key=lambda item: -item[1].seconds)


def operators(facts: Facts) -> Section:
    """Make the section of operators."""
    why = lacking(facts, "operators")
    if not why and not facts["operators"]["rows"]:
        why = "the micro-batch has no operators"
    if why:
        return Section("operators", "Operators", missing=why)
    timing = facts["operators"]
    whole = sum(texts.real(row["seconds"]) for row in timing["rows"])
    values = {
        "about": _about(timing, whole),
        "tables": dict(_tables(timing, whole)),
    }
    return Section("operators", "Operators", values, [_bars(timing["rows"], whole)])


def _tables(timing: Facts, whole: float) -> Iterator[Tuple[str, Dict[str, object]]]:
    """Yield the tables of operators, each with the name of its button."""
    for name, heads, key in _GROUPS:
        groups = grouped(timing["rows"], key)
        caption = {"each": "Every operator"}.get(name, f"Operators by {name}")
        left_out = groups[_MOST:]
        if left_out:
            rest = sum(work.seconds for _, work in left_out)
            caption += (
                f": the first {_MOST} of {len(groups):,}; the others take "
                f"{texts.share(texts.part_of(rest, whole))} of the time"
            )
        rows = [(names, _numbers(work, whole, timing)) for names, work in groups[:_MOST]]
        table: Dict[str, object] = {"name": name, "caption": caption, "heads": heads, "rows": rows}
        yield {"each": "each alone"}.get(name, f"by {name}"), table


def _about(timing: Facts, whole: float) -> str:
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
    return " ".join(parts)


def _numbers(work: OperatorTotals, whole: float, timing: Facts) -> List[Tuple[str, float]]:
    """List the numbers of operators, each as text and as the value that it is sorted by."""
    peak = timing.get("peak") or {}
    spent = work.seconds
    flops = work.flops / spent if spent and work.flops else None
    moved = work.bytes / spent if spent and work.bytes else None
    part = texts.part_of(spent, whole)
    return [
        (texts.count(work.calls), work.calls),
        (texts.seconds(spent), spent),
        (texts.share(part), part),
        (texts.work(work.flops), work.flops),
        (texts.rate(flops, "FLOP"), flops or 0.0),
        _of_peak(flops, peak.get("flops")),
        (texts.size(work.bytes), work.bytes),
        _of_peak(moved, peak.get("bytes")),
    ]


def _of_peak(rate: Optional[float], peak: object) -> Tuple[str, float]:
    most = texts.real(peak)
    if rate is None or not most > 0:
        return texts.DASH, 0.0
    return texts.share(rate / most), rate / most


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
        is_across=True,
        stacks=True,
        height=110 + 24 * len(groups),
        names=titles,
    )


def layers(facts: Facts) -> Section:
    """Make the section of layers: their tree, each with the operators inside it."""
    why = lacking(facts, "layers")
    if why:
        return Section("layers", "Layers", missing=why)
    tree = facts["layers"][:_LAYERS]
    rows = facts.get("operators", {}).get("rows")
    work = _by_layer(rows) if rows is not None else None
    depths = [int(layer["depth"]) for layer in tree]
    caption = "The tree of layers"
    if len(facts["layers"]) > len(tree):
        caption += f": the first {len(tree):,} of {len(facts['layers']):,}"
    values = {
        "timed": work is not None,
        "caption": caption,
        "tree": [_layer(*each, work) for each in zip(tree, [*depths[1:], 0])],
    }
    return Section("layers", "Layers", values)


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


def _layer(
    layer: Facts, next_depth: int, work: Optional[Mapping[str, OperatorTotals]]
) -> Dict[str, object]:
    """Return a layer with the work of the operators inside it; None is work that is not known."""
    depth, name = int(layer["depth"]), str(layer["name"]) or "the module"
    inside = None if work is None else work.get(layer["name"], OperatorTotals())
    return {
        **layer,
        "depth": depth,
        "name": name,
        "last_name": name.rpartition(".")[2] if depth > 1 else name,
        "folds": next_depth > depth,
        "place": place_of(layer),
        "seconds": None if inside is None else inside.seconds,
        "flops": None if inside is None else inside.flops,
    }
