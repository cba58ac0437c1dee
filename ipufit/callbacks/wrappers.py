"""Callbacks made of something else: of functions, or of a callback that runs in a thread."""

from __future__ import annotations

import functools
import queue
import threading
from typing import Any, Callable, Dict, Optional, Tuple

from ipufit.callbacks.callback import EVENTS, Callback, Event, Logs, overrides, whole
from ipufit.callbacks.callback_list import checked
from ipufit.callbacks.weights import ModelCheckpoint
from ipufit.errors import ConfigurationError, unfit


class Asynchronous(Callback):
    """Runs the batch hooks of a callback in a thread, while the next execution runs.

    Each hook runs once, in order, with a copy of the logs of its execution. All other hooks wait
    for them and then run in the calling thread, so nothing is late at the end of an epoch.
    ``stop_training`` set in a batch hook takes effect after a later execution, at the latest at the
    end of the epoch. An error in a batch hook ends training: it is raised, with its own traceback,
    at the next hook, and pending hooks are skipped.

    In a batch hook, the callback must not read or change weights or the optimizer, because the next
    execution changes them at the same time.

    Args:
        callback: a callback with slow batch hooks.
        max_pending: largest number of pending hooks; training waits if there are more.

    Attributes:
        callback: the wrapped callback.

    Raises:
        ConfigurationError: it is not a callback, or needs the state of its execution.
    """

    def __init__(self, callback: Callback, max_pending: int = 64) -> None:
        super().__init__()
        self.callback: Callback = _check_callback(callback)
        self.every_updates: Optional[int] = callback.every_updates
        self.writes_files: bool = callback.writes_files
        self.monitors: Tuple[str, ...] = callback.monitors
        self.adds: Optional[Tuple[str, ...]] = (
            callback.adds if overrides(callback, "on_epoch_end") else ()
        )
        self._waiting: queue.Queue[Optional[Tuple[str, int, Dict[str, float]]]] = queue.Queue(
            whole(self, "max_pending", max_pending, 1)
        )
        self._thread: Optional[threading.Thread] = None
        self._error: Optional[BaseException] = None
        self._failed = False

    def _later(self, hook: str, batch: int, logs: Optional[Logs] = None) -> None:
        self._raise_error()
        if not overrides(self.callback, hook):
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="ipufit-callback", daemon=True)
            self._thread.start()
        # The values go on changing with the training: they are worked out here.
        self._waiting.put((hook, batch, dict(logs or {})))

    def _work(self) -> None:
        while True:
            item = self._waiting.get()
            try:
                if item is None:
                    return
                if not self._failed:
                    hook, *args = item
                    getattr(self.callback, hook)(*args)
            except BaseException as error:
                self._failed, self._error = True, error
            finally:
                self._waiting.task_done()

    def _raise_error(self) -> None:
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _now(self, hook: str, *args: object, **kwargs: object) -> object:
        self._waiting.join()
        self._raise_error()
        return getattr(self.callback, hook)(*args, **kwargs)

    def _at_last(self, hook: str, *args: object) -> None:
        """Call a hook that ends something, also after the callback has failed."""
        self._waiting.join()
        try:
            getattr(self.callback, hook)(*args)
        finally:
            self._raise_error()

    def set_model(self, model: Any) -> None:
        """Pass the model to the callback."""
        super().set_model(model)
        self.callback.set_model(model)

    def set_params(self, params: Dict[str, Any]) -> None:
        """Pass the parameters of the run to the callback."""
        super().set_params(params)
        self.callback.set_params(params)

    def state_dict(self) -> object:
        """Return the callback's state, after all pending hooks."""
        return self._now("state_dict")

    def load_state_dict(self, state: object) -> None:
        """Restore the callback's state, after all pending hooks."""
        self._now("load_state_dict", state)

    def on_train_end(self, logs: Optional[Logs] = None) -> None:
        """Call the hook after all pending hooks, also after an error."""
        self._at_last("on_train_end", logs)

    def close(self) -> None:
        """Close the callback after all pending hooks, and end the thread."""
        try:
            self._at_last("close")
        finally:
            self._failed = False
            if self._thread is not None:
                self._waiting.put(None)
                self._thread.join()
                self._thread = None


def _forward(event: Event) -> Callable[..., object]:
    """Make the hook of Asynchronous for an event: batch hooks wait, the others are called."""

    def hook(self: Asynchronous, *args: object, **kwargs: object) -> object:
        call: Callable[..., object] = self._later if event.is_of_batch else self._now
        return call(event.hook, *args, **kwargs)

    return functools.wraps(getattr(Callback, event.hook))(hook)


for _event in EVENTS.values():
    if _event.hook not in vars(Asynchronous):
        setattr(Asynchronous, _event.hook, _forward(_event))


def _check_callback(callback: object) -> Callback:
    if isinstance(callback, type) or not isinstance(callback, Callback):
        raise ConfigurationError(
            "Asynchronous takes one object of a subclass of ipufit.callbacks.Callback, got "
            f"{callback!r}. Wrap each callback on its own."
        )
    if isinstance(callback, Asynchronous):
        raise ConfigurationError(
            "Asynchronous takes a callback that runs in the calling thread, got one that is "
            "already Asynchronous. Leave one of the two out."
        )
    in_batches = isinstance(callback, ModelCheckpoint) and callback.every_updates is not None
    if in_batches or callback.wants_outputs:
        raise ConfigurationError(
            "Asynchronous takes a callback whose batch hooks need nothing but their logs, but "
            f"{type(callback).__name__} reads the {'weights' if in_batches else 'outputs'} of an "
            "execution, which the next execution may have replaced by then. Pass it to fit "
            "directly."
        )
    checked([callback])
    return callback


Hook = Optional[Callable[..., object]]


class LambdaCallback(Callback):
    """Calls the given functions as hooks, with the arguments that the hooks of Callback have.

    Args:
        on_epoch_begin: ``(epoch, logs)``.
        on_epoch_end: ``(epoch, logs)``.
        on_train_begin: ``(logs)``.
        on_train_end: ``(logs)``.
        on_train_batch_begin: ``(batch, logs)``.
        on_train_batch_end: ``(batch, logs)``.
        hooks: functions for the other hooks of :class:`ipufit.callbacks.Callback` by name, with
            their arguments; the one for ``on_non_finite`` returns whether training should end.

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
        arguments = dict(locals())
        super().__init__()
        hooks.update((name, each) for name, each in arguments.items() if name.startswith("on_"))
        for name, function in hooks.items():
            if name not in EVENTS:
                raise TypeError(
                    f"LambdaCallback takes hooks of ipufit.callbacks.Callback by name, got {name}. "
                    f"The hooks are {', '.join(EVENTS)}."
                )
            if function is None:
                continue
            if not callable(function):
                advice = "Write for example on_epoch_end=lambda epoch, logs: print(logs)."
                raise unfit(f"{name} of LambdaCallback", "a function or None", function, advice)
            setattr(self, name, function)
