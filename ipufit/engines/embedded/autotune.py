"""Compiled updates: always for jit="inductor"; for jit="auto" where they are measured to pay."""

from __future__ import annotations

import abc
import collections
import functools
import math
import os
import re
import time
from typing import Callable, Dict, Generic, List, NamedTuple, Optional, Sequence, Tuple, TypeVar

from ipufit.core.batch import CombinedBatch, MicroBatch
from ipufit.core.compile_arguments import GRAPH, INDUCTOR
from ipufit.engines.embedded.execution import ExecutionWork, UpdateWay
from ipufit.engines.embedded.inductor.compiled import (
    CompiledMicroBatches,
    CompiledPart,
    CompiledUpdates,
    CompilerError,
)
from ipufit.engines.embedded.inductor.store import Libraries
from ipufit.engines.embedded.timing import fastest
from ipufit.engines.embedded.traced_step import Seeding, TracedStep, computing
from ipufit.engines.embedded.training_state import Snapshot, TrainingState
from ipufit.engines.embedded.update_runner import UpdateRunner
from ipufit.engines.program import ExecutionResult
from ipufit.errors import ConfigurationError, NonFiniteLossError

# Seconds that a compilation takes of a core, and how many times that it has to save to be begun:
# what it will save is an estimate.
_COMPILATION, _SURELY = 20.0, 2.0

# What compiling may save: seconds of each recorded operator, which is what it costs to call one,
# and no larger share of the time.
_CALL, _LARGEST_SHARE = 5e-6, 0.7

# A number in a sentence, and how many shapes of batches are listed.
_FIGURE, _SHOWN = re.compile(r"\b\d+(?:\.\d+)?\b"), 3

# Runs the next update compiled (or recorded, for None), takes it back, and returns its seconds.
Trial = Callable[[Optional[CompiledPart]], float]


