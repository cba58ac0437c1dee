"""Training and inference where each process has a part of weights or optimizer state."""

from __future__ import annotations

from typing import Any, Dict, List, Sequence, Tuple, Type

import torch
from torch import Tensor, nn

from ipufit.core.batch import CombinedBatch, counts_by_rank
from ipufit.engines.embedded.fsdp import (
    FSDPOptimizer,
    ShardedStep,
    ShardedWeights,
    one_order,
    pieces_of,
)
from ipufit.engines.embedded.optimizer_state_location import StateMemory
from ipufit.engines.embedded.programs.base import ModuleWeights
from ipufit.engines.embedded.traced_step import TracedStep
from ipufit.engines.embedded.training_state import CarriedState, StatePlacement
from ipufit.engines.embedded.zero import ShardedOptimizer, StateParts, cuts_of
from ipufit.engines.external_changes import refuse_replaced
from ipufit.engines.program import ProgramSpec
from ipufit.errors import ConfigurationError
from ipufit.optim.rules import rules_for
from ipufit.tracing.flat_storage import FlatBlock, FlatStorage
from ipufit.tracing.grad_step import ModuleWithLoss


class ShardedPlacement(StatePlacement):
    """The optimizer's state lies in parts over the processes, as ``shard="optimizer"`` asks.

    torch's optimizer has no state of what is trained, until somebody asks for it by
    :meth:`gather_optimizer`; with the next execution it has none again.
    """

    updater_class: Type[ShardedOptimizer] = ShardedOptimizer

    updater: ShardedOptimizer

    def __init__(
        self,
        spec: ProgramSpec,
        step: ModuleWithLoss,
        carried: CarriedState,
        memory: StateMemory,
        device: torch.device,
    ) -> None:
        assert spec.optimizer is not None
        parts = carried.state_parts
        if parts is None or parts.optimizer is not spec.optimizer:
            parts = carried.state_parts = StateParts(spec.optimizer, spec.processes)
        self._parts = parts
        self._is_gathered = False
        updater = self.updater_class(
            spec.optimizer,
            rules_for(spec.optimizer),
            carried.optimizer_graphs,
            spec.config,
            memory,
            parts,
            spec.processes,
        )
        super().__init__(spec, step, carried, updater, device)

    def bind(
        self, blocks: List[FlatBlock], others: Sequence[Tuple[str, nn.Parameter]], updates: int
    ) -> FlatStorage:
        """Take over parameters, and this process's part of the optimizer's state."""
        storage = super().bind(blocks, others, updates)
        self.cuts = self.updater.cuts if self.updater.takes_parts else None
        self._is_gathered = False
        return storage

    def must_take_over(self) -> bool:
        """Tell before an epoch whether callbacks of all processes have changed the state.

        Raises:
            ProcessError: some have changed it, and others not.
        """
        changed = self._version.is_changed
        self.spec.processes.assert_equal_across_ranks(
            state_of_the_optimizer="changed" if changed else "as it was"
        )
        return changed

    def follow_the_optimizer(self, updates: int) -> bool:
        """Let go of what was gathered, before an execution.

        Raises:
            ConfigurationError: the state was changed within an epoch.
        """
        if self._version.is_changed:
            raise ConfigurationError(
                "with shard='optimizer' the optimizer's state must be changed in all processes "
                "before an epoch begins, but it was changed within one. Change it in "
                "on_epoch_end or on_epoch_begin, after model.gather_optimizer()."
            )
        if self._is_gathered:
            for slot in (slot for block in self.storage.blocks for slot in block.slots):
                self._optimizer.state.pop(slot.parameter, None)
            self._version.note(updates)
            self._is_gathered = False
        return False

    def publish(self, updates: int) -> None:
        """Nothing: the whole state is made when somebody asks for it."""

    def gather_optimizer(self, updates: int) -> None:
        """Give torch's optimizer the whole state, in all processes at the same time."""
        self._parts.gather_optimizer(self.updater.parts())
        self._version.note(updates)
        self._is_gathered = True

    def read_optimizer(self) -> Dict[str, Any]:
        """Return a copy of the whole state in process 0; the others have settings alone."""
        return self._parts.state_dict(self.updater.parts())

    def forget(self) -> None:
        """Take this process's part of a state that torch's optimizer has, from now on."""
        self._parts.forget_all()

    def unbind(self) -> None:
        """Keep the parts for the next program."""
        self.updater.keep()
        super().unbind()


