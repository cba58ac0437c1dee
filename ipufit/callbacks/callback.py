"""The base of all callbacks, whose hooks are the table of events, and what callbacks share."""

from __future__ import annotations

import inspect
import math
from typing import (
    Any,
    Callable,
    Dict,
    Iterable,
    Mapping,
    NamedTuple,
    Optional,
    Tuple,
    TypeVar,
)

from ipufit.errors import ConfigurationError, NonFiniteLossError
from ipufit.utils import error_collector

Logs = Mapping[str, float]


class Event(NamedTuple):
    """A moment of a run at which callbacks are called.

    Attributes:
        hook: the method of :class:`Callback` that is called.
        arguments: names of what the hook gets, in its order.
        when: when it fires, in words; empty where Python runs without docstrings.
    """

    hook: str
    arguments: Tuple[str, ...]
    when: str

    @property
    def is_of_batch(self) -> bool:
        """True if it fires at every execution: its first argument is named ``batch``.

        Asynchronous then runs it in its thread, with ``(batch, logs)``.
        """
        return self.arguments[0] == "batch"

    @property
    def is_end_of_run(self) -> bool:
        """True if it ends a fit, an evaluation or a prediction."""
        return self.hook.endswith("_end") and self.arguments == ("logs",)


class Callback:
    """Base of all callbacks: override the hooks you need. See docs/callbacks.md.

    ``on_*_batch_*`` fire once per execution. Before it, ``batch`` is the index of the execution's
    first update in the epoch (or of its first micro-batch per replica when evaluating and
    predicting); after it, that of its last one, as in Keras. In any hook, parameters of the module
    have their current values. Setting ``self.model.stop_training = True`` ends training after the
    current execution. An error in a hook ends the call, with its own traceback.

    Attributes:
        model: the :class:`ipufit.Model`.
        params: ``epochs``, ``updates`` (per epoch, None if unknown), ``samples``, ``verbose``,
            ``resumes`` (whether the run resumes from a checkpoint), ``metrics`` (the names in
            ``logs`` of an epoch, as far as they are known before it), ``directions`` ("min" or
            "max" for each of them, if it is known) and ``adds`` (names that callbacks add).
        every_updates: an execution ends, and ``on_train_batch_end`` fires, after every so many
            updates, counted from the start of ``fit``. None has no effect.
        writes_files: whether it writes files; a trial run leaves such callbacks out.
        wants_outputs: of the class; whether it reads ``model.outputs``, the outputs of an execution
            during ``fit``.
        monitors: names in ``logs`` that ``on_epoch_end`` needs. If it is certain before training
            that one of them will be missing, ``fit`` raises
            :class:`ipufit.errors.ConfigurationError`.
        adds: names that ``on_epoch_end`` adds to ``logs``. None means that they are not known, so
            ``monitors`` are checked after the first epoch.
    """

    # A new event is one more hook here: name, arguments, and when it fires as the first line of its
    # docstring. What calls hooks or passes them on reads them from EVENTS.
    every_updates: Optional[int] = None
    writes_files: bool = False
    wants_outputs: bool = False
    monitors: Tuple[str, ...] = ()
    adds: Optional[Tuple[str, ...]] = None

    @property
    def only_reports(self) -> bool:
        """True if, of several processes, only the first one calls the callback.

        This is right for a callback that only reports, by files or messages. By default, it is true
        if the callback writes files.
        """
        return self.writes_files

    def __init__(self) -> None:
        self.model: Any = None
        self.params: Dict[str, Any] = {}

    # Any, so that an override may name ipufit.Model or whatever it really needs.
    def set_model(self, model: Any) -> None:
        """Called with the :class:`ipufit.Model` before any other hook.

        Args:
            model: becomes the attribute ``model``.
        """
        self.model = model

    def set_params(self, params: Dict[str, Any]) -> None:
        """Called before any other hook.

        Args:
            params: becomes the attribute ``params``.
        """
        self.params = params

    def on_train_begin(self, logs: Optional[Logs] = None) -> None:
        """Before the first epoch; the program is recorded.

        Args:
            logs: empty, as in every hook that begins something.
        """

    def on_train_end(self, logs: Optional[Logs] = None) -> None:
        """After the last epoch, also when training was interrupted or failed.

        It is called if :meth:`on_train_begin` of this callback has returned.

        Args:
            logs: the values of the last epoch.
        """

    def on_epoch_begin(self, epoch: int, logs: Optional[Logs] = None) -> None:
        """Before an epoch.

        Args:
            epoch: its index, from 0.
            logs: empty.
        """

    def on_epoch_end(self, epoch: int, logs: Optional[Dict[str, float]] = None) -> None:
        """After an epoch, its validation and the schedule; before its checkpoint.

        Args:
            epoch: its index, from 0.
            logs: its values by name, those of the validation with ``val_``. All callbacks get the
                same dict, in their order; values that they add are in the history too.
        """

    def on_train_batch_begin(self, batch: int, logs: Optional[Logs] = None) -> None:
        """Before an execution.

        Args:
            batch: index of its first update in the epoch.
            logs: empty.
        """

    def on_train_batch_end(self, batch: int, logs: Optional[Logs] = None) -> None:
        """After an execution; ``logs`` has means of the epoch so far, ``updates``, ``samples``.

        Args:
            batch: index of its last update in the epoch.
            logs: by name, the means of the epoch so far, and how many "updates" and "samples" of it
                are done.
        """

    def on_non_finite(self, error: NonFiniteLossError) -> bool:
        """At a loss that is not finite, with the state from before its update; True ends training.

        Args:
            error: what ``fit`` raises if no callback returns True.

        Returns:
            True to end training here, as if ``stop_training`` had been set; the epoch's "loss" is
            then the value that is not finite.
        """
        return False

    def state_dict(self) -> object:
        """Return the state that a checkpoint keeps, so that a resumed ``fit`` has the same results.

        Returns:
            Dicts, lists, tuples, strings, numbers, tensors and None; None for nothing, the default.
        """
        return None

    def load_state_dict(self, state: Any) -> None:
        """Restore a state: after ``on_train_begin`` of the ``fit`` that resumes.

        In the middle of an epoch, ``on_epoch_begin`` has been called again before. It is not called
        if the state is None.

        Args:
            state: what :meth:`state_dict` returned when the checkpoint was written.
        """
        raise NotImplementedError(
            f"{type(self).__name__} has state_dict, but no load_state_dict. Write both, or neither."
        )

    def close(self) -> None:
        """Release files and threads: after all other hooks, also after an error. Safe to repeat."""

    def on_test_begin(self, logs: Optional[Logs] = None) -> None:
        """Before an evaluation, validation included.

        Args:
            logs: empty.
        """

    def on_test_end(self, logs: Optional[Logs] = None) -> None:
        """After an evaluation.

        Args:
            logs: its values by name.
        """

    def on_test_batch_begin(self, batch: int, logs: Optional[Logs] = None) -> None:
        """Before an execution of an evaluation.

        Args:
            batch: index of its first micro-batch of a replica.
            logs: empty.
        """

    def on_test_batch_end(self, batch: int, logs: Optional[Logs] = None) -> None:
        """After an execution of an evaluation.

        Args:
            batch: index of its last micro-batch of a replica.
            logs: by name, the means so far, and how many "updates" and "samples" are done.
        """

    def on_predict_begin(self, logs: Optional[Logs] = None) -> None:
        """Before a prediction.

        Args:
            logs: empty.
        """

    def on_predict_end(self, logs: Optional[Logs] = None) -> None:
        """After a prediction.

        Args:
            logs: empty.
        """

    def on_predict_batch_begin(self, batch: int, logs: Optional[Logs] = None) -> None:
        """Before an execution of a prediction.

        Args:
            batch: index of its first micro-batch of a replica.
            logs: empty.
        """

    def on_predict_batch_end(self, batch: int, logs: Optional[Logs] = None) -> None:
        """After an execution of a prediction; ``logs["outputs"]`` is what the module returned.

        Args:
            batch: index of its last micro-batch of a replica.
            logs: the "outputs", in the structure that the module returns, with a row per sample of
                the execution.
        """


