"""Whole updates of a training program, each one call of a compiled library.

A library is compiled in a process of its own.
"""

from __future__ import annotations

import abc
import contextlib
import os
import signal
import subprocess
import sys
import time
import weakref
from pathlib import Path
from typing import Any, Iterator, List, Optional

from torch import Tensor

from ipufit.core.batch import MicroBatch
from ipufit.core.compile_arguments import INDUCTOR
from ipufit.core.precision import WithoutAutocast
from ipufit.engines.embedded.execution import ExecutionOutputs, ExecutionWork, losses_of
from ipufit.engines.embedded.flat_optimizer import RuleOptimizer, Settings
from ipufit.engines.embedded.inductor import worker
from ipufit.engines.embedded.inductor.build_spec import (
    CompilableUpdate,
    UncompilableError,
    describe,
)
from ipufit.engines.embedded.inductor.requirements import loader
from ipufit.engines.embedded.inductor.store import LIBRARY, Libraries, LibraryStore, Runner, key_of
from ipufit.engines.embedded.inductor.update_spec import Request, digest_of
from ipufit.engines.embedded.non_finite import refuse_loss
from ipufit.engines.embedded.traced_step import Seeding, TracedStep, Update
from ipufit.engines.embedded.training_state import TrainingState
from ipufit.errors import ConfigurationError
from ipufit.optim.several import name_of_optimizer
from ipufit.tracing.flat_storage import FlatStorage

_LOG = "log.txt"
_RUN = "import sys; from {0} import main; sys.exit(main(sys.argv[1]))"
_SHOWN = 2000


class CompilerError(Exception):
    """Failure of the compiler, with its own text."""


class Compilation:
    """Starts at once and goes on until it is done, closed, or this process ends.

    Args:
        request: what to compile.
        store: takes the library.

    Attributes:
        reason: why it is needed, in half a sentence.
        seconds: that it took, once there is a result.
    """

    def __init__(self, request: Request, store: LibraryStore) -> None:
        self._store = store
        self._parts = request.parts()
        self.reason = store.why_missing(self._parts)
        self._start = time.perf_counter()
        self.seconds = 0.0
        with contextlib.ExitStack() as opened:
            self._place = opened.enter_context(store.workplace())
            (self._place / worker.REQUEST).write_text(request.to_json())
            self._process = opened.enter_context(_started(self._place, store.scratch()))
            self.close = weakref.finalize(self, _close, opened.pop_all(), os.getpid())

    def is_done(self) -> bool:
        """Tell whether :meth:`result` need not wait."""
        return self._process.poll() is not None

    def result(self) -> Path:
        """The library, once it is compiled.

        Raises:
            CompilerError: it could not be.
        """
        code = self._process.wait()
        try:
            library = self._place / LIBRARY
            if code != 0 or not library.exists():
                raise CompilerError(_said(self._place) or f"it ended with exit code {code}")
            self.seconds = time.perf_counter() - self._start
            return self._store.keep(library, self._parts, self.seconds)
        finally:
            self.close()


def _close(opened: contextlib.ExitStack, owner: int) -> None:
    # A copy of this process, made by fork, must not end what it has not started.
    if os.getpid() == owner:
        opened.close()


@contextlib.contextmanager
def _started(place: Path, scratch: Path) -> Iterator[subprocess.Popen[bytes]]:
    """The process; killed on the way out, with all that it has started."""
    # The folder that holds the package of all of these modules.
    root = str(Path(__file__).resolve().parents[__name__.count(".")])
    # The same modules as here; not those of the directory that it works in.
    paths = [root, *(os.path.abspath(path) for path in sys.path)]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(paths),
        "TORCHINDUCTOR_CACHE_DIR": str(place / "inductor"),
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
        "TMPDIR": str(scratch),
    }
    command = [sys.executable, "-c", _RUN.format(worker.__name__), str(place)]
    with open(place / _LOG, "wb") as log:
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=subprocess.STDOUT,
            cwd=str(place),
            env=environment,
            start_new_session=True,
        )
    try:
        yield process
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        assert process.stdin is not None
        process.stdin.close()
        process.wait()


