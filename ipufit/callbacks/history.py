"""History: the values of every epoch of a fit, with its files and its table."""

from __future__ import annotations

import csv
import json
import math
import os
import re
from typing import Any, Dict, List, Mapping, Optional, Sequence, Tuple, Union

from ipufit.callbacks import history_plot
from ipufit.callbacks.callback import Callback, Logs, stored
from ipufit.core import Direction
from ipufit.errors import ConfigurationError
from ipufit.utils.error_collector import one_of

Path = Union[str, "os.PathLike[str]"]

_FORMAT = "ipufit.History/1"
_ROWS = 8  # epochs that a notebook shows

# Words in the names of metrics, by whether their values are better when large or small.
_LARGE = {
    *("acc", "accuracy", "auc", "auroc", "f1", "fbeta", "precision", "recall", "specificity"),
    *("sensitivity", "iou", "jaccard", "dice", "map", "ap", "r2", "psnr", "ssim", "bleu", "rouge"),
    *("kappa", "mcc", "similarity", "ndcg", "mrr", "top1", "top3", "top5", "correct"),
}
_SMALL = {
    *("loss", "error", "mse", "mae", "rmse", "mape", "msle", "perplexity", "ppl", "nll", "wer"),
    *(
        "cer",
        "hinge",
        "divergence",
        "crossentropy",
        "bce",
        "logloss",
        "brier",
        "fid",
        "deviance",
        "distance",
    ),
}


def direction_of(
    name: str, directions: Optional[Mapping[str, str]] = None, guess: bool = True
) -> Optional[str]:
    """Return "min" or "max", the direction of better values of a metric; None if unknown.

    Args:
        name: such as "val_loss", "BinaryAccuracy" or "top5_acc"; its words decide where nothing is
            known, and of these the last one with a meaning: an "accuracy_loss" is a loss.
        directions: what losses and metrics say of themselves, by name: ``params["directions"]``.
        guess: whether other words than "loss" count. Not where a wrong guess would keep the worst
            weights instead of the best.
    """
    if directions is not None and name in directions:
        return directions[name]
    if not guess:
        return "min" if name.endswith("_loss") else None
    spaced = re.sub(r"([a-z0-9])([A-Z])", r"\1_\2", name)
    spaced = re.sub(r"(?i)cross_entropy", "crossentropy", spaced)
    for word in reversed(re.split(r"[^a-z0-9]+", spaced.lower())):
        if word in _SMALL:
            return "min"
        if word in _LARGE:
            return "max"
    return None


def required_direction(
    owner: object, monitor: str, mode: str, directions: Optional[Mapping[str, str]]
) -> str:
    """Return "min" or "max", the better end of a value by which something is kept or ended.

    Args:
        owner: watches the value; its class is named in the error.
        monitor: name of the value.
        mode: "min", "max", or "auto" to take what losses and metrics say.
        directions: what they say of themselves, by name: ``params["directions"]``.

    Raises:
        ConfigurationError: nobody knows, so a guess might keep the worst instead of the best.
    """
    if mode != "auto":
        return mode
    direction = direction_of(monitor, directions, guess=False)
    if direction is not None:
        return direction
    raise ConfigurationError(
        f"{type(owner).__name__} must know whether a small or a large {monitor!r} is better. "
        "Pass mode='min' or mode='max'."
    )


def improves(value: float, best: Optional[float], direction: str, min_delta: float = 0.0) -> bool:
    """Return True if a value beats the best by more than ``min_delta``; NaN never does.

    Args:
        value: the new one.
        best: the best before; None where there is none, which any number beats.
        direction: "min" or "max".
        min_delta: smallest improvement that counts.
    """
    if best is None:
        return not math.isnan(value)
    if direction == "min":
        return value + min_delta < best
    return value - min_delta > best


def best_place(values: Sequence[float], direction: str) -> Optional[int]:
    """Index of the first value that is as good as any; None if all are NaN."""
    sign = 1.0 if direction == "min" else -1.0
    ranked = [(sign * value, i) for i, value in enumerate(values) if not math.isnan(value)]
    return min(ranked)[1] if ranked else None


