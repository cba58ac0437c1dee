"""Searches for a learning rate or a batch size by short trainings that leave no trace.

``find_lr`` is the range test of Smith, "Cyclical learning rates for training neural networks"
(2017), section 3.3, with an exponential range and a smoothed loss. ``find_batch_size`` runs one
update with growing micro-batches. Both train the user's own module in a :class:`Trial`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import time
from typing import Any, Callable, Dict, Iterator, List, Optional, Tuple, Union

import torch

from ipufit.callbacks.callback_list import Observer
from ipufit.callbacks.epoch_metrics import EpochMetrics
from ipufit.core.batch import CombinedBatch, Mode
from ipufit.core.plan import Plan
from ipufit.core.train_config import HyperparameterSchedule, Outputs
from ipufit.data.adapters import DataArguments, comes_in_samples, get_data_adapter
from ipufit.data.source import DataAdapter
from ipufit.engines.program import Engine
from ipufit.errors import ConfigurationError, DataError, NonFiniteLossError
from ipufit.metrics.metric_set import MetricSet
from ipufit.optim.schedules import resolve_schedule
from ipufit.planner.divided_module import DividedModule
from ipufit.training.arguments import checked_seed
from ipufit.training.session import JobSpec, Session
from ipufit.training.trainer import Job, Trainer
from ipufit.utils.devices import clear_cache, is_out_of_memory
from ipufit.utils.error_collector import ErrorCollector, at_least, number_in
from ipufit.utils.figures import new_figure, save_figure
from ipufit.utils.random_streams import draw_seed
from ipufit.utils.state import fork_rng, preserve_state, train_mode

_ALONE = "Run it in one process, and pass the result to the others."
# Share of the old value in the smoothed loss.
_SMOOTHING = 0.9
# A smoothed loss of so many times its best one has left the road.
_DIVERGED = 4.0


@dataclasses.dataclass(frozen=True)
class Trial:
    """Trains for a while, and restores everything.

    Args:
        session: what ``compile`` fixed.
        make_engine: an engine of the trial's own, so that no recording of it stays either.
        jit: how it runs; None is as compiled.
    """

    session: Session
    make_engine: Callable[[], Engine]
    jit: Optional[str] = None

    @contextlib.contextmanager
    def running(
        self,
        source: DataAdapter,
        plan: Plan,
        seed: int,
        schedule: Callable[[torch.optim.Optimizer], Optional[HyperparameterSchedule]],
    ) -> Iterator[Job]:
        """Run a job on the user's module; afterwards all is as it was.

        Args:
            source: data.
            plan: batch algebra.
            seed: of all random numbers.
            schedule: makes the schedule in place of the user's, which must not move on.
        """
        session = self.session
        if isinstance(source.loader, Iterator):
            raise DataError(
                f"{source.role} must be readable again after a search, got a "
                f"{type(source.loader).__name__}, which can be read only once. Pass a DataLoader "
                "or another object whose __iter__ starts again."
            )
        optimizer = session.optimizer
        assert optimizer is not None
        modules = [session.module, session.loss.module]
        with preserve_state(modules, optimizer, source.loader), train_mode(*modules):
            config = dataclasses.replace(
                session.config,
                ema=None,
                schedule=schedule(optimizer),
                outputs=Outputs(),
                jit=session.config.jit if self.jit is None else self.jit,
            )
            rounds = session.divided.auto_round_ipus
            divided = DividedModule(
                session.module, optimizer, session.loss, config, auto_round_ipus=rounds
            )
            trial = Session(divided, MetricSet(), self.make_engine())
            job = trial.start(JobSpec(source, plan, Mode.TRAIN, seed, "train"))
            with trial.running(job):
                yield job


def seed_of_trial(seed: Optional[int], session: Session) -> int:
    """Return the seed that the next ``fit`` would have, without drawing it from fit."""
    seed = session.fixed.seed_or(None if seed is None else checked_seed(seed))
    if seed is not None:
        return seed
    with fork_rng():
        return draw_seed()


@dataclasses.dataclass(frozen=True)
class LearningRates:
    """Result of a learning rate range test, by :meth:`ipufit.Model.find_lr`.

    Attributes:
        learning_rates: of the first trained parameter group, for each update.
        losses: of each update, before its weights change.
        smoothed: the losses, exponentially averaged without bias.
        diverged: whether the test ended because the loss had grown to four times its best, or was
            not finite.
    """

    learning_rates: Tuple[float, ...]
    losses: Tuple[float, ...]
    smoothed: Tuple[float, ...]
    diverged: bool

    @property
    def suggestion(self) -> Optional[float]:
        """The rate around which the smoothed loss fell fastest; None where it never fell.

        Differences are taken over a fifth of the test, so that the noise of single updates does not
        decide.
        """
        reach = max(1, len(self.smoothed) // 10)
        falls = [
            (self.smoothed[i + reach] - self.smoothed[i - reach], self.learning_rates[i])
            for i in range(reach, len(self.smoothed) - reach)
        ]
        best = min(falls, default=(0.0, 0.0))
        return best[1] if best[0] < 0 else None

    def plot(self, path: Optional[Union[str, os.PathLike[str]]] = None) -> Any:
        """Draw the loss over the learning rate.

        Args:
            path: where to save the picture (the suffix chooses the format); None only returns it,
                which shows it in a notebook.

        Returns:
            The matplotlib ``Figure``.

        Raises:
            ConfigurationError: matplotlib is not installed (``pip install ipufit[plot]``), or the
                path can't be written.
        """
        figure = new_figure("LearningRates.plot", (6.0, 3.8))
        panel = figure.subplots()
        panel.plot(self.learning_rates, self.losses, color="0.75", linewidth=1, label="each update")
        panel.plot(self.learning_rates, self.smoothed, color="C0", linewidth=2, label="smoothed")
        suggestion = self.suggestion
        if suggestion is not None:
            label = f"steepest, {suggestion:.2g}"
            panel.axvline(suggestion, color="C1", linestyle="--", label=label)
        panel.set_xscale("log")
        # The last points of a test that diverged would flatten all others.
        low, first = min(self.smoothed), self.smoothed[0]
        if self.diverged and low < first:
            panel.set_ylim(low - 0.1 * (first - low), first + 0.3 * (first - low))
        panel.set_xlabel("learning rate")
        panel.set_ylabel("loss")
        panel.grid(alpha=0.3)
        panel.legend(frameon=False)
        return save_figure(figure, path, "LearningRates.plot")

    def __repr__(self) -> str:
        suggestion = self.suggestion
        hint = "no suggestion" if suggestion is None else f"suggestion {suggestion:.3g}"
        first, last = self.learning_rates[0], self.learning_rates[-1]
        return f"LearningRates({len(self.losses)} updates from {first:.3g} to {last:.3g}, {hint})"


def _check_range(min_lr: float, max_lr: float, updates: int) -> Tuple[float, float, int]:
    """Refuse a range that can't be tested, and return one that can.

    Raises:
        ConfigurationError: rates that are not positive and growing, or too few updates.
    """
    min_lr, max_lr = number_in("min_lr", min_lr), number_in("max_lr", max_lr)
    if min_lr >= max_lr:
        raise ConfigurationError(
            f"max_lr must be more than min_lr, got {max_lr!r} and {min_lr!r}. Try min_lr=1e-7, "
            "max_lr=10."
        )
    return min_lr, max_lr, at_least("updates", updates, 3, advice="100 gives a clear curve.")


def exponential_range(first: float, last: float, count: int) -> List[float]:
    """Return a geometric sequence from the first to the last number."""
    return [first * (last / first) ** (i / (count - 1)) for i in range(count)]


class RangeTest(Observer):
    """Watches the losses, and ends the test when they diverge.

    Args:
        rates: learning rate of every update.
        meter: measures the training.

    Attributes:
        done: whether the test has ended.
    """

    def __init__(self, rates: List[float], meter: EpochMetrics) -> None:
        self.done = False
        self._rates = rates
        self._meter = meter
        self._losses: List[float] = []
        self._smoothed: List[float] = []
        self._average = 0.0
        self._diverged = False

    def end_execution(self, epoch: int, outputs: List[Any]) -> None:
        """Record the loss of the update and end the test if it diverged."""
        self._losses.append(self._meter.last_loss)
        self._average = _SMOOTHING * self._average + (1 - _SMOOTHING) * self._losses[-1]
        self._smoothed.append(self._average / (1 - _SMOOTHING ** len(self._losses)))
        best = min(self._smoothed)
        self._diverged = self._smoothed[-1] > best + (_DIVERGED - 1) * abs(best)
        self.done = self._diverged or len(self._losses) >= len(self._rates)

    def result(self, blew_up: bool) -> LearningRates:
        """Return the learning rates so far with their losses.

        Args:
            blew_up: whether the loss became infinite or NaN.
        """
        return LearningRates(
            tuple(self._rates[: len(self._losses)]),
            tuple(self._losses),
            tuple(self._smoothed),
            self._diverged or blew_up,
        )


def find_lr(
    trial: Trial,
    data: DataArguments,
    rates: Tuple[float, float, int],
    ipus: Optional[int],
    gradient_accumulation: Optional[int],
    seed: Optional[int],
) -> LearningRates:
    """Train for a moment with a learning rate that grows with every update.

    Args:
        trial: where.
        data: read as often as needed.
        rates: the first one, the last one, and the number of updates.
        ipus: as for ``fit``.
        gradient_accumulation: as for ``fit``.
        seed: of all random numbers; None for that of the next ``fit``.

    Raises:
        ConfigurationError: arguments that can't work.
        DataError: data that can't be read or used, or that can be read only once.
    """
    session = trial.session
    session.processes.require_single("find_lr", _ALONE)
    assert session.optimizer is not None
    rates = _check_range(*rates)
    source = get_data_adapter(data, Mode.TRAIN, session.loss.in_module)
    work = session.resolve_work(
        source, True, ipus=ipus, gradient_accumulation=gradient_accumulation
    )
    accumulation = work["gradient_accumulation"]
    plan = session.plan(source, work["ipus"], 1, accumulation, training=True)
    sequence = exponential_range(*rates)
    trial_seed = seed_of_trial(seed, session)
    ErrorCollector.end_checks()
    tables: List[Dict[str, Callable[[int], float]]] = [
        {"lr": lambda update, ratio=ratio: ratio * sequence[min(update, len(sequence) - 1)]}  # type: ignore[misc]
        for ratio in _ratios(session.optimizer)
    ]
    with trial.running(
        source, plan, trial_seed, lambda optimizer: resolve_schedule(tables, optimizer)
    ) as job:
        watch = RangeTest(sequence, job.meter)
        blew_up = False
        try:
            trainer = Trainer(job, [watch], stopped=lambda: watch.done)
            trainer.run(range(len(sequence)))
        except NonFiniteLossError:
            blew_up = True
        result = watch.result(blew_up)
    if not result.losses:
        raise ConfigurationError(
            "a range test needs a finite loss at its lowest rate, but the loss was not finite "
            f"at {sequence[0]:g}. Look for non-finite data, or lower min_lr."
        )
    return result


def _ratios(optimizer: torch.optim.Optimizer) -> List[float]:
    """Divide the rates of groups by the first that is not 0; a group at rest stays so.

    A scheduler may stand at 0 just now, so its base rates count.
    """
    rates = [float(group.get("initial_lr", group["lr"])) for group in optimizer.param_groups]
    first = next((rate for rate in rates if rate), None)
    return [1.0 if first is None else rate / first for rate in rates]


@dataclasses.dataclass(frozen=True)
class BatchSize:
    """Batch size that :meth:`ipufit.Model.find_batch_size` found.

    Attributes:
        batch_size: the largest micro-batch that ran.
        gradient_accumulation: with it, an update has the requested number of samples.
        tried: (batch_size, samples per second), in order; the rate is None if memory ran out. Each
            rate is measured in one update, so it is only a rough value.
    """

    batch_size: int
    gradient_accumulation: int
    tried: Tuple[Tuple[int, Optional[float]], ...]


def find_batch_size(
    trial: Trial,
    x: object,
    y: object,
    effective: object,
    start: object,
    ipus: Optional[int],
    seed: Optional[int],
) -> BatchSize:
    """Run one update with larger and larger micro-batches until memory runs out.

    Args:
        trial: where.
        x: the samples.
        y: their targets.
        effective: samples of an update.
        start: the smallest batch size.
        ipus: as for ``fit``.
        seed: of all random numbers; None for that of the next ``fit``.

    Raises:
        ConfigurationError: arguments that can't work, or not even the smallest one fits.
        DataError: data that can't be read or used.
    """
    session = trial.session
    session.processes.require_single("find_batch_size", _ALONE)
    if not comes_in_samples(DataArguments("training data", x, y)):
        raise ConfigurationError(
            "find_batch_size needs samples, but the training data already comes in batches, "
            f"from a {type(x).__name__}. Pass tensors, arrays or the dataset."
        )

    def open_with(size: int) -> DataAdapter:
        arguments = DataArguments("training data", x, y, batch_size=size, shuffles=True)
        return get_data_adapter(arguments, Mode.TRAIN, session.loss.in_module)

    single = open_with(1)
    total = session.resolve_work(single, True, ipus=ipus)["ipus"]
    whole = session.plan(single, total, 1, 1, training=True)
    pairs = candidates(effective, start, whole.replicas, whole.samples)
    trial_seed = seed_of_trial(seed, session)
    ErrorCollector.end_checks()
    tried: List[Tuple[int, Optional[float]]] = []
    best: Optional[Tuple[int, int]] = None
    for size, accumulation in pairs:
        rate = None
        try:
            source = open_with(size)
            plan = session.plan(source, total, 1, accumulation, training=True)
            rate = _one_update(trial, source, plan, trial_seed)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
        tried.append((size, rate))
        if rate is None:
            # Only now has the error let go of the tensors of its frames.
            clear_cache()
            break
        best = (size, accumulation)
    if best is None:
        raise ConfigurationError(
            f"the smallest micro-batch must fit into memory, but {pairs[0][0]} samples do "
            "not. Pass a smaller `start`, or make the module smaller."
        )
    return BatchSize(*best, tuple(tried))


def candidates(
    effective: object, start: object, replicas: int, samples: Optional[int] = None
) -> List[Tuple[int, int]]:
    """Return pairs of batch size and gradient accumulation of one product, growing.

    Args:
        effective: samples of an update.
        start: the smallest batch size.
        replicas: that share an update.
        samples: of the data; None if nobody knows.

    Raises:
        ConfigurationError: there is none.
    """
    effective = at_least("effective_batch_size", effective, 1)
    start = at_least("start", start, 1)
    if effective % (start * replicas):
        raise ConfigurationError(
            f"effective_batch_size must be a multiple of start × replicas ({start} × {replicas} = "
            f"{start * replicas}), got {effective}. Try "
            f"{max(1, effective // (start * replicas)) * start * replicas}."
        )
    if samples is not None and effective > samples:
        raise ConfigurationError(
            f"effective_batch_size must be at most the number of samples, {samples}, got "
            f"{effective}. Larger batches can't be tried with so few samples."
        )
    sizes, size = [], start
    while size * replicas <= effective and effective % (size * replicas) == 0:
        sizes.append((size, effective // (size * replicas)))
        size *= 2
    return sizes


def _one_update(trial: Trial, source: DataAdapter, plan: Plan, seed: int) -> float:
    """Run one update, and return the samples per second."""
    with trial.running(source, plan, seed, lambda _: None) as job:
        # More than one: from the second on, the sum of gradients is there beside the next one.
        count = min(2, job.plan.micro_batches_per_update)
        start = time.perf_counter()
        job.program.run(CombinedBatch([job.first] * count))
        return count * job.first.size / (time.perf_counter() - start)
