"""Several callbacks as one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Dict, Iterable, List, Sequence

from ipufit.callbacks.callback import Callback
from ipufit.errors import ConfigurationError

if TYPE_CHECKING:
    from ipufit.model import Model

__all__ = ["CallbackList", "checked"]


class CallbackList:
    """Calls every callback's hook, in order.

    Attributes:
        callbacks: the callbacks.
        params: what every callback is told of the run.

    Raises:
        ConfigurationError: an element is not a callback.
    """

    def __init__(self, callbacks: Sequence[Callback], model: Model, params: Dict[str, Any]) -> None:
        self.params = params
        self.callbacks = checked(callbacks)
        self._model = model
        for callback in self.callbacks:
            callback.set_model(model)
            callback.set_params(params)

    @property
    def wants_outputs(self) -> bool:
        """Whether a callback looks at the outputs of training executions."""
        return any(callback.wants_outputs for callback in self.callbacks)

    def show_outputs(self, outputs: List[Any]) -> None:
        """Let the callbacks that want them find the outputs of an execution in the model."""
        if self.wants_outputs:
            self._model.outputs = outputs

    def call(self, hook: str, *args: Any) -> None:
        """Call one hook, such as "on_epoch_end", of every callback."""
        for callback in self.callbacks:
            getattr(callback, hook)(*args)


def checked(callbacks: Any) -> List[Callback]:
    """The callbacks as a list: of None, of a single one, or of several.

    Raises:
        ConfigurationError: an element is not a callback.
    """
    if callbacks is None or isinstance(callbacks, Callback):
        return [] if callbacks is None else [callbacks]
    if isinstance(callbacks, (str, bytes)) or not isinstance(callbacks, Iterable):
        raise _refusal(callbacks, "Pass a list of objects: callbacks=[...]; [] for none.")
    found = list(callbacks)
    for callback in found:
        if isinstance(callback, type):
            raise _refusal(callback, f"Pass an object of it: {callback.__name__}(...).")
        if not isinstance(callback, Callback):
            raise _refusal(callback, "Subclass ipufit.callbacks.Callback and override its hooks.")
    return found


def _refusal(came: Any, instead: str) -> ConfigurationError:
    what = f"the class {came.__name__}" if isinstance(came, type) else repr(came)
    return ConfigurationError(
        f"callbacks must be a list of ipufit.callbacks.Callback objects, got {what}. {instead}"
    )