class History(Callback):
    """The values of every epoch.

    ``fit`` creates one and returns it, or uses one that is among its callbacks. A notebook shows it
    as a table. It runs after the user's callbacks, so it includes what they add to ``logs``. It
    keeps no reference to the model. See docs/history-and-summary.md.

    Args:
        params: settings of the run; ``fit`` fills it in.

    Attributes:
        history: one list per name ("loss", metrics, and the same with ``val_``), one value per
            epoch. "loss" is the mean over all samples of the epoch. If an epoch has no value,
            because validation did not run, the list has no entry for it; :meth:`aligned` shows
            where.
        epoch: indices of the finished epochs.
        updates: values that were logged per update: by name, pairs of the update's index since
            ``compile`` and the value.
        params: settings and facts of the run, by name: "epochs", "updates" and "samples" per epoch,
            "seed", "engine", the plan, "dropped_samples", "metrics", "directions" (whether smaller
            or larger is better), "updates_done" (weight updates, also of a run that was stopped),
            "capture_seconds" (spent on recording), "recordings" (number of batch shapes that were
            recorded), "eager_shapes" (number of shapes that can't be recorded), "jit" (how the
            program ran), "prefetch", the limits that were set, and the arguments of ``compile``
            about gradients, precision and outputs. After resuming, "resumed" has the "checkpoint",
            "update" and "epoch", and how the "data" got there; "resume_changes" lists what
            "changed" at which "update", and allowed names that are "unchanged".
    """

    adds: Tuple[str, ...] = ()

    def __init__(self, params: Optional[Mapping[str, object]] = None) -> None:
        super().__init__()
        self.history: Dict[str, List[float]] = {}
        self.epoch: List[int] = []
        self.updates: Dict[str, List[Tuple[int, float]]] = {}
        self.params: Dict[str, Any] = dict(params or {})
        # For each list in history, the places in epoch that its values belong to.
        self._places: Dict[str, List[int]] = {}

    def set_model(self, model: Any) -> None:
        """Ignore the model, so that a history can be copied and stored."""

    def on_train_begin(self, logs: Optional[Logs] = None) -> None:
        """Forget the values of an earlier fit."""
        self.history = {}
        self.epoch = []
        self.updates = {}
        self._places = {}

    def on_epoch_end(self, epoch: int, logs: Optional[Logs] = None) -> None:
        """Append the epoch's values to those of the epochs before."""
        self.append(epoch, logs or {})

    def append(self, epoch: int, logs: Mapping[str, float]) -> None:
        """Add the values of a finished epoch.

        Args:
            epoch: its index.
            logs: its values by name.

        Raises:
            ConfigurationError: a value is not a number; nothing is added.
        """
        values = {name: _number(name, value) for name, value in logs.items()}
        self.epoch.append(epoch)
        for name, number in values.items():
            self._places.setdefault(name, []).append(len(self.epoch) - 1)
            self.history.setdefault(name, []).append(number)

    def state_dict(self) -> Dict[str, object]:
        """Return everything but ``params``."""
        return {
            "epoch": list(self.epoch),
            "history": {name: list(values) for name, values in self.history.items()},
            "updates": {name: list(values) for name, values in self.updates.items()},
            "places": {name: self.places(name) for name in self.history},
        }

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Restore what :meth:`state_dict` returned."""
        self.epoch = [int(epoch) for epoch in stored(state, "epoch", list)]
        self.history = {
            str(name): [float(value) for value in values]
            for name, values in stored(state, "history", dict).items()
        }
        self.updates = {
            str(name): [(int(update), float(value)) for update, value in points]
            for name, points in stored(state, "updates", dict).items()
        }
        self._places = {
            str(name): [int(place) for place in places]
            for name, places in stored(state, "places", dict).items()
        }

    def append_update(self, name: str, update: int, value: float) -> None:
        """Add a value that belongs to one update.

        Args:
            name: what it is.
            update: its index since ``compile``; larger than that of the name's value before.
            value: a number.
        """
        self.updates.setdefault(name, []).append((int(update), float(value)))

    def places(self, name: str) -> List[int]:
        """For each value in ``history[name]``, the place in ``epoch`` that it belongs to.

        Args:
            name: of the value, such as "val_loss".

        Raises:
            ConfigurationError: there is no such name; lists the existing ones.
        """
        self._check_name(name)
        count, places = len(self.history[name]), self._places.get(name, [])
        if len(places) == count:
            return list(places)
        # A list that somebody put there by hand: its end is the last epoch.
        return list(range(len(self.epoch) - count, len(self.epoch)))

    def aligned(self, name: str) -> List[float]:
        """One value per epoch in ``epoch``, NaN where the epoch has none.

        Args:
            name: of the value, such as "val_loss".

        Raises:
            ConfigurationError: there is no such name; lists the existing ones.
        """
        value_by_place = dict(zip(self.places(name), self.history[name]))
        return [value_by_place.get(place, math.nan) for place in range(len(self.epoch))]

    def best_epoch(self, monitor: str = "val_loss", mode: Direction = "auto") -> int:
        """Index of the epoch with the best value; the first one if several are equal.

        Args:
            monitor: name of the value.
            mode: "min", "max", or "auto": by the loss or metric, or by the name: losses and errors
                should be small, accuracies large.

        Returns:
            An element of ``epoch``. NaN is never the best value.

        Raises:
            ConfigurationError: there is no such name, all values are NaN, or "auto" can't tell
                which direction is better.
        """
        one_of("mode", mode, Direction, "Use 'min' where a smaller value is better.")
        self._check_name(monitor)
        directions = self.params.get("directions")
        direction = direction_of(monitor, directions) if mode == "auto" else mode
        if direction is None:
            raise ConfigurationError(
                "mode='auto' needs a name that says whether smaller is better, such as 'val_loss' "
                f"or 'val_accuracy', got {monitor!r}. Pass mode='min' or mode='max'."
            )
        place = best_place(self.aligned(monitor), direction)
        if place is None:
            raise ConfigurationError(
                f"best_epoch needs an epoch with a value of {monitor!r}, but all are NaN. "
                "Monitor another value."
            )
        return self.epoch[place]

    def to_csv(self, path: Path) -> None:
        """Write one line per epoch, with a header; a cell is empty where an epoch has no value.

        Args:
            path: of the file, which is overwritten. Values have all their digits.
        """
        columns = [self._cells(name) for name in self.history]
        with open(path, "w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow(["epoch", *self.history])
            writer.writerows(zip(self.epoch, *columns))

    def _cells(self, name: str) -> List[str]:
        cells = [""] * len(self.epoch)
        for place, value in zip(self.places(name), self.history[name]):
            cells[place] = repr(value)
        return cells

    def to_json(self, path: Optional[Path] = None) -> str:
        """Convert everything to JSON: values, ``updates`` and ``params``.

        Args:
            path: also write it to this file; None only returns it.

        Returns:
            The text, which :meth:`from_json` reads. NaN and infinities are strings in it.

        Raises:
            ConfigurationError: ``params`` has a value that JSON can't represent.
        """
        content = {"format": _FORMAT, "params": self.params, **values_to_json(self)}
        try:
            text = json.dumps(content, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise ConfigurationError(
                "History.params must hold only JSON values (finite numbers, strings, lists, "
                f"dicts, None), but {str(error).rstrip('.')}. Remove that entry, or convert it "
                "to a string."
            ) from error
        if path is not None:
            with open(path, "w", encoding="utf-8") as file:
                file.write(text + "\n")
        return text

    @classmethod
    def from_json(cls, source: Path) -> History:
        """Read a history that :meth:`to_json` wrote, with the same values.

        Args:
            source: path of the file, or the text itself, which begins with a brace.

        Raises:
            ConfigurationError: the file or text has another format.
        """
        history = cls()
        text = os.fspath(source)
        came = "the text"
        if not text.lstrip().startswith("{"):
            came = repr(text)
            try:
                with open(text, encoding="utf-8") as file:
                    text = file.read()
            except OSError as error:
                raise ConfigurationError(
                    f"from_json needs a file that to_json wrote, or its text, but {error}. Check "
                    "the path."
                ) from error
        try:
            content = json.loads(text)
            if content["format"] != _FORMAT:
                raise ValueError(f"its format is {content['format']!r}")
            history.params.update(content["params"])
            history.epoch.extend(content["epoch"])
            for name, pairs in content["history"].items():
                history._places[name] = [place for place, _ in pairs]
                history.history[name] = [float(value) for _, value in pairs]
            for name, pairs in content["updates"].items():
                history.updates[name] = [(update, float(value)) for update, value in pairs]
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigurationError(
                f"from_json needs the output of History.to_json, got something else in {came} "
                f"({type(error).__name__}: {error}). Write it with history.to_json(path)."
            ) from error
        return history

    def to_dataframe(self) -> Any:
        """A pandas ``DataFrame``: one row per epoch, one column per name, NaN where there is none.

        Raises:
            ConfigurationError: pandas is not installed (``pip install ipufit[pandas]``).
        """
        try:
            import pandas
        except ImportError as error:
            raise ConfigurationError(
                "History.to_dataframe needs pandas, which is not installed. Run: "
                "pip install ipufit[pandas]"
            ) from error
        index = pandas.Index(self.epoch, name="epoch", dtype="int64")
        columns = {name: self.aligned(name) for name in self.history}
        return pandas.DataFrame(columns, index=index, dtype="float64")

    def plot(
        self,
        path: Optional[Path] = None,
        metrics: Union[str, Sequence[str], None] = None,
        *,
        columns: Optional[int] = None,
        mark_best: bool = True,
    ) -> Any:
        """Draw each value over the epochs, training and validation in one panel.

        Args:
            path: where to save the picture (the suffix chooses the format); None only returns it,
                which shows it in a notebook.
            metrics: names of values without ``val_``, in this order; None for all, including those
                logged per update.
            columns: panels in a row; None chooses.
            mark_best: whether to mark the best epoch, by validation if there is any, of every value
                whose better direction is known.

        Returns:
            The matplotlib ``Figure``. Values over several orders of magnitude have a logarithmic
            axis, and epochs whose value is not finite a cross.

        Raises:
            ConfigurationError: matplotlib is not installed, no epoch has finished, or a name does
                not exist.
        """
        if not self.epoch:
            raise ConfigurationError(
                "plot needs at least one finished epoch, but there is none yet."
            )
        best = {}
        if mark_best:
            finite = {
                name: [value if math.isfinite(value) else math.nan for value in self.aligned(name)]
                for name in self.history
            }
            best = self._best_places(finite)
        return history_plot.draw(self, path, metrics, columns, best)

    def __repr__(self) -> str:
        last = ", ".join(
            f"{name}={values[-1]:.4g}" for name, values in self.history.items() if values
        )
        return f"History({len(self.epoch)} epochs{': ' + last if last else ''})"

    def _repr_html_(self) -> str:
        """Return a small table for notebooks: the last epochs, the best of each column in bold."""
        # Imported here: its table of characters would slow `import ipufit` down.
        import html

        names = list(self.history)
        columns: Dict[str, List[float]] = {name: self.aligned(name) for name in names}
        best = self._best_places(columns)
        shown = {*range(len(self.epoch))[-_ROWS:], *best.values()}
        rows, before = [], -1
        for place in sorted(shown):
            if place != before + 1:
                rows.append(f"<tr><td colspan='{len(names) + 1}'>&#8230;</td></tr>")
            before = place
            cells = [_cell(columns[name][place], best.get(name) == place) for name in names]
            rows.append(f"<tr><td>{self.epoch[place] + 1}</td>{''.join(cells)}</tr>")
        head = "".join(f"<th>{html.escape(name)}</th>" for name in ["epoch", *names])
        count = len(self.epoch)
        return (
            f"<table><caption>History of {count} epoch{'' if count == 1 else 's'}</caption>"
            f"<thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>"
        )

    def _best_places(self, columns: Mapping[str, Sequence[float]]) -> Dict[str, int]:
        """Find the best of one value per epoch, by name, where it is known which way is better."""
        directions = self.params.get("directions")
        places: Dict[str, int] = {}
        for name, values in columns.items():
            direction = direction_of(name, directions)
            place = None if direction is None else best_place(values, direction)
            if place is not None:
                places[name] = place
        return places

    def _check_name(self, name: str) -> None:
        if name not in self.history:
            raise ConfigurationError(
                f"the history must have a value of that name, got {name!r}. It has "
                f"{', '.join(self.history) or 'none yet'}."
            )


def values_to_json(history: History) -> Dict[str, object]:
    """Return the values of every epoch, each with the place of its epoch, and the logged ones.

    Numbers that are not finite are texts.
    """
    return {
        "epoch": list(history.epoch),
        "history": {
            name: [[place, _json_number(v)] for place, v in zip(history.places(name), values)]
            for name, values in history.history.items()
        },
        "updates": {
            name: [[update, _json_number(value)] for update, value in values]
            for name, values in history.updates.items()
        },
    }


def _number(name: str, value: float) -> float:
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ConfigurationError(
            f"values of an epoch must be numbers, but {name!r} in logs is a "
            f"{type(value).__name__}. Keep it in the callback itself, or log a number."
        ) from error


def _json_number(value: float) -> Union[float, str]:
    return value if math.isfinite(value) else str(value)


def _cell(value: float, best: bool) -> str:
    text = "" if math.isnan(value) else f"{value:.4g}"
    return f"<td><b>{text}</b></td>" if best else f"<td>{text}</td>"