EVENTS: Dict[str, Event] = {
    name: Event(
        name,
        tuple(inspect.signature(hook).parameters)[1:],
        (hook.__doc__ or "").partition("\n")[0].rstrip("."),
    )
    for name, hook in vars(Callback).items()
    if name.startswith("on_")
}


T = TypeVar("T")


def overrides(callback: Callback, hook: str) -> bool:
    """Return True if the class of a callback, or the object itself, has a hook of its own."""
    return hook in vars(callback) or getattr(type(callback), hook) is not getattr(Callback, hook)


def means(logs: Optional[Logs]) -> Dict[str, float]:
    """The means of the epoch so far, of the logs of an execution; not how much has been done."""
    return {name: v for name, v in (logs or {}).items() if name not in ("updates", "samples")}


def stored(state: Mapping[str, object], name: str, kind: Callable[[Any], T]) -> T:
    """Read a value of a callback's state in a checkpoint.

    Raises:
        KeyError, TypeError, ValueError: it is not of that kind.
    """
    return kind(state[name])


def whole(owner: Callback, name: str, value: object, least: int = 0) -> int:
    """Check that an argument of a callback is an integer of at least ``least``, and return it.

    Raises:
        ConfigurationError: it is none.
    """
    return error_collector.at_least(f"{name} of {type(owner).__name__}", value, least)


