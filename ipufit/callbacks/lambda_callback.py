"""A callback from functions."""

from __future__ import annotations

from typing import Any, Callable, Optional

from ipufit.callbacks.callback import EVENTS, Callback
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
        hooks: functions for the other hooks of :class:`Callback` by name; that for
            ``on_non_finite`` returns whether training is to end here.

    Raises:
        ConfigurationError: one of them can't be called.
        TypeError: there is no hook of that name.
    """

    def __init__(
        self,
        on_epoch_begin: Hook = None,
        on_epoch_end: Hook = None,
        on_train_begin: Hook = None,
        on_train_end: Hook = None,
        on_train_batch_begin: Hook = None,
        on_train_batch_end: Hook = None,
        **hooks: Hook,
    ) -> None:
        super().__init__()
        hooks.update(
            on_epoch_begin=on_epoch_begin,
            on_epoch_end=on_epoch_end,
            on_train_begin=on_train_begin,
            on_train_end=on_train_end,
            on_train_batch_begin=on_train_batch_begin,
            on_train_batch_end=on_train_batch_end,
        )
        for name, function in hooks.items():
            if name not in EVENTS:
                raise TypeError(
                    f"LambdaCallback takes hooks of ipufit.callbacks.Callback by name, got {name}. "
                    f"The hooks are {', '.join(EVENTS)}."
                )
            if function is None:
                continue
            if not callable(function):
                raise ConfigurationError(
                    f"{name} of LambdaCallback must be a function or None, got {function!r}. Write "
                    "for example on_epoch_end=lambda epoch, logs: print(logs)."
                )
            setattr(self, name, function)
