"""The progress bar."""

from __future__ import annotations

import time
from typing import Any, Dict, Optional

from ipufit.callbacks.callback import Callback, Logs
from ipufit.callbacks.checks import say
from ipufit.callbacks.records import means

__all__ = ["ProgbarLogger"]


class ProgbarLogger(Callback):
    """A bar that counts updates, whatever ``device_iterations`` is, or one line an epoch.

    Shows loss, metrics, samples per second and the time left. Time spent on recording the program
    is reported apart; neither it nor validation counts into the rate.

    Args:
        verbose: 1 for a bar, 2 for one line an epoch, an evaluation or a prediction.
    """

    def __init__(self, verbose: int = 1) -> None:
        super().__init__()
        self._verbose = verbose
        self._bar: Any = None
        self._done = 0
        self._samples = 0.0
        self._start = 0.0
        self._elapsed = 0.0
        self._training = False
        self._captured = 0.0

    @property
    def _unit(self) -> str:
        return "updates" if self._training else "batches"

    def _open(self, description: str, total: Optional[int]) -> None:
        self._close()
        self._done = 0
        self._start = time.perf_counter()
        self._captured = float(self.model.capture_seconds)
        if self._verbose == 1:
            # Imported here: nobody needs it who sees no bar.
            from tqdm.auto import tqdm

            self._bar = tqdm(total=total, desc=description, unit=" " + self._unit, leave=True)

    def _advance(self, batch: int, logs: Optional[Logs]) -> None:
        count, self._done = batch + 1 - self._done, batch + 1
        self._samples = logs["samples"] if logs else 0.0
        captured = float(self.model.capture_seconds) - self._captured
        self._elapsed = time.perf_counter() - self._start - captured
        # TQDM_DISABLE switches every bar of a process off.
        if self._bar is None or self._bar.disable:
            return
        # Metrics are worked out only when the bar is about to be drawn.
        if time.perf_counter() - self._bar.last_print_t >= self._bar.mininterval:
            self._bar.set_postfix(self._shown(logs), refresh=False)
        self._bar.update(count)

    def _shown(self, logs: Optional[Logs]) -> Dict[str, str]:
        shown = {name: f"{value:.4g}" for name, value in means(logs).items()}
        if self._samples and self._elapsed > 0:
            shown["samples/s"] = f"{self._samples / self._elapsed:.0f}"
        return shown

    def _close(self, logs: Optional[Logs] = None) -> None:
        if self._bar is not None:
            if logs is not None:
                self._bar.set_postfix(self._shown(logs), refresh=False)
            self._bar.close()
            self._bar = None

    def on_train_begin(self, logs: Optional[Logs] = None) -> None:
        """Say how long the recording took."""
        self._training = True
        say(f"recorded the program in {self.model.capture_seconds:.2f} s")

    def _line(self, title: str, logs: Optional[Logs]) -> None:
        if self._verbose == 2:
            shown = [f"{name}={value}" for name, value in self._shown(logs).items()]
            say(f"{title}: " + ", ".join([f"{self._done} {self._unit}", *shown]))

    def on_epoch_begin(self, epoch: int, logs: Optional[Logs] = None) -> None:
        """Open the epoch's bar."""
        self._open(f"epoch {epoch + 1}/{self.params['epochs']}", self.params["updates"])

    def on_train_batch_end(self, batch: int, logs: Optional[Logs] = None) -> None:
        """Advance by the updates of the execution."""
        self._advance(batch, logs)

    def on_epoch_end(self, epoch: int, logs: Optional[Logs] = None) -> None:
        """Finish the bar, or print the epoch's line."""
        self._close(logs)
        self._line(f"epoch {epoch + 1}/{self.params['epochs']}", logs)

    def on_train_end(self, logs: Optional[Logs] = None) -> None:
        """Leave no bar open."""
        self._training = False
        self._close()

    def on_test_begin(self, logs: Optional[Logs] = None) -> None:
        """Open a bar, unless this is the validation inside fit."""
        if not self._training:
            self._open("evaluate", self.params["updates"])

    def on_test_batch_end(self, batch: int, logs: Optional[Logs] = None) -> None:
        """Advance by the device iterations of the execution."""
        if not self._training:
            self._advance(batch, logs)

    def on_test_end(self, logs: Optional[Logs] = None) -> None:
        """Finish the bar, or print the line."""
        if not self._training:
            self._close(logs)
            self._line("evaluate", logs)

    def on_predict_begin(self, logs: Optional[Logs] = None) -> None:
        """Open a bar."""
        self._open("predict", self.params["updates"])

    def on_predict_batch_end(self, batch: int, logs: Optional[Logs] = None) -> None:
        """Advance by the device iterations of the execution."""
        self._advance(batch, None)

    def on_predict_end(self, logs: Optional[Logs] = None) -> None:
        """Finish the bar, or print the line."""
        self._close()
        self._line("predict", None)

    def close(self) -> None:
        """Leave no bar open after an evaluation or a prediction that did not end."""
        self._close()
