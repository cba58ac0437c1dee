"""Compiled updates: always for jit="inductor"; for jit="auto" where they are measured to pay."""

from __future__ import annotations

import abc
import math
import time
from typing import Callable, Dict, Generic, List, Mapping, Optional, TypeVar

from ipufit.core.batch import CombinedBatch, MicroBatch
from ipufit.core.compile_arguments import GRAPH, INDUCTOR
from ipufit.core.plan import Plan
from ipufit.engines.embedded.execution import ExecutionWork, UpdateWay
from ipufit.engines.embedded.inductor.compiled import CompiledUpdates, CompilerError
from ipufit.engines.embedded.inductor.store import Libraries
from ipufit.engines.embedded.timing import fastest
from ipufit.engines.embedded.traced_step import Seeding, TracedStep, Update, computing
from ipufit.engines.embedded.training_state import Snapshot, TrainingState
from ipufit.engines.embedded.update_runner import UpdateRunner
from ipufit.engines.program import ExecutionResult
from ipufit.errors import ConfigurationError, NonFiniteLossError

# Seconds that a compilation takes of a core, and how many times that it has to save to be begun:
# what it will save is an estimate.
_COMPILATION, _SURELY = 20.0, 2.0

# What compiling may save: seconds of each recorded operator, which is what it costs to call one,
# and no larger share of an update.
_CALL, _LARGEST_SHARE = 5e-6, 0.7

# Runs the next update compiled (or recorded, for None), takes it back, and returns its seconds.
Trial = Callable[[Optional[CompiledUpdates]], float]


