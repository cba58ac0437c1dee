"""The data of ``fit``, ``evaluate`` and ``predict``: opened, split and limited."""

from __future__ import annotations

import dataclasses
import math
import numbers
from typing import Any, Dict, List, Mapping, Optional, Type, TypeVar, Union

from torch.utils.data import DataLoader

from ipufit.core.batch import Mode
from ipufit.core.plan import Plan
from ipufit.data.adapters import DataArguments, comes_in_samples, get_data_adapter, split_data
from ipufit.data.in_memory import is_array, is_table
from ipufit.data.settings import Loading, Validation, resolve_loading, resolve_validation, rivals
from ipufit.data.source import DataAdapter
from ipufit.errors import ConfigurationError, PlanError, unfit
from ipufit.training.session import Session
from ipufit.utils.error_collector import ErrorCollector, at_least, at_least_or_none

RequestT = TypeVar("RequestT", bound="CallRequest")


@dataclasses.dataclass(frozen=True)
class CallRequest:
    """The arguments of a call of :class:`ipufit.Model`, as they came.

    Attributes:
        data: those that say what is read.
        verbose, callbacks, ipus, device_iterations, seed: as all such calls have them.
    """

    data: DataArguments
    verbose: Any = 0
    callbacks: object = ()
    ipus: object = None
    device_iterations: object = None
    seed: object = None

    @classmethod
    def of(cls: Type[RequestT], data: DataArguments, arguments: Mapping[str, Any]) -> RequestT:
        """Take the arguments from all values of the call, by name; others have their defaults."""
        fields = dataclasses.fields(cls)
        return cls(data, **{f.name: arguments[f.name] for f in fields if f.name in arguments})


@dataclasses.dataclass(frozen=True)
class FitRequest(CallRequest):
    """The arguments of ``fit``, as they came."""

    epochs: object = 1
    validation_split: Any = 0.0
    validation_data: object = None
    steps_per_epoch: object = None
    gradient_accumulation: object = None
    checkpoint: object = None
    loading: object = None


@dataclasses.dataclass(frozen=True)
class InferenceRequest(CallRequest):
    """The arguments of ``evaluate`` or ``predict``, as they came."""

    steps: object = None
    prefetch: object = None
    padding_value: Optional[float] = None


