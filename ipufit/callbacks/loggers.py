"""Callbacks that write the values of a run into files, to a server or to an experiment tracker."""

from __future__ import annotations

import contextlib
import csv
import dataclasses
import json
import math
import os
import sys
import urllib.error
import urllib.parse
import urllib.request
from typing import IO, Any, Callable, Dict, Iterator, List, Literal, Mapping, Optional, Tuple, Union

from ipufit.callbacks import callback
from ipufit.callbacks.learning_rate import log_rates
from ipufit.errors import ConfigurationError, unfit
from ipufit.optim.several import name_of_optimizer
from ipufit.utils.console import warn_user
from ipufit.utils.files import replace_file


def _to_json_line(record: Mapping[str, Union[str, float, None]]) -> str:
    """Return a record as one line of JSON, in which numbers that are not finite are texts.

    JSON has no numbers that are not finite; they become "NaN", "Infinity" and "-Infinity", which
    ``float`` reads.
    """
    return json.dumps({name: _plain(value) for name, value in record.items()}, allow_nan=False)


def _plain(value: Union[str, float, None]) -> Union[str, float, None]:
    if isinstance(value, (bool, str)) or value is None:
        return value
    if isinstance(value, int):
        return int(value)
    number = float(value)
    if math.isfinite(number):
        return number
    return "NaN" if math.isnan(number) else "Infinity" if number > 0 else "-Infinity"


@contextlib.contextmanager
def _name_file(owner: callback.Callback, path: str) -> Iterator[None]:
    """Name the file of a logger where the disk refuses it.

    Raises:
        ConfigurationError: the block raised an OSError.
    """
    try:
        yield
    except OSError as error:
        raise ConfigurationError(
            f"{type(owner).__name__} writes to {path!r}, but it can't: {error}. Free some space or "
            "choose another filename."
        ) from error


def _check_file(owner: callback.Callback, path: str) -> None:
    """Make the folder of a file that a logger writes to; nothing is written yet.

    Raises:
        ConfigurationError: the file can't be written.
    """
    with _name_file(owner, path):
        os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
        with open(path, "a", encoding="utf-8"):
            pass


def _check_length(owner: callback.Callback, path: str, unit: str, length: int, wanted: int) -> None:
    """Make sure that a file still has all that was in it when a checkpoint was written.

    Raises:
        ConfigurationError: it is shorter.
    """
    if length < wanted:
        raise ConfigurationError(
            f"{type(owner).__name__} continues {path!r}, which had {wanted} {unit} when the "
            f"checkpoint was written, but now has {length}. Restore the file, or start a new run "
            "with another filename."
        )


_ABSENT = "NA"


