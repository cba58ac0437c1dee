"""From what users pass as ``lr_scheduler`` to one normal form."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from typing import Callable, Dict, FrozenSet, List, Mapping, Optional, Sequence, Tuple, Union

import torch
from torch.optim.lr_scheduler import ReduceLROnPlateau

from ipufit.core import Interval
from ipufit.errors import ConfigurationError, shown
from ipufit.optim.schedules import settings
from ipufit.optim.schedules.by_optimizer import MemberSchedules, schedules_by_member
from ipufit.optim.schedules.curves import ENDLESS, Curve, OneCycle, curve_by_name, resolve_length
from ipufit.optim.schedules.schedule import (
    Schedule,
    Scheduler,
    TorchSchedule,
    parts,
    silence_warnings,
)
from ipufit.optim.several import members_of
from ipufit.utils.error_collector import at_least, one_of


@dataclasses.dataclass(frozen=True)
class _ScheduledGroups:
    """Functions that hold for some parameter groups.

    Attributes:
        groups: their indices.
        functions: by the user's name of the hyper-parameter.
    """

    groups: Sequence[int]
    functions: Mapping[str, Callable[[int], object]]


class _CallableSchedule(Schedule):
    """Calls functions with the number of updates, or epochs, since ``compile``.

    Args:
        optimizer: whose settings they give.
        parts: the functions.
        per_update: whether they are functions of the update or of the epoch.

    Raises:
        ConfigurationError: the optimizer has no such number, or a first value is none.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, parts: Sequence[_ScheduledGroups], per_update: bool
    ) -> None:
        super().__init__(optimizer, per_update)
        self._parts = parts
        groups, kind = settings.read(optimizer), type(optimizer).__name__
        self._targets = [
            (group, settings.target(name, groups[group], kind, group), name)
            for part in parts
            for group in part.groups
            for name in part.functions
        ]
        self._set(0)
        self._settled()

    @property
    def name(self) -> str:
        """Names of the hyper-parameters that are scheduled."""
        names = dict.fromkeys(name for part in self._parts for name in part.functions)
        return f"the schedule of {', '.join(names)}"

    @property
    def configuration(self) -> Dict[str, object]:
        """The functions, and the groups that they hold for."""
        parts = [{"groups": each.groups, "functions": each.functions} for each in self._parts]
        return {**super().configuration, "parts": parts}

    @property
    def names(self) -> FrozenSet[str]:
        """Settings that it changes, as the groups have them."""
        return frozenset(name for _, (name, _), _ in self._targets)

    def _advance(self) -> None:
        self._set(self.updates if self._per_update else self.epochs + 1)

    def _set(self, position: int) -> None:
        # All values first: where one fails, none is set.
        values = [
            {name: self._value(name, f, position) for name, f in part.functions.items()}
            for part in self._parts
        ]
        of_group = {
            g: new_values for part, new_values in zip(self._parts, values) for g in part.groups
        }
        for group, where, name in self._targets:
            settings.write(self._optimizer.param_groups[group], where, of_group[group][name])

    def _value(self, name: str, function: Callable[[int], object], position: int) -> float:
        value = function(position)
        number = settings.number(value)
        if number is None:
            unit = "update" if self._per_update else "epoch"
            raise ConfigurationError(
                f"the schedule of {name} must return one number, got {type(value).__name__} for "
                f"{unit} {position}, counted from 0. Return for example 0.1 * 0.99 ** {unit}."
            )
        return number

    def _present(self) -> List[object]:
        groups = settings.read(self._optimizer)
        return [
            groups[group][name] if place is None else groups[group][name][place]
            for group, (name, place), _ in self._targets
        ]

    def _settled(self) -> None:
        self._wanted = self._present()

    def _before_row(self) -> None:
        for (group, _, name), wanted, present in zip(self._targets, self._wanted, self._present()):
            self._refuse_change(name, wanted, present, group)

    def _keep(self) -> Callable[[], None]:
        wanted = list(self._wanted)

        def restore() -> None:
            self._wanted = list(wanted)

        return restore


