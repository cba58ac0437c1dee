"""The progress bar."""

from __future__ import annotations

import contextlib
import time
from typing import Dict, Iterator, List, Optional, Sequence, Union

from ipufit.callbacks.callback import Callback, Logs, means, one_of
from ipufit.engines.program import Engine
from ipufit.utils.display import Display, Progress, make_display

__all__ = ["ProgbarLogger", "showing"]

_INTERVAL = 0.1  # seconds between two states of a bar


class ProgbarLogger(Callback):
    """A bar that counts updates, whatever ``device_iterations`` is, or one line an epoch.

    ``verbose`` of ``fit``, ``evaluate`` and ``predict`` adds it. It shows loss and metrics so far,
    the time left and samples per second, from the first execution on and then ten times a second,
    and a validation on a line of its own; values that have no room in a line go to the next one.
    What stays is one line an epoch, with the values of its end. Time spent on recording the program
    is reported apart; neither it nor validation counts into the rate.

    Args:
        verbose: 1 for a bar, 2 for one line an epoch, an evaluation or a prediction, "rich" for a
            bar by the package of that name.

    Raises:
        ConfigurationError: ``verbose`` is something else.
    """

    def __init__(self, verbose: Union[int, str] = 1) -> None:
        super().__init__()
        choices: Sequence[Union[int, str]] = (1, 2, "rich")
        self._verbose = one_of(self, "verbose", verbose, choices)
        self._bars: List[Progress] = []
        self._display: Optional[Display] = None
        self._recordings = 0
        self._has_recorded = self._training = False
        self._captured = self._first_captured = 0.0
        self._start = self._next_draw = 0.0

    @contextlib.contextmanager
    def _recording(self) -> Iterator[None]:
        self._recordings += 1
        if self._recordings == 1:
            self._has_recorded = True
            self._draw("recording the program ...")
        try:
            yield
        finally:
            self._recordings -= 1
            if not self._recordings:
                self._draw()

    def _shown_by(self) -> Display:
        """Where it is shown; made anew for every run."""
        if self._display is None:
            self._display = make_display(self._verbose)
        return self._display

    def _draw(self, note: str = "") -> None:
        self._shown_by().draw(self._bars if self._verbose != 2 else [], note)

    def _open(self, title: str, total: Optional[int]) -> None:
        unit = "updates" if title.startswith("epoch") else "batches"
        self._bars.append(Progress(title, unit, total))
        self._captured = float(self.model.capture_seconds)
        self._start = self._next_draw = time.perf_counter()
        self._draw()

    def _advance(self, batch: int, logs: Optional[Logs]) -> None:
        bar, now = self._bars[-1], time.perf_counter()
        captured = float(self.model.capture_seconds) - self._captured
        bar.done, bar.seconds = batch + 1, now - self._start - captured
        bar.samples = logs["samples"] if logs else 0.0
        # Metrics are worked out only when the bar is drawn: after the first execution, and then in
        # intervals, in which a whole epoch may pass.
        if self._verbose != 2 and now >= self._next_draw:
            bar.values = _shown(logs)
            self._draw()
            self._next_draw = now + _INTERVAL

    def _keep(self, logs: Optional[Logs]) -> None:
        """Put the last bar's line, which stays, in its place."""
        bar = self._bars.pop()
        self._shown_by().keep(bar.title, f"{bar.done} {bar.unit}", {**_shown(logs), **bar.rate})

    def on_train_begin(self, logs: Optional[Logs] = None) -> None:
        """Say how long the recording took, if something was recorded."""
        self._training = True
        if self._has_recorded:
            seconds = float(self.model.capture_seconds) - self._first_captured
            self._shown_by().write(f"recorded the program in {seconds:.2f} s")

    def on_epoch_begin(self, epoch: int, logs: Optional[Logs] = None) -> None:
        """Open the epoch's bar."""
        self._bars = []
        self._open(f"epoch {epoch + 1}/{self.params['epochs']}", self.params["updates"])

    def on_train_batch_end(self, batch: int, logs: Optional[Logs] = None) -> None:
        """Advance by the updates of the execution."""
        self._advance(batch, logs)

    def on_epoch_end(self, epoch: int, logs: Optional[Logs] = None) -> None:
        """Finish the epoch's bar by its line."""
        self._keep(logs)

    def on_train_end(self, logs: Optional[Logs] = None) -> None:
        """Count batches from here on, of evaluations and predictions."""
        self._training = False

    def on_test_begin(self, logs: Optional[Logs] = None) -> None:
        """Open a bar, which is below that of the epoch for the validation inside fit."""
        if self._training:
            self._open("validation", self.params.get("validation_updates"))
        else:
            self._open("evaluate", self.params["updates"])

    def on_test_batch_end(self, batch: int, logs: Optional[Logs] = None) -> None:
        """Advance by the device iterations of the execution."""
        self._advance(batch, logs)

    def on_test_end(self, logs: Optional[Logs] = None) -> None:
        """Finish the bar; an evaluation leaves its line, and a validation that of its epoch."""
        if self._training:
            self._bars.pop()
        else:
            self._keep(logs)

    def on_predict_begin(self, logs: Optional[Logs] = None) -> None:
        """Open the bar of a prediction."""
        self._open("predict", self.params["updates"])

    def on_predict_batch_end(self, batch: int, logs: Optional[Logs] = None) -> None:
        """Advance by the device iterations of the execution."""
        self._advance(batch, None)

    def on_predict_end(self, logs: Optional[Logs] = None) -> None:
        """Finish the bar by the line of the prediction."""
        self._keep(None)

    def close(self) -> None:
        """Leave no bar open after a run that did not end."""
        self._bars = []
        if self._display is not None:
            self._display.close()
            self._display = None


@contextlib.contextmanager
def showing(logger: ProgbarLogger, engine: Engine) -> Iterator[None]:
    """Show within the block what the engine records, and leave no bar open after it."""
    logger._first_captured, logger._has_recorded = engine.seconds, False
    engine.announce = logger._recording
    try:
        yield
    finally:
        engine.announce = contextlib.nullcontext
        ProgbarLogger.close(logger)


def _shown(logs: Optional[Logs]) -> Dict[str, str]:
    return {name: f"{value:.4g}" for name, value in means(logs).items()}