class UpdateLogger(callback.Callback):
    """The base of loggers that write values of updates too: it counts them from the start of fit.

    Args:
        every_updates: None, or write after every that many updates.
        argument: the name that the user knows ``every_updates`` by.
    """

    adds: Tuple[str, ...] = ()
    writes_files = True

    def __init__(self, every_updates: object, argument: str = "every_updates") -> None:
        super().__init__()
        if every_updates is not None:
            self.every_updates: Optional[int] = callback.whole(self, argument, every_updates, 1)
        self._count = callback.UpdateCount()
        self._earlier = 0

    @property
    def _updates_seen(self) -> int:
        """Updates of all fits that this object has seen."""
        return self._earlier + self._count.done

    def on_train_begin(self, logs: Optional[callback.Logs] = None) -> None:
        """Count the updates of a new fit from zero."""
        self._earlier += self._count.done
        self._count = callback.UpdateCount()

    def on_epoch_begin(self, epoch: int, logs: Optional[callback.Logs] = None) -> None:
        """Count the updates of finished epochs."""
        self._count.begin_epoch(epoch)

    def state_dict(self) -> Dict[str, object]:
        """Return how many updates this fit has made; a subclass adds more."""
        return {"count": self._count.state_dict()}

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Restore what :meth:`state_dict` returned."""
        self._count.load_state_dict(callback.stored(state, "count", dict))


class CSVLogger(callback.Callback):
    """Writes one row for each epoch: its index, and its values in alphabetical order.

    The columns are those that are known before training; if a later epoch has a new value, the file
    is written again with one more column. A missing value is "NA".

    Args:
        filename: of the table; its folder is created.
        separator: between the columns, one character.
        append: continue an existing table; False overwrites it.

    Raises:
        ConfigurationError: an argument can't work; or, in training, the file can't be written, or
            is a table of something else.
    """

    adds: Tuple[str, ...] = ()
    writes_files = True

    def __init__(
        self,
        filename: Union[str, os.PathLike[str]],
        separator: str = ",",
        append: bool = False,
    ) -> None:
        super().__init__()
        self.filename: str = os.fspath(filename)
        if not isinstance(separator, str) or len(separator) != 1 or separator in '\r\n"':
            needed = "one character, but not a quote or a line end"
            raise unfit("separator of CSVLogger", needed, separator, "Use ',' or ';' or '\\t'.")
        self.separator = separator
        self.append: bool = callback.one_of(self, "append", append, (True, False))
        self._columns: List[str] = []
        self._rows = 0

    def on_train_begin(self, logs: Optional[callback.Logs] = None) -> None:
        """Open the table, or create it."""
        _check_file(self, self.filename)
        self._columns = ["epoch"]
        rows = self._read() if self.append or self.params.get("resumes") else []
        metrics = [name for name in self.params.get("metrics", ()) if name not in self._columns]
        self._rewrite([*self._columns, *sorted(metrics)], rows)

    def state_dict(self) -> Dict[str, object]:
        """Return the number of rows in the table."""
        return {"rows": self._rows}

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Remove rows that were written later, because they will be written again.

        Raises:
            ConfigurationError: the table has fewer rows.
        """
        rows = self._read()
        kept = callback.stored(state, "rows", int)
        _check_length(self, self.filename, "rows", len(rows), kept)
        self._rewrite(self._columns, rows[:kept])

    def _read(self) -> List[Dict[str, str]]:
        """The rows of the file; its columns become ours."""
        # What a spreadsheet has saved may begin with a mark.
        with open(self.filename, newline="", encoding="utf-8-sig") as file:
            reader = csv.DictReader(file, delimiter=self.separator)
            rows = list(reader)
            if not reader.fieldnames:
                return []
            if reader.fieldnames[0] != "epoch":
                raise ConfigurationError(
                    "CSVLogger appends to a table whose first column is 'epoch', but the first "
                    f"column of {self.filename!r} is {reader.fieldnames[0]!r}. Choose another "
                    "filename or separator, or append=False."
                )
            self._columns = list(reader.fieldnames)
            return rows

    def _rewrite(self, columns: List[str], rows: List[Dict[str, str]]) -> None:
        """Put the table in place at once, so that no row can be lost."""
        self._columns, self._rows = columns, len(rows)
        with _name_file(self, self.filename), replace_file(self.filename) as part, open(
            part, "w", newline="", encoding="utf-8"
        ) as file:
            writer = self._writer(file)
            writer.writeheader()
            writer.writerows(rows)

    def _writer(self, file: IO[str]) -> csv.DictWriter[str]:
        return csv.DictWriter(file, self._columns, restval=_ABSENT, delimiter=self.separator)

    def on_epoch_end(self, epoch: int, logs: Optional[callback.Logs] = None) -> None:
        """Write the row of the epoch, with new columns for new names."""
        row = {"epoch": epoch, **(logs or {})}
        new = sorted(name for name in row if name not in self._columns)
        if new:
            before = self._columns
            self._rewrite([*before, *new], self._read())
        with _name_file(self, self.filename), open(
            self.filename, "a", newline="", encoding="utf-8"
        ) as file:
            self._writer(file).writerow(row)
        self._rows += 1


