"""Observers of a fit, and several callbacks as one of them."""

from __future__ import annotations

import operator
from typing import Any, Dict, Iterable, List, Mapping, Optional, Sequence

from ipufit.callbacks.callback import EVENTS, Callback, missing_value
from ipufit.callbacks.history import History
from ipufit.callbacks.running_fit import CallbackModel, Measurement, RunningFit
from ipufit.core.batch import CombinedBatch, Mode
from ipufit.errors import ConfigurationError

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
            _call_all(callbacks, hook, args)
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


def _call_all(callbacks: Sequence[Callback], hook: str, args: Sequence[object]) -> None:
    """Every one in order, whatever the others raise; several errors are chained."""
    if callbacks:
        try:
            getattr(callbacks[0], hook)(*args)
        finally:
            _call_all(callbacks[1:], hook, args)


def _may_add(callback: Callback, name: str) -> bool:
    overrides = "on_epoch_end" in vars(callback) or type(callback).on_epoch_end is not (
        Callback.on_epoch_end
    )
    return overrides and (callback.adds is None or name in callback.adds)


def checked(callbacks: object) -> List[Callback]:
    """The callbacks as a list: of None, of a single one, or of several.

    Raises:
        ConfigurationError: an element is not a callback, or asks for what can't be.
    """
    if callbacks is None or isinstance(callbacks, Callback):
        callbacks = [] if callbacks is None else [callbacks]
    if isinstance(callbacks, (str, bytes)) or not isinstance(callbacks, Iterable):
        raise _refusal(callbacks, "Pass a list of objects: callbacks=[...]; [] for none.")
    listed = list(callbacks)
    for callback in listed:
        if isinstance(callback, type):
            raise _refusal(callback, f"Pass an object: {callback.__name__}(...).")
        if not isinstance(callback, Callback):
            raise _refusal(callback, _instead_of(callback))
        _check_every_updates(callback)
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


def _check_every_updates(callback: Callback) -> None:
    every = callback.every_updates
    if every is None or (isinstance(every, int) and not isinstance(every, bool) and every >= 1):
        return
    raise ConfigurationError(
        f"every_updates of {type(callback).__name__} must be None or an integer of at least 1, got "
        f"{every!r}. It counts weight updates from the start of fit."
    )


def _refusal(came: object, instead: str) -> ConfigurationError:
    what = f"the class {came.__name__}" if isinstance(came, type) else repr(came)
    return ConfigurationError(
        f"callbacks must be a list of ipufit.callbacks.Callback objects, got {what}. {instead}"
    )
