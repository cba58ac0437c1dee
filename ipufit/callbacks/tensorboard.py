"""Curves for TensorBoard."""

from __future__ import annotations

import os
from typing import Any, Dict, Mapping, Optional, Tuple, Union

from ipufit.callbacks.callback import Callback, Logs
from ipufit.callbacks.checks import whole
from ipufit.callbacks.rates import log_rates
from ipufit.callbacks.records import means
from ipufit.callbacks.update_count import UpdateCount
from ipufit.errors import ConfigurationError

__all__ = ["TensorBoard"]


class TensorBoard(Callback):
    """Writes scalars under the names that Keras gives them, and histograms of the weights.

    Into ``train`` and ``validation`` under ``log_dir``: "epoch_<name>" over the epochs, the
    learning rate among them; "batch_<name>" over the updates since ``fit`` began, the means of the
    epoch so far; and of every evaluation "evaluation_<name>_vs_iterations" over the updates that
    this object has seen.

    Args:
        log_dir: the folder.
        histogram_freq: write histograms of all parameters every that many epochs; 0 never.
        update_freq: "epoch"; "batch" for every execution too; or a number: every that many
            updates too, for which executions are cut.

    Raises:
        ConfigurationError: an argument can't work, or the package tensorboard is not installed.
    """

    adds: Tuple[str, ...] = ()
    writes_files = True

    def __init__(
        self,
        log_dir: Union[str, os.PathLike[str]] = "logs",
        histogram_freq: int = 0,
        update_freq: Union[str, int] = "epoch",
    ) -> None:
        super().__init__()
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ConfigurationError(
                "TensorBoard needs the package tensorboard, which is not installed. Run: "
                "pip install ipufit[tensorboard]"
            ) from error
        self._make: Any = SummaryWriter
        self.log_dir: str = os.fspath(log_dir)
        self.histogram_freq: int = whole(self, "histogram_freq", histogram_freq)
        self.update_freq = update_freq
        if update_freq not in ("epoch", "batch"):
            self.every_updates: Optional[int] = whole(self, "update_freq", update_freq, 1)
        self._writers: Dict[str, Any] = {}
        self._count = UpdateCount()
        self._updates_seen = 0

    def _write(self, part: str, pattern: str, values: Mapping[str, Any], step: int) -> None:
        if part not in self._writers:
            self._writers[part] = self._make(os.path.join(self.log_dir, part))
        for name, value in values.items():
            self._writers[part].add_scalar(pattern.format(name), float(value), step)
        self._writers[part].flush()

    def on_train_begin(self, logs: Optional[Logs] = None) -> None:
        """Count the updates of a new fit from zero."""
        self._count = UpdateCount()

    def state_dict(self) -> Any:
        """Return how many updates this fit, and all fits so far, have made."""
        return {"count": self._count.state_dict(), "seen": self._updates_seen}

    def load_state_dict(self, state: Any) -> None:
        """Restore what :meth:`state_dict` returned."""
        self._count.load_state_dict(state["count"])
        self._updates_seen = int(state["seen"])

    def on_epoch_begin(self, epoch: int, logs: Optional[Logs] = None) -> None:
        """Count the updates of finished epochs."""
        self._count.begin_epoch(epoch)

    def on_train_batch_end(self, batch: int, logs: Optional[Logs] = None) -> None:
        """Write the means so far, if they are due."""
        before = self._count.done
        due = self._count.end_execution(batch, self.every_updates)
        self._updates_seen += self._count.done - before
        if due or self.update_freq == "batch":
            self._write("train", "batch_{}", means(logs), self._count.done)

    def on_epoch_end(self, epoch: int, logs: Optional[Logs] = None) -> None:
        """Write the epoch's values, and histograms of the weights where it is their turn."""
        train: Dict[str, float] = {}
        held_out: Dict[str, float] = {}
        for name, value in (logs or {}).items():
            part, short = (held_out, name[4:]) if name.startswith("val_") else (train, name)
            part[short] = value
        log_rates(self.model.optimizer, train)
        self._write("train", "epoch_{}", train, epoch)
        if held_out:
            self._write("validation", "epoch_{}", held_out, epoch)
        if self.histogram_freq and epoch % self.histogram_freq == 0:
            for name, parameter in self.model.module.named_parameters():
                values = parameter.detach().float().cpu()
                self._writers["train"].add_histogram(f"{name}/histogram", values, epoch)

    def on_test_end(self, logs: Optional[Logs] = None) -> None:
        """Write the values of an evaluation at the number of updates made so far."""
        pattern = "evaluation_{}_vs_iterations"
        self._write("validation", pattern, logs or {}, self._updates_seen)

    def close(self) -> None:
        """Close the files of training and validation."""
        writers, self._writers = self._writers, {}
        for writer in writers.values():
            writer.close()