class JSONLinesLogger(UpdateLogger):
    """Writes one line of JSON for each epoch, and, if requested, one every so many updates.

    A line has "event" ("epoch" or "update"), "epoch" (its index), "update" (how many were done
    since ``fit`` began) and the values: those of the epoch, or their means so far. Values that are
    not finite are the strings "NaN", "Infinity" and "-Infinity".

    Args:
        filename: of the file; its folder is created.
        append: continue an existing file; False overwrites it.
        every_updates: write a line after every so many updates, counted from the start of ``fit``;
            None only writes epochs.

    Raises:
        ConfigurationError: an argument can't work; or, in training, the file can't be written.
    """

    def __init__(
        self,
        filename: Union[str, os.PathLike[str]],
        append: bool = False,
        every_updates: Optional[int] = None,
    ) -> None:
        super().__init__(every_updates)
        self.filename: str = os.fspath(filename)
        self.append: bool = callback.one_of(self, "append", append, (True, False))
        self._file: Optional[IO[str]] = None

    @property
    def _opened(self) -> IO[str]:
        assert self._file is not None, "the file is open from on_train_begin to close"
        return self._file

    def _size(self) -> int:
        return os.fstat(self._opened.fileno()).st_size

    def _write(self, event: str, values: callback.Logs) -> None:
        record: Dict[str, Union[str, float]] = {
            "event": event,
            "epoch": self._count.epoch,
            "update": self._count.done,
            **values,
        }
        with _name_file(self, self.filename):
            self._opened.write(_to_json_line(record) + "\n")
            # Whoever reads along, or finds the file after a crash, has every line.
            self._opened.flush()

    def on_train_begin(self, logs: Optional[callback.Logs] = None) -> None:
        """Open the file, and keep its lines if they should stay."""
        super().on_train_begin(logs)
        _check_file(self, self.filename)
        mode = "a" if self.append or self.params.get("resumes") else "w"
        self._file = open(self.filename, mode, encoding="utf-8")  # noqa: SIM115

    def state_dict(self) -> Dict[str, object]:
        """Return the length of the file, and the number of updates."""
        return {**super().state_dict(), "size": self._size()}

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Remove lines that were written later, because they will be written again.

        Raises:
            ConfigurationError: the file is shorter.
        """
        size = callback.stored(state, "size", int)
        _check_length(self, self.filename, "bytes", self._size(), size)
        self._opened.truncate(size)
        super().load_state_dict(state)

    def on_train_batch_end(self, batch: int, logs: Optional[callback.Logs] = None) -> None:
        """Write the line of an update, if it is time."""
        if self._count.end_execution(batch, self.every_updates):
            self._write("update", {} if logs is None else logs)

    def on_epoch_end(self, epoch: int, logs: Optional[callback.Logs] = None) -> None:
        """Write the line of the epoch."""
        self._write("epoch", {} if logs is None else logs)

    def close(self) -> None:
        """Close the file, if it is open."""
        if self._file is not None:
            # A line that the disk has refused is tried, and named, once.
            with contextlib.suppress(OSError):
                self._file.close()
            self._file = None


class RemoteMonitor(callback.Callback):
    """Sends a POST request with the index and the values of every epoch, as JSON.

    If the server does not answer, or refuses, there is a warning, and training continues.

    Args:
        root: address of the server, "http://..." or "https://...".
        path: on the server.
        field: name of the form field for the JSON.
        headers: a dict of additional headers.
        send_as_json: send the JSON itself instead of a form.
        timeout: seconds to wait for an answer.

    Raises:
        ConfigurationError: an argument can't work.
    """

    adds: Tuple[str, ...] = ()

    def __init__(
        self,
        root: str = "http://localhost:9000",
        path: str = "/publish/epoch/end/",
        field: str = "data",
        headers: Optional[Mapping[str, str]] = None,
        send_as_json: bool = False,
        timeout: float = 10.0,
    ) -> None:
        super().__init__()
        if not isinstance(root, str) or not root.startswith(("http://", "https://")):
            needed = "an address that starts with http:// or https://"
            advice = "Write for example 'http://localhost:9000'."
            raise unfit("root of RemoteMonitor", needed, root, advice)
        self.root = root
        self.path = path
        self.field = field
        self.headers: Dict[str, str] = dict(headers or {})
        self.send_as_json: bool = callback.one_of(self, "send_as_json", send_as_json, (True, False))
        self.timeout: float = callback.finite(self, "timeout", timeout, 0.0)

    @property
    def only_reports(self) -> bool:
        """True, so that only the first of several processes sends."""
        return True

    def on_epoch_end(self, epoch: int, logs: Optional[callback.Logs] = None) -> None:
        """Send the epoch's values, and warn if that fails."""
        text = _to_json_line({"epoch": epoch, **(logs or {})})
        headers: Dict[str, str] = {}
        if self.send_as_json:
            headers["Content-Type"] = "application/json"
        else:
            text = urllib.parse.urlencode({self.field: text})
        request = urllib.request.Request(
            self.root + self.path, text.encode(), {**headers, **self.headers}, method="POST"
        )
        try:
            with urllib.request.urlopen(request, timeout=self.timeout):
                pass
        except (urllib.error.URLError, OSError) as error:
            warn_user(
                f"RemoteMonitor could not send epoch {epoch + 1} to {self.root}: {error}. Training "
                "continues.",
            )