def one_of(owner: Callback, name: str, value: T, choices: object) -> T:
    """Check that an argument of a callback is one of the choices, and return it.

    Raises:
        ConfigurationError: it is none.
    """
    return error_collector.one_of(f"{name} of {type(owner).__name__}", value, choices)


def finite(owner: Callback, name: str, value: object, least: Optional[float] = None) -> float:
    """Check that an argument of a callback is a finite number, and return it as a float.

    Raises:
        ConfigurationError: it is none, or below ``least``.
    """
    limit = "" if least is None else f" of at least {least}"
    words = (f"{name} of {type(owner).__name__}", value, f"a finite number{limit}")
    low = -math.inf if least is None else least
    return error_collector.number_in(*words, lambda n: math.isfinite(n) and n >= low)


def missing_value(callback: object, name: str, available: Iterable[str]) -> ConfigurationError:
    """Make the error for a callback that needs a value which is not there."""
    cure = "Use one of these, or add it to metrics."
    if name.startswith("val_") and not any(other.startswith("val_") for other in available):
        cure = "Pass validation_data to fit, or use one of these."
    return ConfigurationError(
        f"{type(callback).__name__} needs the value {name!r} at the end of an epoch, but there is "
        f"only {', '.join(available) or 'none'}. {cure}"
    )


class UpdateCount:
    """Counts from the start of ``fit``; hooks tell of updates within their epoch only.

    Attributes:
        epoch: index of the present epoch.
        done: updates since ``fit`` began.
    """

    def __init__(self) -> None:
        self.epoch = self.done = self._before = 0

    def state_dict(self) -> Dict[str, int]:
        """Return the count, for a checkpoint."""
        return {"epoch": self.epoch, "done": self.done, "before": self._before}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Restore what :meth:`state_dict` returned."""
        self.epoch, self.done = int(state["epoch"]), int(state["done"])
        self._before = int(state["before"])

    def begin_epoch(self, epoch: int) -> None:
        """Add the updates so far to those of earlier epochs."""
        self.epoch, self._before = epoch, self.done

    def end_execution(self, batch: int, every: Optional[int]) -> bool:
        """Count up to this update of the epoch.

        Returns:
            Whether a multiple of ``every`` has been reached; never where that is None.
        """
        before, self.done = self.done, self._before + batch + 1
        return every is not None and self.done // every > before // every
