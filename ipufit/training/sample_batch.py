"""A micro-batch for what looks at a model without training it."""

from __future__ import annotations

import contextlib
from typing import Any, Iterator

from ipufit.core.batch import MicroBatch
from ipufit.data.source import Source
from ipufit.errors import ConfigurationError, DataError, IpufitError
from ipufit.training.sanity_check import FailureExplainer, check_call
from ipufit.training.session import Session
from ipufit.training.summary import sample_of

__all__ = ["able_to_run", "no_batch", "sample_for"]


def sample_for(session: Session, x: Any, asks: str) -> MicroBatch:
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
        check_call(session.module, sample, session.loss, Source([], asks))
        return sample
    if session.sample is None:
        raise no_batch(asks)
    return session.sample


def no_batch(asks: str) -> ConfigurationError:
    """The error of a method that has nothing to look at."""
    return ConfigurationError(
        f"{asks} needs a batch, {asks}((inputs, target)), or an earlier fit; got neither."
    )


@contextlib.contextmanager
def able_to_run(explainer: FailureExplainer, sample: MicroBatch) -> Iterator[None]:
    """Raise what module or loss raise in the block as an error about the batch.

    Args:
        explainer: names the layer or line, as it does for ``fit``; its role is the method that
            needs the batch.
        sample: the batch.

    Raises:
        DataError, LossError, CaptureError: they can't take it.
    """
    try:
        with explainer.explained([sample], None):
            yield
    except IpufitError:
        raise
    except Exception as error:
        shapes = ", ".join(str(tuple(leaf.shape)) for leaf in sample.leaves)
        raise DataError(
            f"{explainer.role} must be able to run module and loss on the batch, whose tensors "
            f"have shape {shapes}, but that fails: {type(error).__name__}: "
            f"{str(error).partition(chr(10))[0].rstrip('.')}. Pass a batch that fit takes."
        ) from error
