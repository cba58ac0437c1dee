"""Schedules: the hyper-parameters of each coming update, and those of torch's schedulers."""

from __future__ import annotations

import abc
import collections
import contextlib
import copy
import functools
import inspect
import math
import re
import warnings
from typing import (
    Any,
    Callable,
    Dict,
    FrozenSet,
    Iterator,
    List,
    Mapping,
    NamedTuple,
    Optional,
    Sequence,
    Tuple,
    Union,
)

import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler as lrs

from ipufit.errors import ConfigurationError
from ipufit.optim.schedules import settings

# torch has a program's steps for those of a loop that forgot optimizer.step(); SequentialLR itself
# passes an epoch on torch 2.0.1.
_FALSE_WARNINGS = (
    "Detected call of `lr_scheduler.step()` before `optimizer.step()`",
    "Seems like `optimizer.step()` has been overridden",
    "The epoch parameter in `scheduler.step()` was not necessary",
)
_AT_ONCE = 1000  # updates whose settings are made together


@contextlib.contextmanager
def silence_warnings() -> Iterator[None]:
    """Without the warnings that torch's schedulers give where no loop calls ``step``."""
    with warnings.catch_warnings():
        for text in _FALSE_WARNINGS:
            warnings.filterwarnings("ignore", re.escape(text), UserWarning)
        yield


class ScheduleSnapshot(NamedTuple):
    """Everything that a schedule had at one moment; for that schedule only."""

    updates: int
    epochs: int
    batches: int
    fault: Optional[str]
    cause: Optional[Exception]
    put_back: Tuple[Callable[[], None], ...]


