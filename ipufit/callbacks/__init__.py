"""Hooks into training, under Keras' names and with its timing."""

from ipufit.callbacks.callback import Callback
from ipufit.callbacks.callback_list import CallbackList
from ipufit.callbacks.progbar_logger import ProgbarLogger
from ipufit.history import History

__all__ = ["Callback", "CallbackList", "History", "ProgbarLogger"]
