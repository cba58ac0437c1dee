"""Compiled updates: always for jit="inductor"; for jit="auto" where they are measured to pay."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING, Callable, List, Optional

from ipufit.core.batch import CombinedBatch, MicroBatch
from ipufit.core.compile_arguments import GRAPH, INDUCTOR
from ipufit.engines.embedded.execution import ExecutionWork, UpdateWay
from ipufit.engines.embedded.inductor.compiled import CompilerError
from ipufit.engines.embedded.timing import fastest
from ipufit.engines.embedded.traced_step import TracedStep, computing
from ipufit.engines.embedded.training_state import Snapshot, TrainingState
from ipufit.engines.embedded.update_runner import UpdateRunner
from ipufit.engines.program import ExecutionResult
from ipufit.errors import ConfigurationError, NonFiniteLossError

if TYPE_CHECKING:
    from ipufit.engines.embedded.inductor.compiled import CompiledUpdates

__all__ = ["AutotunedWay", "CompiledWay", "JitAutotuner", "Trial"]

# Seconds that a compilation takes of a core, and how many times that it has to save to be begun:
# what it will save is an estimate.
_COMPILATION, _SURELY = 20.0, 2.0

# What compiling may save: seconds of each recorded operator, which is what it costs to call one,
# and no larger share of an update.
_CALL, _LARGEST_SHARE = 5e-6, 0.7

# Runs the next update compiled (or recorded, for None), takes it back, and returns its seconds.
Trial = Callable[[Optional["CompiledUpdates"]], float]


class JitAutotuner(UpdateWay):
    """Chooses between recorded and compiled updates of one training program.

    A library that was kept is looked for before the first update, and one that the training still
    to come pays for is compiled in the background. Once there is one, the next update is made in
    both ways, taken back each time, and the choice holds for the rest of the process: the bits of
    a run depend on what was chosen, and neither on when nor on ``device_iterations``.

    Args:
        compiled: not yet started.
        clock: in seconds.
    """

    def __init__(
        self, compiled: CompiledUpdates, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self.compiled = compiled
        self._clock = clock
        self._updates_to_come = 0
        self._recorded: Optional[TracedStep] = None
        self._example: Optional[MicroBatch] = None
        self._choice: Optional[str] = None
        self._is_compiling = False
        self._start = 0.0
        self._seconds = math.inf
        self._trials: List[float] = []
        self._failure = ""

    @property
    def jit(self) -> Optional[str]:
        """INDUCTOR where compiled updates have turned out to be faster."""
        return INDUCTOR if self._choice == INDUCTOR else None

    @property
    def is_undecided(self) -> bool:
        """Say whether the two ways of running have not been measured yet."""
        return self._choice is None

    def expect(self, updates: int) -> None:
        """So many updates are to come."""
        self._updates_to_come = updates

    def enter(self, recorded: TracedStep, example: MicroBatch) -> None:
        """Look for a library of this program.

        Args:
            recorded: of a full micro-batch.
            example: such a micro-batch.
        """
        if recorded is self._recorded:
            return
        self._recorded, self._example = recorded, example
        self._choice, self._is_compiling, self._seconds = None, False, math.inf
        if self.compiled.may_be_there():
            self._begin(compiles=False)

    def choose(self, trial: Optional[Trial]) -> Optional[CompiledUpdates]:
        """Say what makes the full updates of the next execution; None for what is recorded.

        Args:
            trial: for its first update that a library can make; None where there is none.
        """
        if self._choice is None and self._is_ready() and trial is not None:
            self._choice = self._judge(trial)
        self._start = self._clock()
        return self.compiled if self.jit else None

    def after(self, updates: int) -> None:
        """Count an execution of so many updates as done, and compile if that pays now."""
        self._updates_to_come -= updates
        # Without a full micro-batch there is nothing that a library could make.
        if self._recorded is not None and self._choice is None and not self._is_compiling:
            self._seconds = min(self._seconds, (self._clock() - self._start) / updates)
            if self._pays():
                self._is_compiling = True
                self._begin(compiles=True)

    def _begin(self, compiles: bool) -> None:
        assert self._recorded is not None
        assert self._example is not None
        try:
            self.compiled.start(self._recorded, self._example, compiles=compiles)
        except ConfigurationError as error:
            self._failure, self._choice = str(error), GRAPH

    def _pays(self) -> bool:
        """Say whether the training to come is estimated to save more time than compiling takes."""
        assert self._recorded is not None
        of_calls = _CALL * self.compiled.operators_of(self._recorded)
        saved = self._updates_to_come * min(of_calls, _LARGEST_SHARE * self._seconds)
        return saved > _SURELY * _COMPILATION

    def _is_ready(self) -> bool:
        try:
            return self.compiled.poll()
        except CompilerError as error:
            self._failure, self._choice = str(error).partition("\n")[0], GRAPH
            return False

    def _judge(self, trial: Trial) -> str:
        def measure(way: Optional[CompiledUpdates]) -> float:
            seconds = trial(way)
            times[way is not None] = min(times[way is not None], seconds)
            return seconds

        times = [math.inf, math.inf]
        ways = {GRAPH: lambda: measure(None), INDUCTOR: lambda: measure(self.compiled)}
        try:
            choice = fastest(("updates", self.compiled.key), lambda: ways, lambda way: way())
        except NonFiniteLossError:
            # Training is about to say so itself.
            return GRAPH
        self._trials = times
        return choice

    def explain(self) -> List[str]:
        """Tell the result of the measurement in a sentence, if there is a result."""
        if self._failure:
            return [f"Updates run as recorded, uncompiled: {self._failure}"]
        if self._choice is None:
            return []
        are = "are kept" if self.jit else "are not used"
        if math.isinf(max(self._trials, default=math.inf)):
            return [f"Compiled updates {are}, as was measured before."]
        recorded, compiled = self._trials
        return [f"Compiled updates take {compiled / recorded:.2f} of the time, and {are}."]


class CompiledWay(UpdateWay):
    """``jit="inductor"``: updates that fit run compiled, others as recorded.

    Args:
        compiled: not yet started.
        runner: makes executions.

    Attributes:
        compiled: as given.
    """

    def __init__(self, compiled: CompiledUpdates, runner: UpdateRunner) -> None:
        self.compiled = compiled
        self._runner = runner

    @property
    def jit(self) -> Optional[str]:
        """INDUCTOR once updates run compiled."""
        return INDUCTOR if self.compiled.is_ready else None

    def explain(self) -> List[str]:
        """Describe in sentences how updates run."""
        return self.compiled.explain()

    def enter(self, recorded: TracedStep, example: MicroBatch) -> None:
        """Begin to compile the program; doesn't wait."""
        self.compiled.start(recorded, example)

    def run(self, execution: ExecutionWork) -> ExecutionResult:
        """Run all updates, once the compiler is done."""
        self.compiled.wait()
        execution.compiled = self.compiled
        return self._runner.run(execution)

    def close(self) -> None:
        """Stop compiling, and let go of the tensors; safe twice."""
        self.compiled.close()


