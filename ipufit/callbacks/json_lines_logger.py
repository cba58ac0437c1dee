"""The values of epochs and updates as lines of JSON."""

from __future__ import annotations

import os
from typing import Any, Mapping, Optional, Tuple, Union

from ipufit.callbacks.callback import Callback, Logs
from ipufit.callbacks.checks import one_of, whole
from ipufit.callbacks.records import as_json, check_length, log_file
from ipufit.callbacks.update_count import UpdateCount

__all__ = ["JSONLinesLogger"]


class JSONLinesLogger(Callback):
    """Writes one line of JSON an epoch, and one every so many updates if asked to.

    A line has "event" ("epoch" or "update"), "epoch" (its index), "update" (how many were done
    since ``fit`` began) and the values: those of the epoch, or their means so far. Values that are
    not finite are the strings "NaN", "Infinity" and "-Infinity".

    Args:
        filename: of the file; its folder is made.
        append: go on with a file that is there; False replaces it.
        every_updates: write a line after every that many updates, counted from the start of
            ``fit``; None writes epochs only.

    Raises:
        ConfigurationError: an argument can't work; or, in training, the file can't be written.
    """

    adds: Tuple[str, ...] = ()
    writes_files = True

    def __init__(
        self,
        filename: Union[str, os.PathLike[str]],
        append: bool = False,
        every_updates: Optional[int] = None,
    ) -> None:
        super().__init__()
        self.filename: str = os.fspath(filename)
        self.append: bool = one_of(self, "append", append, (True, False))
        if every_updates is not None:
            self.every_updates: Optional[int] = whole(self, "every_updates", every_updates, 1)
        self._file: Any = None
        self._count = UpdateCount()

    def _write(self, event: str, values: Mapping[str, object]) -> None:
        record = {"event": event, "epoch": self._count.epoch, "update": self._count.done, **values}
        self._file.write(as_json(record) + "\n")
        # Whoever reads along, or finds the file after a crash, has every line.
        self._file.flush()

    def on_train_begin(self, logs: Optional[Logs] = None) -> None:
        """Open the file, to append to it where it is to be kept."""
        path = log_file(self, self.filename)
        goes_on = self.append or self.params.get("resumes")
        self._file = open(path, "a" if goes_on else "w", encoding="utf-8")  # noqa: SIM115
        self._count = UpdateCount()

    def state_dict(self) -> Any:
        """How long the file is, and how many updates there were."""
        size = os.fstat(self._file.fileno()).st_size
        return {"size": size, "count": self._count.state_dict()}

    def load_state_dict(self, state: Any) -> None:
        """Take out the lines that came later: they come again.

        Raises:
            ConfigurationError: the file is shorter.
        """
        size = os.fstat(self._file.fileno()).st_size
        check_length(self, self.filename, "bytes", size, state["size"])
        self._file.truncate(state["size"])
        self._count.load_state_dict(state["count"])

    def on_epoch_begin(self, epoch: int, logs: Optional[Logs] = None) -> None:
        """Count the updates of finished epochs."""
        self._count.begin_epoch(epoch)

    def on_train_batch_end(self, batch: int, logs: Optional[Logs] = None) -> None:
        """Write the line of an update, if one is due."""
        if self._count.end_execution(batch, self.every_updates):
            self._write("update", {} if logs is None else logs)

    def on_epoch_end(self, epoch: int, logs: Optional[Logs] = None) -> None:
        """Write the line of the epoch."""
        self._write("epoch", {} if logs is None else logs)

    def close(self) -> None:
        """Close the file, if it is open."""
        if self._file is not None:
            self._file.close()
            self._file = None
