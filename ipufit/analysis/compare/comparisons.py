"""Comparison of a program with its module, and of one division of an update with another."""

from __future__ import annotations

import copy
import dataclasses
from typing import Callable, Dict, List, Optional, Tuple

import torch
from torch import Tensor, nn

from ipufit.analysis.compare.invariance_report import (
    InvarianceCause,
    InvarianceReport,
    InvarianceSetting,
    find_causes,
)
from ipufit.analysis.tuner import Trial
from ipufit.core import Reference
from ipufit.core.batch import Mode
from ipufit.core.compile_arguments import GRAPH, INDUCTOR, OFF
from ipufit.core.plan import Plan
from ipufit.core.train_config import Outputs, Precision
from ipufit.data.adapters import DataArguments, get_data_adapter
from ipufit.engines.program import Engine
from ipufit.errors import ConfigurationError, DataError
from ipufit.losses import Loss
from ipufit.metrics.metric_set import MetricSet
from ipufit.planner.divided_module import DividedModule
from ipufit.tracing.comparison import Comparison, Tolerance, distance
from ipufit.training.sanity_check import require_one_loss
from ipufit.training.session import JobSpec, Session
from ipufit.training.summary import batch_of, sample_of
from ipufit.utils import tree
from ipufit.utils.error_collector import ErrorCollector, one_of
from ipufit.utils.interrupts import defer_signals
from ipufit.utils.state import device_of, fork_rng, train_mode

# Relative and absolute; None for those of the dtype.
Tolerances = Tuple[Optional[float], Optional[float]]


def compare(session: Session, sample: object, reference: str, tolerances: Tolerances) -> Comparison:
    """Run one micro-batch through the program and through the reference; all is put back.

    Args:
        session: of the model.
        sample: a batch, or a loader, whose first one is taken.
        reference: "eager" or "float64".
        tolerances: relative and absolute; None for those of the dtype.

    Raises:
        ConfigurationError: arguments that can't work, or an engine whose programs can't be looked
            into.
        DataError: the batch can't be used.
    """
    require_one_loss(session.loss, "compare")
    session.processes.require_single(
        "compare", "Compare in one process: all processes run the same program."
    )
    faults, tolerance = ErrorCollector(of_call=True), Tolerance(*tolerances)
    with faults.collect():
        one_of("reference", reference, Reference)
    with faults.collect():
        tolerance.check()
    faults.raise_all()
    beside = session.engine.beside()
    if beside is None:
        raise ConfigurationError(
            "compare runs the recorded program operator by operator, which needs "
            f"engine='embedded', got engine {session.engine.name!r}. Make the model with "
            "ipufit.Model(module, engine='embedded')."
        )
    batch = batch_of(sample, session.loss.in_module, "compare")
    source = get_data_adapter(DataArguments("sample", [batch]), Mode.TRAIN, session.loss.in_module)
    plan = session.plan(source, None, 1, 1, training=True)
    # A compiled update tells nothing of its operators, and would be compiled only for this.
    jit = GRAPH if session.config.jit == INDUCTOR else None
    trial = Trial(session, lambda: beside, jit)
    with trial.running(source, plan, 0, lambda _: None) as job, defer_signals():
        return job.program.compare(job.first, reference, tolerance)


# So that two device iterations have two executions.
_UPDATES = 4

# Adam makes of the rounding of a gradient that is zero a step of some 1e-8 of its rate. What
# depends on the division does so in the first digits.
_RTOL = 1e-7

# Batch size, gradient accumulation, replicas, device iterations.
_Way = Tuple[int, int, int, int]


def check_invariance(
    session: Session, make_engine: Callable[[], Engine], sample: object, tolerances: Tolerances
) -> InvarianceReport:
    """Make some updates of the sample in each way, on copies of everything.

    Args:
        session: of the model.
        make_engine: engines for the copies.
        sample: a batch, or a loader, whose first one is taken.
        tolerances: relative and absolute; None for those of the dtype.

    Raises:
        ConfigurationError: arguments that can't work, or a module that can't be copied.
        DataError: the batch can't be fed, or divided.
    """
    instead = "Check in one process: its replicas behave like those of all processes."
    require_one_loss(session.loss, "check_invariance")
    session.processes.require_single("check_invariance", instead)
    tolerance = Tolerance(*tolerances)
    tolerance.check()
    ErrorCollector.end_checks()
    batch = batch_of(sample, session.loss.in_module, "check_invariance")
    size = sample_of(batch, session.form(Mode.TRAIN), "check_invariance", target=True).size
    if size < 2:
        raise DataError(
            f"check_invariance divides the samples of a batch, which needs at least 2, got {size}. "
            "Pass a batch of 8 or 12."
        )
    with fork_rng():
        try:
            trial = _Trial(session, make_engine, batch, size, torch.float64)
            results = [trial.run(way) for way in _ways(size)]
        except ConfigurationError:
            raise
        except Exception:
            # Something is of one dtype whatever the module's; then rounding is a part of it.
            trial = _Trial(session, make_engine, batch, size, None)
            results = [trial.run(way) for way in _ways(size)]
        if tolerance.rtol is None and trial.dtype == "float64":
            tolerance = dataclasses.replace(tolerance, rtol=_RTOL)
        # What is added up is no mean that could stay the same.
        has_loss = session.config.gradient_reduction == "mean"
        settings = tuple(
            _compare_results(results[0], result, tolerance, has_loss) for result in results
        )
        causes = () if all(each.ok for each in settings) else trial.causes()
    return InvarianceReport(settings, causes, size, _UPDATES, trial.dtype)