class _RunSchedule(_CallableSchedule):
    """A curve over all updates of a run, or over its epochs; every ``fit`` is a run.

    Args:
        optimizer: whose learning rates are multiplied.
        curve: says with what.
        per_update: whether it goes over the updates or over the epochs.

    Raises:
        ConfigurationError: the curve changes momentum, and the optimizer has none; or it does not
            fit into its ``total``.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, curve: Curve, per_update: bool) -> None:
        self._curve = curve
        # Until a run begins; the first values do not depend on it.
        self._length = curve.total or ENDLESS
        self._begin = 0
        super().__init__(optimizer, self._parts_of(optimizer), per_update)
        try:
            resolve_length(curve, None, "updates" if per_update else "epochs")
        except ConfigurationError as error:
            if curve.total is not None:
                raise
            self._fault = str(error)

    def _parts_of(self, optimizer: torch.optim.Optimizer) -> List[_ScheduledGroups]:
        others: Dict[str, Callable[[int], object]] = {}
        curve = self._curve
        if isinstance(curve, OneCycle) and curve.momentum is not None:
            name = "beta1" if "betas" in optimizer.defaults else "momentum"
            if any(name not in settings.numbers_of(group) for group in settings.read(optimizer)):
                raise ConfigurationError(
                    f"{curve!r} changes momentum in addition to the learning rate, but "
                    f"{type(optimizer).__name__} has none. Pass OneCycle(momentum=None)."
                )
            others[name] = lambda place: curve.momentum_at(place - self._begin, self._length)
        parts = []
        self._rates: List[float] = []
        functions: Dict[str, Callable[[int], object]]
        for index, group in enumerate(optimizer.param_groups):
            # Where torch's schedulers keep it too: what group["lr"] is from now on is the curve's.
            rate = float(group.setdefault("initial_lr", float(group["lr"])))
            self._rates.append(rate)
            functions = {"lr": functools.partial(self._rate, rate), **others}
            parts.append(_ScheduledGroups([index], functions))
        return parts

    def _rate(self, rate: float, place: int) -> float:
        return rate * self._curve.multiplier(place - self._begin, self._length)

    def begin_run(
        self, updates: Optional[int], epochs: Optional[int], is_trial: bool = False
    ) -> None:
        """Begin a run, also one that resumes and whose state is loaded next.

        Args:
            updates: of the whole run; None if the number is unknown.
            epochs: of the whole run; None if the number is unknown.
            is_trial: whether it ends after its first updates, for any length.

        Raises:
            ConfigurationError: the curve does not fit into the run, or needs to know its length; or
                somebody has set a rate by hand.
        """
        self._before_row()
        length, unit = (updates, "updates") if self._per_update else (epochs, "epochs")
        curve = self._curve
        self._length = curve.total or ENDLESS
        if not is_trial:
            self._length = resolve_length(curve, length, unit)
        self._begin = self._place
        self._fault = self._cause = None
        self._set(self._place)
        self._settled()

    def advance_to(self, updates: int, epochs: int, in_run: Tuple[int, int]) -> None:
        """Bring the curve to where it is after the run's updates and epochs alone.

        Args:
            updates: that have been made since ``compile``.
            epochs: that have ended since ``compile``.
            in_run: updates and epochs of the run that goes on, from whose beginning a curve counts.
        """
        super().advance_to(*in_run, in_run)

    @property
    def name(self) -> str:
        """Name of the curve's class."""
        return type(self._curve).__name__

    @property
    def configuration(self) -> Dict[str, object]:
        """The curve, its length, and the rates that it multiplies."""
        configuration = {**super().configuration, **vars(self._curve)}
        del configuration["parts"], configuration["total"]
        return {**configuration, "length": self._length, "rates": self._rates}

    @property
    def _place(self) -> int:
        return self.updates if self._per_update else self.epochs

    def _advance(self) -> None:
        super()._advance()
        place = self.updates if self._per_update else self.epochs + 1
        if place - self._begin >= self._length:
            unit = "update" if self._per_update else "epoch"
            cure = "Set total to the length of the run, or leave it out if the data has a length."
            if self._curve.total is None:
                cure = "If fit still runs, correct __len__ of the data, which says fewer batches."
            self._fault = (
                f"lr_scheduler={self._curve!r} ends after {self._length} {unit}s, but another "
                f"{unit} comes. {cure}"
            )

    def _own_state(self) -> object:
        return {"begin": self._begin}

    def _load_own(self, state: object) -> None:
        assert isinstance(state, dict)
        self._begin = state["begin"]


