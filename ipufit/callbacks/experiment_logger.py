"""The values of a run for an experiment tracker, whichever it is."""

from __future__ import annotations

import dataclasses
import sys
from typing import Any, Callable, Dict, Mapping, Optional, Tuple

from ipufit.callbacks.callback import Callback, Logs
from ipufit.callbacks.checks import one_of, whole
from ipufit.callbacks.rates import log_rates
from ipufit.callbacks.records import means
from ipufit.callbacks.update_count import UpdateCount
from ipufit.errors import ConfigurationError

__all__ = ["ExperimentLogger", "logs_metrics"]

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
    describe: Optional[Callable[[Dict[str, Any]], object]] = None
    end: Optional[Callable[[str], object]] = None


class ExperimentLogger(Callback):
    """Hands values to an experiment tracker: a logger of Lightning's, W&B, MLflow, Comet, ...

    The values of an epoch, with its learning rates, have the names that they have in the history;
    those of updates, the means of the epoch so far, are "batch_<name>"; those of an ``evaluate``
    of its own are "evaluation_<name>". Each comes with "epoch", the index, but for those of
    ``evaluate``. The step is the number of weight updates in all fits that this object has seen.

    Before the first epoch of the first ``fit`` the tracker is told what the run is made with: what
    ``History.params`` has, the optimizer and its learning rates, and the ``hparams`` of a
    LightningModule.

    The tracker stays yours: begin its run before ``fit`` and end it afterwards. Only loggers of
    Lightning's are told how ``fit`` ended. What a tracker raises ends training. Of several
    processes the first one tells it; ``fast_dev_run`` leaves it alone.

    Args:
        logger: one of

            - a logger of Lightning's, whatever it writes to (``log_metrics``,
              ``log_hyperparams``, ``save``, ``finalize``);
            - the module ``mlflow``, or an experiment of Comet's (``log_metrics``, ``log_params`` or
              ``log_parameters``);
            - a run of W&B's, or the module ``wandb`` (``log``, ``config``);
            - a tracker of Accelerate's (``log``, ``store_init_configuration``);
            - a function of the values, a dict of floats by name, and the step.
        every_updates: log after every that many updates too, counted from the start of ``fit``;
            None logs epochs only.
        log_params: whether to tell what the run is made with; None does so unless ``fit`` goes on
            from a checkpoint, whose run has been told.

    Raises:
        ConfigurationError: an argument can't work.
    """

    adds: Tuple[str, ...] = ()
    writes_files = True

    def __init__(
        self,
        logger: Any,
        every_updates: Optional[int] = None,
        log_params: Optional[bool] = None,
    ) -> None:
        super().__init__()
        self.logger = logger
        self._tracker = _tracker(logger)
        if every_updates is not None:
            self.every_updates: Optional[int] = whole(self, "every_updates", every_updates, 1)
        self.log_params: Optional[bool] = one_of(
            self, "log_params", log_params, (None, True, False)
        )
        self._count = UpdateCount()
        self._earlier = 0
        self._told = self._fits = False
        self._handled: Optional[BaseException] = None

    def on_train_begin(self, logs: Optional[Logs] = None) -> None:
        """Say what the run is made with."""
        self._earlier += self._count.done
        self._count = UpdateCount()
        wanted = not self.params.get("resumes") if self.log_params is None else self.log_params
        if wanted and not self._told and self._tracker.describe is not None:
            self._tracker.describe(self._description())
        self._told = self._fits = True
        self._handled = sys.exc_info()[1]

    def _description(self) -> Dict[str, Any]:
        params = {n: v for n, v in self.model.history.params.items() if n not in _UNTOLD}
        params["optimizer"] = type(self.model.optimizer).__name__
        log_rates(self.model.optimizer, params)
        params.update(self.model.hyperparameters)
        return params

    def state_dict(self) -> Any:
        """Return how many updates there were over all fits."""
        return {"count": self._count.state_dict(), "earlier": self._earlier}

    def load_state_dict(self, state: Any) -> None:
        """Restore what :meth:`state_dict` returned."""
        self._count.load_state_dict(state["count"])
        self._earlier = int(state["earlier"])

    def _log(self, pattern: str, values: Mapping[str, Any], **others: float) -> None:
        named = {pattern.format(name): float(value) for name, value in values.items()}
        self._tracker.log({**named, **others}, self._earlier + self._count.done)

    def on_epoch_begin(self, epoch: int, logs: Optional[Logs] = None) -> None:
        """Count the updates of finished epochs."""
        self._count.begin_epoch(epoch)

    def on_train_batch_end(self, batch: int, logs: Optional[Logs] = None) -> None:
        """Log the means so far, if they are due."""
        if self._count.end_execution(batch, self.every_updates):
            self._log("batch_{}", means(logs), epoch=self._count.epoch)

    def on_epoch_end(self, epoch: int, logs: Optional[Logs] = None) -> None:
        """Log the epoch's values and learning rates."""
        values = dict(logs or {})
        log_rates(self.model.optimizer, values)
        self._log("{}", values, epoch=epoch)

    def on_test_end(self, logs: Optional[Logs] = None) -> None:
        """Log an evaluation; one of ``fit`` belongs to its epoch."""
        if not self._fits:
            self._log("evaluation_{}", logs or {})

    def on_train_end(self, logs: Optional[Logs] = None) -> None:
        """Tell the tracker whether training succeeded or failed."""
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
            repr(logger), "For any other, pass a function: lambda values, step: ..., which logs."
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

    def configure(params: Dict[str, Any]) -> None:
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
        "logger of ExperimentLogger must be a logger of Lightning's, the module mlflow, an "
        "experiment of Comet's, a run of W&B's, a tracker of Accelerate's or a function of values "
        f"and step, got {came}. {instead}"
    )
