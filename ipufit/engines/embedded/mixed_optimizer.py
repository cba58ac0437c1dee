"""Several optimizers in one update: flat rules for those that have one, the others' own steps."""

from __future__ import annotations

from typing import List, Mapping, Optional, Sequence, Tuple

import torch
from torch import Tensor, nn

from ipufit.core.compile_arguments import Backend
from ipufit.core.train_config import Clip
from ipufit.engines.embedded.clipping import GradientTransform
from ipufit.engines.embedded.flat_optimizer import CompositeOptimizer, FlatOptimizer, Rows, Waiting
from ipufit.engines.embedded.optimizer_state_location import StateMemory
from ipufit.engines.embedded.traced_optimizer import TracedOptimizer
from ipufit.optim.several import has_step_hooks, members_of
from ipufit.tracing.flat_storage import FlatBlock, FlatStorage


class MixedOptimizer(CompositeOptimizer):
    """Each parameter group in the hands of what applies its optimizer.

    Args:
        parts: each with the parameter groups that it applies, and those whose settings it takes;
            they get finished gradients.
        owners: for each parameter, by identity, the index of its group.
        finish: makes of accumulated gradients, of all of them together, what the optimizers get.
    """

    def __init__(
        self,
        parts: Sequence[Tuple[FlatOptimizer, Sequence[int], slice]],
        owners: Mapping[int, int],
        finish: GradientTransform,
    ) -> None:
        self.parts = [part for part, _, _ in parts]
        self.memory = self.parts[0].memory
        self._groups = [groups for _, groups, _ in parts]
        self._settings = [groups for _, _, groups in parts]
        self._finish = finish
        self._storage = FlatStorage([])
        self._owners = owners

    def layout(self, named: Sequence[Tuple[str, nn.Parameter]]) -> List[FlatBlock]:
        """Each part divides its parameters."""
        blocks: List[FlatBlock] = []
        for part, groups in zip(self.parts, self._groups):
            blocks += part.layout([(n, p) for n, p in named if self._owners[id(p)] in groups])
        return blocks

    def bind(self, storage: FlatStorage, run_eagerly: bool) -> None:
        """Take over the optimizers' state and record the updates."""
        self._storage = storage
        # Of a turn, an optimizer may move nothing.
        self.places = [
            [place for place, block in enumerate(storage.blocks) if block.group in groups]
            for groups in self._groups
        ]
        super().bind(storage, run_eagerly)

    def refresh(self, rows: Rows) -> None:
        """Take the settings of the coming updates."""
        for part, groups in zip(self.parts, self._settings):
            by_row = {id(row): row[groups] for row in rows}
            part.refresh([by_row[id(row)] for row in rows])

    def apply(self, gradients: Sequence[Tensor]) -> None:
        """One weight update of all, from gradients as they were accumulated."""
        storage = self._storage
        if not self._finish.is_identity:
            gradients = self._finish(gradients, storage.blocks, storage.flats)
        super().apply(gradients)

    def release(self) -> None:
        """Let go of the states; safe twice."""
        self._storage, self.places = FlatStorage([]), ()
        super().release()


def make_mixed(
    optimizer: torch.optim.Optimizer,
    by_rule: Sequence[object],
    rules: FlatOptimizer,
    finish: GradientTransform,
    memory: StateMemory,
    compiler: Optional[Backend],
    waiting: Optional[Waiting],
) -> FlatOptimizer:
    """Make what applies an optimizer of which at least a part has no rule.

    Args:
        optimizer: several as one, or one.
        by_rule: for each of its parameter groups the rule, or None.
        rules: applies those groups that have one, with finished gradients.
        finish: makes of accumulated gradients what the optimizers get.
        memory: where the state is between two updates.
        compiler: of recorded graphs.
        waiting: as a :class:`TracedOptimizer` takes it.
    """
    members = list(members_of(optimizer).values())
    if len(members) == 1 or has_step_hooks(optimizer):
        return TracedOptimizer(optimizer, finish, memory, compiler, 0, waiting)
    plain = GradientTransform(Clip(), None)
    parts: List[Tuple[FlatOptimizer, Sequence[int], slice]] = []
    ruled = [index for index, rule in enumerate(by_rule) if rule is not None]
    if ruled:
        parts.append((rules, ruled, slice(None)))
    start = 0
    for member in members:
        groups = range(start, start + len(member.param_groups))
        start = groups.stop
        if by_rule[groups.start] is None:
            traced = TracedOptimizer(member, plain, memory, compiler, groups.start, waiting)
            parts.append((traced, groups, slice(groups.start, groups.stop)))
    owners = {
        id(p): index for index, group in enumerate(optimizer.param_groups) for p in group["params"]
    }
    return MixedOptimizer(parts, owners, finish)