class FitData:
    """The data of one ``fit``: opened, split and limited, with every fault collected.

    Attributes:
        loading: how much of the data is read; the default where it has faults.
        source: the training data; None where it has faults.
        validation: how held-out data is evaluated.
        held_out: the validation data, or None.
        notes: what History should say of it.
    """

    def __init__(self, session: Session, request: FitRequest, faults: ErrorCollector) -> None:
        self._session = session
        self._request = request
        self.loading = Loading()
        with faults.collect():
            self.loading = resolve_loading(request.loading)
        self._faults = faults
        self._steps: Optional[int] = None
        self._is_split = True  # until that is known
        self.validation = Validation()
        self.source: Optional[DataAdapter] = None
        self.held_out: Optional[DataAdapter] = None
        self.notes: Dict[str, Any] = {}

    def open(self, mode: Mode = Mode.TRAIN) -> None:
        """Training and validation data, whatever forms they have."""
        request, faults = self._request, self._faults
        own_loss = self._session.loss.in_module
        shuffles = self.loading.overfit_batches is None
        given = dataclasses.replace(request.data, shuffles=shuffles)
        with faults.collect():
            self.source = get_data_adapter(given, mode, own_loss)
        with faults.collect():
            self.validation = resolve_validation(request.validation_data)
            held = DataArguments(
                "validation data",
                None,
                batch_size=self.validation.batch_size,
                batch_size_name="batch_size of Validation",
            )
            held_given = self._held_out(held, given)
            if held_given is not None:
                self.held_out = get_data_adapter(held_given, Mode.EVALUATE, own_loss)

    def _held_out(self, held: DataArguments, given: DataArguments) -> Optional[DataArguments]:
        """The validation data in the user's form; of a split, what is left is the training data."""
        split = self._request.validation_split
        is_number = isinstance(split, numbers.Real) and not isinstance(split, bool)
        if not is_number or not 0 <= split < 1:
            needed = "a fraction of at least 0.0 and less than 1.0"
            raise unfit("validation_split", needed, split, "Try 0.2.")
        self._is_split = bool(split)
        if split and self.validation.data is not None:
            raise ConfigurationError(
                "validation_split and validation_data both say what to evaluate. Pass one of them."
            )
        own_loss = self._session.loss.in_module
        rest = _validation_parts(self.validation.data, held, bool(own_loss))
        if split:
            if self.source is None:
                return None
            kept, rest = split_data(given, split, held)
            self.source = get_data_adapter(kept, Mode.TRAIN, own_loss)
        if rest is None or rest.batch_size is not None or self.source is None:
            return rest
        if comes_in_samples(rest):
            rest = dataclasses.replace(rest, batch_size=given.batch_size)
        return rest

    def limit(self) -> None:
        """Apply all limits but those in executions."""
        request, faults, loading = self._request, self._faults, self.loading
        with faults.collect():
            self._steps = at_least_or_none("steps_per_epoch", request.steps_per_epoch, 1)
        with faults.collect():
            self._refuse_rivals()
            if loading.overfit_batches is not None and request.data.shuffle is True:
                raise ConfigurationError(
                    "overfit_batches reads the same batches in every epoch, but shuffle=True "
                    "changes them. Leave one out."
                )
        if self.source is not None:
            with faults.collect():
                self._limit_training(self.source)
        if self.held_out is not None and loading.overfit_batches is None:
            with faults.collect():
                self._limit_validation(self.held_out)

    def _refuse_rivals(self) -> None:
        """Refuse ``steps_per_epoch`` and steps of a validation beside limits in batches.

        Raises:
            ConfigurationError: both say how much of the data is read.
        """
        steps, loading = self._request.steps_per_epoch, self.loading
        pairs = (
            (steps, "steps_per_epoch", "limit_train_batches", "an epoch"),
            (self.validation.steps, "steps of Validation", "limit_val_batches", "a validation"),
        )
        for value, name, limit, what in pairs:
            limits = (limit, "overfit_batches")
            names = [each for each in limits if getattr(loading, each) is not None]
            if value is not None and names:
                raise rivals([name, *names], what)

    def refuse_unused(self) -> None:
        """Refuse settings of a validation where there is none.

        Raises:
            ConfigurationError: names them.
        """
        validation = self.validation
        if validation.data is not None or self._is_split:
            return
        names = ("ipus", "device_iterations", "steps", "batch_size")
        unused = [f"{n} of Validation" for n in names if getattr(validation, n) is not None]
        unused += ["limit_val_batches"] if self.loading.limit_val_batches is not None else []
        unused += ["freq of Validation"] if validation.freq != 1 else []
        if unused:
            raise ConfigurationError(
                f"{' and '.join(unused)} set how validation_data is evaluated, but there is no "
                "validation_data. Pass Validation(data, ...) or validation_split, or leave them "
                "out."
            )

    def _limit_training(self, source: DataAdapter) -> None:
        loading = self.loading
        if loading.limit_train_batches is not None:
            count = resolve_limit("limit_train_batches", loading.limit_train_batches, source)
            source.limit(count)
            self.notes["limit_train_batches"] = count
        if loading.overfit_batches is not None:
            count = resolve_limit("overfit_batches", loading.overfit_batches, source)
            self.source = source.first_batches(count)
            if self.held_out is not None:
                self.held_out = self.source.again("validation data")
            self.notes["overfit_batches"] = count
        if self._steps is not None:
            self.notes["steps_per_epoch"] = self._steps

    def _limit_validation(self, held_out: DataAdapter) -> None:
        value = self.loading.limit_val_batches
        if value is None:
            return
        count = resolve_limit("limit_val_batches", value, held_out, least=0)
        self.notes["limit_val_batches"] = count
        if count:
            held_out.limit(count)
        else:
            self.held_out = None

    def plan(self) -> Optional[Plan]:
        """The batch algebra of training; None where it has faults.

        Without data, whose faults are told too, what the arguments say by themselves is checked.
        """
        request, source = self._request, self.source or DataAdapter([], "training data")
        session, steps, dev_run = self._session, self._steps, int(self.loading.fast_dev_run)
        with self._faults.collect():
            work = session.resolve_work(
                source,
                True,
                ipus=request.ipus,
                device_iterations=request.device_iterations,
                gradient_accumulation=request.gradient_accumulation,
            )
            plan = session.plan(source, **work, training=True, fixed_updates=steps)
            if not dev_run:
                return plan
            if steps is not None:
                steps = min(steps, dev_run * plan.device_iterations)
            else:
                source.limit(dev_run * plan.micro_batches_per_execution)
            return session.plan(source, **work, training=True, fixed_updates=steps)
        return None

    def inference_plan(self) -> Optional[Plan]:
        """The batch algebra of validation; its arguments are looked at without validation too."""
        request, validation = self._request, self.validation
        source = self.held_out or self.source or DataAdapter([], "training data")
        names = ("ipus", "device_iterations")
        own = {n: getattr(validation, n) for n in names if getattr(validation, n) is not None}
        fixed = self._session.fixed.names(False)
        shared = {n: None if n in fixed else getattr(request, n) for n in names}
        with self._faults.collect():
            try:
                return self._validation_plan(source, {**shared, **own})
            except PlanError as error:
                raise _of_validation(error, validation, list(own)) from error
        return None

    def _validation_plan(self, source: DataAdapter, work: Dict[str, Any]) -> Optional[Plan]:
        work = self._session.resolve_work(source, False, **work)
        dev_run, steps = int(self.loading.fast_dev_run), self.validation.steps
        if dev_run or self.held_out is None:
            plan = self._session.plan(source, **work, gradient_accumulation=1, training=False)
            if self.held_out is None:
                return None
            source.limit(dev_run * plan.micro_batches_per_execution)
            steps = None
        return inference_plan(self._session, source, steps, "steps of Validation", **work)


