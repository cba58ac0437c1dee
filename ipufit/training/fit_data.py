"""The data of ``fit``, ``evaluate`` and ``predict`` as asked for: opened, split and limited."""

from __future__ import annotations

import dataclasses
import numbers
from typing import Any, Dict, List, Optional, Tuple

from torch.utils.data import DataLoader

from ipufit.core.batch import Mode
from ipufit.core.plan import Plan
from ipufit.data.adapters import DataArguments, comes_in_samples, get_data_adapter, split_data
from ipufit.data.in_memory import is_array, is_frame
from ipufit.data.limits import batch_count, dev_run_length, first_batches
from ipufit.data.source import DataAdapter
from ipufit.errors import ConfigurationError
from ipufit.training.session import Session
from ipufit.utils.error_collector import ErrorCollector, at_least

__all__ = [
    "FitData",
    "FitRequest",
    "inference_plan",
    "limited_plan",
    "refuse_unused",
    "resolve_prefetch",
    "training_work",
]


@dataclasses.dataclass(frozen=True)
class FitRequest:
    """The arguments of ``fit``, as they came."""

    x: Any
    y: Any
    batch_size: Any
    epochs: Any
    ipus: Any
    device_iterations: Any
    gradient_accumulation: Any
    validation_split: Any
    validation_data: Any
    shuffle: Any
    class_weight: Any
    sample_weight: Any
    initial_epoch: Any
    steps_per_epoch: Any
    validation_steps: Any
    validation_batch_size: Any
    validation_freq: Any
    limit_train_batches: Any
    limit_val_batches: Any
    overfit_batches: Any
    fast_dev_run: Any
    prefetch: Any
    inference_ipus: Any
    inference_device_iterations: Any
    callbacks: Any
    checkpoint: Any
    resume: Any
    resume_changes: Any
    max_restarts: Any
    report: Any
    autoreport: Any
    autoreport_dir: Any
    seed: Any
    verbose: Any


