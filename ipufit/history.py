"""What happened in a fit."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, Dict, List, Mapping, Optional, Union

from ipufit.callbacks.callback import Callback, Logs
from ipufit.errors import ConfigurationError

if TYPE_CHECKING:
    from ipufit.model import Model

__all__ = ["History"]


class History(Callback):
    """The values of every epoch.

    As a callback it stands after those of the user, so that it has what they add to ``logs``. It
    keeps no reference to the model.

    Attributes:
        history: one list per name ("loss", metrics, and the same with "val_"), one value per epoch.
            "loss" is the mean over all samples of the epoch. Values that an epoch has not
            (validation that did not run) are absent from the list.
        epoch: indices of the finished epochs.
        params: how the run was made: epochs, plan, seed, engine, seconds spent on recording.
    """

    adds = ()

    def __init__(self, params: Optional[Mapping[str, Any]] = None) -> None:
        super().__init__()
        self.history: Dict[str, List[float]] = {}
        self.epoch: List[int] = []
        self.params: Dict[str, Any] = dict(params or {})

    def set_model(self, model: Model) -> None:
        """Without the model, a history can be copied and stored."""

    def on_train_begin(self, logs: Optional[Logs] = None) -> None:
        """Forget an earlier fit."""
        self.history = {}
        self.epoch = []

    def on_epoch_end(self, epoch: int, logs: Optional[Logs] = None) -> None:
        """Add the epoch's values."""
        self.append(epoch, logs or {})

    def append(self, epoch: int, logs: Mapping[str, float]) -> None:
        """Add the values of a finished epoch."""
        self.epoch.append(epoch)
        for name, value in logs.items():
            self.history.setdefault(name, []).append(float(value))

    def __repr__(self) -> str:
        last = ", ".join(f"{name}={values[-1]:.4g}" for name, values in self.history.items())
        return f"History({len(self.epoch)} epochs{': ' + last if last else ''})"

    def plot(self, path: Optional[Union[str, os.PathLike[str]]] = None) -> Any:
        """Draw each value over the epochs, training and validation in one panel.

        Args:
            path: where to save the picture (the suffix chooses the format); None to only return it.

        Returns:
            The matplotlib ``Figure``.

        Raises:
            ConfigurationError: matplotlib is not installed, or no epoch has finished.
        """
        if not self.epoch:
            raise ConfigurationError("plot needs at least one finished epoch, there is none yet.")
        try:
            from matplotlib.backends.backend_agg import FigureCanvasAgg
            from matplotlib.figure import Figure
        except ImportError as error:
            raise ConfigurationError(
                "History.plot needs matplotlib, which is not installed. Run: "
                "pip install ipufit[plot]"
            ) from error
        names = [name for name in self.history if not name.startswith("val_")]
        names += [n for n in self.history if n.startswith("val_") and n[4:] not in names]
        figure = Figure(figsize=(4.8 * len(names), 3.6), layout="constrained")
        FigureCanvasAgg(figure)
        panels = figure.subplots(1, len(names), squeeze=False)[0]
        for panel, name in zip(panels, names):
            for key, label, style in ((name, "training", "-"), (f"val_{name}", "validation", "--")):
                values = self.history.get(key)
                if values:
                    epochs = [epoch + 1 for epoch in self.epoch[-len(values) :]]
                    panel.plot(epochs, values, style, marker="o", markersize=3, label=label)
            panel.set_title(name)
            panel.set_xlabel("epoch")
            panel.grid(alpha=0.3)
            panel.legend(frameon=False)
            panel.xaxis.get_major_locator().set_params(integer=True)
        if path is not None:
            figure.savefig(path, dpi=120)
        return figure
