"""End training in order when a loss is no number."""

from __future__ import annotations

import math
from typing import Optional, Tuple

from ipufit.callbacks.callback import Callback, Logs
from ipufit.callbacks.checks import one_of, say
from ipufit.errors import NonFiniteLossError

__all__ = ["TerminateOnNaN"]


class TerminateOnNaN(Callback):
    """Ends training, instead of an error, when the loss is NaN or infinite.

    ``fit`` finds such a loss before its update and raises ``NonFiniteLossError``. With this
    callback it ends as if a callback had asked it to stop: the weights are those from before that
    update, and the epoch's "loss" is the value that came. It also ends with an epoch in which
    another value, such as ``val_loss``, is not finite.

    Args:
        raise_error: True raises instead, also for the other values.

    Raises:
        ConfigurationError: ``raise_error`` is neither True nor False.
        NonFiniteLossError: in training, with ``raise_error``.
    """

    adds: Tuple[str, ...] = ()

    def __init__(self, raise_error: bool = False) -> None:
        super().__init__()
        self.raise_error: bool = one_of(self, "raise_error", raise_error, (True, False))

    def on_non_finite(self, error: NonFiniteLossError) -> bool:
        """Say that the loss is not finite, and that this is the end."""
        if self.raise_error:
            return False
        say(f"TerminateOnNaN ends training: the loss became {error.value} in update {error.update}")
        self.model.stop_training = True
        return True

    def on_train_batch_end(self, batch: int, logs: Optional[Logs] = None) -> None:
        """Look at the mean so far, which may overflow where no loss does."""
        loss = (logs or {}).get("loss", 0.0)
        if not math.isfinite(loss):
            self._end("loss", loss, f"batch {batch}")

    def on_epoch_end(self, epoch: int, logs: Optional[Logs] = None) -> None:
        """Look at every value of the epoch."""
        for name, value in (logs or {}).items():
            if not math.isfinite(value) and not self.model.stop_training:
                self._end(name, value, f"epoch {epoch + 1}")

    def _end(self, name: str, value: float, where: str) -> None:
        if self.raise_error:
            raise NonFiniteLossError(
                f"every value must be finite, but {name} became {value} in {where}. Look for a "
                "learning rate that is too high, a log or division of zero, or non-finite data.",
                None,
                value,
            )
        say(f"TerminateOnNaN ends training: {name} became {value} in {where}")
        self.model.stop_training = True
