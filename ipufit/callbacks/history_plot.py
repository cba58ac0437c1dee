"""The picture of a history."""

from __future__ import annotations

import math
import os
from typing import Any, Dict, List, Mapping, Optional, Protocol, Sequence, Tuple, Union

from ipufit.errors import ConfigurationError, unfit
from ipufit.utils.error_collector import at_least
from ipufit.utils.figures import new_figure, save_figure

# Dark and light, solid and dashed, round and square: apart in grey and for any eye.
_TRAINING = {"color": "#12466b", "linestyle": "-", "marker": "o"}
_VALIDATION = {"color": "#e07b00", "linestyle": "--", "marker": "s"}
_RATES = ("lr", "learning_rate")
# Markers of more points than this would hide the line.
_MARKED = 40
_PANEL = (4.6, 3.2)  # inches


class RecordedValues(Protocol):
    """The part of :class:`ipufit.History` that its picture shows; see there."""

    history: Dict[str, List[float]]
    epoch: List[int]
    updates: Dict[str, List[Tuple[int, float]]]

    def places(self, name: str) -> List[int]:
        """Return for each value the place in ``epoch`` that it belongs to."""

    def aligned(self, name: str) -> List[float]:
        """Return one value per epoch, NaN where the epoch has none."""


def draw(
    history: RecordedValues,
    path: Union[str, os.PathLike[str], None],
    metrics: Union[str, Sequence[str], None],
    columns: Optional[int],
    best: Mapping[str, int],
) -> Any:
    """Draw one panel per name; see :meth:`ipufit.History.plot`.

    Args:
        best: by the name of a value, where in ``epoch`` its best is to be marked.
    """
    figure = new_figure("History.plot", _PANEL)
    names = _chosen(history, metrics)
    columns = _columns(columns, len(names))
    rows = -(-len(names) // columns)
    figure.set_size_inches(_PANEL[0] * columns, _PANEL[1] * rows)
    figure.get_layout_engine().set(w_pad=0.12, h_pad=0.1)
    panels = list(figure.subplots(rows, columns, squeeze=False).flat)
    for panel, (name, per_update) in zip(panels, names):
        if per_update:
            updates, values = zip(*history.updates[name])
            _draw_lines(panel, [(updates, values, {**_TRAINING, "linewidth": 1.2})])
            _finish(panel, f"{name}, per update", "update", updates)
        else:
            _draw_epochs(panel, name, history, best)
    for panel in panels[len(names) :]:
        panel.remove()
    return save_figure(figure, path, "History.plot")


def _chosen(
    history: RecordedValues, metrics: Union[str, Sequence[str], None]
) -> List[Tuple[str, bool]]:
    """Names of the panels, and whether their values belong to updates."""
    trained = [name for name in history.history if not name.startswith("val_")]
    held_out = [n[4:] for n in history.history if n.startswith("val_") and n[4:] not in trained]
    epochs = [*trained, *held_out]
    epochs = [n for n in epochs if n not in _RATES] + [n for n in epochs if n in _RATES]
    available = [(name, False) for name in epochs] + [(name, True) for name in history.updates]
    if metrics is None:
        return available
    wanted = [metrics] if isinstance(metrics, str) else list(metrics)
    chosen: List[Tuple[str, bool]] = []
    for name in wanted:
        panels = [panel for panel in available if panel[0] == name]
        if not panels:
            advice = f"It has {', '.join(dict.fromkeys(name for name, _ in available))}."
            raise unfit("metrics", "names of the history without 'val_'", name, advice)
        chosen += panels
    if not chosen:
        raise ConfigurationError(
            "metrics must name at least one value, got none. Leave it out to draw all."
        )
    return chosen


def _columns(columns: Optional[int], panels: int) -> int:
    if columns is None:
        return 2 if panels == 4 else min(3, panels)
    advice = "Leave it out to let the number of panels decide."
    columns = at_least("columns", columns, 1, advice=advice)
    return min(columns, panels)


# What a line of a panel shows, and how it looks.
_Line = Tuple[Sequence[int], Sequence[float], Dict[str, object]]


def _draw_epochs(panel: Any, name: str, history: RecordedValues, best: Mapping[str, int]) -> None:
    lines: List[_Line] = []
    kinds = ((name, "training", _TRAINING), (f"val_{name}", "validation", _VALIDATION))
    shown = [kind for kind in kinds if history.history.get(kind[0])]
    for key, label, style in shown:
        epochs = [history.epoch[place] + 1 for place in history.places(key)]
        line: Dict[str, object] = {**style, "label": label, "linewidth": 1.6}
        if name in _RATES:
            line["drawstyle"] = "steps-mid"
        lines.append((epochs, history.history[key], line))
    _draw_lines(panel, lines)
    if name not in _RATES and shown and shown[-1][0] in best and len(history.epoch) > 1:
        key, label, style = shown[-1]
        place = best[key]
        value = history.aligned(key)[place]
        _mark_best(panel, history.epoch[place] + 1, value, label, style["color"])
    _finish(panel, name, "epoch", [epoch + 1 for epoch in history.epoch])


def _draw_lines(panel: Any, lines: Sequence[_Line]) -> None:
    drawn: List[float] = []
    broken: List[int] = []
    for where, values, style in lines:
        if len(values) > _MARKED:
            style["marker"] = ""
        panel.plot(where, [_finite(value) for value in values], markersize=3.5, **style)
        drawn += [value for value in values if math.isfinite(value)]
        broken += [place for place, value in zip(where, values) if not math.isfinite(value)]
    _scale(panel, drawn)
    if broken:
        _mark_broken(panel, broken)


def _finite(value: float) -> float:
    return value if math.isfinite(value) else math.nan


def _scale(panel: Any, values: Sequence[float]) -> None:
    if values and min(values) > 0 and max(values) / min(values) > 300:
        panel.set_yscale("log")


def _mark_best(panel: Any, epoch: int, value: float, label: str, color: str) -> None:
    across = panel.get_xaxis_transform()
    panel.vlines(
        epoch, 0, 1, color="0.55", linewidth=0.8, linestyle=":", zorder=0, transform=across
    )
    panel.scatter([epoch], [value], s=110, marker="*", color=color, edgecolor="black", zorder=5)
    best = f"\N{BLACK STAR} {label} {value:.4g}, epoch {epoch}"
    panel.set_title(best, fontsize="small", loc="right")


def _mark_broken(panel: Any, where: Sequence[int]) -> None:
    heights = [0.03] * len(where)
    across = panel.get_xaxis_transform()
    style = {"color": "#b00020", "linewidth": 1.6, "label": "NaN or infinite", "zorder": 6}
    panel.scatter(where, heights, s=36, marker="x", transform=across, clip_on=False, **style)


def _finish(panel: Any, title: str, unit: str, where: Sequence[int]) -> None:
    if panel.get_legend_handles_labels()[1] not in ([], ["training"]):
        panel.legend(fontsize="small", framealpha=0.8, edgecolor="none")
    if len(title) + len(panel.get_title(loc="right")) > 46:
        title += "\n"  # on a line of its own
    panel.set_title(title, fontsize="medium", fontweight="bold", loc="left")
    panel.set_xlabel(unit)
    panel.grid(axis="y", color="0.88", linewidth=0.8)
    panel.set_axisbelow(True)
    panel.spines[["top", "right"]].set_visible(False)
    margin = max(0.5, 0.02 * (max(where) - min(where)))
    panel.set_xlim(min(where) - margin, max(where) + margin)
    if len(set(where)) == 1:
        panel.set_xticks([where[0]])
    else:
        panel.xaxis.get_major_locator().set_params(integer=True)
