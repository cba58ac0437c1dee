"""Small questions that PopTorch answers from its insides, and that scripts ask there."""

from __future__ import annotations

from typing import Any

from ipufit.poptorch._errors import Error, error
from ipufit.poptorch._tracing import tracing
from ipufit.poptorch._wrapped import isWrapped, rewrapModelIfNecessary, unwrapModelIfNecessary

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
    """An error of the front end, to be raised."""
    return error(msg)


def isRunningOnIpu() -> bool:
    """Whether a model's forward is being recorded for the device.

    False while a model is built, and while its forward runs as plain torch.
    """
    return tracing() is not None


def isDispatchTracing() -> bool:
    """The same: there is one way of recording."""
    return tracing() is not None


def _restoreWrapperIfNecessary(obj: Any) -> Any:
    """What files call by this name into which PopTorch pickled a wrapped model: it is plain here.

    Our own files have plain modules and tensors, and don't call it.
    """
    return obj


def poptorchAtExit() -> None:
    """Give up what is held outside of Python: nothing, on this engine."""
