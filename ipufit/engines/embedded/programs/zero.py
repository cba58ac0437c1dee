"""Training where each process has a part of the optimizer's state."""

from __future__ import annotations

from typing import Any, Dict, List, Sequence, Tuple, Type

import torch
from torch import nn

from ipufit.engines.embedded.optimizer_state_location import StateMemory
from ipufit.engines.embedded.training_state import CarriedState, StatePlacement
from ipufit.engines.embedded.zero import ShardedOptimizer, StateParts
from ipufit.engines.program import ProgramSpec
from ipufit.errors import ConfigurationError
from ipufit.optim.rules import rule_for
from ipufit.tracing.flat_storage import FlatBlock, FlatStorage
from ipufit.tracing.grad_step import ModuleWithLoss

__all__ = ["ShardedPlacement"]


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
        rule = rule_for(spec.optimizer)
        assert rule is not None
        updater = self.updater_class(
            spec.optimizer,
            rule,
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
        self._spec.processes.assert_equal_across_ranks(
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