class FitData:
    """The data of one ``fit``: opened, split and limited, with every fault collected.

    Attributes:
        source: the training data; None where it has faults.
        held_out: the validation data, or None.
        notes: what History should say of it.
    """

    def __init__(self, session: Session, asked: FitRequest, faults: ErrorCollector) -> None:
        self._session = session
        self._asked = asked
        self._faults = faults
        self._steps: Optional[int] = None
        self._validation_steps: Optional[int] = None
        self.source: Optional[DataAdapter] = None
        self.held_out: Optional[DataAdapter] = None
        self.notes: Dict[str, Any] = {}

    def open(self) -> None:
        """Training and validation data, whatever forms they have."""
        asked, faults = self._asked, self._faults
        own_loss = self._session.loss.in_module
        given = DataArguments(
            "training data",
            asked.x,
            asked.y,
            asked.sample_weight,
            asked.class_weight,
            asked.batch_size,
            asked.shuffle,
            shuffles=asked.overfit_batches is None,
        )
        with faults.collect():
            self.source = get_data_adapter(given, Mode.TRAIN, own_loss)
        held = DataArguments(
            "validation data",
            None,
            batch_size=asked.validation_batch_size,
            batch_size_name="validation_batch_size",
        )
        with faults.collect():
            held_given = self._held_out(held, given)
            if held_given is not None:
                self.held_out = get_data_adapter(held_given, Mode.EVALUATE, own_loss)

    def _held_out(self, held: DataArguments, given: DataArguments) -> Optional[DataArguments]:
        """The validation data in the user's form; of a split, what is left is the training data."""
        asked = self._asked
        split = asked.validation_split
        is_number = isinstance(split, numbers.Real) and not isinstance(split, bool)
        if not is_number or not 0 <= split < 1:
            raise ConfigurationError(
                "validation_split must be a fraction of at least 0.0 and less than 1.0, got "
                f"{split!r}. Try 0.2."
            )
        if split and asked.validation_data is not None:
            raise ConfigurationError(
                "validation_split and validation_data both say what to evaluate. Pass one of them."
            )
        own_loss = self._session.loss.in_module
        rest = _validation_parts(asked.validation_data, held, bool(own_loss))
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

    def limit(self) -> int:
        """Apply all limits but those in executions, whose number is returned; 0 for none."""
        asked, faults = self._asked, self._faults
        dev_run = 0
        with faults.collect():
            dev_run = dev_run_length(asked.fast_dev_run)
        with faults.collect():
            if asked.steps_per_epoch is not None:
                self._steps = at_least("steps_per_epoch", asked.steps_per_epoch, 1, " or None")
        with faults.collect():
            if asked.validation_steps is not None:
                name = "validation_steps"
                self._validation_steps = at_least(name, asked.validation_steps, 1, " or None")
        with faults.collect():
            _refuse_rivals(asked)
        if self.source is not None:
            with faults.collect():
                self._limit_training(self.source)
        if self.held_out is not None and asked.overfit_batches is None:
            with faults.collect():
                self._limit_validation(self.held_out)
        return dev_run

    def _limit_training(self, source: DataAdapter) -> None:
        asked = self._asked
        if asked.limit_train_batches is not None:
            count = batch_count("limit_train_batches", asked.limit_train_batches, source)
            source.limit(count)
            self.notes["limit_train_batches"] = count
        if asked.overfit_batches is not None:
            count = batch_count("overfit_batches", asked.overfit_batches, source)
            self.source = first_batches(source, count, source.role)
            if self.held_out is not None:
                self.held_out = self.source.again("validation data")
            self.notes["overfit_batches"] = count
        if self._steps is not None:
            self.notes["steps_per_epoch"] = self._steps

    def _limit_validation(self, held_out: DataAdapter) -> None:
        value = self._asked.limit_val_batches
        if value is None:
            return
        count = batch_count("limit_val_batches", value, held_out, least=0)
        self.notes["limit_val_batches"] = count
        if count:
            held_out.limit(count)
        else:
            self.held_out = None

    def plan(self, dev_run: int) -> Optional[Plan]:
        """The batch algebra of training; None where it has faults.

        Without data, whose faults are told too, what the arguments say by themselves is checked.
        """
        asked, source = self._asked, self.source or DataAdapter([], "training data")
        given = asked.ipus, asked.device_iterations, asked.gradient_accumulation
        with self._faults.collect():
            work = training_work(self._session, source, given)
            plan = self._session.plan(source, *work, True, self._steps)
            if not dev_run:
                return plan
            if self._steps is not None:
                self._steps = min(self._steps, dev_run * plan.device_iterations)
            else:
                source.limit(dev_run * plan.micro_batches_per_execution)
            return self._session.plan(source, *work, True, self._steps)
        return None

    def inference_plan(self, dev_run: int) -> Optional[Plan]:
        """The batch algebra of validation; its arguments are looked at without validation too."""
        asked = self._asked
        source = self.held_out or self.source or DataAdapter([], "training data")
        own = {"ipus": asked.inference_ipus, "device_iterations": asked.inference_device_iterations}
        own = {name: value for name, value in own.items() if value is not None}
        fixed = self._session.fixed.names(False)
        shared = {"ipus": asked.ipus, "device_iterations": asked.device_iterations}
        shared = {name: shared[name] for name in shared if name not in fixed}
        shared = {"ipus": None, "device_iterations": None, **shared, **own}
        with self._faults.collect(inference=list(own)):
            shared = self._session.resolve_work(source, False, **shared)
            if self.held_out is None:
                self._session.plan(source, **shared, gradient_accumulation=1, training=False)
                return None
            steps = self._validation_steps
            if dev_run:
                plan = self._session.plan(source, **shared, gradient_accumulation=1, training=False)
                source.limit(dev_run * plan.micro_batches_per_execution)
                steps = None
            return inference_plan(self._session, source, steps, "validation_steps", **shared)
        return None