class AutotunedWay(JitAutotuner):
    """``jit="auto"``: updates run compiled where that turns out to be faster.

    Args:
        compiled: not yet started.
        runner: makes executions.
        state: what updates change.
    """

    def __init__(
        self, compiled: CompiledUpdates, runner: UpdateRunner, state: TrainingState
    ) -> None:
        super().__init__(compiled)
        self._runner = runner
        self._state = state

    def run(self, execution: ExecutionWork) -> ExecutionResult:
        """Run all updates in the way that is the faster one as far as is known."""
        execution.compiled = self._choose(execution)
        result = self._runner.run(execution)
        self.after(len(execution.updates))
        return result

    def _choose(self, execution: ExecutionWork) -> Optional[CompiledUpdates]:
        """Ask what makes the full updates of an execution; the first of them is there to try."""
        state, updates = self._state, execution.updates
        full: Optional[int] = None
        if self.is_undecided:
            fits = self.compiled.fits
            full = next((i for i, update in enumerate(updates) if fits(update)), None)
        if full is None:
            return self.choose(None)
        batch = CombinedBatch([batch for batch, _ in updates[full]])
        alone = ExecutionWork(batch, [updates[full]], [execution.rows[full]])
        alone.merged = execution.merged
        is_random = any(recorded.random for _, recorded in updates[full])
        before: Optional[Snapshot] = None

        def trial(compiled: Optional[CompiledUpdates]) -> float:
            nonlocal before
            # Not before it is needed: what was measured once in a process is not tried again.
            before = before or state.snapshot()
            alone.compiled = compiled
            state.updater.refresh(alone.rows)
            try:
                with computing(state.device, is_random):
                    start = time.perf_counter()
                    self._runner.make(alone, alone.updates, None)
                    return time.perf_counter() - start
            finally:
                state.restore(before)

        return self.choose(trial)

    def close(self) -> None:
        """Stop compiling, and let go of the tensors; safe twice."""
        self.compiled.close()