def _said(place: Path) -> Optional[str]:
    """The cause that the process has left, or the end of what it printed."""
    for name in (worker.ERROR, _LOG):
        with contextlib.suppress(OSError):
            text = (place / name).read_text(errors="replace").strip()
            if text:
                return text if len(text) <= _SHOWN else text[:_SHOWN] + " ..."
    return None


class CompiledPart(abc.ABC):
    """Compiles a part of a training program.

    ``start``, then ``poll`` now and then, or ``wait``: from then on there is a library.

    Args:
        live: what updates change.
        libraries: loaded before; takes what is loaded here.
        recorded: of a micro-batch.
        example: such a micro-batch.

    Attributes:
        title: what the library makes.
        reason: why nothing is compiled, in half a sentence; None where something is.
        origin: where the library came from, in a sentence; None before there is one.
    """

    title: str

    def __init__(
        self, live: TrainingState, libraries: Libraries, recorded: TracedStep, example: MicroBatch
    ) -> None:
        self._plan = live.spec.plan
        self._live = live
        self._libraries = libraries
        self._recorded = recorded
        self._example = example
        self._tensors = digest_of([*live.states[0], *example.leaves])
        self._described: Optional[CompilableUpdate] = None
        self._request: Optional[Request] = None
        self._running: Optional[Compilation] = None
        self._run: Optional[Runner] = None
        # The tensors that are the same in every call, and the storage they belong to.
        self._same: List[Tensor] = []
        self._bound: Optional[FlatStorage] = None
        self.reason: Optional[str] = None
        self.origin: Optional[str] = None

    def start(self, compiles: bool = True) -> None:
        """Begin to compile, or take what is compiled already; doesn't wait.

        Args:
            compiles: whether to compile what is not there.

        Raises:
            ConfigurationError: the directory of compiled programs is not the user's alone.
        """
        if self._request is None:
            try:
                self._described = self._describe()
            except UncompilableError as unfit:
                self.reason = str(unfit)
                return
            inputs = self._like(self._described)
            self._request = Request.of(self._described.form, inputs, self._tensors)
        self._begin(self._request, compiles)

    @abc.abstractmethod
    def _describe(self) -> CompilableUpdate:
        """Describe what to compile.

        Raises:
            UncompilableError: it can't be compiled.
        """

    @abc.abstractmethod
    def _like(self, described: CompilableUpdate) -> List[Tensor]:
        """Tensors like the inputs of the library."""

    def _begin(self, request: Request, compiles: bool) -> None:
        parts = request.parts()
        if key_of(parts) in self._libraries:
            self._run = self._libraries[key_of(parts)]
            self.origin = "compiled by TorchInductor for an earlier fit"
            return
        store = LibraryStore()
        library = store.find(parts)
        if library is not None:
            try:
                self._load(library, "compiled by TorchInductor before, and kept")
                return
            except RuntimeError:
                # Of a system that has changed in a way that its description does not show.
                store.drop(parts)
        if compiles:
            self._running = Compilation(request, store)

    @property
    def key(self) -> Optional[str]:
        """The digest of all that the library depends on; None where nothing can be compiled."""
        return None if self._request is None else key_of(self._request.parts())

    def operators(self) -> int:
        """Count the operators of what is compiled, where it runs as recorded."""
        assert self._recorded.graph is not None
        return len(self._recorded.graph.graph.nodes)

    @property
    def are_kernels_settled(self) -> bool:
        """Tell whether the kernels that it replaces, and follows, won't change any more."""
        trial = self._recorded.lowered.trial
        # Without a run so far it is part of a larger batch, which replaces it.
        return trial is None or not trial.seconds

    def may_be_there(self) -> bool:
        """Say whether a library for such tensors is loaded or stored, so that it pays to look."""
        is_loaded = any(key.startswith(self._tensors) for key in self._libraries)
        return is_loaded or LibraryStore.has_entries(self._tensors)

    @property
    def jit(self) -> Optional[str]:
        """INDUCTOR once there is a library."""
        return None if self._run is None else INDUCTOR

    @property
    def is_compiling(self) -> bool:
        """Tell whether the compiler is at work."""
        return self._running is not None

    def poll(self) -> bool:
        """Load what has been compiled, without waiting for it; whether there is a library.

        Raises:
            CompilerError: it could not be compiled.
        """
        if self._running is not None and self._running.is_done():
            self._finish(self._running)
        return self._run is not None

    def wait(self) -> None:
        """Wait for the compiler, if it is at work, and load what it makes.

        Raises:
            ConfigurationError: it failed; with its text.
        """
        if self._running is None:
            return
        try:
            self._finish(self._running)
        except CompilerError as error:
            raise ConfigurationError(
                "jit='inductor' compiles the program, but TorchInductor could not: "
                f"{error}\nPass jit='graph', which runs the recorded program without compiling "
                "it, or leave jit out."
            ) from error

    def _finish(self, running: Compilation) -> None:
        self._running = None
        library = running.result()
        origin = f"compiled by TorchInductor in {running.seconds:.0f} s, as {running.reason}"
        try:
            self._load(library, origin)
        except RuntimeError as error:
            raise CompilerError(str(error)) from error

    def _load(self, library: Path, origin: str) -> None:
        assert self._request is not None
        kind: Any = loader()
        runner = kind(str(library), 1)
        run = WithoutAutocast(lambda *tensors: runner.run(list(tensors)), self._same)
        self._libraries[key_of(self._request.parts())] = self._run = run
        self.origin = origin

    def _bound_to(self, described: CompilableUpdate) -> List[Tensor]:
        """The tensors that the library works on in every call, as they are now."""
        storage = self._live.storage
        if self._bound is not storage:
            self._same = [
                flat[slot.start : slot.stop]
                for block, flat in zip(storage.blocks, storage.flats)
                for slot in block.slots
            ]
            self._same += self._same_more(described)
            self._bound = storage
        return self._same

    def _same_more(self, described: CompilableUpdate) -> List[Tensor]:
        """The tensors of :meth:`_bound_to` beside the parameters."""
        return []

    def close(self) -> None:
        """Stop compiling, and let go of the tensors; safe twice."""
        self._same, self._bound = [], None
        if self._running is not None:
            self._running.close()
            self._running = None

    def explain(self) -> List[str]:
        """Say how what can be compiled runs, in a sentence."""
        if self.reason is not None:
            return [f"Updates run as recorded, not compiled: {self.reason}."]
        if self.origin is not None:
            return [f"{self._subject()} run {self.origin}."]
        return []

    @abc.abstractmethod
    def use(self, execution: ExecutionWork, place: int) -> None:
        """Let the library make an update of an execution, or micro-batches of it.

        Args:
            execution: that is to run.
            place: of the update.
        """

    @abc.abstractmethod
    def _subject(self) -> str:
        """Name what runs compiled, and say when."""


