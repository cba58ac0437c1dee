"""Callbacks that write the weights, or exchange them for their moving average."""

from __future__ import annotations

import contextlib
import os
import re
import string
from typing import Dict, List, Literal, Mapping, Optional, Tuple, Union

from ipufit.callbacks.callback import Callback, Logs, UpdateCount, finite, one_of, stored, whole
from ipufit.callbacks.stopping import Monitor
from ipufit.core import Direction, Mention
from ipufit.core.weights_file import check_path
from ipufit.errors import ConfigurationError, unfit
from ipufit.utils.console import say


class ModelCheckpoint(Monitor):
    """Writes the module's weights to safetensors files, which are never half-written.

    The files are those of :meth:`ipufit.Model.save_weights`.

    Args:
        filepath: ends with ".safetensors"; may have fields such as ``{epoch:02d}`` (counted from
            1), ``{val_loss:.2f}``, and with a number as ``save_freq`` ``{batch}``, the number of
            updates in the epoch. Folders are created. An existing file is overwritten.
        monitor: name of the value for ``save_best_only``.
        verbose: 1 to print a message.
        save_best_only: write only when the value is the best so far, over all fits.
        save_weights_only: must be True: for checkpoints of the whole training, use
            ``fit(checkpoint=...)``.
        mode: "min", "max", or "auto", as the metric declares; an error if it declares nothing.
        save_freq: "epoch", or a number of weight updates: an execution ends there, so the file has
            the weights after exactly so many updates, counted from the start of ``fit``. Values are
            then the means of the epoch so far, without validation.
        initial_value_threshold: value that the first file must improve on; None accepts any.
        keep: how many of the latest files of this object are kept; None keeps all.

    Attributes:
        best: the best value so far, or None.
        files: paths of the files that it has written and not removed, oldest first.

    Raises:
        ConfigurationError: an argument can't work; or, in training, the value does not exist.
    """

    adds: Tuple[str, ...] = ()
    writes_files = True

    def __init__(
        self,
        filepath: Union[str, os.PathLike[str]],
        monitor: str = "val_loss",
        verbose: Mention = 0,
        save_best_only: bool = False,
        save_weights_only: bool = True,
        mode: Direction = "auto",
        save_freq: Union[Literal["epoch"], int] = "epoch",
        initial_value_threshold: Optional[float] = None,
        keep: Optional[int] = None,
    ) -> None:
        super().__init__(monitor, mode)
        self.filepath: str = os.fspath(filepath)
        self.verbose: int = one_of(self, "verbose", verbose, Mention)
        self.save_best_only: bool = one_of(self, "save_best_only", save_best_only, (True, False))
        if save_weights_only is not True:
            advice = (
                "Leave it out to write weights; fit(checkpoint='runs/1') writes checkpoints of "
                "the whole training."
            )
            raise unfit("save_weights_only of ModelCheckpoint", "True", save_weights_only, advice)
        self.save_freq = save_freq
        if save_freq != "epoch":
            self.every_updates: Optional[int] = whole(self, "save_freq", save_freq, 1)
        if initial_value_threshold is not None:
            initial_value_threshold = finite(
                self, "initial_value_threshold", initial_value_threshold
            )
        self.best = initial_value_threshold
        self.keep: Optional[int] = None if keep is None else whole(self, "keep", keep, 1)
        self.files: List[str] = []
        self._count = UpdateCount()
        wanted = self._check_fields()
        if self.save_best_only:
            wanted = (*wanted, self.monitor)
        self.monitors: Tuple[str, ...] = tuple(
            name for name in wanted if name not in ("updates", "samples")
        )
        self._check_running(wanted)

    def _check_fields(self) -> Tuple[str, ...]:
        """Names of values in the path, which is tried out."""
        parts = list(string.Formatter().parse(self.filepath))
        fields = {field for _, field, _, _ in parts if field is not None}
        counters = {"epoch": 1, **({"batch": 1} if self.every_updates is not None else {})}
        try:
            path = self.filepath.format(**{**dict.fromkeys(fields, 0.5), **counters})
        except (AttributeError, IndexError, KeyError, ValueError) as error:
            raise ConfigurationError(
                "filepath of ModelCheckpoint may have fields such as {epoch:02d} and "
                f"{{val_loss:.2f}}, but {self.filepath!r} can't be filled in: {error}. Correct "
                "the field, or double each literal brace."
            ) from error
        if "batch" in fields and self.every_updates is None:
            raise ConfigurationError(
                "filepath of ModelCheckpoint may have the field {batch} only if save_freq is a "
                f"number of updates, got {self.filepath!r}. Use {{epoch}}."
            )
        if not path.endswith(".safetensors"):
            check_path(path)
        return tuple(sorted(fields - set(counters)))

    def _own_path(self) -> re.Pattern[str]:
        """Return the pattern of the paths that ``filepath`` stands for."""
        parts = string.Formatter().parse(self.filepath)
        filled = ((text, "" if name is None else r"[^/\\]+") for text, name, *_ in parts)
        return re.compile("".join(re.escape(text) + field for text, field in filled))

    def _check_running(self, wanted: Tuple[str, ...]) -> None:
        late = [name for name in wanted if name.startswith("val_")]
        if late and self.every_updates is not None:
            raise ConfigurationError(
                f"ModelCheckpoint with save_freq={self.save_freq} writes in the middle of an "
                f"epoch, where {late[0]!r} has no value. Use a value of training, such as 'loss', "
                "or save_freq='epoch'."
            )

    def _find_direction(self) -> str:
        return super()._find_direction() if self.save_best_only else "min"

    def on_train_begin(self, logs: Optional[Logs] = None) -> None:
        """Create the folder, to detect a path that can't be written before any work."""
        super().on_train_begin(logs)
        self._count = UpdateCount()
        folder = os.path.dirname(self.filepath)
        if not any(field is not None for _, field, _, _ in string.Formatter().parse(folder)):
            self._make_folder(folder.format())
            if "{" not in self.filepath:
                check_path(self.filepath)

    def _make_folder(self, folder: str) -> None:
        try:
            os.makedirs(folder or ".", exist_ok=True)
        except OSError as error:
            raise ConfigurationError(
                f"ModelCheckpoint writes into the folder {folder!r}, but it can't be made: "
                f"{error}. Choose another filepath."
            ) from error

    def state_dict(self) -> Dict[str, object]:
        """Return the best value, the files, and the number of updates."""
        progress = {"files": list(self.files), "count": self._count.state_dict()}
        return {**super().state_dict(), **progress}

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Restore what :meth:`state_dict` returned.

        Raises:
            ValueError: it names files that this object can't have written.
        """
        files = [str(file) for file in stored(state, "files", list)]
        foreign = [file for file in files if not self._own_path().fullmatch(file)]
        if foreign:
            raise ValueError(f"{foreign[0]!r} does not match filepath={self.filepath!r}")
        super().load_state_dict(state)
        self.files = files
        self._count.load_state_dict(stored(state, "count", dict))

    def on_epoch_begin(self, epoch: int, logs: Optional[Logs] = None) -> None:
        """Count the updates of finished epochs."""
        self._count.begin_epoch(epoch)

    def on_train_batch_end(self, batch: int, logs: Optional[Logs] = None) -> None:
        """Write a file after the updates of ``save_freq``."""
        if self._count.end_execution(batch, self.every_updates):
            self._consider(self._count.epoch, {"batch": batch + 1, **dict(logs or {})})

    def on_epoch_end(self, epoch: int, logs: Optional[Logs] = None) -> None:
        """Write a file if ``save_freq`` is "epoch"."""
        if self.every_updates is None:
            self._consider(epoch, dict(logs or {}))

    def _consider(self, epoch: int, logs: Logs) -> None:
        if not self.save_best_only:
            self._save(epoch, logs)
            return
        current = self._current(logs)
        if current is None:
            return
        if self._improves(current, self.best):
            self.best = current
            self._save(epoch, logs)
        elif self.verbose:
            say(f"epoch {epoch + 1}: {self.monitor} {current:.5g} is not better than {self.best}")

    def _save(self, epoch: int, logs: Logs) -> None:
        try:
            path = self.filepath.format(**{**logs, "epoch": epoch + 1})
        except KeyError as error:
            raise ConfigurationError(
                f"filepath of ModelCheckpoint has a field {error.args[0]} that no epoch logs, "
                f"got {self.filepath!r}. There is epoch, {', '.join(logs)}."
            ) from error
        self._make_folder(os.path.dirname(path))
        self.model.save_weights(path)
        if self.verbose:
            say(f"epoch {epoch + 1}: wrote {path}")
        self.files = [*(file for file in self.files if file != path), path]
        while self.keep is not None and len(self.files) > self.keep:
            with contextlib.suppress(FileNotFoundError):
                os.remove(self.files.pop(0))


class SwapEMAWeights(Callback):
    """Evaluates with the exponential moving average of the weights in ``fit``.

    The model must be compiled with ``ema``. The callback is for ``fit``; a separate ``evaluate`` or
    ``predict`` refuses it, because after ``fit`` the averages are the weights. It calls
    :meth:`ipufit.Model.swap_ema_weights`, and restores the trained weights, also after an error.

    Args:
        swap_on_epoch: also have the averages in the model at the end of an epoch, for the callbacks
            after this one, such as ModelCheckpoint, until the next epoch begins or training ends.

    Raises:
        ConfigurationError: ``swap_on_epoch`` is neither True nor False.
    """

    adds: Tuple[str, ...] = ()

    def __init__(self, swap_on_epoch: bool = False) -> None:
        super().__init__()
        self.swap_on_epoch: bool = one_of(self, "swap_on_epoch", swap_on_epoch, (True, False))
        self._swapped = False

    def _swap(self, averaged: bool) -> None:
        if self._swapped is not averaged:
            self.model.swap_ema_weights()
            self._swapped = averaged

    def on_epoch_begin(self, epoch: int, logs: Optional[Logs] = None) -> None:
        """Restore the trained weights before the epoch."""
        self._swap(False)

    def on_epoch_end(self, epoch: int, logs: Optional[Logs] = None) -> None:
        """Put the averages into the module for the callbacks after this one."""
        if self.swap_on_epoch:
            self._swap(True)

    def on_test_begin(self, logs: Optional[Logs] = None) -> None:
        """Put the averages into the module for the evaluation or prediction."""
        self._swap(True)

    def on_test_end(self, logs: Optional[Logs] = None) -> None:
        """Restore the trained weights."""
        self._swap(False)

    on_predict_begin = on_test_begin
    on_predict_end = on_test_end
    on_train_end = on_test_end

    def close(self) -> None:
        """Restore the trained weights, also after an error."""
        self._swap(False)