_SPELLINGS = (
    "lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, step_size=10) or "
    "lambda update: 0.1 * 0.99 ** update"
)


@dataclasses.dataclass(frozen=True)
class AtEpochEnd:
    """A schedule that steps at the end of epochs instead of after every update.

    Attributes:
        scheduler: a torch scheduler, a factory, a callable or a dict, as ``lr_scheduler`` takes
            them; callables get the epoch, counted from 0 since ``compile``.
        monitor: the value that ReduceLROnPlateau watches; None is "val_loss" if there is a
            validation, else "loss".
        frequency: it steps at the ends of every so many epochs, counted from ``compile``.
    """

    scheduler: object
    monitor: Optional[str] = None
    frequency: int = 1


@dataclasses.dataclass(frozen=True)
class EveryBatches:
    """A scheduler that steps after updates that end a multiple of so many batches of an epoch.

    An update ends a batch of every replica, or as many as accumulation steps.

    Attributes:
        scheduler: as ``lr_scheduler`` takes them.
        frequency: how many batches.
    """

    scheduler: object
    frequency: int


def resolve_schedule(
    lr_scheduler: object,
    optimizer: Optional[torch.optim.Optimizer],
    interval: Interval = "update",
) -> Union[Schedule, MemberSchedules, None]:
    """Make a :class:`ipufit.optim.schedules.Schedule` of an argument ``lr_scheduler``.

    Args:
        lr_scheduler: one of

            - None;
            - "constant", "cosine", "linear", "one_cycle", "polynomial" or "wsd", a curve over the
              whole run; or one of these with settings, such as
              ``ipufit.optim.schedules.Cosine(warmup=0.1)``;
            - a torch scheduler for this optimizer; ReduceLROnPlateau steps at epoch ends, for any
              ``interval``;
            - a factory, called with the optimizer: ``lambda opt: OneCycleLR(opt, ...)``, or a
              ``functools.partial`` of a scheduler class;
            - a callable ``(update) -> learning rate``, with updates counted from 0;
            - a dict of such callables by hyper-parameter ("lr", "momentum", "beta1", ...) for all
              parameter groups, or a list with one dict for each group;
            - :class:`AtEpochEnd` around one of these;
            - for several optimizers, a dict from their names to these forms, or a list of torch
              schedulers, each for one of them.

            A partial or an annotation (``Optimizer``, ``int``, a scheduler class or ``float`` as
            result) determines the kind of a callable. Otherwise it is called with 0; if it does not
            return a number, it is called with the optimizer.
        optimizer: whose settings change.
        interval: "update", or "epoch" for steps at epoch ends.

    Returns:
        The schedule, or None for None.

    Raises:
        ConfigurationError: anything else, another optimizer, a hyper-parameter that the optimizer
            lacks, a first value that is not a number. The optimizer is as before the call.
    """
    advice = "Take 'update', which steps it after every weight update."
    one_of("the interval of lr_scheduler", interval, Interval, advice)
    if lr_scheduler is None:
        return None
    if optimizer is None:
        raise ConfigurationError(
            "lr_scheduler needs an optimizer to schedule, got optimizer=None. Leave it out of a "
            "model that only evaluates and predicts."
        )
    restore = settings.keep(optimizer)
    by_member = schedules_by_member(lr_scheduler, optimizer)
    schedule: Union[Schedule, MemberSchedules]
    try:
        with silence_warnings():
            if by_member is None:
                schedule = _schedule(lr_scheduler, optimizer, interval == "update")
            else:
                members = members_of(optimizer)
                schedules = {
                    name: _schedule(each, members[name], interval == "update")
                    for name, each in by_member.items()
                    if each is not None
                }
                schedule = MemberSchedules(schedules, members)
        schedule.check_present()
    except BaseException:
        restore()
        raise
    return schedule


def check_form(lr_scheduler: object) -> None:
    """Refuse what is a schedule of no optimizer.

    Raises:
        ConfigurationError: it is.
    """
    if isinstance(lr_scheduler, (AtEpochEnd, EveryBatches)):
        lr_scheduler = lr_scheduler.scheduler
    is_list = isinstance(lr_scheduler, list) and all(isinstance(e, Mapping) for e in lr_scheduler)
    is_factory = callable(lr_scheduler) and not isinstance(lr_scheduler, type)
    if isinstance(lr_scheduler, str):
        curve_by_name(lr_scheduler)
    elif not (is_list or is_factory or isinstance(lr_scheduler, (Curve, *Scheduler))):
        _parts(lr_scheduler, 1)


