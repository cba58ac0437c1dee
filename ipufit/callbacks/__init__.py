"""Hooks into training, under Keras' names and with its timing."""

from ipufit.callbacks.callback import Callback
from ipufit.callbacks.callback_list import CallbackList
from ipufit.callbacks.early_stopping import EarlyStopping
from ipufit.callbacks.model_checkpoint import ModelCheckpoint
from ipufit.callbacks.progbar_logger import ProgbarLogger
from ipufit.callbacks.reduce_lr_on_plateau import ReduceLROnPlateau
from ipufit.history import History

__all__ = [
    "Callback",
    "CallbackList",
    "EarlyStopping",
    "History",
    "ModelCheckpoint",
    "ProgbarLogger",
    "ReduceLROnPlateau",
]
