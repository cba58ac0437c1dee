"""``jit="cudagraph"``: all updates of an execution as one captured CUDA graph.

The first execution of a kind runs as it was recorded, the second is captured, and from then on the
host fills static memory, replays, and waits once, for what comes back. An execution that turns out
to have a loss or a gradient that is not finite is taken back and left to whoever finds out which.
"""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from typing import Callable, Dict, List, Optional, Sequence, Tuple

import torch
from torch import Tensor

from ipufit.core.batch import CombinedBatch
from ipufit.core.compile_arguments import CUDAGRAPH
from ipufit.engines.embedded.context import EngineContext
from ipufit.engines.embedded.cuda_graphs import (
    CapturedGraph,
    Draw,
    GraphMaker,
    Sent,
    Static,
    keeps_its_form,
)
from ipufit.engines.embedded.execution import (
    ExecutionOutputs,
    ExecutionWork,
    UpdateWay,
    pack,
    unpack,
)
from ipufit.engines.embedded.flat_optimizer import Rows, RuleOptimizer
from ipufit.engines.embedded.gradient_transform import ScaleState
from ipufit.engines.embedded.traced_step import TracedStep, Update
from ipufit.engines.embedded.training_state import Snapshot, TrainingState
from ipufit.engines.embedded.update_runner import UpdateRunner
from ipufit.engines.program import ExecutionResult
from ipufit.optim.several import name_of_optimizer
from ipufit.utils.console import warn_user

# Kinds of executions that are remembered; the least recently seen go first, with their graphs.
_KEPT = 6

# The key of the random numbers of a micro-batch, from its update and its place in it.
KeyOf = Callable[[int, int], int]


@dataclasses.dataclass(frozen=True)
class _StagedBatch(CombinedBatch):
    """The samples of an execution, which are on their way to the device as well."""

    sent: Optional[Sent] = None


@dataclasses.dataclass(frozen=True)
class _Captured:
    """One kind of execution.

    Attributes:
        graph: its work.
        updates: its micro-batches, in static memory.
        inputs: that memory.
        tables: coefficients of each block, by update, and the loss scale if there is one.
        results: what comes back, without values.
        shapes: what comes back, in tensors without values.
        packed: the same with values, as bytes.
        draws: micro-batches that draw random numbers, as their update and their place in it.
    """

    graph: CapturedGraph
    updates: Sequence[Update]
    inputs: Static
    tables: Static
    results: ExecutionOutputs
    shapes: Sequence[Tensor]
    packed: Tensor
    draws: Sequence[Tuple[int, int]]


@dataclasses.dataclass(frozen=True)
class _Counters:
    """Counters of the updates so far, which the host keeps."""

    updates: int
    counts: Sequence[float]
    scale: Optional[ScaleState]


