"""Helpers from PopTorch's module of this name, which published programs call."""

from __future__ import annotations

from ipufit.poptorch._logging import Error, error
from ipufit.poptorch._tracing import tracing
from ipufit.poptorch._wrapping import isWrapped, rewrapModelIfNecessary, unwrapModelIfNecessary
from ipufit.poptorch.poptorch_core import poptorchAtExit

__all__ = [
    "createPoptorchError",
    "isDispatchTracing",
    "isRunningOnIpu",
    "isWrapped",
    "poptorchAtExit",
    "rewrapModelIfNecessary",
    "unwrapModelIfNecessary",
]


def createPoptorchError(msg: str) -> Error:
    """Return an error of the front end, to be raised."""
    return error(msg)


def isRunningOnIpu() -> bool:
    """Return True while a model's forward is recorded for the device.

    False while a model is built, and while its forward runs as plain torch.
    """
    return tracing() is not None


def isDispatchTracing() -> bool:
    """Return True while a model's forward is recorded, which is done in one way only."""
    return tracing() is not None


def _restoreWrapperIfNecessary(obj: object) -> object:
    """Return the object, for files in which PopTorch pickled a wrapped model with a call of this.

    Our own files have plain modules and tensors, and don't call it.
    """
    return obj
