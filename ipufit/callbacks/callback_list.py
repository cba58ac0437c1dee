"""Observers of a fit, several callbacks as one of them, and the fit as they see it."""

from __future__ import annotations

import dataclasses
import operator
from typing import TYPE_CHECKING, Any, Dict, List, Mapping, Optional, Protocol, Sequence

import torch
from torch import nn

from ipufit.callbacks.callback import EVENTS, Callback, missing_value, overrides
from ipufit.callbacks.epoch_metrics import EpochMetrics
from ipufit.callbacks.history import History
from ipufit.core.batch import CombinedBatch, DataCursor, MicroBatch, Mode
from ipufit.core.plan import Plan
from ipufit.core.train_config import TrainConfig
from ipufit.data.pipeline import BatchPipeline
from ipufit.engines.program import Engine, Program
from ipufit.errors import ConfigurationError, shown
from ipufit.losses import Loss
from ipufit.partition.partition import Partition
from ipufit.planner.divided_module import DividedModule
from ipufit.processes import Processes
from ipufit.utils.error_collector import as_list, at_least_or_none
from ipufit.utils.interrupts import call_each

if TYPE_CHECKING:
    from ipufit.planner.planning import PartitionEstimator


class CallbackModel(Protocol):
    """The part of :class:`ipufit.Model` that the callbacks of this package and the loop rely on.

    Attributes:
        module: the user's module.
        history: of the last ``fit``.
        stop_training: ends ``fit`` with the present execution where it is True.
        outputs: the module's, of the last execution, for callbacks with ``wants_outputs``.
        extras: fields of the batches of the last execution that forward does not take.
    """

    module: nn.Module
    history: History
    stop_training: bool
    outputs: List[Any]
    extras: List[Mapping[str, object]]

    @property
    def optimizer(self) -> Optional[torch.optim.Optimizer]:
        """The torch optimizer with its present state."""

    @property
    def hyperparameters(self) -> Dict[str, Any]:
        """Settings that the module itself says it was made with."""

    @property
    def capture_seconds(self) -> float:
        """Seconds spent on recording so far."""

    def swap_ema_weights(self) -> None:
        """Exchange weights and their moving averages."""

    def save_weights(self, path: str) -> None:
        """Write the weights to a file."""


@dataclasses.dataclass
class Measurement:
    """A program with everything that measures it.

    Attributes:
        program: prepared.
        mode: what the program is for.
        plan: with the micro-batch size that the loader really has.
        meter: its loss and metrics.
        first: the first micro-batch.
    """

    program: Program
    mode: Mode
    plan: Plan
    meter: EpochMetrics
    first: MicroBatch


class ObservedSession(Protocol):
    """The part of a compiled model that observers of a fit read.

    Attributes:
        module: the user's module.
        loss: normal form.
        config: how an update is made.
        divided: the module on IPUs.
        engine: builds the programs.
        sample: shapes of the first micro-batch of the last ``fit``, or None.
    """

    module: nn.Module
    loss: Loss
    config: TrainConfig
    divided: DividedModule
    engine: Engine
    sample: Optional[MicroBatch]

    @property
    def processes(self) -> Processes:
        """The processes that train together."""

    @property
    def optimizer(self) -> Optional[torch.optim.Optimizer]:
        """The torch optimizer with its present state."""

    @property
    def groups(self) -> List[Dict[str, Any]]:
        """The optimizer's parameter groups with their present settings."""

    def plan_estimator(
        self, sample: MicroBatch, partition: Optional[Partition], recompute: Sequence[str]
    ) -> PartitionEstimator:
        """Follow a micro-batch through module and loss, for estimates of its divisions."""

    def choices(self) -> Optional[Dict[str, str]]:
        """Return what decides between ways that round otherwise, for a checkpoint."""

    def explain(self) -> str:
        """Describe in a few lines how the program runs."""


class RunningFit(Protocol):
    """A fit as its observers see it.

    Attributes:
        history: filled epoch by epoch.
        place: where the data stands after the last execution.
    """

    history: History
    place: Optional[DataCursor]

    @property
    def job(self) -> Measurement:
        """The training program and its measures."""

    @property
    def pipeline(self) -> BatchPipeline:
        """The pipeline of the training data."""

    @property
    def shards_data(self) -> bool:
        """True if ipufit shards the data, or one process reads all of it."""

    def ending(self) -> bool:
        """Return True if training ends with the last execution."""