def _schedule(scheduler: object, optimizer: torch.optim.Optimizer, per_update: bool) -> Schedule:
    monitor, frequency = None, 1
    if isinstance(scheduler, AtEpochEnd):
        frequency, monitor = scheduler.frequency, scheduler.monitor
        scheduler, per_update = scheduler.scheduler, False
    elif isinstance(scheduler, EveryBatches):
        frequency, per_update = scheduler.frequency, True
        scheduler = scheduler.scheduler
    schedule = _stepped(scheduler, optimizer, per_update, monitor)
    schedule.frequency = at_least("the frequency of a scheduler", frequency, 1)
    return schedule


def _stepped(
    scheduler: object, optimizer: torch.optim.Optimizer, per_update: bool, monitor: Optional[str]
) -> Schedule:
    if callable(scheduler) and not isinstance(scheduler, (type, Scheduler)):
        scheduler = _called(scheduler, optimizer)
    if isinstance(scheduler, ReduceLROnPlateau):
        per_update = False
    elif monitor is not None:
        raise ConfigurationError(
            f"only ReduceLROnPlateau monitors a value, got monitor={monitor!r} for "
            f"{type(scheduler).__name__}. Leave monitor out."
        )
    if isinstance(scheduler, Scheduler):
        _check_scheduler(scheduler, optimizer)
        return TorchSchedule(optimizer, scheduler, per_update, monitor)
    if isinstance(scheduler, str):
        scheduler = curve_by_name(scheduler)
    if isinstance(scheduler, Curve):
        return _RunSchedule(optimizer, scheduler, per_update)
    return _CallableSchedule(optimizer, _parts(scheduler, len(optimizer.param_groups)), per_update)


def _check_scheduler(scheduler: object, optimizer: torch.optim.Optimizer) -> None:
    for part in parts(scheduler):
        kind = type(part).__name__
        if part.optimizer is not optimizer:
            raise ConfigurationError(
                f"lr_scheduler must be made for the compiled optimizer, got {kind} for another "
                f"{type(part.optimizer).__name__}. Pass that optimizer too, or a factory: lambda "
                f"optimizer: {kind}(optimizer, ...)."
            )
        if part is not scheduler and isinstance(part, ReduceLROnPlateau):
            raise ConfigurationError(
                f"ReduceLROnPlateau can't be combined, got one inside {type(scheduler).__name__}: "
                "it needs a value that only exists at the end of an epoch. Pass it directly as "
                "lr_scheduler."
            )


def _parts(scheduler: object, groups: int) -> List[_ScheduledGroups]:
    if isinstance(scheduler, Mapping):
        _check_functions(scheduler)
        return [_ScheduledGroups(range(groups), dict(scheduler))]
    if (
        isinstance(scheduler, list)
        and scheduler
        and all(isinstance(one, Mapping) for one in scheduler)
    ):
        if len(scheduler) != groups:
            raise ConfigurationError(
                f"lr_scheduler must be one dict, or a list with one for each of the {groups} "
                f"parameter groups, got {len(scheduler)}. Write {{}} for a group without a "
                "schedule."
            )
        for one in scheduler:
            _check_functions(one, empty=any(scheduler))
        return [_ScheduledGroups([index], dict(one)) for index, one in enumerate(scheduler)]
    if isinstance(scheduler, type):
        name = scheduler.__name__
        instead = f"functools.partial({name}, ...), which is called with the optimizer"
        if issubclass(scheduler, Curve):
            instead = f"{name}()"
        raise ConfigurationError(
            f"lr_scheduler must be an object, a factory, a callable or a dict, got the class "
            f"{name}. Pass for example {instead}."
        )
    came = (
        f"{type(scheduler).__name__} of {len(scheduler)}"
        if isinstance(scheduler, (list, tuple))
        else ""
    )
    raise ConfigurationError(
        "lr_scheduler must be a name, an object of torch.optim.lr_scheduler, a factory, a callable "
        f"or a dict of callables, got {came or shown(scheduler)}. Pass for example 'cosine' or "
        f"{_SPELLINGS}; torch's SequentialLR and ChainedScheduler combine several."
    )


