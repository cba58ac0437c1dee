"""A history as CSV, JSON and HTML."""

from __future__ import annotations

import csv
import json
import math
import os
from typing import TYPE_CHECKING, Any, Dict, List, Optional, Union

from ipufit.callbacks import history_plot
from ipufit.callbacks.monitor_mode import direction_of
from ipufit.errors import ConfigurationError

if TYPE_CHECKING:
    from ipufit.callbacks.history import History

__all__ = ["as_html", "read_json", "write_csv", "write_json"]

Path = Union[str, "os.PathLike[str]"]

_FORMAT = "ipufit.History/1"
_ROWS = 8  # epochs that a notebook shows


def write_csv(history: History, path: Path) -> None:
    """One line per epoch; see :meth:`ipufit.History.to_csv`."""
    columns = [_cells(history, name) for name in history.history]
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["epoch", *history.history])
        writer.writerows(zip(history.epoch, *columns))


def _cells(history: History, name: str) -> List[str]:
    cells = [""] * len(history.epoch)
    for place, value in zip(history.places(name), history.history[name]):
        cells[place] = repr(value)
    return cells


def write_json(history: History, path: Optional[Path]) -> str:
    """Everything; see :meth:`ipufit.History.to_json`."""
    content = {
        "format": _FORMAT,
        "params": history.params,
        "epoch": history.epoch,
        "history": {
            name: [[place, _number(value)] for place, value in zip(history.places(name), values)]
            for name, values in history.history.items()
        },
        "updates": {
            name: [[update, _number(value)] for update, value in values]
            for name, values in history.updates.items()
        },
    }
    try:
        text = json.dumps(content, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ConfigurationError(
            "History.params must hold only what JSON has (numbers that are finite, strings, lists, "
            f"dicts, None), but {str(error).rstrip('.')}. Take that entry out, or turn it into a "
            "string."
        ) from error
    if path is not None:
        with open(path, "w", encoding="utf-8") as file:
            file.write(text + "\n")
    return text


def _number(value: float) -> Union[float, str]:
    return value if math.isfinite(value) else str(value)


def read_json(source: Path, history: History, places: Dict[str, List[int]]) -> None:
    """Fill an empty history; see :meth:`ipufit.History.from_json`."""
    text = os.fspath(source)
    came = "the text"
    if not text.lstrip().startswith("{"):
        came = repr(text)
        try:
            with open(text, encoding="utf-8") as file:
                text = file.read()
        except OSError as error:
            raise ConfigurationError(
                f"from_json needs a file that to_json wrote, or its text, but {error}. Check the "
                "path."
            ) from error
    try:
        content = json.loads(text)
        if content["format"] != _FORMAT:
            raise ValueError(f"its format is {content['format']!r}")
        history.params.update(content["params"])
        history.epoch.extend(content["epoch"])
        for name, pairs in content["history"].items():
            places[name] = [place for place, _ in pairs]
            history.history[name] = [float(value) for _, value in pairs]
        for name, pairs in content["updates"].items():
            history.updates[name] = [(update, float(value)) for update, value in pairs]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigurationError(
            f"from_json needs what History.to_json wrote, got something else in {came} "
            f"({type(error).__name__}: {error}). Write it with history.to_json(path)."
        ) from error


def as_html(history: History) -> str:
    """A small table for notebooks: the last epochs, the best value of each column in bold."""
    # Imported here: its table of characters is slow to import, and `import ipufit` must stay quick.
    import html

    names = list(history.history)
    columns: Dict[str, List[float]] = {name: history.aligned(name) for name in names}
    best: Dict[str, Any] = {
        name: history_plot.best_place(columns[name], direction)
        for name in names
        for direction in [direction_of(name, history.params.get("directions"))]
        if direction is not None
    }
    shown = set(range(len(history.epoch))[-_ROWS:]) | {p for p in best.values() if p is not None}
    rows, before = [], -1
    for place in sorted(shown):
        if place != before + 1:
            rows.append(f"<tr><td colspan='{len(names) + 1}'>&#8230;</td></tr>")
        before = place
        cells = [_cell(columns[name][place], best.get(name) == place) for name in names]
        rows.append(f"<tr><td>{history.epoch[place]}</td>{''.join(cells)}</tr>")
    head = "".join(f"<th>{html.escape(name)}</th>" for name in ["epoch", *names])
    count = len(history.epoch)
    return (
        f"<table><caption>History of {count} epoch{'' if count == 1 else 's'}</caption>"
        f"<thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>"
    )


def _cell(value: float, best: bool) -> str:
    text = "" if math.isnan(value) else f"{value:.4g}"
    return f"<td><b>{text}</b></td>" if best else f"<td>{text}</td>"