class TensorBoard(UpdateLogger):
    """Writes scalars with Keras' names, and histograms of the weights, for TensorBoard.

    In ``train`` and ``validation`` under ``log_dir``: ``epoch_<name>`` for each epoch, including
    the learning rate; ``batch_<name>`` for updates since ``fit`` began, as means of the epoch so
    far; and for every evaluation ``evaluation_<name>_vs_iterations`` over all updates with this
    object.

    Args:
        log_dir: the folder.
        histogram_freq: write histograms of all parameters every so many epochs; 0 for never.
        update_freq: "epoch"; "batch" to also write after every execution; or a number to also write
            after every so many updates, where an execution then ends.

    Raises:
        ConfigurationError: an argument can't work, or the package tensorboard is not installed
            (``pip install ipufit[tensorboard]``).
    """

    def __init__(
        self,
        log_dir: Union[str, os.PathLike[str]] = "logs",
        histogram_freq: int = 0,
        update_freq: Union[Literal["epoch", "batch"], int] = "epoch",
    ) -> None:
        by_number = update_freq not in ("epoch", "batch")
        super().__init__(update_freq if by_number else None, "update_freq")
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ConfigurationError(
                "TensorBoard needs the package tensorboard, which is not installed. Run: "
                "pip install ipufit[tensorboard]"
            ) from error
        self._make: Callable[[str], Any] = SummaryWriter
        self.log_dir: str = os.fspath(log_dir)
        self.histogram_freq: int = callback.whole(self, "histogram_freq", histogram_freq)
        self.update_freq = update_freq
        self._writers: Dict[str, Any] = {}

    def _write(self, part: str, pattern: str, values: callback.Logs, step: int) -> None:
        if part not in self._writers:
            self._writers[part] = self._make(os.path.join(self.log_dir, part))
        for name, value in values.items():
            self._writers[part].add_scalar(pattern.format(name), float(value), step)
        self._writers[part].flush()

    def state_dict(self) -> Dict[str, object]:
        """Return the number of updates in this fit, and in all fits so far."""
        return {**super().state_dict(), "seen": self._updates_seen}

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Restore what :meth:`state_dict` returned."""
        super().load_state_dict(state)
        self._earlier = callback.stored(state, "seen", int) - self._count.done

    def on_train_batch_end(self, batch: int, logs: Optional[callback.Logs] = None) -> None:
        """Write the means so far, if it is time."""
        due = self._count.end_execution(batch, self.every_updates)
        if due or self.update_freq == "batch":
            self._write("train", "batch_{}", callback.means(logs), self._count.done)

    def on_epoch_end(self, epoch: int, logs: Optional[callback.Logs] = None) -> None:
        """Write the epoch's values, and histograms of the weights if it is time."""
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

    def on_test_end(self, logs: Optional[callback.Logs] = None) -> None:
        """Write the values of an evaluation at the number of updates made so far."""
        pattern = "evaluation_{}_vs_iterations"
        self._write("validation", pattern, logs or {}, self._updates_seen)

    def close(self) -> None:
        """Close the files of training and validation."""
        writers, self._writers = self._writers, {}
        for writer in writers.values():
            writer.close()