@dataclasses.dataclass(eq=False)
class CapturedExecutions(UpdateWay):
    """Replays executions that have been captured, and captures those that come again.

    Attributes:
        engine: brings results to the host.
        live: what the updates change.
        maker: captures.
        key_of: of random numbers.
        runner: makes executions that are not captured.
    """

    engine: EngineContext
    live: TrainingState
    maker: GraphMaker
    key_of: KeyOf
    runner: UpdateRunner

    def __post_init__(self) -> None:
        self._spec = self.live.spec
        self._device = self.live.device
        self._known: OrderedDict[Tuple[object, ...], Optional[_Captured]] = OrderedDict()
        # Where samples of one form go, whatever else sets executions apart.
        self._inputs: Dict[object, Static] = {}
        # Where every graph copies the state before anything else: one is replayed at a time.
        self._saved: Optional[Snapshot] = None
        self._states = 0
        self._reason: Optional[str] = None
        self._explanation: Optional[str] = None
        self._replays = False

    @property
    def jit(self) -> Optional[str]:
        """CUDAGRAPH once an execution was captured."""
        return CUDAGRAPH if self._replays else None

    def explain(self) -> List[str]:
        """Describe in a sentence what became of CUDA graphs, once it is known."""
        return [] if self._explanation is None else [self._explanation]

    def forget(self) -> None:
        """The state is somewhere else from now on."""
        self._known.clear()
        self._inputs.clear()
        self._saved = None

    def stage(self, batch: CombinedBatch) -> CombinedBatch:
        """Start to bring a batch to the device if one like it was captured; from any thread."""
        leaves = [leaf for micro_batch in batch.micro_batches for leaf in micro_batch.leaves]
        inputs = self._inputs.get(_form(leaves))
        if inputs is None or any(leaf.device.type != "cpu" for leaf in leaves):
            return batch
        with torch.no_grad():
            return _StagedBatch(batch.micro_batches, batch.place, sent=inputs.send(leaves))

    def run(self, execution: ExecutionWork) -> ExecutionResult:
        """Replay an execution, or run it as recorded where it is not captured, or bad."""
        result = self._run_captured(execution)
        if result is None:
            with self.maker.aside():
                result = self.runner.run(execution)
        return result

    def _run_captured(self, execution: ExecutionWork) -> Optional[ExecutionResult]:
        """Run an execution; None if it is not captured, or bad: then nothing has changed."""
        updates, rows, batch = execution.updates, execution.rows, execution.batch
        sent = batch.sent if isinstance(batch, _StagedBatch) else None
        updater, averages = self.live.updater, self.live.averages
        if self._reason is None:
            self._note(self._why_not(updates))
        if self._reason is not None or (averages is not None and averages.fresh):
            return None
        if any(recorded.graph is None for update in updates for _, recorded in update):
            # Of a shape that can't be recorded.
            return None
        assert isinstance(updater, RuleOptimizer)
        with torch.no_grad():
            tables = updater.tables(rows)
            if len(updater.state_tensors()) != self._states:
                # Graphs don't save what the optimizer has begun to need.
                self.forget()
                self._states = len(updater.state_tensors())
            if self.live.scaler is not None:
                scales = [state.value for state in self.live.scaler.coming(len(rows))[:-1]]
                tables.append(torch.tensor(scales, dtype=torch.float64))
            captured = self._captured(updater, execution, tables)
            if captured is None:
                return None
            if sent is not None and sent.static is captured.inputs:
                captured.inputs.receive(sent)
            else:
                captured.inputs.fill(_leaves(updates))
            captured.tables.fill(tables)
            return self._replay(captured, rows)

    def _why_not(self, updates: Sequence[Update]) -> Optional[str]:
        """Why these are not captured, as the end of a sentence."""
        config, live = self._spec.config, self.live
        if not isinstance(live.updater, RuleOptimizer):
            name = name_of_optimizer(self._spec.optimizer)
            return f"the step of {name} is torch's own, which counts steps on the host"
        if config.detect_nan:
            return "detect_nan inspects every update while it runs"
        if config.offload_optimizer_state:
            return "the optimizer's state is in host memory between updates"
        if any(flat.device != self._device for flat in live.storage.flats):
            return "the module is on several devices"
        half = (torch.float16, torch.bfloat16)
        sums = [config.accumulation_dtype or flat.dtype for flat in live.storage.flats]
        if live.scaler is not None and any(dtype in half for dtype in sums):
            return "a loss scale in a tensor rounds a half-precision gradient differently"
        if not all(keeps_its_form(leaf, self._device) for leaf in _leaves(updates)):
            return "the samples are not contiguous in memory, but their copy is"
        return None

    def _note(self, reason: Optional[str]) -> None:
        if reason is None:
            return
        self._reason = reason
        self._explanation = f"Runs no CUDA graphs: {reason}."
        if self._spec.config.jit == CUDAGRAPH:
            warn_user(
                f"jit='cudagraph' runs this program as jit='graph' does: {reason}.",
            )

    def _captured(
        self, updater: RuleOptimizer, execution: ExecutionWork, tables: Sequence[Tensor]
    ) -> Optional[_Captured]:
        """The graph for such an execution; captured now if it comes for the second time."""
        live, ema = self.live, self._spec.config.ema
        every = ema.overwrite_frequency if ema is not None else None
        key = (
            tuple(id(recorded) for update in execution.updates for _, recorded in update),
            tuple(map(id, execution.merged.values())),
            updater.constants(execution.rows),
            live.updates % every if every is not None else 0,
            # Somebody may have given a buffer other memory. Parameters are followed.
            tuple(buffer.data_ptr() for own in live.replicas for buffer in own.values()),
        )
        if key not in self._known:
            self._known[key] = None
            # Where every shape is a kind of its own, all of them come again and again.
            if len(self._known) > max(_KEPT, self._spec.config.max_recordings):
                self._known.popitem(last=False)
            return None
        self._known.move_to_end(key)
        if self._known[key] is None:
            before = self._counters(updater)
            try:
                with self.engine.recording():
                    self._known[key] = self._capture(updater, execution, tables)
            except RuntimeError as error:
                cause = error.__context__ or error
                self._note(f"torch can't capture it: {str(cause).partition(chr(10))[0]}")
                self.forget()
                return None
            finally:
                self._go_on_from(updater, before)
            count = sum(captured is not None for captured in self._known.values())
            self._replays = True
            self._explanation = f"Runs as CUDA graphs of whole executions, {count} captured."
        return self._known[key]

    def _capture(
        self, updater: RuleOptimizer, execution: ExecutionWork, tables: Sequence[Tensor]
    ) -> _Captured:
        live, updates, rows = self.live, execution.updates, execution.rows
        present = _leaves(updates)
        form = _form(present)
        if form not in self._inputs:
            self._inputs[form] = Static(present, self._device)
        inputs, static = self._inputs[form], Static(tables, self._device)
        # A maker may do the work to see what it is.
        inputs.fill(present)
        static.fill(tables)
        leaves = iter(inputs.tensors)
        placed = [
            [
                (dataclasses.replace(b, leaves=tuple(next(leaves) for _ in b.leaves)), recorded)
                for b, recorded in update
            ]
            for update in updates
        ]
        draws: Dict[Tuple[int, int], int] = {}
        for index, update in enumerate(updates):
            for place, (_, recorded) in enumerate(update):
                if recorded.random:
                    draws[index, place] = len(draws)
        blocks = len(live.storage.blocks)
        captured: List[Tuple[ExecutionOutputs, Sequence[Tensor], Tensor]] = []
        saved = self._saved = self._saved or live.snapshot()

        def run(draw: Draw) -> None:
            first, scales = live.updates, [table.unbind() for table in static.tensors[blocks:]]

            def seed(recorded: TracedStep, update: int, place: int, stream: str) -> None:
                if recorded.random:
                    draw(draws[update - first, place], self.key_of(update, place))

            values = iter(scales[0]) if scales else None
            runner = UpdateRunner(self.engine, live, seed, False, scales=values)
            for place, value in zip(saved.tensors(), live.snapshot().tensors()):
                place.copy_(value)
            updater.take(rows, static.tensors[:blocks])
            whole = CombinedBatch([batch for update in placed for batch, _ in update])
            work = ExecutionWork(whole, placed, rows, merged=execution.merged)
            results = runner.make(work, placed, set())
            packed = pack(results.tensors())
            results.forget()
            captured.append((results, results.tensors(), packed))

        graph = self.maker.capture(run, len(draws))
        return _Captured(graph, placed, inputs, static, *captured[0], list(draws))

    def _replay(self, captured: _Captured, rows: Rows) -> Optional[ExecutionResult]:
        live, updater = self.live, self.live.updater
        assert isinstance(updater, RuleOptimizer)
        before = self._counters(updater)
        keys = [self.key_of(live.updates + index, place) for index, place in captured.draws]
        captured.graph.replay(keys)
        try:
            arrived = self.engine.transfer.start(captured.packed)
            scales = live.scaler.coming(len(rows)) if live.scaler is not None else [None]
            counts = updater.counts_after(rows)
            self._go_on_from(updater, _Counters(live.updates + len(rows), counts, scales[-1]))
            host = unpack(arrived(), captured.shapes)
            anchors, finite = captured.results.anchors(host, live.describe(rows))
        except BaseException:
            self._take_back(updater, before)
            raise
        if all(finite) and bool(anchors.losses.isfinite().all()):
            return anchors
        self._take_back(updater, before)
        return None

    def _take_back(self, updater: RuleOptimizer, before: _Counters) -> None:
        assert self._saved is not None
        self.live.restore(self._saved)
        self._go_on_from(updater, before)

    def _counters(self, updater: RuleOptimizer) -> _Counters:
        scaler = self.live.scaler
        return _Counters(
            self.live.updates, updater.counts, scaler.state if scaler is not None else None
        )

    def _go_on_from(self, updater: RuleOptimizer, counters: _Counters) -> None:
        self.live.updates = counters.updates
        updater.counts = counters.counts
        if self.live.scaler is not None and counters.scale is not None:
            self.live.scaler.state = counters.scale


def _leaves(updates: Sequence[Update]) -> List[Tensor]:
    return [leaf for update in updates for batch, _ in update for leaf in batch.leaves]


def _form(leaves: Sequence[Tensor]) -> object:
    return tuple((leaf.shape, leaf.dtype, leaf.stride()) for leaf in leaves)
