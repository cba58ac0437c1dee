"""The base of all callbacks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Dict, Mapping, Optional

if TYPE_CHECKING:
    from ipufit.model import Model

__all__ = ["Callback", "Logs"]

Logs = Mapping[str, float]


class Callback:
    """Override the hooks you need.

    ``on_*_batch_*`` fire once per execution. Their ``batch`` is, at the beginning, the index of the
    execution's first update in the epoch (or of its first micro-batch per replica when evaluating
    and predicting), and at the end that of its last, as in Keras. A parameter of the module read in
    any hook has its present value. Setting ``self.model.stop_training = True`` ends training with
    the execution.

    Attributes:
        wants_outputs: of the class; whether ``model.outputs`` is filled during ``fit``.
        model: the :class:`ipufit.Model`.
        params: ``epochs``, ``updates`` (per epoch, None if unknown), ``samples`` and ``verbose``.
    """

    wants_outputs = False

    def __init__(self) -> None:
        self.model: Any = None
        self.params: Dict[str, Any] = {}

    def set_model(self, model: Model) -> None:
        """Called before any other hook."""
        self.model = model

    def set_params(self, params: Dict[str, Any]) -> None:
        """Called before any other hook."""
        self.params = params

    def on_train_begin(self, logs: Optional[Logs] = None) -> None:
        """Before the first epoch; the program is recorded."""

    def on_train_end(self, logs: Optional[Logs] = None) -> None:
        """After the last epoch, also when training was interrupted or failed."""

    def on_epoch_begin(self, epoch: int, logs: Optional[Logs] = None) -> None:
        """Before an epoch."""

    def on_epoch_end(self, epoch: int, logs: Optional[Logs] = None) -> None:
        """After an epoch and its validation; ``logs`` is what goes into History."""

    def on_train_batch_begin(self, batch: int, logs: Optional[Logs] = None) -> None:
        """Before an execution."""

    def on_train_batch_end(self, batch: int, logs: Optional[Logs] = None) -> None:
        """After an execution; ``logs`` holds the running means of the epoch."""

    def on_test_begin(self, logs: Optional[Logs] = None) -> None:
        """Before an evaluation, validation included."""

    def on_test_end(self, logs: Optional[Logs] = None) -> None:
        """After an evaluation."""

    def on_test_batch_begin(self, batch: int, logs: Optional[Logs] = None) -> None:
        """Before an execution of an evaluation."""

    def on_test_batch_end(self, batch: int, logs: Optional[Logs] = None) -> None:
        """After an execution of an evaluation."""

    def on_predict_begin(self, logs: Optional[Logs] = None) -> None:
        """Before a prediction."""

    def on_predict_end(self, logs: Optional[Logs] = None) -> None:
        """After a prediction."""

    def on_predict_batch_begin(self, batch: int, logs: Optional[Logs] = None) -> None:
        """Before an execution of a prediction."""

    def on_predict_batch_end(self, batch: int, logs: Optional[Logs] = None) -> None:
        """After an execution of a prediction."""
