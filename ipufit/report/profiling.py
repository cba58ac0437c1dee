"""A profiler of torch's that looks on while a run goes on."""

from __future__ import annotations

import os
from typing import Any

from ipufit.report.files import TORCH_TRACE

__all__ = ["Profiler"]


class Profiler:
    """Starts, steps and stops it.

    Args:
        profiler: a ``torch.profiler.profile``; None for none.
        folder: of the report, where its trace goes.
    """

    def __init__(self, profiler: Any, folder: str) -> None:
        self._profiler = profiler
        self._path = os.path.join(folder, TORCH_TRACE)
        self._runs = False

    def start(self) -> None:
        """Training begins."""
        if self._profiler is not None:
            self._profiler.start()
            self._runs = True

    def step(self) -> None:
        """An execution is over."""
        if self._runs:
            self._profiler.step()

    def stop(self) -> None:
        """Training is over; safe twice."""
        if not self._runs:
            return
        self._runs = False
        self._profiler.stop()
        # One with a handler of its own has done something else with what it has seen.
        if getattr(self._profiler, "on_trace_ready", None) is None:
            self._profiler.export_chrome_trace(self._path)
