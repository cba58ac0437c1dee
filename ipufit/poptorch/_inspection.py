"""Read-only methods of a compiled model: names, anchored tensors, times, cycles."""

from __future__ import annotations

import datetime
from typing import Any, Dict, List, Optional, Tuple

from torch import Tensor

from ipufit.poptorch._compiled import Compiled
from ipufit.poptorch._errors import error
from ipufit.poptorch._execution import latency
from ipufit.poptorch.options import Options

__all__ = ["Inspection"]

Latency = Tuple[float, float, float]


class Inspection:
    """Read-only half of an executor.

    Attributes:
        _executable: the program; None before compiling and after ``destroy``.
        _options: options of the executor.
        _anchors: the anchored tensors of the last call, by their short names.
    """

    _executable: Optional[Compiled]
    _options: Options
    _anchors: Dict[str, Tensor]

    def compilationTime(self) -> datetime.timedelta:
        """Return how long compiling took.

        Raises:
            Error: not compiled, or the progress bar is off.
        Returns:
            Zero for a program that came out of a file.
        """
        if self._executable is None:
            raise error("Please compile the model before obtaining compilation time.")
        if not self._options._show_compilation_progress_bar:
            raise error("Please set showCompilationProgressBar option to obtain compilation time.")
        return self._options._progress_bar.compilation_time or datetime.timedelta()

    def cycleCount(self) -> int:
        """Cycles of the last run, which only hardware counts.

        Raises:
            Error: always.
        """
        if not self._options._Popart.options.get("instrumentWithHardwareCycleCounter", False):
            raise error(
                "Cycle count logging is disabled. Please set option logCycleCount to True to "
                "enable."
            )
        if self._executable is None:
            raise error("Please run the model at least once before obtaining cycle count.")
        raise error(
            "Cycles can be counted on IPU hardware only, and this model runs in plain torch. "
            "getLatency() measures seconds."
        )

    def getTensorNames(self) -> List[str]:
        """Return the names that :meth:`Options.anchorTensor` takes.

        Raises:
            AssertionError: not compiled.
        """
        if self._executable is None:
            raise AssertionError(
                "Model must be compiled before calling getTensorNames: call it with inputs, or "
                "call compile(), first."
            )
        return self._executable.tensor_names()

    def getAnchoredTensor(self, short_name: str) -> Tensor:
        """Return the tensor anchored under this name, as it was in the last call.

        Raises:
            AssertionError: there is none.
        """
        if short_name not in self._anchors:
            names = ", ".join(sorted(self._anchors)) or "none"
            raise AssertionError(
                f"No tensor with name {short_name} found. Anchored, and run: {names}. Ask for one "
                "with options.anchorTensor(short_name, long_name)."
            )
        return self._anchors[short_name]

    def getPerfCounters(self) -> Dict[str, List[List[float]]]:
        """Return when inputs and outputs of the last call were there, in seconds.

        Returns:
            By event ("input", "input_complete", "output", "output_complete"): for every tensor, the
            time of every micro-batch.
        """
        if self._executable is None:
            return {e: [[]] for e in ("input", "input_complete", "output", "output_complete")}
        return self._executable.counters.times()

    def _latency(self, start: str, first: Any, end: str) -> Latency:
        times = self.getPerfCounters()
        return latency(times[start], times[end], first, max)

    def getHostIpuLatency(self) -> Latency:
        """Return smallest, largest and mean seconds from requesting inputs to having them."""
        return self._latency("input", min, "input_complete")

    def getComputeLatency(self) -> Latency:
        """Return smallest, largest and mean seconds from having inputs to having outputs."""
        return self._latency("input_complete", max, "output")

    def getIpuHostLatency(self) -> Latency:
        """Return smallest, largest and mean seconds from having outputs to their arrival."""
        return self._latency("output", min, "output_complete")

    def getLatency(self) -> Latency:
        """Return smallest, largest and mean seconds from requesting inputs to having outputs."""
        return self._latency("input", min, "output_complete")

    def _debugGetPopartIR(self) -> str:
        raise error(
            "There is no PopART IR: this model runs in plain torch. Only the SDK compiles one."
        )
