"""A micro-batch for what looks at a model without training it."""

from __future__ import annotations

from ipufit.core.batch import MicroBatch
from ipufit.data.source import DataAdapter
from ipufit.errors import ConfigurationError
from ipufit.training.sanity_check import check_call
from ipufit.training.session import Session
from ipufit.training.summary import sample_of

__all__ = ["no_batch", "sample_for"]


def sample_for(session: Session, x: object, asks: str) -> MicroBatch:
    """The batch that was given, or that of the last ``fit``.

    Args:
        session: of the model.
        x: a batch or a loader; None for the shapes of the last ``fit``.
        asks: the method that asks.

    Raises:
        ConfigurationError: there is none.
        DataError: it can't be fed.
    """
    if x is not None:
        sample = sample_of(x, session.loss.in_module, asks, True, session.casting)
        check_call(session.module, sample, session.loss, DataAdapter([], asks))
        return sample
    if session.sample is None:
        raise no_batch(asks)
    return session.sample


def no_batch(asks: str) -> ConfigurationError:
    """The error of a method that has nothing to look at."""
    return ConfigurationError(
        f"{asks} needs a batch, {asks}((inputs, target)), or an earlier fit; got neither."
    )