def _of_validation(error: PlanError, validation: Validation, names: List[str]) -> PlanError:
    """An error of the plan in the words of who called fit: these arguments are of Validation."""
    faults, suggestion = list(error.faults), dict(error.suggestion)
    for name in names:
        faults = [fault.replace(f"`{name}`", f"`{name}` of Validation") for fault in faults]
    changes: Dict[str, Any] = {n: suggestion.pop(n) for n in names if n in suggestion}
    if changes:
        suggestion["validation_data"] = dataclasses.replace(validation, **changes)
    return PlanError(faults, suggestion)


def resolve_limit(name: str, value: Union[int, float], source: DataAdapter, least: int = 1) -> int:
    """Convert a limit, a number or a fraction, to a number of the source's batches.

    Args:
        name: of the argument.
        value: a count, or a fraction of an epoch as a float; checked by ``Loading``.
        source: what it limits.
        least: the smallest good count.

    Raises:
        ConfigurationError: it is a fraction that leaves nothing, or of an unknown length.
    """
    if isinstance(value, numbers.Integral):
        return int(value)
    if value == 1 and source.micro_batches is None:
        raise ConfigurationError(
            f"{name}=1.0 means all batches of the {source.role}, which is what happens without it. "
            "Leave it out, or write 1 for a single batch."
        )
    if source.micro_batches is None:
        raise ConfigurationError(
            f"{name}={value} is a fraction of the batches of the {source.role}, but their number "
            "is unknown. Pass a number of batches, an integer."
        )
    # 0.29 of 100 batches are 29, though the product is a little less.
    count = math.floor(source.micro_batches * float(value) + 1e-9)
    if count < least:
        raise ConfigurationError(
            f"{name}={value} must leave at least one batch, but leaves none of the "
            f"{source.micro_batches} batches of the {source.role}. Use a larger fraction, or a "
            "number of batches."
        )
    return count


