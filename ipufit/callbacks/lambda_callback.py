"""A callback from functions."""

from __future__ import annotations

from typing import Any, Callable, Optional

from ipufit.callbacks.callback import Callback
from ipufit.errors import ConfigurationError

__all__ = ["LambdaCallback"]

Hook = Optional[Callable[..., Any]]


class LambdaCallback(Callback):
    """Calls the given functions as hooks, with the arguments that the hooks of Callback have.

    Args:
        on_epoch_begin: ``(epoch, logs)``.
        on_epoch_end: ``(epoch, logs)``.
        on_train_begin: ``(logs)``.
        on_train_end: ``(logs)``.
        on_train_batch_begin: ``(batch, logs)``.
        on_train_batch_end: ``(batch, logs)``.
        on_test_begin: ``(logs)``.
        on_test_end: ``(logs)``.
        on_test_batch_begin: ``(batch, logs)``.
        on_test_batch_end: ``(batch, logs)``.
        on_predict_begin: ``(logs)``.
        on_predict_end: ``(logs)``.
        on_predict_batch_begin: ``(batch, logs)``.
        on_predict_batch_end: ``(batch, logs)``.
        on_non_finite: ``(error)``; returns whether training is to end here.

    Raises:
        ConfigurationError: one of them can't be called.
    """

    def __init__(
        self,
        on_epoch_begin: Hook = None,
        on_epoch_end: Hook = None,
        on_train_begin: Hook = None,
        on_train_end: Hook = None,
        on_train_batch_begin: Hook = None,
        on_train_batch_end: Hook = None,
        *,
        on_test_begin: Hook = None,
        on_test_end: Hook = None,
        on_test_batch_begin: Hook = None,
        on_test_batch_end: Hook = None,
        on_predict_begin: Hook = None,
        on_predict_end: Hook = None,
        on_predict_batch_begin: Hook = None,
        on_predict_batch_end: Hook = None,
        on_non_finite: Hook = None,
    ) -> None:
        given = {name: value for name, value in locals().items() if name.startswith("on_")}
        super().__init__()
        for name, function in given.items():
            if function is None:
                continue
            if not callable(function):
                raise ConfigurationError(
                    f"{name} of LambdaCallback must be a function or None, got {function!r}. Write "
                    "for example on_epoch_end=lambda epoch, logs: print(logs)."
                )
            setattr(self, name, function)
