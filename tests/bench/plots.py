"""The plots of docs/benchmarks.md, which are read on light and on dark pages."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any, Dict, Mapping, Sequence

from tests.bench.curves import CURVES, Rounds, medians
from tests.bench.report import Result, ratios

__all__ = ["plot_curves", "plot_ratios", "plot_times"]

# Grey stands out from white and from black alike; so do these colours.
_GREY = "#8a8f98"
_COLOURS = ("#2f8fd8", "#d9822b")


def _drawing() -> Any:
    import matplotlib as mpl

    mpl.use("svg")
    grey = dict.fromkeys(
        (
            *("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color"),
            *("legend.labelcolor", "grid.color"),
        ),
        _GREY,
    )
    plain = {"svg.fonttype": "none", "svg.hashsalt": "ipufit", "font.size": 9, "grid.alpha": 0.3}
    mpl.rcParams.update({**grey, **plain, "axes.spines.top": False, "axes.spines.right": False})
    import matplotlib.pyplot as plt

    return plt


def _save(figure: Any, path: Path) -> None:
    # Without a date, equal figures are equal files.
    figure.savefig(path, transparent=True, bbox_inches="tight", metadata={"Date": None})


def plot_times(times: Mapping[str, Mapping[str, float]], path: Path) -> None:
    """For each workload, the times of the peers as bars, ipufit's being 1."""
    plt = _drawing()
    size = (3.2 * len(times) + 1.4, 2.6)
    figure, rows = plt.subplots(
        1, len(times), figsize=size, sharex=True, sharey=True, squeeze=False
    )
    for axes, (name, peers) in zip(rows[0], times.items()):
        own = {"ipufit": 1.0, **peers}
        colours = [_COLOURS[0], *[_GREY] * len(peers)]
        drawn = axes.barh([*own], [*own.values()], color=colours, height=0.7)
        axes.bar_label(drawn, fmt="%.1f", padding=3)
        axes.set(title=name, xticks=[])
        axes.tick_params(length=0)
        axes.spines[["bottom", "left"]].set_visible(False)
        axes.margins(x=0.15)
    rows[0][0].invert_yaxis()
    figure.supxlabel("time of an update, ipufit = 1 (shorter is faster)", color=_GREY, fontsize=9)
    figure.tight_layout()
    _save(figure, path)


def plot_ratios(results: Sequence[Result], path: Path) -> None:
    """For each workload, the peers as times ipufit's: the median, and the rounds as a line."""
    plt = _drawing()
    names = list(dict.fromkeys(result.workload for result in results))
    figure, rows = plt.subplots(
        1, len(names), figsize=(3.4 * len(names) + 1.6, 3.2), sharey=True, squeeze=False
    )
    peers = list(dict.fromkeys(result.peer for result in results))
    for axes, name in zip(rows[0], names):
        own = [result for result in results if result.workload == name]
        for result in own:
            of, place = ratios(result, own[0]), -peers.index(result.peer)
            colour = _COLOURS[0] if result.peer.startswith("ipufit") else _GREY
            axes.plot([min(of), max(of)], [place, place], color=colour, linewidth=1)
            axes.plot([statistics.median(of)], [place], "o", color=colour, markersize=5)
        axes.axvline(1, color=_COLOURS[0], linewidth=0.8, linestyle=":")
        axes.set(title=name, xlabel="times ipufit's time an update", xscale="log")
        axes.set_yticks([-place for place in range(len(peers))], peers)
        ticks = [t for t in (0.5, 1, 2, 4, 8) if axes.get_xlim()[0] <= t <= axes.get_xlim()[1]]
        axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
        axes.set_xticks([], minor=True)
    figure.tight_layout()
    _save(figure, path)


def plot_curves(found: Dict[str, Rounds], path: Path) -> None:
    """One picture for each curve."""
    plt = _drawing()
    figure, cells = plt.subplots(2, 2, figsize=(8, 5.6))
    for axes, (name, lines) in zip(cells.flat, found.items()):
        curve = CURVES[name]
        for colour, (label, rounds) in zip(_COLOURS, lines.items()):
            values = [value * 1e6 for value in medians(rounds)]
            axes.plot(curve.points, values, "o-", color=colour, markersize=4, label=label)
        axes.set(xlabel=curve.title, ylabel=curve.unit, xscale="log", ylim=(0, None))
        axes.set_xticks(curve.points, [str(point) for point in curve.points], fontsize=7)
        axes.set_xticks([], minor=True)
        axes.grid(axis="y")
        if len(lines) > 1:
            axes.legend(frameon=False)
    figure.tight_layout()
    _save(figure, path)
