"""Training where each process has a part of the optimizer's state."""

from __future__ import annotations

from typing import Any, Dict, Tuple, Type

from ipufit.core.batch import MicroBatch
from ipufit.engines.embedded.context import EngineContext
from ipufit.engines.embedded.flat_optimizer import FlatOptimizer
from ipufit.engines.embedded.programs.training import TrainingProgram
from ipufit.engines.embedded.zero.optimizer import ShardedOptimizer
from ipufit.engines.embedded.zero.state import StateParts
from ipufit.engines.program import Prepared, ProgramSpec, TrainState
from ipufit.errors import ConfigurationError
from ipufit.optim.rules import rule_for

__all__ = ["ShardedTrainingProgram"]


class ShardedTrainingProgram(TrainingProgram):
    """A training program of several processes with ``shard_optimizer=True``.

    torch's optimizer has no state of what is trained, until somebody asks for it by
    :meth:`gather_optimizer`; with the next execution it has none again.
    """

    updater_class: Type[ShardedOptimizer] = ShardedOptimizer

    def __init__(self, engine: EngineContext, spec: ProgramSpec) -> None:
        known = engine.state_parts
        if known is None or known.optimizer is not spec.optimizer:
            assert spec.optimizer is not None
            known = engine.state_parts = StateParts(spec.optimizer, spec.processes)
        self._parts = known
        self._is_gathered = False
        super().__init__(engine, spec)

    def _make_updater(self, tabled: bool) -> FlatOptimizer:
        config, rule = self._spec.config, rule_for(self._optimizer)
        assert rule is not None
        self._updater = self.updater_class(
            self._optimizer,
            rule,
            self._engine.optimizer_graphs,
            config,
            None if config.schedule is None else config.schedule.names,
            self._memory,
            self._parts,
            self._spec.processes,
        )
        return self._updater

    def _take_over(self, with_gradient: Tuple[str, ...]) -> None:
        super()._take_over(with_gradient)
        self._live.cuts = self._updater.cuts if self._updater.takes_parts else None
        self._is_gathered = False

    def prepare(self, example: MicroBatch) -> Prepared:
        """Take over what callbacks of all processes have made of the optimizer's state.

        Raises:
            ProcessError: some have changed it, and others not.
        """
        if self._with_gradient:
            self._take_over_changes()
        return super().prepare(example)

    def _take_over_changes(self) -> None:
        changed = self._published.is_changed
        self._spec.processes.assert_equal_across_ranks(
            state_of_the_optimizer="changed" if changed else "as it was"
        )
        if changed:
            self._let_go()

    def _follow_the_optimizer(self) -> None:
        if not self._with_gradient:
            return
        if self._published.is_changed:
            raise ConfigurationError(
                "with shard_optimizer=True the optimizer's state must be changed in all processes "
                "before an epoch begins, but it was changed within one. Change it in "
                "on_epoch_end or on_epoch_begin, after model.gather_optimizer()."
            )
        if self._is_gathered:
            for slot in (slot for block in self._live.storage.blocks for slot in block.slots):
                self._optimizer.state.pop(slot.parameter, None)
            self._published.note(self.updates)
            self._is_gathered = False

    def publish(self) -> None:
        """Nothing: the whole state is made when somebody asks for it."""

    def gather_optimizer(self) -> None:
        """Give torch's optimizer the whole state."""
        if self._with_gradient:
            self._parts.gather_optimizer(self._updater.parts())
            self._published.note(self.updates)
            self._is_gathered = True

    def _optimizer_state(self) -> Dict[str, Any]:
        """A copy of the optimizer's state in process 0; the others have settings alone."""
        return self._parts.state_dict(self._updater.parts())

    def write_state(self, state: TrainState) -> None:
        """Continue from another state, of which each process takes its part."""
        super().write_state(state)
        self._parts.forget_all()

    def _let_go(self) -> None:
        self._updater.keep()
        super()._let_go()

    def close(self) -> None:
        """The module gets memory of its own again; the parts wait for the next program."""
        if not self._closed and self._with_gradient:
            self._updater.keep()
        super().close()
