"""Hooks into training, under Keras' names and with its timing.

docs/callbacks.md shows them at work.
"""

from typing import TYPE_CHECKING

from ipufit.callbacks.callback import Callback
from ipufit.callbacks.callback_list import CallbackList
from ipufit.callbacks.history import History
from ipufit.utils.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from ipufit.callbacks.learning_rate import LearningRateScheduler, ReduceLROnPlateau
    from ipufit.callbacks.loggers import (
        CSVLogger,
        ExperimentLogger,
        JSONLinesLogger,
        RemoteMonitor,
        TensorBoard,
    )
    from ipufit.callbacks.progbar_logger import ProgbarLogger
    from ipufit.callbacks.stopping import EarlyStopping, TerminateOnNaN, Timer
    from ipufit.callbacks.weights import ModelCheckpoint, SwapEMAWeights
    from ipufit.callbacks.wrappers import Asynchronous, LambdaCallback
else:
    __getattr__, __dir__ = lazy_exports(
        __name__,
        {
            "ipufit.callbacks.learning_rate": ("LearningRateScheduler", "ReduceLROnPlateau"),
            "ipufit.callbacks.loggers": (
                "CSVLogger",
                "ExperimentLogger",
                "JSONLinesLogger",
                "RemoteMonitor",
                "TensorBoard",
            ),
            "ipufit.callbacks.progbar_logger": ("ProgbarLogger",),
            "ipufit.callbacks.stopping": ("EarlyStopping", "TerminateOnNaN", "Timer"),
            "ipufit.callbacks.weights": ("ModelCheckpoint", "SwapEMAWeights"),
            "ipufit.callbacks.wrappers": ("Asynchronous", "LambdaCallback"),
        },
    )

__all__ = [
    "Asynchronous",
    "CSVLogger",
    "Callback",
    "CallbackList",
    "EarlyStopping",
    "ExperimentLogger",
    "History",
    "JSONLinesLogger",
    "LambdaCallback",
    "LearningRateScheduler",
    "ModelCheckpoint",
    "ProgbarLogger",
    "ReduceLROnPlateau",
    "RemoteMonitor",
    "SwapEMAWeights",
    "TensorBoard",
    "TerminateOnNaN",
    "Timer",
]