# What is called before and after each execution.
BATCH_HOOKS = {
    Mode.TRAIN: ("on_train_batch_begin", "on_train_batch_end"),
    Mode.EVALUATE: ("on_test_batch_begin", "on_test_batch_end"),
    Mode.PREDICT: ("on_predict_batch_begin", "on_predict_batch_end"),
}

_EXTRAS = operator.attrgetter("extras")
_ENDS = {"close", *(event.hook for event in EVENTS.values() if event.is_end_of_run)}


class CallbackList:
    """Several callbacks as one, whose hooks are called in order.

    ``fit`` creates its own; only a hand-written loop needs one.

    Args:
        callbacks: the callbacks, in their order.
        model: the ``model`` of every callback.
        params: the ``params`` of every callback.

    Attributes:
        callbacks: the callbacks.
        model: the ``model`` of every callback.
        params: the ``params`` of every callback.

    Raises:
        ConfigurationError: an element is not a callback.
    """

    def __init__(
        self, callbacks: Sequence[Callback], model: CallbackModel, params: Dict[str, Any]
    ) -> None:
        self.params = params
        self.callbacks: List[Callback] = checked(callbacks)
        self.model = model
        self._begun: List[Callback] = []
        for callback in self.callbacks:
            callback.set_model(model)
            callback.set_params(params)

    @property
    def wants_outputs(self) -> bool:
        """True if a callback reads the outputs of training executions."""
        return any(callback.wants_outputs for callback in self.callbacks)

    def show_outputs(self, outputs: List[Any]) -> None:
        """Set ``model.outputs`` for callbacks that read the outputs of an execution.

        Args:
            outputs: what the module returned, for each micro-batch.
        """
        if self.wants_outputs:
            self.model.outputs = outputs

    def call(self, hook: str, *args: object) -> bool:
        """Call one hook, such as "on_epoch_end", of every callback; True if any returned True.

        An error of a callback is raised at once, except in a hook that ends something: then the
        others are called first. ``on_train_end`` is only called for callbacks whose
        ``on_train_begin`` has returned.

        Args:
            hook: name of the method of :class:`ipufit.callbacks.Callback`.
            args: what the hook takes.
        """
        if hook in _ENDS:
            callbacks = self.callbacks
            if hook == "on_train_end":
                callbacks, self._begun = self._begun, []
            call_each(operator.methodcaller(hook, *args), iter(callbacks))
            return False
        answer = False
        for callback in self.callbacks:
            if getattr(callback, hook)(*args):
                answer = True
            if hook == "on_train_begin":
                self._begun.append(callback)
        return answer

    def check_monitors(self) -> None:
        """Check before training that the values that callbacks need will exist.

        Raises:
            ConfigurationError: names the callback, the value and the existing values.
        """
        available = self.params.get("metrics")
        if available is None:
            return
        for callback in self.callbacks:
            for name in callback.monitors:
                if name not in available and not any(_may_add(c, name) for c in self.callbacks):
                    raise missing_value(callback, name, available)


class Observer:
    """Watches a run; the trainer calls its observers in their order and knows none by name.

    Attributes:
        phase: where the clock of the run counts the time of an observer.
    """

    phase = "other"

    def begin_fit(self, fit: RunningFit) -> None:
        """Look at the fit, whose program is prepared, before its first epoch."""

    def notify(self, hook: str, *args: object) -> bool:
        """Look at an event of callbacks that has no method here; True ends training.

        Args:
            hook: its name in EVENTS.
            args: the arguments of the hook.
        """
        return False

    def begin_executions(self, epoch: int) -> None:
        """Look before the first execution of an epoch, or of what is left of one."""

    def begin_execution(self, update: int, batch: CombinedBatch) -> None:
        """Look before an execution, whose first update of the epoch has this index."""

    def end_execution(self, epoch: int, outputs: List[Any]) -> None:
        """Look after an execution that went well, with the outputs that it brought back."""

    def end_executions(self) -> None:
        """Look after the last execution of an epoch, before its validation."""

    def end_epoch(self, epoch: int, logs: Dict[str, float]) -> None:
        """Look after an epoch and its validation; what is added to ``logs`` is in the history."""

    def end_fit(self, logs: Mapping[str, float]) -> None:
        """Look for the last time, also after an error."""