def plan_of_fit(session: Session, request: FitRequest, faults: ErrorCollector) -> Optional[Plan]:
    """The batch algebra of a training, for ``explain``, which needs no target.

    Args:
        session: of the model.
        request: the arguments.
        faults: of the call.

    Raises:
        ConfigurationError: arguments that can't work.
    """
    data = FitData(session, request, faults)
    mode = Mode.PREDICT if request.data.y is None else Mode.TRAIN
    data.open(mode)
    data.limit()
    plan, source = data.plan(), data.source
    faults.raise_all()
    if plan is not None and source is not None and source.micro_batch_size is None:
        first = session.example(source, mode)
        size = source.usual_batch_size or (first and first.size) or 1
        plan = dataclasses.replace(plan, micro_batch_size=size)
    return plan


def inference_plan(
    session: Session,
    source: DataAdapter,
    steps: Optional[int],
    name: str,
    ipus: Any,
    device_iterations: Any,
) -> Plan:
    """The batch algebra of an evaluation that may end after so many device iterations."""
    work = session.resolve_work(source, False, ipus=ipus, device_iterations=device_iterations)
    work.update(gradient_accumulation=1, training=False, fixed_updates=steps)
    plan = session.plan(source, **work)
    if steps is None:
        return plan
    known = source.micro_batches
    if known is not None and known <= (steps - 1) * plan.micro_batches_per_update:
        there = -(-known // plan.micro_batches_per_update)
        raise ConfigurationError(
            f"{name} must be at most {there}, the number of device iterations in the "
            f"{source.role}, got {steps}. Leave it out to use all."
        )
    source.limit(steps * plan.micro_batches_per_update)
    return session.plan(source, **work)


def _validation_parts(data: object, held: DataArguments, own_loss: bool) -> Optional[DataArguments]:
    """A tuple is ``(x, y)`` or ``(x, y, sample_weight)``, as in Keras; the rest is one thing.

    So is a list that can be none of batches: an array by itself is no batch with a target.
    """
    if data is None:
        return None
    if isinstance(data, list) and len(data) in (2, 3) and not own_loss:
        data = tuple(data) if any(is_array(part) or is_table(part) for part in data) else data
    if not isinstance(data, tuple) or hasattr(data, "_fields"):
        return dataclasses.replace(held, x=data)
    if len(data) not in (2, 3):
        raise ConfigurationError(
            "validation_data as a tuple must be (x, y) or (x, y, sample_weight), got a tuple of "
            f"{len(data)}. Pass batches as a list or a DataLoader."
        )
    return dataclasses.replace(
        held, x=data[0], y=data[1], sample_weight=data[2] if len(data) == 3 else None
    )


def resolve_prefetch(
    prefetch: object, source: Optional[DataAdapter], session: Session, passes: bool = False
) -> int:
    """How many executions to prepare ahead; None leaves the choice to the kind of data.

    Args:
        prefetch: what came.
        source: the data, or None.
        session: of the model.
        passes: whether a new pass over the data may begin within an epoch. A loader draws random
            numbers then, which another thread must not do unasked.

    Raises:
        ConfigurationError: it is no count.
    """
    if prefetch is None:
        if source is None or (passes and isinstance(source.loader, DataLoader)):
            return 0
        # Rows are copied in no time; handing them over between threads takes longer.
        if source.is_held and session.engine.computes_on_host(session.module):
            return 0
        return int(source.reads_alone)
    return at_least("prefetch", prefetch, 0, " or None")


def updates_per_epoch(plan: Plan, source: DataAdapter) -> Optional[int]:
    """From the plan, else from the number of batches, else unknown."""
    if plan.updates_per_epoch is not None:
        return plan.updates_per_epoch
    if source.micro_batches is None:
        return None
    return -(-source.micro_batches // plan.micro_batches_per_update)
