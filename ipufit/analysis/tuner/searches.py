"""``Model.find_lr`` and ``find_batch_size``: their arguments are checked and their data opened."""

from __future__ import annotations

from typing import Any, Tuple

from ipufit.analysis.tuner import trials
from ipufit.analysis.tuner.lr_finder import LearningRates, check_range, exponential_range
from ipufit.analysis.tuner.trials import BatchSize, Trial
from ipufit.core.batch import Mode
from ipufit.core.plan import Plan
from ipufit.data.adapters import DataArguments, comes_in_samples, get_data_adapter
from ipufit.data.source import DataAdapter
from ipufit.errors import ConfigurationError
from ipufit.training.session import require_single_process

__all__ = ["find_batch_size", "find_lr"]


def find_lr(
    model: Any,
    trial: Trial,
    data: DataArguments,
    rates: Tuple[Any, Any, Any],
    ipus: Any,
    gradient_accumulation: Any,
    seed: Any,
) -> LearningRates:
    """Train for a moment with rates from the first to the second, in so many updates.

    Raises:
        ConfigurationError: arguments that can't work.
        DataError: data that can't be read or fed, or that can be read only once.
    """
    session = trial.session
    require_single_process(
        session, "find_lr", "Look in one process, and pass the others what it found."
    )
    assert session.optimizer is not None
    check_range(*rates)
    source = get_data_adapter(data, Mode.TRAIN, session.loss.in_module)
    work = session.resolve_work(
        source, True, ipus=ipus, gradient_accumulation=gradient_accumulation
    )
    accumulation = work["gradient_accumulation"]
    plan = session.plan(source, work["ipus"], 1, accumulation, training=True)
    return trials.find_lr(
        trial,
        source,
        plan,
        session.optimizer,
        exponential_range(*rates),
        trials.seed_of_trial(seed, session),
        model,
    )


def find_batch_size(
    trial: Trial, x: object, y: object, effective: object, start: object, ipus: object, seed: Any
) -> BatchSize:
    """Look for the largest micro-batch that fits, at ``effective`` samples per update.

    Raises:
        ConfigurationError: arguments that can't work, or not even the smallest one fits.
        DataError: data that can't be read or fed.
    """
    session = trial.session
    instead = "Look in one process, and pass the others what it found."
    require_single_process(session, "find_batch_size", instead)
    if not comes_in_samples(DataArguments("training data", x, y)):
        raise ConfigurationError(
            "find_batch_size needs samples to make batches of, but the training data comes in "
            f"batches already, from a {type(x).__name__}. Pass tensors, arrays or the dataset."
        )

    def open_with(size: int) -> DataAdapter:
        arguments = DataArguments("training data", x, y, batch_size=size, shuffles=True)
        return get_data_adapter(arguments, Mode.TRAIN, session.loss.in_module)

    def plan_of(source: DataAdapter, accumulation: int) -> Plan:
        return session.plan(source, total, 1, accumulation, training=True)

    single = open_with(1)
    total = session.resolve_work(single, True, ipus=ipus)["ipus"]
    whole = plan_of(single, 1)
    return trials.find_batch_size(
        trial,
        open_with,
        plan_of,
        trials.candidates(effective, start, whole.replicas, whole.samples),
        trials.seed_of_trial(seed, session),
    )