def limited_plan(
    session: Session, source: DataAdapter, limit: Any, steps: Any, work: Tuple[Any, Any, Any]
) -> Plan:
    """The batch algebra of a training that is limited, for ``explain``.

    Args:
        session: of the model.
        source: the training data.
        limit: ``limit_train_batches``.
        steps: ``steps_per_epoch``.
        work: ipus, device_iterations, gradient_accumulation.

    Raises:
        ConfigurationError: arguments that can't work.
    """
    if limit is not None and steps is not None:
        raise _rivals(["steps_per_epoch", "limit_train_batches"], "an epoch")
    if steps is not None:
        steps = at_least("steps_per_epoch", steps, 1, " or None")
    if limit is not None:
        source.limit(batch_count("limit_train_batches", limit, source))
    return session.plan(source, *training_work(session, source, work), True, steps)


def training_work(
    session: Session, source: DataAdapter, work: Tuple[Any, Any, Any]
) -> Tuple[Any, Any, Any]:
    """ipus, device_iterations and gradient_accumulation, as asked for or as ``compile`` has fixed.

    Raises:
        PlanError: both, and they disagree.
    """
    ipus, iterations, accumulation = work
    found = session.resolve_work(
        source, True, ipus=ipus, device_iterations=iterations, gradient_accumulation=accumulation
    )
    return found["ipus"], found["device_iterations"], found["gradient_accumulation"]


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
    ipus, device_iterations = work["ipus"], work["device_iterations"]
    plan = session.plan(source, ipus, device_iterations, 1, False, steps)
    if steps is None:
        return plan
    known = source.micro_batches
    if known is not None and known <= (steps - 1) * plan.micro_batches_per_update:
        there = -(-known // plan.micro_batches_per_update)
        raise ConfigurationError(
            f"{name} must be at most {there}, the device iterations that the {source.role} lasts "
            f"for, got {steps}. Leave it out to use all."
        )
    source.limit(steps * plan.micro_batches_per_update)
    return session.plan(source, ipus, device_iterations, 1, False, steps)


def _validation_parts(data: Any, held: DataArguments, own_loss: bool) -> Optional[DataArguments]:
    """A tuple is ``(x, y)`` or ``(x, y, sample_weight)``, as in Keras; the rest is one thing.

    So is a list that can be none of batches: an array by itself is no batch with a target.
    """
    if data is None:
        return None
    if isinstance(data, list) and len(data) in (2, 3) and not own_loss:
        data = tuple(data) if any(is_array(part) or is_frame(part) for part in data) else data
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
    prefetch: Any, source: Optional[DataAdapter], session: Session, passes: bool = False
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


def _refuse_rivals(asked: FitRequest) -> None:
    """Refuse two arguments of which each says how much of the data an epoch reads."""
    groups = (
        ("an epoch", ("steps_per_epoch", "limit_train_batches", "overfit_batches")),
        ("a validation", ("validation_steps", "limit_val_batches", "overfit_batches")),
    )
    for what, names in groups:
        rivals = [name for name in names if getattr(asked, name) is not None]
        if len(rivals) > 1:
            raise _rivals(rivals, what)
    if asked.overfit_batches is not None and asked.shuffle is True:
        raise ConfigurationError(
            "overfit_batches reads the same batches in every epoch, but shuffle=True asks for "
            "others. Leave one out."
        )


def _rivals(names: List[str], what: str) -> ConfigurationError:
    return ConfigurationError(
        f"{' and '.join(names)} each say how much of the data {what} reads. Pass one of them."
    )


def refuse_unused(asked: FitRequest) -> None:
    """Refuse arguments of a validation where there is none.

    Raises:
        ConfigurationError: naming them.
    """
    names = [
        *("inference_ipus", "inference_device_iterations", "validation_steps"),
        *("validation_batch_size", "limit_val_batches"),
    ]
    given = [name for name in names if getattr(asked, name) is not None]
    if asked.validation_freq is not None and asked.validation_freq != 1:
        given.append("validation_freq")
    if given and asked.validation_data is None and not asked.validation_split:
        raise ConfigurationError(
            f"{' and '.join(given)} set how validation_data is evaluated, but there is none. Pass "
            "validation_data, or leave them out."
        )