class Schedule(abc.ABC):
    """Values of an optimizer's hyper-parameters for each update.

    ``fit`` uses it, and a hand-written loop can too: ``optimizer.param_groups`` has the values for
    the next update, as after ``scheduler.step()``.

    Args:
        optimizer: whose settings change.
        per_update: whether they change with every update, or at epoch ends.

    Attributes:
        updates: updates since ``compile`` that rows were made for.
        epochs: epochs that ended since ``compile``.
        frequency: they change at the ends of every so many epochs; or with an update that ends such
            a number of a replica's batches, counted from the beginning of the epoch.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, per_update: bool) -> None:
        self.updates: int = 0
        self.epochs: int = 0
        self.frequency: int = 1
        self._batches = 0
        self._optimizer = optimizer
        self._per_update = per_update
        # Why there is no value for the next update; matters only if that update comes.
        self._fault: Optional[str] = None
        self._cause: Optional[Exception] = None
        self._first = [settings.numbers_of(group) for group in settings.read(optimizer)]

    def rows(
        self, updates: int, accumulation_steps: Sequence[int] = ()
    ) -> List[List[settings.Settings]]:
        """The settings for each of the coming updates, which count as done.

        Afterwards ``optimizer.param_groups`` holds the values for the update after these.

        Args:
            updates: how many.
            accumulation_steps: how many batches of a replica each of them takes; none counts 1.

        Returns:
            Per update and parameter group, all settings but "params", as numbers where they are
            tensors of one element.

        Raises:
            ConfigurationError: a value that no update can use; everything is as before the call.
        """
        snapshot = self.snapshot()
        try:
            with silence_warnings():
                return [
                    self._row(updates - 1 - i, snapshot, *accumulation_steps[i : i + 1])
                    for i in range(updates)
                ]
        except BaseException:
            self.restore(snapshot)
            raise

    def check(self, updates: int, epoch: Sequence[int] = ()) -> None:
        """Check that all coming updates have values; nothing changes.

        Args:
            updates: how many.
            epoch: accumulation steps of the updates of an epoch; none for one without end.

        Raises:
            ConfigurationError: an update has no value.
        """
        snapshot = self.snapshot()
        try:
            with silence_warnings():
                for i in range(updates):
                    place = i % len(epoch) if epoch else i
                    if not place:
                        self._batches = 0
                    self._row(updates - 1 - i, snapshot, *epoch[place : place + 1])
        finally:
            self.restore(snapshot)

    def begin_run(  # noqa: B027 - most do not depend on how long it is
        self, updates: Optional[int], epochs: Optional[int], is_trial: bool = False
    ) -> None:
        """Begin a run, also one that resumes and whose state is loaded next.

        Args:
            updates: of the whole run; None if the number is unknown.
            epochs: of the whole run; None if the number is unknown.
            is_trial: whether it ends after its first updates, for any length.

        Raises:
            ConfigurationError: the schedule does not fit into the run.
        """

    def end_epoch(self, logs: Mapping[str, float]) -> None:
        """Advance schedules that change at the end of an epoch.

        Args:
            logs: the epoch's values, those of the validation with ``val_`` included.

        Raises:
            ConfigurationError: the monitored value is not in ``logs``; lists those that are.
        """
        self._batches = 0
        if not self._per_update and not (self.epochs + 1) % self.frequency:
            advance = self._at_epoch_end(logs)
            with silence_warnings():
                self._move(advance, self.snapshot())
        self.epochs += 1

    def snapshot(self) -> ScheduleSnapshot:
        """Copy everything, including the settings."""
        counters = (self.updates, self.epochs, self._batches, self._fault, self._cause)
        return ScheduleSnapshot(*counters, (settings.keep(self._optimizer), self._keep()))

    def restore(self, snapshot: ScheduleSnapshot) -> None:
        """Restore a snapshot exactly; can be repeated.

        Args:
            snapshot: what :meth:`snapshot` returned.
        """
        self.updates, self.epochs, self._batches, self._fault, self._cause, parts = snapshot
        for put_back in parts:
            put_back()

    def state_dict(self) -> Dict[str, object]:
        """Return the state: numbers, strings, lists, dicts, and what torch's schedulers have."""
        return {
            "kind": self.name,
            "updates": self.updates,
            "epochs": self.epochs,
            "batches": self._batches,
            "fault": self._fault,
            "settings": [settings.numbers_of(group) for group in settings.read(self._optimizer)],
            "own": self._own_state(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state, including the settings.

        Args:
            state: what :meth:`state_dict` returned.

        Raises:
            ConfigurationError: it is the state of another kind of schedule or optimizer.
        """
        groups = self._optimizer.param_groups
        names = [sorted(group) for group in state["settings"]]
        expected_names = [
            sorted(settings.numbers_of(group)) for group in settings.read(self._optimizer)
        ]
        if state["kind"] != self.name or names != expected_names:
            came = f"{state['kind']} over {names}"
            raise ConfigurationError(
                f"the state of a schedule must be that of {self.name} over {expected_names}, got "
                f"{came}. Compile with the optimizer and the lr_scheduler that made it."
            )
        self._load_own(state["own"])
        for group, values in zip(groups, state["settings"]):
            for name, value in values.items():
                settings.write(group, settings.target(name, group, self.name, 0), value)
        self.updates, self.epochs = state["updates"], state["epochs"]
        self._batches = state.get("batches", 0)
        self._fault, self._cause = state["fault"], None
        self._settled()

    @property
    def per_update(self) -> bool:
        """True if settings change with every update, False if only at epoch ends."""
        return self._per_update

    @property
    def names(self) -> FrozenSet[str]:
        """Names of the settings that it is known to change."""
        return frozenset()

    @property
    def configuration(self) -> Dict[str, object]:
        """Return what determines the settings of all updates, except for the initial ones."""
        interval = "update" if self._per_update else "epoch"
        return {"name": self.name, "interval": interval, "frequency": self.frequency}

    @property
    def follows_values(self) -> bool:
        """Return True if the settings depend on values of the run, such as a loss."""
        return False

    def advance_to(self, updates: int, epochs: int, in_run: Tuple[int, int]) -> None:
        """Advance a schedule that has not begun to its state after so many updates and epochs.

        Args:
            updates: that have been made since ``compile``.
            epochs: that have ended since ``compile``.
            in_run: updates and epochs of the run that resumes; for schedules that start again in
                every run.

        Raises:
            ConfigurationError: it has begun, or changes with batches; or an invalid value.
        """
        if self.updates or self.epochs or (self._per_update and self.frequency != 1):
            raise ConfigurationError(
                f"a run can continue with another lr or lr_scheduler if {self.name} is unused and "
                f"counts updates or epochs, but it has made {self.updates} updates and "
                f"{self.epochs} epochs, and counts by {self.frequency}. Call compile again before "
                "fit, or start a new run in another folder."
            )
        if self._per_update:
            for begin in range(0, updates, _AT_ONCE):
                self.rows(min(_AT_ONCE, updates - begin))
            self.epochs = epochs
        while self.epochs < epochs:
            self.end_epoch({})
        self.updates = updates

    @property
    @abc.abstractmethod
    def name(self) -> str:
        """Name of the schedule in messages."""

    @abc.abstractmethod
    def _advance(self) -> None:
        """Bring the settings to those of the next update or epoch."""

    @abc.abstractmethod
    def _keep(self) -> Callable[[], None]:
        """Remember what is the schedule's own; the result puts it back."""

    def _own_state(self) -> object:
        """Return the part of its state that goes into a checkpoint, besides settings and place."""
        return None

    def _load_own(self, state: object) -> None:  # noqa: B027 - there may be none
        """Take it from a checkpoint."""

    def _at_epoch_end(self, logs: Mapping[str, float]) -> Callable[[], None]:
        return self._advance

    def _before_row(self) -> None:  # noqa: B027 - most have nothing to do
        """Look at the settings before they are used."""

    def _settled(self) -> None:  # noqa: B027 - most have nothing to do
        """The settings are what the schedule wants them to be."""

    def _refuse_change(self, name: str, wanted: object, present: object, group: int) -> None:
        # Not equal to itself: NaN, which the check of the row reports.
        if present != wanted and wanted == wanted:
            raise ConfigurationError(
                f"{name} is set by lr_scheduler, but it was changed from {wanted!r} to "
                f"{present!r} in parameter group {group}. Leave it to the schedule, or compile "
                "without one and set it in a callback."
            )

    def check_present(self) -> None:
        """Check that the next update can use the current settings.

        Raises:
            ConfigurationError: it can't.
        """
        self._check(settings.read(self._optimizer))

    def _row(self, left: int, start: ScheduleSnapshot, batches: int = 1) -> List[settings.Settings]:
        """The next row; ``left`` more follow, and ``start`` is a snapshot from before them."""
        if self._fault is not None:
            raise ConfigurationError(self._fault) from self._cause
        self._before_row()
        row = settings.read(self._optimizer)
        self._check(row)
        # Only the step after the last row may fail without harm, so only there a way back is kept.
        before = None
        if self._per_update and not left:
            before = start if start.updates == self.updates else self.snapshot()
        self.updates += 1
        self._batches += batches
        if self._per_update and not self._batches % self.frequency:
            self._move(self._advance, before)
        return row

    def _move(self, advance: Callable[[], None], before: Optional[ScheduleSnapshot]) -> None:
        """Advance; where that fails, keep the error for when the value is needed."""
        updates, batches = self.updates, self._batches
        try:
            advance()
        except Exception as error:
            fault = (
                error.args[0]
                if isinstance(error, ConfigurationError)
                else f"lr_scheduler must have a value for update {updates}, counted from 0, but "
                f"{self.name} failed with {type(error).__name__}: {str(error).rstrip('.')}. "
                "It must cover all updates of fit: epochs × updates per epoch."
            )
            if before is None:
                raise ConfigurationError(fault) from error
            self.restore(before)
            self.updates, self._batches = updates, batches
            self._fault, self._cause = fault, error
        self._settled()

    def _check(self, row: List[settings.Settings]) -> None:
        for index, (group, first) in enumerate(zip(row, self._first)):
            for name, value in settings.numbers_of(group).items():
                if name == "lr" or value != first.get(name):
                    self._check_value(name, value, index)

    def _check_value(self, name: str, value: object, group: int) -> None:
        number = settings.number(value)
        expected, low, high = _bounds(name)
        if number is not None and math.isfinite(number) and low <= number < high:
            return
        raise ConfigurationError(
            f"lr_scheduler must make {name} {expected}, but {self.name} gives {value!r} for update "
            f"{self.updates}, counted from 0, in parameter group {group}. Correct the schedule; "
            "nothing of that execution has run."
        )


def _bounds(name: str) -> Tuple[str, float, float]:
    """Bounds that torch's optimizers check when they are made, and nothing checks later."""
    if re.fullmatch(r"beta\d+", name):
        return "a number of at least 0 and less than 1", 0.0, 1.0
    if name in ("lr", "momentum", "weight_decay", "eps", "alpha"):
        return "a finite number of at least 0", 0.0, math.inf
    return "a finite number", -math.inf, math.inf


# Where a scheduler stands, and what it shares with the optimizer.
_COUNTERS = frozenset(
    (
        *("optimizer", "base_lrs", "last_epoch", "T_cur", "T_i", "best", "num_bad_epochs"),
        *("cooldown_counter", "mode_worse", "verbose"),
    )
)

_PRIVATE = frozenset(("_milestones", "_schedule_phases", "_anneal_func_type"))

# Their rates come from the first ones alone; other schedulers go on from the present ones.
_OVERWRITING = (lrs.LambdaLR, lrs.OneCycleLR, lrs.CyclicLR, lrs.CosineAnnealingWarmRestarts)

# Not one class on torch 2.0.1.
Scheduler = (lrs.LRScheduler, lrs.ReduceLROnPlateau)


def _is_configuration(name: str) -> bool:
    """Say whether an attribute of a scheduler is set in ``__init__``, and does not change."""
    return name in _PRIVATE or not (name.startswith("_") or name in _COUNTERS)


def parts(scheduler: object) -> Iterator[Any]:
    """Yield the scheduler and those it is made of."""
    yield scheduler
    for inner in getattr(scheduler, "_schedulers", ()):
        yield from parts(inner)


class TorchSchedule(Schedule):
    """Steps a scheduler of torch as a loop written by hand would.

    Args:
        optimizer: the scheduler's.
        scheduler: ReduceLROnPlateau is given the watched value, which there is at epoch ends only.
        per_update: whether it steps after every update, or at epoch ends.
        monitor: name of the value to watch; None is "val_loss" if there is a validation, else
            "loss".

    Attributes:
        scheduler: as passed.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        scheduler: Union[lrs.LRScheduler, lrs.ReduceLROnPlateau],
        per_update: bool,
        monitor: Optional[str] = None,
    ) -> None:
        super().__init__(optimizer, per_update)
        self.scheduler: Any = scheduler
        self._monitor = monitor

    @property
    def name(self) -> str:
        """Class name of the scheduler."""
        return type(self.scheduler).__name__

    @property
    def configuration(self) -> Dict[str, object]:
        """The attributes of the scheduler and of those it is made of, but for counters."""
        attributes = [
            {name: value for name, value in vars(each).items() if _is_configuration(name)}
            for each in parts(self.scheduler)
        ]
        return {**super().configuration, "monitor": self._monitor, "parts": attributes}

    @property
    def follows_values(self) -> bool:
        """Say whether one of the schedulers waits for a value to stop getting better."""
        return any(isinstance(each, lrs.ReduceLROnPlateau) for each in parts(self.scheduler))

    def _before_row(self) -> None:
        if self._per_update and any(isinstance(p, _OVERWRITING) for p in parts(self.scheduler)):
            groups = self.scheduler.optimizer.param_groups
            for index, last in enumerate(self.scheduler.get_last_lr()):
                self._refuse_change("lr", float(last), float(groups[index]["lr"]), index)

    def _advance(self) -> None:
        self.scheduler.step()

    def _at_epoch_end(self, logs: Mapping[str, float]) -> Callable[[], None]:
        if not isinstance(self.scheduler, lrs.ReduceLROnPlateau):
            return self._advance
        monitor = self._monitor or ("val_loss" if "val_loss" in logs else "loss")
        if monitor not in logs:
            raise ConfigurationError(
                f"ReduceLROnPlateau must monitor a value of the epoch, got monitor={monitor!r}. "
                f"There is {', '.join(logs) or 'none'}."
            )
        return functools.partial(self.scheduler.step, logs[monitor])

    def _keep(self) -> Callable[[], None]:
        attributes = [(owner, _copied(vars(owner))) for owner in _owners(self.scheduler)]

        def restore() -> None:
            for owner, values in attributes:
                vars(owner).clear()
                vars(owner).update(_copied(values))

        return restore

    def _own_state(self) -> object:
        return _without_functions(_copied(self.scheduler.state_dict()))

    def _load_own(self, state: object) -> None:
        live = [vars(part) for part in parts(self.scheduler)]
        counters = [{k: v for k, v in one.items() if isinstance(v, dict)} for one in live]
        self.scheduler.load_state_dict(copy.deepcopy(state))
        for one, before in zip(live, counters):
            for key, counter in before.items():
                # JSON has strings for keys where MultiStepLR has milestones.
                if any(isinstance(name, int) for name in counter):
                    one[key] = type(counter)({int(name): v for name, v in one[key].items()})


def _owners(scheduler: object) -> List[Any]:
    """Everything whose attributes change when the scheduler steps."""
    by_id: Dict[int, object] = {}
    for part in parts(scheduler):
        by_id[id(part)] = part
        for value in vars(part).values():
            # LambdaLR and others may hold objects that are called, with attributes of their own.
            for item in value if isinstance(value, (list, tuple)) else (value,):
                if _is_called_object(item):
                    by_id[id(item)] = item
    return list(by_id.values())


def _is_called_object(value: object) -> bool:
    if inspect.isroutine(value) or isinstance(value, (type, nn.Module, functools.partial)):
        return False
    return callable(value) and hasattr(value, "__dict__")


def _copied(value: Any) -> Any:
    """Containers and tensors copied, everything else as it is."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    if type(value) in (list, tuple, set, collections.deque):
        return type(value)(_copied(item) for item in value)
    if isinstance(value, collections.Counter):
        return copy.copy(value)  # its update would add
    if isinstance(value, dict):
        result = copy.copy(value)
        result.update({key: _copied(item) for key, item in value.items()})
        return result
    return value


def _without_functions(value: object) -> object:
    """Left out of a state: they come with the scheduler that loads it."""
    if isinstance(value, dict):
        return {k: _without_functions(v) for k, v in value.items() if not inspect.isroutine(v)}
    if isinstance(value, (list, tuple)) and type(value) in (list, tuple):
        return [_without_functions(item) for item in value]
    return value