def _check_functions(functions: Mapping[object, object], empty: bool = False) -> None:
    if not functions and not empty:
        raise ConfigurationError(
            "lr_scheduler must name a hyper-parameter, got an empty dict. Pass for example "
            "{'lr': lambda update: 0.1 * 0.99 ** update}."
        )
    if "lr" in functions and "learning_rate" in functions:
        raise ConfigurationError(
            "lr_scheduler must name each hyper-parameter once, got 'lr' and 'learning_rate', which "
            "mean the same. Leave one out."
        )
    for name, function in functions.items():
        if not callable(function) or isinstance(function, type):
            raise ConfigurationError(
                f"lr_scheduler must have a callable for {name!r}, got {function!r}. Pass for "
                f"example {{{name!r}: lambda update: 0.1 * 0.99 ** update}}, or set a constant "
                "value in the optimizer."
            )


def _called(function: Callable[..., object], optimizer: torch.optim.Optimizer) -> object:
    """The scheduler that a factory makes, or a dict with the callable for the learning rate."""
    _check_signature(function)
    says = _is_factory(function)
    if says is None:
        return _probed(function, optimizer)
    if not says:
        return {"lr": function}
    try:
        scheduler = function(optimizer)
    except Exception as error:
        raise ConfigurationError(
            "lr_scheduler is a factory, which must make a torch scheduler from the optimizer, but "
            f"it failed with {_text(error)}. Correct it: {_SPELLINGS.partition(' or ')[0]}."
        ) from error
    if not isinstance(scheduler, Scheduler):
        raise ConfigurationError(
            "lr_scheduler is a factory, which must make a torch scheduler from the optimizer, got "
            f"{type(scheduler).__name__}. Write for example {_SPELLINGS.partition(' or ')[0]}."
        )
    return scheduler


def _probed(function: Callable[..., object], optimizer: torch.optim.Optimizer) -> object:
    # With 0 first: a factory fails at once on a number, and a schedule may do anything with an
    # optimizer.
    tried: List[str] = []
    cause: Optional[Exception] = None
    try:
        value = function(0)
        if settings.number(value) is not None:
            return {"lr": function}
        tried.append(f"0 gives {type(value).__name__}")
    except Exception as error:
        tried.append(f"0 fails with {_text(error)}")
        cause = error
    try:
        scheduler = function(optimizer)
        if isinstance(scheduler, Scheduler):
            return scheduler
        tried.append(f"the optimizer gives {type(scheduler).__name__}")
    except Exception as error:
        tried.append(f"the optimizer fails with {_text(error)}")
        cause = cause or error
    raise ConfigurationError(
        "lr_scheduler must make a torch scheduler from the optimizer or a learning rate from the "
        f"update, but calling it with {', and with '.join(tried)}. Write {_SPELLINGS}."
    ) from cause


def _check_signature(function: Callable[..., object]) -> None:
    try:
        inspect.signature(function).bind(0)
    except TypeError as error:
        raise ConfigurationError(
            "lr_scheduler must be callable with one argument, the optimizer or the update, got "
            f"one that is not: {error}. Write {_SPELLINGS}."
        ) from error
    except ValueError:
        pass  # a builtin without a signature


def _is_factory(function: Callable[..., object]) -> Optional[bool]:
    """Read from a callable's annotations if it is a factory; None where they say nothing."""
    if isinstance(function, functools.partial) and isinstance(function.func, type):
        return issubclass(function.func, Scheduler)
    try:
        signature = inspect.signature(function)
    except ValueError:
        return None
    takes = [_annotated(p.annotation) for p in list(signature.parameters.values())[:1]]
    for kind in [*takes, _annotated(signature.return_annotation)]:
        if kind is not None:
            return kind
    return None


def _annotated(annotation: object) -> Optional[bool]:
    """True if an annotation belongs to a factory, False to a schedule, None to neither."""
    if isinstance(annotation, str):
        last = annotation.rpartition(".")[2]
        if last in ("Optimizer", "LRScheduler", "ReduceLROnPlateau") or last.endswith("LR"):
            return True
        return False if last in ("int", "float") else None
    if not isinstance(annotation, type) or annotation is inspect.Parameter.empty:
        return None
    if issubclass(annotation, (*Scheduler, torch.optim.Optimizer)):
        return True
    return False if annotation in (int, float) else None


def _text(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).rstrip('.')}"
