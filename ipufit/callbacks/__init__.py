"""Hooks into training, under Keras' names and with its timing."""

from typing import TYPE_CHECKING

from ipufit.callbacks.callback import Callback
from ipufit.callbacks.callback_list import CallbackList
from ipufit.callbacks.history import History
from ipufit.utils.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from ipufit.callbacks.asynchronous import Asynchronous
    from ipufit.callbacks.csv_logger import CSVLogger
    from ipufit.callbacks.early_stopping import EarlyStopping
    from ipufit.callbacks.experiment_logger import ExperimentLogger
    from ipufit.callbacks.json_lines_logger import JSONLinesLogger
    from ipufit.callbacks.lambda_callback import LambdaCallback
    from ipufit.callbacks.learning_rate_scheduler import LearningRateScheduler
    from ipufit.callbacks.model_checkpoint import ModelCheckpoint
    from ipufit.callbacks.progbar_logger import ProgbarLogger
    from ipufit.callbacks.reduce_lr_on_plateau import ReduceLROnPlateau
    from ipufit.callbacks.remote_monitor import RemoteMonitor
    from ipufit.callbacks.swap_ema_weights import SwapEMAWeights
    from ipufit.callbacks.tensorboard import TensorBoard
    from ipufit.callbacks.terminate_on_nan import TerminateOnNaN
    from ipufit.callbacks.timer import Timer
else:
    __getattr__, __dir__ = lazy_exports(
        __name__,
        {
            "Asynchronous": "ipufit.callbacks.asynchronous",
            "CSVLogger": "ipufit.callbacks.csv_logger",
            "EarlyStopping": "ipufit.callbacks.early_stopping",
            "ExperimentLogger": "ipufit.callbacks.experiment_logger",
            "JSONLinesLogger": "ipufit.callbacks.json_lines_logger",
            "LambdaCallback": "ipufit.callbacks.lambda_callback",
            "LearningRateScheduler": "ipufit.callbacks.learning_rate_scheduler",
            "ModelCheckpoint": "ipufit.callbacks.model_checkpoint",
            "ProgbarLogger": "ipufit.callbacks.progbar_logger",
            "ReduceLROnPlateau": "ipufit.callbacks.reduce_lr_on_plateau",
            "RemoteMonitor": "ipufit.callbacks.remote_monitor",
            "SwapEMAWeights": "ipufit.callbacks.swap_ema_weights",
            "TensorBoard": "ipufit.callbacks.tensorboard",
            "TerminateOnNaN": "ipufit.callbacks.terminate_on_nan",
            "Timer": "ipufit.callbacks.timer",
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
