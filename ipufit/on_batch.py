"""One update, one evaluation, one prediction, on a single batch."""

from __future__ import annotations

from typing import Any, Dict, List, Union

from ipufit.data.forms import Given, open_data
from ipufit.data.source import Source
from ipufit.errors import ConfigurationError
from ipufit.interrupts import deferred
from ipufit.modes import evaluating, training
from ipufit.program import CombinedBatch, Mode
from ipufit.session import Session

__all__ = ["as_keras_returns", "predict_on_batch", "test_on_batch", "train_on_batch"]


def _source(session: Session, batch: Any, mode: Mode, class_weight: Any = None) -> Source:
    given = Given("batch", [batch], class_weight=class_weight)
    return open_data(given, mode, session.loss.in_module)


def train_on_batch(session: Session, batch: Any, class_weight: Any, seed: int) -> Dict[str, float]:
    """One weight update on one replica; its loss and metrics, before the update.

    Random numbers depend on the count of updates, so each call draws others.
    """
    _refuse_unseen_outputs(session)
    source = _source(session, batch, Mode.TRAIN, class_weight)
    plan = session.plan(source, None, 1, 1, training=True)
    with training(session.module, session.loss.module):
        job = session.start(source, plan, Mode.TRAIN, seed, "train")
        with session.running(job), deferred():
            only = CombinedBatch([job.first])
            job.meter.add(only, job.program.run(only))
            return dict(job.meter.values())


def _refuse_unseen_outputs(session: Session) -> None:
    every = session.recipe.output_mode.every
    if every > 1:
        raise ConfigurationError(
            f"train_on_batch runs one update, but output_every={every} brings back the outputs of "
            f"one update in {every}, so that metrics would see none. Compile with "
            "output_mode='all', or call fit."
        )


def test_on_batch(session: Session, batch: Any, seed: int) -> Dict[str, float]:
    """Loss and metrics of one batch."""
    source = _source(session, batch, Mode.EVALUATE)
    plan = session.plan(source, None, 1, 1, training=False)
    with evaluating(session.module, session.loss.module):
        job = session.start(source, plan, Mode.EVALUATE, seed, "evaluate")
        with session.running(job):
            only = CombinedBatch([job.first])
            job.meter.add(only, job.program.run(only))
            return dict(job.meter.values())


def predict_on_batch(session: Session, batch: Any, seed: int) -> Any:
    """The module's outputs for one batch."""
    source = _source(session, batch, Mode.PREDICT)
    plan = session.plan(source, None, 1, 1, training=False)
    with evaluating(session.module, session.loss.module):
        job = session.start(source, plan, Mode.PREDICT, seed, "predict")
        with session.running(job):
            (outputs,) = job.program.run(CombinedBatch([job.first])).outputs
            return outputs


def as_keras_returns(
    values: Dict[str, float], return_dict: bool
) -> Union[float, List[float], Dict[str, float]]:
    """A dict; or else the loss alone, or a list that begins with it, as Keras has it."""
    if return_dict:
        return values
    return list(values.values()) if len(values) > 1 else values["loss"]
