"""One update, one evaluation, one prediction, on a single batch."""

from __future__ import annotations

import contextlib
from typing import Any, Dict, Iterator, List, Tuple, Union

from ipufit.core.batch import CombinedBatch, Mode
from ipufit.data.adapters import DataArguments, get_data_adapter
from ipufit.data.in_memory import as_arrays
from ipufit.errors import ConfigurationError
from ipufit.training.session import JobSpec, Session
from ipufit.training.trainer import Job
from ipufit.utils.error_collector import ErrorCollector
from ipufit.utils.interrupts import defer_signals
from ipufit.utils.state import eval_mode, train_mode


def as_batch(x: object, y: object, sample_weight: object) -> Any:
    """A batch as a loader would yield it, of arrays where it has tables and lists of numbers."""
    x, y = as_arrays(x, "batch: x"), as_arrays(y, "batch: y")
    sample_weight = as_arrays(sample_weight, "batch: sample_weight")
    ErrorCollector.end_checks()
    if sample_weight is not None:
        return (x, y, sample_weight)
    return x if y is None else (x, y)


@contextlib.contextmanager
def _running(
    session: Session, batch: object, mode: Mode, seed: int, class_weight: object = None
) -> Iterator[Tuple[Job, CombinedBatch]]:
    """A program for this batch on one replica, and the only execution there is for it."""
    session.processes.require_single("A call with a single batch", "Call fit, evaluate or predict.")
    arguments = DataArguments("batch", [batch], class_weight=class_weight)
    source = get_data_adapter(arguments, mode, session.loss.own_loss(mode))
    plan = session.plan(source, None, 1, 1, training=mode is Mode.TRAIN)
    in_mode = train_mode if mode is Mode.TRAIN else eval_mode
    with in_mode(session.module, session.loss.module):
        job = session.start(JobSpec(source, plan, mode, seed, mode.value), session.processes)
        with session.running(job):
            yield job, CombinedBatch([job.first])


def _measured(
    session: Session, batch: object, mode: Mode, seed: int, class_weight: object = None
) -> Dict[str, float]:
    with _running(session, batch, mode, seed, class_weight) as (job, only), defer_signals():
        result = job.program.run(only)
        if mode is Mode.EVALUATE:
            job.explainer.examine(result.losses, only.micro_batches)
        job.meter.add(only, result)
        return dict(job.meter.values())


def train_on_batch(
    session: Session, batch: object, class_weight: object, seed: int
) -> Dict[str, float]:
    """One weight update on one replica; its loss and metrics, before the update.

    Random numbers depend on the count of updates, so each call draws others.
    """
    _refuse_unseen_outputs(session)
    if session.config.schedule is not None and not session.updates:
        session.config.schedule.begin_run(None, None)
    return _measured(session, batch, Mode.TRAIN, seed, class_weight)


def _refuse_unseen_outputs(session: Session) -> None:
    every = session.config.outputs.every or 1
    if every > 1:
        raise ConfigurationError(
            f"train_on_batch runs one update, but Outputs.every={every} returns the outputs of one "
            f"update in {every}, so metrics would get none. Compile with outputs='all', or call "
            "fit."
        )


def test_on_batch(session: Session, batch: object) -> Dict[str, float]:
    """Compute loss and metrics for one batch."""
    return _measured(session, batch, Mode.EVALUATE, 0)


def predict_on_batch(session: Session, batch: object) -> Any:
    """Compute the module's outputs for one batch."""
    with _running(session, batch, Mode.PREDICT, 0) as (job, only):
        (outputs,) = job.program.run(only).outputs
        return outputs


def as_keras_returns(
    values: Dict[str, float], return_dict: bool
) -> Union[float, List[float], Dict[str, float]]:
    """A dict; or else the loss alone, or a list that begins with it, as Keras has it."""
    if return_dict:
        return values
    return list(values.values()) if len(values) > 1 else values["loss"]