class JitAutotuner:
    """Chooses between recorded and compiled updates, or micro-batches, of one shape.

    A library that was kept is looked for before the first one, and one that the training still to
    come pays for is compiled in the background. Once there is one, the next update is made in both
    ways, taken back each time, and the choice holds for the rest of the process: the bits of a run
    depend on what was chosen, and neither on when nor on ``device_iterations``.

    Args:
        compiled: not yet started.
        clock: in seconds.

    Attributes:
        compiled: as passed.
        count: of these so far.
    """

    def __init__(
        self, compiled: CompiledPart, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self.compiled = compiled
        self.count = 0
        self._clock = clock
        self._to_come = 0
        self._choice: Optional[str] = None
        self._is_begun = False
        self._start = 0.0
        self._seconds = math.inf
        self._trials: List[float] = []
        self._failure = ""

    @property
    def jit(self) -> Optional[str]:
        """INDUCTOR where what is compiled has turned out to be faster."""
        return INDUCTOR if self._choice == INDUCTOR else None

    def expect(self, count: int) -> None:
        """Note that so many are to come."""
        self._to_come = count

    def start(self) -> None:
        """Look for a library."""
        if self.compiled.may_be_there():
            self._begin(compiles=False)

    def choose(self, make_trial: Callable[[], Trial]) -> Optional[CompiledPart]:
        """Say what makes those of the next execution; None for what is recorded.

        Args:
            make_trial: makes what tries the first of them.
        """
        if self._choice is None and self._is_ready():
            self._choice = self._judge(make_trial())
        self._start = self._clock()
        return self.compiled if self.jit else None

    def after(self, count: int) -> None:
        """Look at an execution of so many, and compile if that pays now."""
        if self._choice is None and not self._is_begun and self.compiled.are_kernels_settled:
            self._seconds = min(self._seconds, (self._clock() - self._start) / count)
            if self._pays():
                self._is_begun = True
                self._begin(compiles=True)

    def _begin(self, compiles: bool) -> None:
        try:
            self.compiled.start(compiles)
        except ConfigurationError as error:
            self._failure, self._choice = str(error), GRAPH

    def _pays(self) -> bool:
        """Say whether the training to come is estimated to save more time than compiling takes."""
        least = _SURELY * _COMPILATION
        is_long = self._to_come * _LARGEST_SHARE * self._seconds > least
        # Operators of a short run need not be counted after each execution.
        return is_long and self._to_come * _CALL * self.compiled.operators() > least

    def _is_ready(self) -> bool:
        try:
            return self.compiled.poll()
        except CompilerError as error:
            self._failure, self._choice = str(error).partition("\n")[0], GRAPH
            return False

    def _judge(self, trial: Trial) -> str:
        def measure(way: Optional[CompiledPart]) -> float:
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
        title = self.compiled.title
        if self._failure:
            return [f"{title.capitalize()} run as recorded, not compiled: {self._failure}"]
        if self._choice is None:
            return []
        are = "are kept" if self.jit else "are not used"
        if math.isinf(max(self._trials, default=math.inf)):
            return [f"Compiled {title} {are}, as was measured before."]
        recorded, compiled = self._trials
        return [f"Compiled {title} take {compiled / recorded:.2f} of the time, and {are}."]

    def close(self) -> None:
        """Stop compiling, and let go of the tensors; safe twice."""
        self.compiled.close()


class _Kind(NamedTuple):
    """Content of a library: updates of micro-batches of one shape, or only such micro-batches.

    Attributes:
        recorded: of a micro-batch.
        settings: of the optimizer that are on in updates; None for micro-batches.
    """

    recorded: TracedStep
    settings: Optional[Tuple[object, ...]]


# Of one kind, what compiles it, or what chooses whether to.
OfKind = TypeVar("OfKind", CompiledPart, JitAutotuner)


class _WayByKind(UpdateWay, Generic[OfKind]):
    """Updates may run compiled.

    An update with all its micro-batches, of one shape, may be one call of a library. Of any other
    update each micro-batch may be one, so that there are no more libraries than shapes. What makes
    an update depends on the update alone, and so on no division into executions.

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
        self._libraries = libraries
        self._seed = seed
        self._by_kind: Dict[_Kind, OfKind] = {}
        self._shapes: Dict[_Kind, str] = {}

    @property
    def jit(self) -> Optional[str]:
        """INDUCTOR once anything runs compiled."""
        return INDUCTOR if any(each.jit for each in self._by_kind.values()) else None

    def explain(self) -> List[str]:
        """Describe in sentences how updates run, and of which shapes where these differ."""
        # Sentences that are equal but for figures.
        alike: Dict[str, Dict[_Kind, str]] = {}
        for kind, each in self._by_kind.items():
            for line in each.explain():
                alike.setdefault(_FIGURE.sub("#", line), {})[kind] = line
        lines = []
        for of in alike.values():
            line = _in_one(list(of.values()))
            alone = {kind.settings is None for kind in of}
            is_all = all(kind in of for kind in self._by_kind if (kind.settings is None) in alone)
            shapes = list(dict.fromkeys(self._shapes[kind] for kind in of))
            count = f"{len(shapes)} shapes, such as " if len(shapes) > _SHOWN else ""
            which = f"Batches of {count}{'; '.join(shapes[:_SHOWN])}: "
            lines.append(line if is_all else which + line)
        return lines

    def run(self, execution: ExecutionWork) -> ExecutionResult:
        """Run all updates, those of each kind in the way that is chosen for it."""
        kinds = self._kinds_of(execution)
        pairs = [(kind, place) for place, several in enumerate(kinds) for kind in several]
        places: Dict[_Kind, int] = {}
        for kind, place in pairs:
            places.setdefault(kind, place)
        for kind, place in places.items():
            if kind not in self._by_kind:
                self._start(kind, execution, place)
        ways = {kind: self._choose(kind, execution, place) for kind, place in places.items()}
        for kind, place in pairs:
            way = ways[kind]
            if way is not None:
                way.use(execution, place)
        result = self._runner.run(execution)
        self._look_back(execution, kinds)
        return result

    def _kinds_of(self, execution: ExecutionWork) -> List[List[_Kind]]:
        """Say what may make each update: itself as a whole, or each of its micro-batches."""
        updater, per_update = self._state.updater, self._state.spec.plan.micro_batches_per_update
        kinds = []
        for update, settings in zip(execution.updates, updater.compiled_as(execution.rows)):
            steps = [recorded for _, recorded in update]
            merged = execution.merged.get(steps[0])
            if settings is not None and steps == [steps[0]] * per_update:
                of_update = [_Kind(steps[0], settings)]
            elif merged is not None and merged.takes(steps):
                of_update = []
            else:
                of_update = [_Kind(recorded, None) for recorded in steps]
            kinds.append([kind for kind in of_update if kind.recorded.graph is not None])
        return kinds

    def _start(self, kind: _Kind, execution: ExecutionWork, place: int) -> None:
        """Begin to compile what is not there yet, or look for its library; doesn't wait.

        Args:
            kind: what to compile.
            execution: that is to run.
            place: of its first update with this kind.
        """
        example = _example(kind, execution, place)
        args = self._state, self._libraries, kind.recorded, example
        if kind.settings is None:
            each = self._make(CompiledMicroBatches(*args))
        else:
            each = self._make(CompiledUpdates(*args, self._seed, execution.rows[place]))
        sizes = [str(tuple(leaf.shape)) for leaf in example.leaves]
        self._by_kind[kind], self._shapes[kind] = each, ", ".join(dict.fromkeys(sizes))
        each.start()

    @abc.abstractmethod
    def _make(self, compiled: CompiledPart) -> OfKind:
        """Make what compiles, or chooses whether to compile, what is of one kind."""

    @abc.abstractmethod
    def _choose(self, kind: _Kind, execution: ExecutionWork, place: int) -> Optional[CompiledPart]:
        """Say what makes what is of a kind; None for what is recorded.

        Args:
            kind: of updates, or of micro-batches.
            execution: that is to run.
            place: of its first update with this kind.
        """

    def _look_back(self, execution: ExecutionWork, kinds: Sequence[Sequence[_Kind]]) -> None:
        """Count an execution as done.

        Args:
            execution: that was run.
            kinds: of its updates.
        """

    def close(self) -> None:
        """Stop compiling, and let go of the tensors; safe twice."""
        for each in self._by_kind.values():
            each.close()


def _in_one(sentences: Sequence[str]) -> str:
    """Write sentences that differ in figures alone as one, with the range of each figure."""
    columns = zip(*map(_FIGURE.findall, sentences))
    ends = [(min(each, key=float), max(each, key=float)) for each in columns]
    ranges = iter([least if least == most else f"{least} to {most}" for least, most in ends])
    return _FIGURE.sub(lambda figure: next(ranges), sentences[0])


class CompiledWay(_WayByKind[CompiledPart]):
    """``jit="inductor"``: what can be compiled runs so, once the compiler is done."""

    def _make(self, compiled: CompiledPart) -> CompiledPart:
        # No more compilers than processors: each needs memory.
        busy = [each for each in self._by_kind.values() if each.is_compiling]
        if len(busy) >= (os.cpu_count() or 1):
            busy[0].wait()
        return compiled

    def _choose(self, kind: _Kind, execution: ExecutionWork, place: int) -> Optional[CompiledPart]:
        compiled = self._by_kind[kind]
        compiled.wait()
        return compiled if compiled.jit else None


class AutotunedWay(_WayByKind[JitAutotuner]):
    """``jit="auto"``: what turns out to be faster compiled runs so."""

    _updates_to_come = 0
    # Updates so far.
    _count = 0

    def _make(self, compiled: CompiledPart) -> JitAutotuner:
        return JitAutotuner(compiled)

    def expect(self, updates: int) -> None:
        """So many updates are to come."""
        self._updates_to_come = updates

    def _look_back(self, execution: ExecutionWork, kinds: Sequence[Sequence[_Kind]]) -> None:
        self._updates_to_come -= len(kinds)
        self._count += len(kinds)
        counts = collections.Counter(kind for of_update in kinds for kind in of_update)
        for kind, count in counts.items():
            tuner = self._by_kind[kind]
            tuner.count += count
            # What came once may have been the only one.
            tuner.expect((tuner.count - 1) * self._updates_to_come // self._count)
            # More compilers than one take longer than is estimated.
            if not any(each.compiled.is_compiling for each in self._by_kind.values()):
                is_alone = kind.settings is None
                tuner.after(sum(map(len, execution.updates)) if is_alone else len(kinds))

    def _choose(self, kind: _Kind, execution: ExecutionWork, place: int) -> Optional[CompiledPart]:
        return self._by_kind[kind].choose(functools.partial(self._trial, kind, execution, place))

    def _trial(self, kind: _Kind, execution: ExecutionWork, place: int) -> Trial:
        state, update = self._state, execution.updates[place]
        if kind.settings is None:
            # An update of one such micro-batch.
            update = [(_example(kind, execution, place), kind.recorded)]
        batch = CombinedBatch([batch for batch, _ in update])
        alone = ExecutionWork(batch, [update], [execution.rows[place]])
        alone.merged = {} if kind.settings is None else execution.merged
        before: Optional[Snapshot] = None

        def trial(compiled: Optional[CompiledPart]) -> float:
            nonlocal before
            # Not before it is needed: what was measured once in a process is not tried again.
            before = before or state.snapshot()
            alone.compiled, alone.runs = {}, {}
            if compiled is not None:
                compiled.use(alone, 0)
            state.updater.refresh(alone.rows)
            try:
                with computing(state.device, kind.recorded.random):
                    start = time.perf_counter()
                    self._runner.make(alone, alone.updates, None)
                    return time.perf_counter() - start
            finally:
                state.restore(before)

        return trial


def _example(kind: _Kind, execution: ExecutionWork, place: int) -> MicroBatch:
    """Return the first micro-batch of a kind in an update."""
    return next(batch for batch, step in execution.updates[place] if step is kind.recorded)
