"""Training where each process has a part of the optimizer's state."""

from __future__ import annotations

from typing import Any, Dict, Optional, Type

from ipufit.engines.embedded.training_state import TrainingState
from ipufit.engines.embedded.zero import ShardedOptimizer, StateParts
from ipufit.errors import ConfigurationError
from ipufit.optim.rules import OptimizerRule

__all__ = ["ShardedState"]


class ShardedState(TrainingState):
    """The optimizer's state lies in parts over the processes, as ``shard="optimizer"`` asks.

    torch's optimizer has no state of what is trained, until somebody asks for it by
    :meth:`gather_optimizer`; with the next execution it has none again.
    """

    updater_class: Type[ShardedOptimizer] = ShardedOptimizer

    updater: ShardedOptimizer

    def _make_updater(self, rule: Optional[Type[OptimizerRule]], tabled: bool) -> ShardedOptimizer:
        """Return what applies the optimizer to this process's parts."""
        assert rule is not None
        carried, optimizer, spec = self._carried, self._optimizer, self.spec
        parts = carried.state_parts
        if parts is None or parts.optimizer is not optimizer:
            parts = carried.state_parts = StateParts(optimizer, spec.processes)
        self._parts = parts
        self._is_gathered = False
        return self.updater_class(
            optimizer,
            rule,
            carried.optimizer_graphs,
            spec.config,
            self.scheduled,
            self.memory,
            parts,
            spec.processes,
        )

    def _enter(self) -> None:
        """Begin to own this process's part of the optimizer's state."""
        super()._enter()
        self.cuts = self.updater.cuts if self.updater.takes_parts else None
        self._is_gathered = False

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

    def follow_the_optimizer(self) -> bool:
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
            self._version.note(self.updates)
            self._is_gathered = False
        return False

    def publish(self) -> None:
        """Nothing: the whole state is made when somebody asks for it."""

    def gather_optimizer(self) -> None:
        """Give torch's optimizer the whole state, in all processes at the same time."""
        if self.with_gradient:
            self._parts.gather_optimizer(self.updater.parts())
            self._version.note(self.updates)
            self._is_gathered = True

    def _read_optimizer(self) -> Dict[str, Any]:
        """Return a copy of the whole state in process 0; the others have settings alone."""
        return self._parts.state_dict(self.updater.parts())

    def _forget(self) -> None:
        """Take this process's part of a state that torch's optimizer has, from now on."""
        self._parts.forget_all()

    def _leave(self) -> None:
        """Keep the parts for the next program."""
        self.updater.keep()