class JitAutotuner:
    """Chooses between recorded and compiled updates of one shape of micro-batch.

    A library that was kept is looked for before the first update, and one that the training still
    to come pays for is compiled in the background. Once there is one, the next update is made in
    both ways, taken back each time, and the choice holds for the rest of the process: the bits of
    a run depend on what was chosen, and neither on when nor on ``device_iterations``.

    Args:
        compiled: not yet started.
        clock: in seconds.

    Attributes:
        count: updates of this shape so far.
    """

    def __init__(
        self, compiled: CompiledUpdates, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self.compiled = compiled
        self.count = 0
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

    def start(self, recorded: TracedStep, example: MicroBatch) -> None:
        """Look for a library of this program.

        Args:
            recorded: of a full micro-batch.
            example: such a micro-batch.
        """
        if recorded is self._recorded:
            return
        self._recorded, self._example = recorded, example
        self._choice, self._is_compiling, self._seconds = None, False, math.inf
        if self.compiled.may_be_there(example):
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
            return [f"Updates run as recorded, not compiled: {self._failure}"]
        if self._choice is None:
            return []
        are = "are kept" if self.jit else "are not used"
        if math.isinf(max(self._trials, default=math.inf)):
            return [f"Compiled updates {are}, as was measured before."]
        recorded, compiled = self._trials
        return [f"Compiled updates take {compiled / recorded:.2f} of the time, and {are}."]

    def close(self) -> None:
        """Stop compiling, and let go of the tensors; safe twice."""
        self.compiled.close()


# Of one shape, what compiles its updates, or what chooses whether to.
OfShape = TypeVar("OfShape", CompiledUpdates, JitAutotuner)


class _WayByShape(UpdateWay, Generic[OfShape]):
    """Full updates may run compiled, each shape of micro-batches by itself; others as recorded.

    Args:
        state: what updates change.
        runner: makes executions.
        libraries: loaded before.
        seed: starts the random numbers of a micro-batch.
    """

    def __init__(
        self, state: TrainingState, runner: UpdateRunner, libraries: Libraries, seed: Seeding
    ) -> None:
        self._state = state
        self._runner = runner
        self._compiles_with = state, libraries, seed, runner.at_once
        self._by_shape: Dict[TracedStep, OfShape] = {}
        self._shapes: Dict[TracedStep, str] = {}

    @property
    def jit(self) -> Optional[str]:
        """INDUCTOR once updates of a shape run compiled."""
        return INDUCTOR if any(each.jit for each in self._by_shape.values()) else None

    def explain(self) -> List[str]:
        """Describe in sentences how updates run, and of which shapes where these differ."""
        shapes: Dict[str, List[str]] = {}
        for recorded, each in self._by_shape.items():
            for line in each.explain():
                shapes.setdefault(line, []).append(self._shapes[recorded])
        return [
            line if len(of) == len(self._by_shape) else f"Batches of {'; '.join(of)}: {line}"
            for line, of in shapes.items()
        ]

    def enter(self, recorded: TracedStep, example: MicroBatch) -> None:
        """Begin to compile this shape, or look for its library; doesn't wait."""
        if recorded not in self._by_shape:
            self._by_shape[recorded] = self._make(CompiledUpdates(*self._compiles_with))
            sizes = [str(tuple(leaf.shape)) for leaf in example.leaves]
            self._shapes[recorded] = ", ".join(dict.fromkeys(sizes))
        self._by_shape[recorded].start(recorded, example)

    def run(self, execution: ExecutionWork) -> ExecutionResult:
        """Run all updates, those of each shape in the way that is chosen for it."""
        shapes = _full_updates(execution, self._state.spec.plan)
        for recorded, update in shapes.items():
            if recorded not in self._by_shape:
                self.enter(recorded, update[0][0])
        ways = {r: self._choose(r, execution, update) for r, update in shapes.items()}
        execution.compiled = {r: compiled for r, compiled in ways.items() if compiled is not None}
        result = self._runner.run(execution)
        self._count_updates(execution, shapes)
        return result

    @abc.abstractmethod
    def _make(self, compiled: CompiledUpdates) -> OfShape:
        """Make what compiles, or chooses whether to compile, the updates of one shape."""

    @abc.abstractmethod
    def _choose(
        self, recorded: TracedStep, execution: ExecutionWork, update: Update
    ) -> Optional[CompiledUpdates]:
        """Say what makes the full updates of a shape; None for what is recorded.

        Args:
            recorded: for the micro-batches of this shape.
            execution: that is to run.
            update: its first full update of this shape.
        """

    def _count_updates(self, execution: ExecutionWork, shapes: Mapping[TracedStep, Update]) -> None:
        """Count an execution with full updates of these shapes as done."""

    def close(self) -> None:
        """Stop compiling, and let go of the tensors; safe twice."""
        for each in self._by_shape.values():
            each.close()


class CompiledWay(_WayByShape[CompiledUpdates]):
    """``jit="inductor"``: updates that fit run compiled, once the compiler is done."""

    def _make(self, compiled: CompiledUpdates) -> CompiledUpdates:
        return compiled

    def _choose(
        self, recorded: TracedStep, execution: ExecutionWork, update: Update
    ) -> CompiledUpdates:
        compiled = self._by_shape[recorded]
        compiled.wait()
        return compiled


class AutotunedWay(_WayByShape[JitAutotuner]):
    """``jit="auto"``: updates run compiled where that turns out to be faster, shape by shape."""

    _updates_to_come = 0
    # Updates so far.
    _count = 0

    def _make(self, compiled: CompiledUpdates) -> JitAutotuner:
        return JitAutotuner(compiled)

    def expect(self, updates: int) -> None:
        """So many updates are to come."""
        self._updates_to_come = updates

    def _count_updates(self, execution: ExecutionWork, shapes: Mapping[TracedStep, Update]) -> None:
        updates = len(execution.updates)
        self._updates_to_come -= updates
        self._count += updates
        for update in execution.updates:
            if update and update[0][1] in shapes:
                self._by_shape[update[0][1]].count += 1
        for recorded in shapes:
            self._by_shape[recorded].after(updates)

    def _choose(
        self, recorded: TracedStep, execution: ExecutionWork, update: Update
    ) -> Optional[CompiledUpdates]:
        tuner = self._by_shape[recorded]
        share = tuner.count / self._count if self._count else 1.0
        tuner.expect(int(share * self._updates_to_come))
        if not tuner.is_undecided or tuner.compiled.jit is None:
            return tuner.choose(None)
        state, place = self._state, list(map(id, execution.updates)).index(id(update))
        batch = CombinedBatch([batch for batch, _ in update])
        alone = ExecutionWork(batch, [update], [execution.rows[place]])
        # Whether it can be compiled depends on its settings, too.
        state.updater.refresh(alone.rows)
        if not tuner.compiled.fits(update):
            return tuner.choose(None)
        alone.merged = execution.merged
        is_random = any(recorded.random for _, recorded in update)
        before: Optional[Snapshot] = None

        def trial(compiled: Optional[CompiledUpdates]) -> float:
            nonlocal before
            # Not before it is needed: what was measured once in a process is not tried again.
            before = before or state.snapshot()
            alone.compiled = {} if compiled is None else {recorded: compiled}
            state.updater.refresh(alone.rows)
            try:
                with computing(state.device, is_random):
                    start = time.perf_counter()
                    self._runner.make(alone, alone.updates, None)
                    return time.perf_counter() - start
            finally:
                state.restore(before)

        return tuner.choose(trial)


def _full_updates(execution: ExecutionWork, plan: Plan) -> Dict[TracedStep, Update]:
    """Return, by what is recorded, the first update of full micro-batches of that shape alone."""
    first: Dict[TracedStep, Update] = {}
    for update in execution.updates:
        if len(update) == plan.micro_batches_per_update:
            batch, recorded = update[0]
            is_full = batch.size == plan.micro_batch_size and recorded.graph is not None
            if is_full and all(each is recorded for _, each in update):
                first.setdefault(recorded, update)
    return first