def _ways(size: int) -> List[_Way]:
    """Return ways to divide an update: not at all, by each option alone, and by all."""
    first = next(n for n in range(2, size + 1) if size % n == 0)
    rest = size // first
    second = next((n for n in range(2, rest + 1) if rest % n == 0 and rest > n), 1)
    ways = [(size, 1, 1, 1), (size, 1, 1, 2), (rest, first, 1, 1)]
    # IPUs come in powers of two.
    replicas = first if first == 2 else 1
    if replicas > 1:
        ways.append((rest, 1, replicas, 1))
    if second > 1:
        ways.append((rest // second, second * first // replicas, replicas, 2))
    return ways


@dataclasses.dataclass(frozen=True)
class _Result:
    way: _Way
    loss: float
    weights: Dict[str, Tensor]


class _Trial:
    """Trains copies of the module with one setting.

    Args:
        session: of the model; it stays as it is.
        make_engine: an engine for each copy.
        batch: the samples of an update.
        size: how many.
        dtype: in which floating-point numbers are computed; None leaves them as they are.
    """

    def __init__(
        self,
        session: Session,
        make_engine: Callable[[], Engine],
        batch: object,
        size: int,
        dtype: Optional[torch.dtype],
    ) -> None:
        self._session = session
        self._make_engine = make_engine
        self._dtype = dtype
        self._size = size
        self._batch = _cast(batch, dtype)
        self._config = dataclasses.replace(
            session.config,
            ema=None,
            schedule=None,
            outputs=Outputs(),
            recompute=(),
            offload_optimizer_state=False,
            shard_optimizer=False,
            shard_weights=False,
            detect_nan=False,
            jit=OFF,
        )
        if dtype is not None:
            self._config = dataclasses.replace(
                self._config, precision=Precision(), loss_scale=None, accumulation_dtype=None
            )

    @property
    def dtype(self) -> str:
        """Name of the dtype in which the copies compute."""
        return "its own precision" if self._dtype is None else str(self._dtype)[len("torch.") :]

    def _copies(self) -> Tuple[nn.Module, torch.optim.Optimizer, Loss]:
        session = self._session
        try:
            module, optimizer, loss = copy.deepcopy(
                (session.module, session.optimizer, session.loss)
            )
        except Exception as error:
            raise ConfigurationError(
                "check_invariance trains copies of module, loss and optimizer, but "
                f"{type(session.module).__name__} can't be copied: {type(error).__name__}: "
                f"{error}. Make copy.deepcopy work with it."
            ) from error
        assert optimizer is not None
        if self._dtype is not None:
            module.to(self._dtype)
            if loss.module is not None:
                loss.module.to(self._dtype)
            # The state follows the parameters.
            optimizer.load_state_dict(optimizer.state_dict())
        return module, optimizer, loss

    def run(self, way: _Way) -> _Result:
        """Train a copy for some updates and return its loss and weights."""
        size, accumulation, replicas, iterations = way
        module, optimizer, loss = self._copies()
        pieces = [
            _rows(self._batch, begin, begin + size, self._size)
            for begin in range(0, self._size, size)
        ] * _UPDATES
        engine = self._make_engine()
        divided = DividedModule(module, optimizer, loss, self._config)
        copied = Session(divided, MetricSet(), engine)
        source = get_data_adapter(DataArguments("sample", pieces), Mode.TRAIN, loss.in_module)
        plan = Plan.make(
            micro_batch_size=size,
            ipus=replicas,
            device_iterations=iterations,
            gradient_accumulation=accumulation,
            samples=self._size * _UPDATES,
            training=True,
        )
        with train_mode(module, loss.module):
            job = copied.start(JobSpec(source, plan, Mode.TRAIN, 0, "train"))
            with copied.running(job):
                with job.executions(0) as batches:
                    for batch in batches:
                        job.meter.add(batch, job.program.run(batch))
                weights = job.program.read_state().weights
                return _Result(way, job.meter.values()["loss"], weights)

    def causes(self) -> Tuple[InvarianceCause, ...]:
        """Find what breaks invariance, on a copy of the module."""
        module, _, loss = self._copies()
        with train_mode(module, loss.module):
            form = self._session.form(Mode.TRAIN)
            batch = sample_of(self._batch, form, "check_invariance", target=True)
            batch = batch.to(device_of(module))
            return find_causes(module, loss, batch, self._config.gradient_reduction)


def _compare_results(
    first: _Result, result: _Result, tolerance: Tolerance, has_loss: bool
) -> InvarianceSetting:
    worst, parameter, ok = 0.0, "", True
    for name, value in result.weights.items():
        away = distance(value, first.weights[name])
        ok = ok and away.absolute <= tolerance.of(value.dtype, away.scale)
        if away.relative > worst:
            worst, parameter = away.relative, name
    dtype = next((v.dtype for v in result.weights.values()), torch.float64)
    apart = abs(result.loss - first.loss)
    ok = ok and (not has_loss or apart <= tolerance.of(dtype, abs(first.loss)))
    return InvarianceSetting(*result.way, result.loss, apart, worst, parameter, ok)


def _cast(batch: object, dtype: Optional[torch.dtype]) -> object:
    def cast(leaf: object) -> object:
        tensor = torch.as_tensor(leaf) if type(leaf).__module__ == "numpy" else leaf
        if dtype is None or not isinstance(tensor, Tensor) or not tensor.is_floating_point():
            return tensor
        return tensor.to(dtype)

    return tree.map_leaves(cast, batch)


def _rows(batch: object, begin: int, end: int, size: int) -> object:
    def cut(leaf: object) -> object:
        if isinstance(leaf, Tensor) and leaf.dim() and leaf.shape[0] == size:
            return leaf[begin:end]
        return leaf

    return tree.map_leaves(cut, batch)
