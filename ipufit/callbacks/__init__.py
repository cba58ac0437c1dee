"""Hooks into training, under Keras' names and with its timing."""

from ipufit.callbacks.asynchronous import Asynchronous
from ipufit.callbacks.callback import Callback
from ipufit.callbacks.callback_list import CallbackList
from ipufit.callbacks.csv_logger import CSVLogger
from ipufit.callbacks.early_stopping import EarlyStopping
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
from ipufit.history import History

__all__ = [
    "Asynchronous",
    "CSVLogger",
    "Callback",
    "CallbackList",
    "EarlyStopping",
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
