"""Training and inference where each process has a part of the weights."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Dict, List, Optional, Sequence, Tuple, Type

import torch
from torch import Tensor, nn

from ipufit.core.batch import CombinedBatch, MicroBatch, counts_by_rank
from ipufit.engines.embedded.context import EngineContext
from ipufit.engines.embedded.external_changes import refuse_replaced
from ipufit.engines.embedded.fsdp.running import ShardedStep
from ipufit.engines.embedded.fsdp.updater import FSDPOptimizer
from ipufit.engines.embedded.fsdp.weights import ShardedWeights, pieces_of
from ipufit.engines.embedded.profiling.profile import DIVIDED
from ipufit.engines.embedded.programs.inference import InferenceProgram
from ipufit.engines.embedded.programs.zero import ShardedTrainingProgram
from ipufit.engines.embedded.traced_step import TracedStep
from ipufit.engines.embedded.zero.optimizer import ShardedOptimizer
from ipufit.engines.embedded.zero.state import cuts_of
from ipufit.engines.program import ExecutionResult, ProgramSpec, TrainState
from ipufit.errors import ConfigurationError, NonFiniteLossError
from ipufit.tracing.flat_storage import FlatBlock, FlatStorage

if TYPE_CHECKING:
    from ipufit.engines.embedded.batching import BatchedStep

__all__ = ["FSDPInferenceProgram", "FSDPTrainingProgram"]


class FSDPTrainingProgram(ShardedTrainingProgram):
    """A training program of several processes with ``shard_weights=True``.

    The module's parameters are copies in host memory, which are up to date at the end of an epoch,
    after :meth:`read_state` and after :meth:`gather_weights`.
    """

    updater_class: Type[ShardedOptimizer] = FSDPOptimizer

    def __init__(self, engine: EngineContext, spec: ProgramSpec) -> None:
        self._weights: Optional[ShardedWeights] = None
        super().__init__(engine, spec)

    def _make_storage(self, with_gradient: Sequence[str]) -> FlatStorage:
        blocks = self._lay_out(with_gradient)
        cuts = self._updater.cuts_of(blocks)
        names = [name for name in self._parameters if name not in set(with_gradient)]
        rest = _blocks([(name, self._parameters[name]) for name in names])
        count = self._spec.processes.num_processes
        cuts += [cuts_of(block, count, False) for block in rest]
        self._weights = self._engine.divided = self._live.divided = ShardedWeights(
            [*blocks, *rest],
            cuts,
            len(blocks),
            self._spec.processes,
            self._device,
            self._spec.config.accumulation_dtype,
        )
        return self._weights

    def _collect_state(self, buffers: Dict[str, Tensor]) -> List[Tensor]:
        if self._weights is None:
            return super()._collect_state(buffers)
        views = self._weights.views
        names = [*self._trained, *self._frozen]
        return [*(views[name] for name in names), *buffers.values()]

    def _record(self, example: MicroBatch) -> TracedStep:
        recorded = super()._record(example)
        assert self._weights is not None
        assert isinstance(recorded.lowered.run, ShardedStep)
        recorded.lowered.run.take(self._weights)
        return recorded

    def _find_merged(self, example: MicroBatch) -> Optional[BatchedStep]:
        return None

    def _take_over_changes(self) -> None:
        super()._take_over_changes()
        weights = self._weights
        if weights is None:
            return  # those of the module are taken anyway
        refuse_replaced(self._step, {**self._parameters, **self._buffers})
        # Each sees the change of its own part.
        if any(self._spec.processes.gather(weights.is_changed(), "weights")):
            self._let_go()
        else:
            weights.note()

    def _follow_the_module(self) -> None:
        refuse_replaced(self._step, {**self._parameters, **self._buffers})
        assert self._weights is not None
        if self._weights.was_touched():
            raise ConfigurationError(
                "with shard_weights=True weights must be changed in all processes before an epoch "
                "begins, but one was changed within an epoch. Change it in on_epoch_end or "
                "on_epoch_begin."
            )

    def run(self, batch: CombinedBatch) -> ExecutionResult:
        """One execution.

        Raises:
            NonFiniteLossError: the module has the weights of before the update named in it.
        """
        try:
            return super().run(batch)
        except NonFiniteLossError:
            # All processes have it, at the same update.
            self.gather_weights()
            raise

    def profile(self, batch: MicroBatch) -> Dict[str, Any]:
        """Nothing, and why: a micro-batch meets the other processes on its way."""
        return {"missing": DIVIDED}

    def share_buffers(self) -> None:
        """The module's weights and buffers become in all processes the present ones."""
        super().share_buffers()
        self.gather_weights()

    def gather_weights(self) -> None:
        """Bring the module's parameters up to date, in all processes at the same time."""
        if self._weights is not None:
            self._weights.publish()

    def read_state(self) -> TrainState:
        """Copies of everything that training has changed."""
        self.gather_weights()
        return super().read_state()

    def _let_go(self) -> None:
        super()._let_go()
        self._weights = self._engine.divided = self._live.divided = None

    def close(self) -> None:
        """The parts are let go of; what the module holds stays."""
        super().close()
        self._weights = self._engine.divided = self._live.divided = None


class FSDPInferenceProgram(InferenceProgram):
    """Evaluates or predicts with parts: those of the training program, if there is one."""

    def __init__(self, engine: EngineContext, spec: ProgramSpec) -> None:
        super().__init__(engine, spec)
        self._is_own = engine.divided is None
        self._events: Sequence[Tuple[str, int]] = ()
        processes = spec.processes
        if engine.divided is None:
            blocks = _blocks(list(self._parameters.items()))
            cuts = [cuts_of(block, processes.num_processes, False) for block in blocks]
            self._weights = ShardedWeights(blocks, cuts, 0, processes, self._device)
        else:
            self._weights = engine.divided
            self._device = self._weights.device
        views = self._weights.views
        self._state = [*(views[name] for name in self._parameters), *self._buffers.values()]

    def _record(self, example: MicroBatch) -> TracedStep:
        recorded = super()._record(example)
        assert isinstance(recorded.lowered.run, ShardedStep)
        recorded.lowered.run.take(self._weights)
        self._events = recorded.lowered.run.events
        return recorded

    def run(self, batch: CombinedBatch) -> ExecutionResult:
        """One execution; a process without a micro-batch brings its parts to those of others."""
        anchors = super().run(batch)
        plan, layout = self._spec.plan, batch.layout
        assert layout is not None
        counts = [sum(each) for each in zip(*(counts_by_rank(update, plan) for update in layout))]
        for _ in range(max(counts) - counts[plan.process]):
            with torch.no_grad():
                self._weights.idle(self._events)
        return anchors

    def read_state(self) -> TrainState:
        """The module's weights and buffers."""
        self._weights.publish()
        return super().read_state()

    def close(self) -> None:
        """The parts are let go of, if no program trains with them."""
        super().close()
        if self._is_own:
            self._weights.release()


def _blocks(named: Sequence[Tuple[str, nn.Parameter]]) -> List[FlatBlock]:
    """Pieces of parameters that get no gradient."""
    alike: Dict[Tuple[object, ...], List[Tuple[str, Tensor]]] = {}
    for number, piece in enumerate(pieces_of(named)):
        for name, parameter in piece:
            key = (number, parameter.dtype, parameter.device)
            alike.setdefault(key, []).append((name, parameter))
    return [FlatBlock.of(own, 0, 0.0) for own in alike.values()]
