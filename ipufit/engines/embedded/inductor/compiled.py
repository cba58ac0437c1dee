"""Whole updates of a training program, each one call of a compiled library.

A library is compiled in a process of its own.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
import weakref
from pathlib import Path
from typing import Any, Iterator, List, Optional, Tuple

from torch import Tensor

from ipufit.core.batch import MicroBatch
from ipufit.core.compile_arguments import INDUCTOR
from ipufit.core.precision import without_autocast
from ipufit.engines.embedded.execution import ExecutionOutputs, WholeUpdates, losses_of
from ipufit.engines.embedded.flat_optimizer import RuleOptimizer
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
        seconds: that it took, once there is a result.
    """

    def __init__(self, request: Request, store: LibraryStore) -> None:
        self._store = store
        self._parts = request.parts()
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


class CompiledUpdates(WholeUpdates):
    """Compiles the updates of one training program, and makes them.

    ``start``, then ``poll`` now and then, or ``wait``: from then on updates that ``fits`` can be
    made here. What doesn't fit, such as the smaller last update of an epoch, is for the recorded
    graphs.

    Args:
        live: what the updates change.
        libraries: loaded before; takes what is loaded here.
        seed: starts the random numbers of a micro-batch.
        at_once: whether losses are looked at as they come, as they are here.

    Attributes:
        reason: why nothing is compiled, in half a sentence; None where something is.
        origin: where the library came from, in a sentence; None before there is one.
    """

    def __init__(
        self, live: TrainingState, libraries: Libraries, seed: Seeding, at_once: bool
    ) -> None:
        self._plan = live.spec.plan
        self._live = live
        self._seed = seed
        self._libraries = libraries
        self._at_once = at_once
        self._store: Optional[LibraryStore] = None
        self._recorded: Optional[TracedStep] = None
        # Of the optimizer, that are on.
        self._settings: object = None
        self._described: Optional[CompilableUpdate] = None
        self._request: Optional[Request] = None
        self._running: Optional[Compilation] = None
        self._miss = ""
        self._compiles = True
        self._run: Optional[Runner] = None
        # The tensors that are the same in every update, the storage they belong to, and how that is
        # divided in what is compiled.
        self._same: List[Tensor] = []
        self._bound: Optional[FlatStorage] = None
        self._division: List[Tuple[str, ...]] = []
        self.reason: Optional[str] = None
        self.origin: Optional[str] = None

    def start(self, recorded: TracedStep, example: MicroBatch, compiles: bool = True) -> None:
        """Begin to compile, or take what is compiled already; doesn't wait.

        Args:
            recorded: of a full micro-batch.
            example: such a micro-batch.
            compiles: whether to compile what is not there.

        Raises:
            ConfigurationError: the directory of compiled programs is not the user's alone.
        """
        updater = self._live.updater
        settings = updater.compiled_as() if isinstance(updater, RuleOptimizer) else None
        is_same = recorded is self._recorded and settings == self._settings
        if is_same and (self._running is not None or self._run is not None):
            return
        self._compiles = compiles
        self.close()
        self._recorded, self._settings = recorded, settings
        self._run = self._described = self.reason = self.origin = None
        try:
            if not self._at_once:
                raise UncompilableError(
                    "losses are checked after an execution, which is then undone"
                )
            self._described = describe(self._live, recorded, example)
        except UncompilableError as unfit:
            self.reason = str(unfit)
            return
        self._bind()
        self._division = self._live.storage.division
        rows = self._updater.like_coming()
        leaves = [*self._described.leaves] * self._described.form.micro_batches
        inputs, tensors = [*self._same, *rows, *leaves], self._digest_of(example)
        self._request = Request.of(self._described.form, inputs, tensors)
        self._begin(self._request)

    def _begin(self, request: Request) -> None:
        parts = request.parts()
        if key_of(parts) in self._libraries:
            self._run = self._libraries[key_of(parts)]
            self.origin = "compiled by TorchInductor for an earlier fit"
            return
        self._store = self._store or LibraryStore()
        library = self._store.find(parts)
        if library is not None:
            try:
                self._load(library, "compiled by TorchInductor before, and kept")
                return
            except RuntimeError:
                # Of a system that has changed in a way that its description does not show.
                self._store.drop(parts)
        if not self._compiles:
            return
        self._miss = self._store.why_missing(parts)
        self._running = Compilation(request, self._store)

    @property
    def _updater(self) -> RuleOptimizer:
        assert isinstance(self._live.updater, RuleOptimizer)
        return self._live.updater

    @property
    def key(self) -> Optional[str]:
        """The digest of all that the library depends on; None where nothing can be compiled."""
        return None if self._request is None else key_of(self._request.parts())

    def operators_of(self, recorded: TracedStep) -> int:
        """Count the operators of an update that runs as recorded.

        Args:
            recorded: of a full micro-batch.
        """
        graphs = [self._live.updater.recorded()]
        graphs += [recorded.graph] * self._plan.micro_batches_per_update
        return sum(len(graph.graph.nodes) for graph in graphs if graph is not None)

    def may_be_there(self, example: MicroBatch) -> bool:
        """Say whether a library for such tensors is loaded or stored, so that it pays to look.

        Args:
            example: a full micro-batch.
        """
        tensors = self._digest_of(example)
        is_loaded = any(key.startswith(tensors) for key in self._libraries)
        return is_loaded or LibraryStore.has_entries(tensors)

    def _digest_of(self, example: MicroBatch) -> str:
        return digest_of([*self._live.states[0], *example.leaves])

    @property
    def jit(self) -> Optional[str]:
        """INDUCTOR once updates can be made here."""
        return None if self._run is None else INDUCTOR

    def poll(self) -> bool:
        """Load what has been compiled, without waiting for it; whether updates can be made here.

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
        origin = f"compiled by TorchInductor in {running.seconds:.0f} s, as {self._miss}"
        try:
            self._load(library, origin)
        except RuntimeError as error:
            raise CompilerError(str(error)) from error

    def _load(self, library: Path, origin: str) -> None:
        assert self._request is not None
        kind: Any = loader()
        runner = kind(str(library), 1)
        run = without_autocast(lambda *tensors: runner.run(list(tensors)), self._same)
        self._libraries[key_of(self._request.parts())] = self._run = run
        self.origin = origin

    def close(self) -> None:
        """Stop compiling, and let go of the tensors; safe twice."""
        self._same, self._bound = [], None
        if self._running is not None:
            self._running.close()
            self._running = None

    def fits(self, update: Update) -> bool:
        """Tell whether :meth:`make` can make it: all micro-batches are there, and full ones."""
        return (
            self._run is not None
            and len(update) == self._plan.micro_batches_per_update
            and all(recorded is self._recorded for _, recorded in update)
            and self._updater.comes_as(self._settings)
            and (self._bound is self._live.storage or self._live.storage.division == self._division)
        )

    def make(self, update: Update, results: ExecutionOutputs) -> None:
        """Make one update, with its results in the form of other updates.

        Raises:
            NonFiniteLossError: a loss is not finite; nothing has changed.
        """
        live, described, recorded = self._live, self._described, self._recorded
        assert described is not None
        assert recorded is not None
        assert self._run is not None
        if self._bound is not live.storage:
            self._bind()
        inputs = [*self._same, *self._updater.coming()]
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

    def _bind(self) -> None:
        """Take what the program works on now."""
        live, described = self._live, self._described
        assert described is not None
        weights = [
            flat[slot.start : slot.stop]
            for block, flat in zip(live.storage.blocks, live.storage.flats)
            for slot in block.slots
        ]
        rest = [state[place] for state in live.states for place in described.rest]
        self._same = [
            *weights,
            *self._updater.states(described.state_names),
            *rest,
            *described.constants,
        ]
        self._bound = live.storage

    def explain(self) -> List[str]:
        """Say how updates run, in sentences."""
        if self.reason is not None:
            return [f"Updates run as recorded, not compiled: {self.reason}."]
        if self.origin is not None:
            return [f"Full updates run {self.origin}; smaller ones run as recorded."]
        return []