class CompiledMicroBatches(CompiledPart):
    """Compiles the micro-batches of one shape, for updates that are no single call.

    Gradients are added up and applied by whoever runs them.
    """

    title = "micro-batches"

    def _describe(self) -> CompilableUpdate:
        return describe(self._live, self._recorded, self._example, None)

    def _like(self, described: CompilableUpdate) -> List[Tensor]:
        rest = [self._live.states[0][place] for place in described.rest]
        return [*self._bound_to(described), *rest, *described.constants, *described.leaves]

    def use(self, execution: ExecutionWork, place: int) -> None:
        """Let the library run the micro-batches of its shape in an update of an execution."""
        execution.runs.setdefault(place, {})[self._recorded] = self._run_one

    def _run_one(self, *tensors: Tensor) -> List[Tensor]:
        """Run a micro-batch: takes and returns what the recording does."""
        described = self._described
        assert described is not None
        assert self._run is not None
        leaves = tensors[len(self._live.states[0]) :]
        drawn = () if described.draw is None else described.draw()
        rest = [tensors[place] for place in described.rest]
        same = self._bound_to(described)
        return self._run(*same, *rest, *described.constants, *leaves, *drawn)

    def _subject(self) -> str:
        spec = self._live.spec
        if spec.config.optimizer_clips:
            return "As optimizers have their own gradient clipping, micro-batches alone"
        if isinstance(self._live.updater, RuleOptimizer):
            return "Where an update is smaller or mixes shapes, its micro-batches"
        why = f"{name_of_optimizer(spec.optimizer)} runs through its own step"
        return f"As {why}, micro-batches alone"


