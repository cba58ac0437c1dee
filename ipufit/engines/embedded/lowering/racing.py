"""jit="auto" and compiled updates: compiled when that pays, kept when they are faster."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING, Callable, List, Optional

from ipufit.engines.embedded.lowering.inductor.compilation import CompilerError
from ipufit.errors import ConfigurationError
from ipufit.program import MicroBatch

if TYPE_CHECKING:
    from ipufit.engines.embedded.engine import Recorded
    from ipufit.engines.embedded.lowering.inductor.compiled import CompiledUpdates

__all__ = ["Race"]

# Seconds of training still to come from which it pays to look for a library that was kept, and to
# compile one, which takes a core for half a minute.
_LOOKS, _COMPILES = 20.0, 300.0

# Executions of each kind that are measured, after a first one; and what the compiled ones must need
# less than, of the time of the others.
_ROUNDS = 4
_WORTH = 0.9


class Race:
    """Recorded and compiled updates of one training program, in turn until one is known to win.

    Both make the same updates, equal up to the order of summation.

    Args:
        compiled: not yet started.
        clock: in seconds.
    """

    def __init__(
        self, compiled: CompiledUpdates, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self.compiled = compiled
        self._clock = clock
        self._to_come = 0
        self._recorded: Optional[Recorded] = None
        self._example: Optional[MicroBatch] = None
        self._looked = self._compiles = False
        self._is_compiled = False
        self._start = 0.0
        # Seconds of an update, of each execution.
        self._times: List[List[float]] = [[], []]
        self._wins: Optional[bool] = None
        self._failed = ""

    @property
    def wins(self) -> bool:
        """Whether compiled updates have turned out to be faster."""
        return self._wins is True

    def expect(self, updates: int) -> None:
        """So many updates are to come."""
        self._to_come = updates

    def enter(self, recorded: Recorded, example: MicroBatch) -> None:
        """The program to compile: what is recorded for a full micro-batch, and such a one."""
        if recorded is not self._recorded:
            self._recorded, self._example = recorded, example
            self._looked = self._compiles = False
            self._times, self._wins = [[], []], None

    def before(self) -> Optional[CompiledUpdates]:
        """What makes the full updates of the next execution; None for what is recorded."""
        self._start_if_it_pays()
        self._is_compiled = self._wins is not False and self._is_ready() and self._has_turn()
        self._start = self._clock()
        return self.compiled if self._is_compiled else None

    def after(self, updates: int) -> None:
        """The execution is done; it had so many updates."""
        seconds = (self._clock() - self._start) / updates
        self._to_come -= updates
        if self._wins is None:
            self._times[self._is_compiled].append(seconds)
            self._judge()

    def _has_turn(self) -> bool:
        return self._wins is True or len(self._times[1]) < len(self._times[0])

    def _judge(self) -> None:
        recorded, compiled = (times[1:] for times in self._times)
        if len(recorded) >= _ROUNDS and len(compiled) >= _ROUNDS:
            self._wins = min(compiled) < _WORTH * min(recorded)

    def _is_ready(self) -> bool:
        if not self._looked:
            return False
        try:
            return self.compiled.poll()
        except CompilerError as error:
            self._failed, self._wins = str(error).partition("\n")[0], False
            return False

    def _start_if_it_pays(self) -> None:
        times = self._times[0][1:]
        if not times or self._compiles or self._wins is not None or self.compiled.is_ready:
            return
        left = self._to_come * min(times)
        if left < _LOOKS or (self._looked and left < _COMPILES):
            return
        assert self._recorded is not None
        assert self._example is not None
        self._looked, self._compiles = True, left >= _COMPILES
        try:
            self.compiled.start(self._recorded, self._example, compiles=self._compiles)
        except ConfigurationError as error:
            self._failed, self._wins = str(error), False

    def said(self) -> List[str]:
        """What came of it, in a sentence, if anything did."""
        if self._failed:
            return [f"Updates run as recorded, uncompiled: {self._failed}"]
        if self._wins is None:
            return []
        recorded, compiled = (min(times[1:], default=math.nan) for times in self._times)
        kept = "are kept" if self._wins else "are not used"
        return [f"Compiled updates take {compiled / recorded:.2f} of the time, and {kept}."]