class CallbackObserver(Observer):
    """Calls the hooks of callbacks.

    Args:
        callbacks: all of them.
        job: what is run.
        history: of a fit; None of an evaluation or a prediction.

    Attributes:
        callbacks: as given.
        meter: the measures of what is run.
    """

    phase = "callbacks"

    def __init__(
        self, callbacks: CallbackList, job: Measurement, history: Optional[History] = None
    ) -> None:
        self.callbacks = callbacks
        self.meter = job.meter
        self._history = history
        self._shows_outputs = job.mode is Mode.TRAIN and callbacks.wants_outputs
        self._batch_begin, self._batch_end = BATCH_HOOKS[job.mode]

    def notify(self, hook: str, *args: object) -> bool:
        """Call the hook of every callback; whether any has answered True."""
        return self.callbacks.call(hook, *args)

    def begin_fit(self, fit: RunningFit) -> None:
        """Call ``on_train_begin``."""
        self.callbacks.call("on_train_begin", {})

    def begin_execution(self, update: int, batch: CombinedBatch) -> None:
        """Call ``on_train_batch_begin`` with the index of the first update."""
        self.callbacks.model.extras = list(map(_EXTRAS, batch.micro_batches))
        self.callbacks.call(self._batch_begin, update, {})

    def end_execution(self, epoch: int, outputs: List[Any]) -> None:
        """Call ``on_train_batch_end`` with the index of the last update and the running means."""
        if self._shows_outputs:
            self.callbacks.show_outputs(outputs)
        self.callbacks.call(self._batch_end, self.meter.updates - 1, self.meter.running())

    def end_epoch(self, epoch: int, logs: Dict[str, float]) -> None:
        """Call ``on_epoch_end``, after which the history has the epoch, also after an error."""
        try:
            self.callbacks.call("on_epoch_end", epoch, logs)
        finally:
            # A callback before it has failed; the epoch has been trained all the same.
            if self._history is not None and epoch not in self._history.epoch:
                self._history.append(epoch, logs)

    def end_fit(self, logs: Mapping[str, float]) -> None:
        """Call ``on_train_end`` and ``close``."""
        try:
            self.callbacks.call("on_train_end", logs)
        finally:
            self.callbacks.call("close")


def _may_add(callback: Callback, name: str) -> bool:
    return overrides(callback, "on_epoch_end") and (callback.adds is None or name in callback.adds)


def checked(callbacks: object) -> List[Callback]:
    """The callbacks as a list: of None, of a single one, or of several.

    Raises:
        ConfigurationError: an element is not a callback, or asks for what can't be.
    """
    if callbacks is None or isinstance(callbacks, Callback):
        callbacks = [] if callbacks is None else [callbacks]
    listed = as_list(callbacks)
    if listed is None:
        raise _refusal(callbacks, "Pass a list of objects: callbacks=[...]; [] for none.")
    for callback in listed:
        if isinstance(callback, type):
            raise _refusal(callback, f"Pass an object: {callback.__name__}(...).")
        if not isinstance(callback, Callback):
            raise _refusal(callback, _instead_of(callback))
        name = f"every_updates of {type(callback).__name__}"
        advice = "It counts weight updates from the start of fit."
        at_least_or_none(name, callback.every_updates, 1, advice)
        _check_hooks(callback)
    return listed


def _instead_of(came: object) -> str:
    # Imported here: nobody needs it whose callbacks are some.
    from ipufit.callbacks.loggers import logs_metrics

    if logs_metrics(came):
        return "Pass ipufit.callbacks.ExperimentLogger(...) of it."
    return "Subclass ipufit.callbacks.Callback and override its hooks."


def _check_hooks(callback: Callback) -> None:
    """Keras still calls these, so whoever brings one along expects it to be called."""
    for name in ("on_batch_begin", "on_batch_end"):
        if callable(getattr(type(callback), name, None)):
            raise ConfigurationError(
                f"{type(callback).__name__} must have hooks for train, test or predict batches, "
                f"but has {name}, which is never called. Rename it to {name[:3]}train_{name[3:]}."
            )


def _refusal(came: object, instead: str) -> ConfigurationError:
    what = f"the class {came.__name__}" if isinstance(came, type) else shown(came)
    return ConfigurationError(
        f"callbacks must be a list of ipufit.callbacks.Callback objects, got {what}. {instead}"
    )