class FSDPPlacement(ShardedPlacement):
    """Weights and optimizer state lie in parts over the processes: ``Memory(shard="weights")``.

    The module's parameters are copies in host memory, which are up to date at the end of an epoch,
    after :meth:`TrainingState.read` and after :meth:`gather_weights`.
    """

    updater_class: Type[ShardedOptimizer] = FSDPOptimizer

    def _make_storage(
        self, blocks: List[FlatBlock], others: Sequence[Tuple[str, nn.Parameter]]
    ) -> ShardedWeights:
        """This process's parts of all parameters."""
        processes = self.spec.processes
        rest = _blocks(others)
        cuts = self.updater.cuts_of(blocks)
        cuts += [cuts_of(block, processes.num_processes, False) for block in rest]
        dtype, count = self.spec.config.accumulation_dtype, len(blocks)
        weights = ShardedWeights([*blocks, *rest], cuts, count, processes, self.device, dtype)
        self.weights = self.carried.weights = weights
        return weights

    def attach(self, recorded: TracedStep) -> None:
        """Let a recording gather its weights from the parts, in the order of all others.

        Raises:
            CaptureError: it uses them in another order.
        """
        assert self.weights is not None
        assert isinstance(recorded.lowered.run, ShardedStep)
        recorded.lowered.run.take(self.weights)

    def must_take_over(self) -> bool:
        """Tell before an epoch whether weights or optimizer state were changed in any process."""
        if super().must_take_over():
            return True
        assert self.weights is not None
        refuse_replaced(self.step, self._tensors)
        # Each sees the change of its own part.
        if any(self.spec.processes.gather(self.weights.is_changed(), "weights")):
            return True
        self.weights.note()
        return False

    def follow_the_module(self) -> bool:
        """Refuse changes of weights before an execution.

        Raises:
            ConfigurationError: a weight was changed or replaced within an epoch.
        """
        refuse_replaced(self.step, self._tensors)
        assert self.weights is not None
        if self.weights.was_touched():
            raise ConfigurationError(
                "with shard='weights' weights must be changed in all processes before an epoch "
                "begins, but one was changed within an epoch. Change it in on_epoch_end or "
                "on_epoch_begin."
            )
        return False

    def gather_weights(self) -> None:
        """Bring the module's parameters up to date, in all processes at the same time."""
        if self.weights is not None:
            self.weights.publish()

    def unbind(self) -> None:
        """Keep the optimizer's parts for the next program; what the module holds stays."""
        super().unbind()
        self.weights = self.carried.weights = None


class FSDPWeights(ModuleWeights):
    """Parts of the weights for inference: those of the training program, if there is one."""

    def __init__(
        self,
        spec: ProgramSpec,
        carried: CarriedState,
        parameters: Dict[str, nn.Parameter],
        device: torch.device,
    ) -> None:
        super().__init__(parameters, device)
        self._plan = spec.plan
        self._is_owner = carried.weights is None
        self._events: Sequence[Tuple[str, int]] = ()
        weights = carried.weights
        if weights is None:
            blocks = _blocks(list(parameters.items()))
            cuts = [cuts_of(block, spec.processes.num_processes, False) for block in blocks]
            weights = ShardedWeights(blocks, cuts, 0, spec.processes, device)
        self._weights = weights
        self.device = weights.device

    def tensors(self) -> List[Tensor]:
        """Return the parts of this process."""
        return [self._weights.views[name] for name in self._parameters]

    def attach(self, recorded: TracedStep) -> None:
        """Let a recording gather its weights from the parts."""
        assert isinstance(recorded.lowered.run, ShardedStep)
        recorded.lowered.run.take(self._weights)
        self._events = one_order(self._events, recorded.lowered.run.events)

    def finish(self, batch: CombinedBatch) -> None:
        """Bring the own parts to processes that have more micro-batches of an execution."""
        layout, plan = batch.layout, self._plan
        assert layout is not None
        counts = [sum(each) for each in zip(*(counts_by_rank(update, plan) for update in layout))]
        for _ in range(max(counts) - counts[plan.process]):
            with torch.no_grad():
                self._weights.idle(self._events)

    def gather(self) -> None:
        """Bring the module's parameters up to date, in all processes at the same time."""
        self._weights.publish()

    def release(self) -> None:
        """Let go of the parts, if no program trains with them."""
        super().release()
        if self._is_owner:
            self._weights.release()


def _blocks(named: Sequence[Tuple[str, nn.Parameter]]) -> List[FlatBlock]:
    """Pieces of parameters that get no gradient."""
    alike: Dict[Tuple[object, ...], List[Tuple[str, Tensor]]] = {}
    for number, piece in enumerate(pieces_of(named)):
        for name, parameter in piece:
            key = (number, parameter.dtype, parameter.device)
            alike.setdefault(key, []).append((name, parameter))
    return [FlatBlock.of(members, 0, 0.0) for members in alike.values()]