class CompiledUpdates(CompiledPart):
    """Compiles updates that have all their micro-batches, of one shape, and makes them.

    Args:
        live, libraries, recorded, example: as for all parts.
        seed: starts the random numbers of a micro-batch.
        groups: settings of the optimizer that such an update comes with.
    """

    title = "updates"

    def __init__(
        self,
        live: TrainingState,
        libraries: Libraries,
        recorded: TracedStep,
        example: MicroBatch,
        seed: Seeding,
        groups: Settings,
    ) -> None:
        super().__init__(live, libraries, recorded, example)
        self._seed = seed
        self._groups = groups

    @property
    def _updater(self) -> RuleOptimizer:
        assert isinstance(self._live.updater, RuleOptimizer)
        return self._live.updater

    def _describe(self) -> CompilableUpdate:
        return describe(self._live, self._recorded, self._example, self._groups)

    def _like(self, described: CompilableUpdate) -> List[Tensor]:
        rows = self._updater.like_coming(self._groups)
        leaves = [*described.leaves] * described.form.micro_batches
        return [*self._bound_to(described), *rows, *leaves]

    def _same_more(self, described: CompilableUpdate) -> List[Tensor]:
        rest = [state[place] for state in self._live.states for place in described.rest]
        names = [rule.tensors for rule in described.form.rules()]
        return [*self._updater.states(names), *rest, *described.constants]

    def operators(self) -> int:
        """Count the operators of an update that runs as recorded."""
        graph, micro_batches = self._updater.recorded(), self._plan.micro_batches_per_update
        rule = 0 if graph is None else len(graph.graph.nodes)
        return micro_batches * super().operators() + rule

    def use(self, execution: ExecutionWork, place: int) -> None:
        """Let the library make an update of an execution."""
        execution.compiled[place] = self._make

    def _make(self, update: Update, results: ExecutionOutputs) -> None:
        """Make one update, with its results in the form of other updates.

        Raises:
            NonFiniteLossError: a loss is not finite; nothing has changed.
        """
        live, described, recorded = self._live, self._described, self._recorded
        assert described is not None
        assert self._run is not None
        inputs = [*self._bound_to(described), *self._updater.coming()]
        scale = [] if live.scaler is None else [live.scaler.tensor(live.device)]
        for place, (batch, _) in enumerate(update):
            inputs += [*batch.leaves, *scale]
            if described.draw is not None:
                self._seed(recorded, live.updates, place, "")
                inputs += described.draw()
        numbers, *outputs = self._run(*inputs)
        for loss in losses_of(numbers, len(update)):
            refuse_loss(live, loss)
        is_skipped = live.scaler is not None and live.scaler.judge(
            outputs.pop(), None, results.finite, live.updates
        )
        results.add(recorded, [recorded.micro.reported] * len(update), numbers, outputs)
        if is_skipped:
            results.skipped += 1
            self._updater.skip()
        else:
            self._updater.count()
        live.updates += 1
        if live.averages is not None:
            live.averages.after_update(live.storage.flats, live.updates, is_skipped)

    def _subject(self) -> str:
        return "Updates"