# Of what History says of a run, that which is about the call alone, or not known at its beginning.
_UNTOLD = ("verbose", "metrics", "directions", "adds", "prefetch", "updates_done")


@dataclasses.dataclass(frozen=True)
class _Tracker:
    """How one kind of tracker is told.

    Attributes:
        log: takes values by name and the step that they belong to.
        describe: takes what the run is made with; None if nothing does.
        end: takes "success" or "failed", when ``fit`` has ended; None if nothing does.
    """

    log: Callable[[Dict[str, float], int], object]
    describe: Optional[Callable[[Dict[str, object]], object]] = None
    end: Optional[Callable[[str], object]] = None


class ExperimentLogger(UpdateLogger):
    """Passes values to an experiment tracker: a Lightning logger, W&B, MLflow, Comet, ...

    The values of an epoch, with its learning rates, have the names of the history; values of
    updates, which are means of the epoch so far, are ``batch_<name>``; values of a separate
    ``evaluate`` are ``evaluation_<name>``. All except those of ``evaluate`` come with "epoch", the
    index. The step is the number of weight updates in all fits with this object.

    Before the first epoch of the first ``fit``, settings are logged: ``History.params``, the
    optimizer and its learning rates, and the ``hparams`` of a LightningModule.

    Start the tracker's run before ``fit`` and end it afterwards. Only Lightning's loggers get the
    result of ``fit``. An error of a tracker ends training. With several processes, the first one
    logs; ``fast_dev_run`` logs nothing.

    Args:
        logger: one of

            - any Lightning logger (``log_metrics``, ``log_hyperparams``, ``save``, ``finalize``);
            - the module ``mlflow``, or a Comet experiment (``log_metrics``, ``log_params`` or
              ``log_parameters``);
            - a W&B run, or the module ``wandb`` (``log``, ``config``);
            - an Accelerate tracker (``log``, ``store_init_configuration``);
            - a function of the values, a dict of floats by name, and the step.
        every_updates: also log after every so many updates, counted from the start of ``fit``; None
            only logs epochs.
        log_params: whether to log the settings; None logs them unless ``fit`` resumes from a
            checkpoint.

    Raises:
        ConfigurationError: an argument can't work.
    """

    def __init__(
        self,
        logger: Any,
        every_updates: Optional[int] = None,
        log_params: Optional[bool] = None,
    ) -> None:
        super().__init__(every_updates)
        self.logger = logger
        self._tracker = _tracker(logger)
        self.log_params: Optional[bool] = callback.one_of(
            self, "log_params", log_params, (None, True, False)
        )
        self._told = self._fits = False
        self._handled: Optional[BaseException] = None

    def on_train_begin(self, logs: Optional[callback.Logs] = None) -> None:
        """Log the settings of the run."""
        super().on_train_begin(logs)
        wanted = not self.params.get("resumes") if self.log_params is None else self.log_params
        if wanted and not self._told and self._tracker.describe is not None:
            self._tracker.describe(self._description())
        self._told = self._fits = True
        self._handled = sys.exc_info()[1]

    def _description(self) -> Dict[str, Any]:
        params = {n: v for n, v in self.model.history.params.items() if n not in _UNTOLD}
        params["optimizer"] = name_of_optimizer(self.model.optimizer)
        log_rates(self.model.optimizer, params)
        params.update(self.model.hyperparameters)
        return params

    def state_dict(self) -> Dict[str, object]:
        """Return the number of updates in all fits."""
        return {**super().state_dict(), "earlier": self._earlier}

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Restore what :meth:`state_dict` returned."""
        super().load_state_dict(state)
        self._earlier = callback.stored(state, "earlier", int)

    def _log(self, pattern: str, values: callback.Logs, **others: float) -> None:
        named = {pattern.format(name): float(value) for name, value in values.items()}
        self._tracker.log({**named, **others}, self._updates_seen)

    def on_train_batch_end(self, batch: int, logs: Optional[callback.Logs] = None) -> None:
        """Log the means so far, if it is time."""
        if self._count.end_execution(batch, self.every_updates):
            self._log("batch_{}", callback.means(logs), epoch=self._count.epoch)

    def on_epoch_end(self, epoch: int, logs: Optional[callback.Logs] = None) -> None:
        """Log the epoch's values and learning rates."""
        values = dict(logs or {})
        log_rates(self.model.optimizer, values)
        self._log("{}", values, epoch=epoch)

    def on_test_end(self, logs: Optional[callback.Logs] = None) -> None:
        """Log an evaluation, unless it is a validation of ``fit``."""
        if not self._fits:
            self._log("evaluation_{}", logs or {})

    def on_train_end(self, logs: Optional[callback.Logs] = None) -> None:
        """Report to the tracker whether training succeeded or failed."""
        self._fits = False
        handled, self._handled = self._handled, None
        if self._tracker.end is not None:
            self._tracker.end("success" if sys.exc_info()[1] is handled else "failed")


