"""Short trainings that look for a setting, on the user's own module, and leave no trace in it."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Iterator as IteratorType
from typing import Any, Callable, Dict, Iterator, List, Optional, Tuple

import torch

from ipufit.analysis.tuner.lr_finder import LearningRates, RangeTest
from ipufit.callbacks import CallbackList
from ipufit.callbacks.callback_list import CallbackObserver
from ipufit.callbacks.history import History
from ipufit.core.batch import CombinedBatch, Mode
from ipufit.core.plan import Plan
from ipufit.core.train_config import Outputs
from ipufit.data.source import DataAdapter
from ipufit.engines.program import Engine
from ipufit.errors import ConfigurationError, DataError, NonFiniteLossError
from ipufit.metrics import MetricSet
from ipufit.optim.schedules import Schedule, resolve_schedule
from ipufit.training import loop
from ipufit.training.arguments import checked_seed
from ipufit.training.loop import Job
from ipufit.training.session import Session
from ipufit.utils.random_streams import draw_seed
from ipufit.utils.state import cuda_in_use, fork_rng, preserve_state, train_mode

__all__ = ["BatchSize", "Trial", "candidates", "find_batch_size", "find_lr", "seed_of_trial"]


@dataclasses.dataclass(frozen=True)
class BatchSize:
    """Result of a search for a batch size.

    Attributes:
        batch_size: the largest micro-batch that ran.
        gradient_accumulation: with it, an update has the wished number of samples.
        tried: (batch_size, samples per second or None where memory ran out), in order. The rates
            are those of one update and only a hint.
    """

    batch_size: int
    gradient_accumulation: int
    tried: Tuple[Tuple[int, Optional[float]], ...]


class Trial:
    """Trains for a while, and restores everything.

    Args:
        session: what ``compile`` fixed.
        make_engine: an engine of the trial's own, so that no recording of it stays either.
        jit: how it runs; None is as compiled.
    """

    def __init__(
        self, session: Session, make_engine: Callable[[], Engine], jit: Optional[str] = None
    ) -> None:
        self.session = session
        self._jit = jit
        self._make_engine = make_engine

    @contextlib.contextmanager
    def running(
        self,
        source: DataAdapter,
        plan: Plan,
        seed: int,
        schedule: Callable[[torch.optim.Optimizer], Optional[Schedule]],
    ) -> Iterator[Job]:
        """Run a job on the user's module; afterwards all is as it was.

        Args:
            source: data.
            plan: batch algebra.
            seed: of all random numbers.
            schedule: makes the schedule in place of the user's, which must not move on.
        """
        session = self.session
        if isinstance(source.loader, IteratorType):
            raise DataError(
                f"{source.role} must be readable again after a search, got a "
                f"{type(source.loader).__name__}, which can be read only once. Pass a DataLoader "
                "or another object whose __iter__ starts anew."
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
                jit=session.config.jit if self._jit is None else self._jit,
            )
            trial = Session(
                session.module,
                optimizer,
                session.loss,
                MetricSet(),
                self._make_engine(),
                config,
                session.auto_round_ipus,
            )
            job = trial.start(source, plan, Mode.TRAIN, seed, "train")
            with trial.running(job):
                yield job


def seed_of_trial(seed: Optional[int], session: Session) -> int:
    """Return the seed that the next ``fit`` would have, without drawing it from fit."""
    seed = session.fixed.seed_or(None if seed is None else checked_seed(seed))
    if seed is not None:
        return seed
    with fork_rng():
        return draw_seed()


def find_lr(
    trial: Trial,
    source: DataAdapter,
    plan: Plan,
    optimizer: torch.optim.Optimizer,
    rates: List[float],
    seed: int,
    model: Any,
) -> LearningRates:
    """Train with a learning rate that grows with every update.

    Args:
        trial: where.
        source: data; read as often as needed.
        plan: batch algebra with one device iteration.
        optimizer: whose groups keep the ratios of their rates.
        rates: of the first group that learns, by update.
        seed: of all random numbers.
        model: for the callback.
    """
    ratios = _ratios(optimizer)
    tables: List[Dict[str, Callable[[int], float]]] = [
        {"lr": lambda update, ratio=ratio: ratio * rates[min(update, len(rates) - 1)]}  # type: ignore[misc]
        for ratio in ratios
    ]
    with trial.running(source, plan, seed, lambda users: resolve_schedule(tables, users)) as job:
        watch = RangeTest(rates, job.meter)
        callbacks = CallbackList([watch], model, {})
        blew_up = False
        try:
            fit = loop.Fit(job, [CallbackObserver(callbacks)], History(), None, lambda: watch.done)
            fit.run(range(len(rates)))
        except NonFiniteLossError:
            blew_up = True
        result = watch.result(blew_up)
    if not result.losses:
        raise ConfigurationError(
            f"a range test needs a finite loss at its lowest rate, but it was not at {rates[0]:g}. "
            "Look for non-finite data, or lower min_lr."
        )
    return result


def _ratios(optimizer: torch.optim.Optimizer) -> List[float]:
    """Divide the rates of groups by the first that is not 0; a group at rest stays so.

    A scheduler may stand at 0 just now, so its base rates count.
    """
    rates = [float(group.get("initial_lr", group["lr"])) for group in optimizer.param_groups]
    first = next((rate for rate in rates if rate), None)
    return [1.0 if first is None else rate / first for rate in rates]


def find_batch_size(
    trial: Trial,
    source_of: Callable[[int], DataAdapter],
    plan_of: Callable[[DataAdapter, int], Plan],
    candidates: List[Tuple[int, int]],
    seed: int,
) -> BatchSize:
    """Run one update with larger and larger micro-batches until memory runs out.

    Args:
        trial: where.
        source_of: the data, in micro-batches of a size.
        plan_of: batch algebra for them and a gradient accumulation.
        candidates: (batch size, gradient accumulation), growing.
        seed: of all random numbers.
    """
    tried: List[Tuple[int, Optional[float]]] = []
    best: Optional[Tuple[int, int]] = None
    for size, accumulation in candidates:
        rate = None
        try:
            rate = _one_update(trial, source_of(size), plan_of, accumulation, seed)
        except Exception as error:
            if not _is_out_of_memory(error):
                raise
        tried.append((size, rate))
        if rate is None:
            # Only now has the error let go of the tensors of its frames.
            if cuda_in_use():
                torch.cuda.empty_cache()
            break
        best = (size, accumulation)
    if best is None:
        raise ConfigurationError(
            f"the smallest micro-batch must fit into memory, but {candidates[0][0]} samples do "
            "not. Pass a smaller `start`, or make the module smaller."
        )
    return BatchSize(*best, tuple(tried))


def candidates(
    effective: Any, start: Any, replicas: int, samples: Optional[int] = None
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
    for name, value in (("effective_batch_size", effective), ("start", start)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ConfigurationError(f"{name} must be an integer of at least 1, got {value!r}.")
    if effective % (start * replicas):
        raise ConfigurationError(
            f"effective_batch_size must be a multiple of start × replicas ({start} × {replicas} = "
            f"{start * replicas}), got {effective}. Try "
            f"{max(1, effective // (start * replicas)) * start * replicas}."
        )
    if samples is not None and effective > samples:
        raise ConfigurationError(
            f"effective_batch_size must be at most the number of samples, {samples}, got "
            f"{effective}. A larger batch could not be filled to try it."
        )
    sizes, size = [], start
    while size * replicas <= effective and effective % (size * replicas) == 0:
        sizes.append((size, effective // (size * replicas)))
        size *= 2
    return sizes


def _one_update(
    trial: Trial,
    source: DataAdapter,
    plan_of: Callable[[DataAdapter, int], Plan],
    accumulation: int,
    seed: int,
) -> float:
    with trial.running(source, plan_of(source, accumulation), seed, lambda _: None) as job:
        # More than one: from the second on, the sum of gradients is there beside the next one.
        count = min(2, job.plan.micro_batches_per_update)
        start = time.perf_counter()
        job.program.run(CombinedBatch([job.first] * count))
        return count * job.first.size / (time.perf_counter() - start)


def _is_out_of_memory(error: Exception) -> bool:
    texts = ("out of memory", "not enough memory", "can't allocate memory")
    return isinstance(error, MemoryError) or (
        isinstance(error, RuntimeError) and any(text in str(error).lower() for text in texts)
    )
