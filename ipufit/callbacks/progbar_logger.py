"""The progress bar."""

from __future__ import annotations

import time
from typing import Any, Dict, Iterator, Optional, Tuple

from ipufit.callbacks.callback import Callback, Logs, means, say

__all__ = ["ProgbarLogger"]

# How a line is laid out, from the widest to the narrowest, in tqdm's words. A bar of fewer cells
# than these says nothing.
_CELLS = 5
_COUNT = "{n_fmt}/{total_fmt}"
_LAYOUTS = (
    "{l_bar}{bar}| " + _COUNT + " [{elapsed}<{remaining}, {rate_fmt}{postfix}]",
    "{l_bar}{bar}| " + _COUNT + " [{elapsed}<{remaining}{postfix}]",
    "{desc}: " + _COUNT + " [{elapsed}<{remaining}{postfix}]",
    "{desc}: " + _COUNT + " [{remaining}{postfix}]",
    "{desc}: " + _COUNT + "{postfix}",
)
_WITHOUT_TOTAL = (
    "{desc}: {n_fmt}{unit} [{elapsed}, {rate_fmt}{postfix}]",
    "{desc}: {n_fmt}{unit} [{elapsed}{postfix}]",
    "{desc}: {n_fmt}{unit}{postfix}",
)


class ProgbarLogger(Callback):
    """A bar that counts updates, whatever ``device_iterations`` is, or one line an epoch.

    ``verbose=1`` and ``verbose=2`` add it. Shows loss, metrics, samples per second and the time
    left. A bar is drawn after the first execution, and then in intervals of tqdm's ``mininterval``.
    Where a terminal is too narrow, it
    leaves out updates per second, samples per second, the bar itself, times, the count and then the
    last metrics, in this order. Time spent on recording the program is reported apart; neither it
    nor validation counts into the rate.

    Args:
        verbose: 1 for a bar, 2 for one line an epoch, an evaluation or a prediction.
    """

    def __init__(self, verbose: int = 1) -> None:
        super().__init__()
        self._verbose = verbose
        self._bar: Any = None
        self._done = 0
        self._samples = 0.0
        self._start = self._next_draw = 0.0
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

            unit = " " + self._unit
            # With any delay at all tqdm does not draw before there is a layout.
            options = {"unit": unit, "dynamic_ncols": True, "delay": 1e-9}
            self._bar = tqdm(total=total, desc=description, **options)
            if not self._bar.disable:
                self._lay_out({})
                self._bar.refresh()

    def _advance(self, batch: int, logs: Optional[Logs]) -> None:
        self._done = batch + 1
        self._samples = logs["samples"] if logs else 0.0
        captured = float(self.model.capture_seconds) - self._captured
        now = time.perf_counter()
        self._elapsed = now - self._start - captured
        # TQDM_DISABLE switches every bar of a process off.
        if self._bar is None or self._bar.disable:
            return
        self._bar.n = self._done
        # Metrics are worked out only when the bar is drawn, which tqdm leaves to this: after the
        # first execution, and then in intervals, in which a whole epoch may pass.
        if now >= self._next_draw:
            self._lay_out(logs)
            self._bar.refresh()
            self._next_draw = now + self._bar.mininterval

    def _lay_out(self, logs: Optional[Logs]) -> None:
        """Choose what of the values, and beside them, has room in the line."""
        state = self._bar.format_dict
        for layout, values in _choices(self._shown(logs), state["total"]):
            self._bar.bar_format, self._bar.postfix = layout, values
            state.update(bar_format=layout.replace("{bar}", " " * _CELLS), postfix=values)
            # The count grows, and the time that is left shrinks.
            ends = [{**state, "ncols": None, "n": n} for n in (self._done, state["total"])]
            widths = [len(self._bar.format_meter(**end)) for end in ends if end["n"] is not None]
            if state["ncols"] is None or max(widths) <= state["ncols"]:
                return

    def _shown(self, logs: Optional[Logs]) -> Dict[str, str]:
        shown = {name: f"{value:.4g}" for name, value in means(logs).items()}
        if self._samples and self._elapsed > 0:
            shown["samples/s"] = f"{self._samples / self._elapsed:.0f}"
        return shown

    def _close(self, logs: Optional[Logs] = None) -> None:
        if self._bar is not None:
            if logs is not None and not self._bar.disable:
                self._lay_out(logs)
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
        """Close a bar that an error or Ctrl-C left open."""
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
        """Open the bar of a prediction."""
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


def _choices(shown: Dict[str, str], total: Optional[int]) -> Iterator[Tuple[str, str]]:
    """Layouts and the values in them, from the most to the least."""
    layouts = _WITHOUT_TOTAL if total is None else _LAYOUTS
    values = [f"{name}={value}" for name, value in shown.items()]
    yield layouts[0], ", ".join(values)
    yield layouts[1], ", ".join(values)
    values = [value for value in values if not value.startswith("samples/s=")]
    for layout in layouts[1:]:
        yield layout, ", ".join(values)
    while values:
        # tqdm puts a comma before the postfix.
        yield "{desc}: " + ", ".join(values).replace("{", "{{").replace("}", "}}"), ""
        values.pop()
    yield "{desc}", ""