def logs_metrics(candidate: object) -> bool:
    """Return True for a tracker of a supported kind."""
    return not isinstance(candidate, type) and _match_tracker(candidate) is not None


def _tracker(logger: object) -> _Tracker:
    if isinstance(logger, type):
        raise _refusal(f"the class {logger.__name__}", "Pass an object of it.")
    tracker = _match_tracker(logger)
    if tracker is None and callable(logger):
        tracker = _Tracker(logger)
    if tracker is None:
        raise _refusal(
            repr(logger),
            "For any other logger, pass a function that logs: lambda values, step: ...",
        )
    return tracker


def _match_tracker(logger: Any) -> Optional[_Tracker]:
    def log(values: Dict[str, float], step: int) -> None:
        logger.log(values, step=step)

    def log_metrics(values: Dict[str, float], step: int) -> None:
        logger.log_metrics(values, step=step)

    def log_and_save(values: Dict[str, float], step: int) -> None:
        log_metrics(values, step)
        # As Lightning's Trainer does: some write nothing before.
        logger.save()

    def configure(params: Dict[str, object]) -> None:
        # The module's config is another object once a run has begun.
        logger.config.update(params, allow_val_change=True)

    if _has(logger, "log_metrics", "log_hyperparams", "save", "finalize"):
        return _Tracker(log_and_save, logger.log_hyperparams, logger.finalize)
    if _has(logger, "log_metrics", "log_params"):
        return _Tracker(log_metrics, logger.log_params)
    if _has(logger, "log_metrics", "log_parameters"):
        return _Tracker(log_metrics, logger.log_parameters)
    if _has(logger, "log", "store_init_configuration"):
        return _Tracker(log, logger.store_init_configuration)
    if _has(logger, "log") and hasattr(logger, "config"):
        return _Tracker(log, configure)
    return None


def _has(candidate: object, *names: str) -> bool:
    return all(callable(getattr(candidate, name, None)) for name in names)


def _refusal(came: str, instead: str) -> ConfigurationError:
    return ConfigurationError(
        "logger of ExperimentLogger must be a Lightning logger, the mlflow module, a Comet "
        "experiment, a W&B run, an Accelerate tracker or a function of values and step, got "
        f"{came}. {instead}"
    )
