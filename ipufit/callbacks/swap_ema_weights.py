"""Evaluate with averaged weights."""

from __future__ import annotations

from typing import Optional, Tuple

from ipufit.callbacks.callback import Callback, Logs
from ipufit.callbacks.checks import one_of

__all__ = ["SwapEMAWeights"]


class SwapEMAWeights(Callback):
    """Exchanges the weights for their exponential moving average while ``fit`` validates.

    The model must have been compiled with such an average. It belongs into ``fit``, where the
    averages are; when a ``fit`` has ended, they are the weights, and there is nothing to exchange.
    In an ``evaluate`` or ``predict`` outside of it this callback is refused.

    Args:
        swap_on_epoch: the average is in the model at the end of an epoch too, for the callbacks
            after this one, such as ModelCheckpoint, until the next epoch begins or training ends.

    Raises:
        ConfigurationError: ``swap_on_epoch`` is neither True nor False.
    """

    adds: Tuple[str, ...] = ()

    def __init__(self, swap_on_epoch: bool = False) -> None:
        super().__init__()
        self.swap_on_epoch: bool = one_of(self, "swap_on_epoch", swap_on_epoch, (True, False))
        self._swapped = False

    def _swap(self, averaged: bool) -> None:
        if self._swapped is not averaged:
            self.model.swap_ema_weights()
            self._swapped = averaged

    def on_epoch_begin(self, epoch: int, logs: Optional[Logs] = None) -> None:
        """Put the trained weights back before the epoch trains them."""
        self._swap(False)

    def on_epoch_end(self, epoch: int, logs: Optional[Logs] = None) -> None:
        """Show the average to the callbacks that follow."""
        if self.swap_on_epoch:
            self._swap(True)

    def on_train_end(self, logs: Optional[Logs] = None) -> None:
        """Put the trained weights back into the module."""
        self._swap(False)

    def on_test_begin(self, logs: Optional[Logs] = None) -> None:
        """Put the averaged weights into the module for the evaluation."""
        self._swap(True)

    def on_test_end(self, logs: Optional[Logs] = None) -> None:
        """Go on with the trained weights."""
        self._swap(False)

    def on_predict_begin(self, logs: Optional[Logs] = None) -> None:
        """Put the averaged weights into the module for the prediction."""
        self._swap(True)

    def on_predict_end(self, logs: Optional[Logs] = None) -> None:
        """Go on with the trained weights."""
        self._swap(False)

    def close(self) -> None:
        """Put the trained weights back after an error too."""
        self._swap(False)
