"""Other torch optimizers, through their own ``step``: recorded where it can be, else as it is.

Of several in one update, those that have a rule go by it.
"""

from __future__ import annotations

import collections
import copy
import dataclasses
from typing import Any, Callable, Dict, List, Mapping, Optional, Sequence, Tuple

import torch
from torch import Tensor, fx

from ipufit.core.compile_arguments import Backend
from ipufit.core.precision import refuse_missing_half
from ipufit.core.train_config import Clip
from ipufit.engines.embedded.flat_optimizer import (
    CompositeOptimizer,
    FlatOptimizer,
    Rows,
    Steps,
    Waiting,
)
from ipufit.engines.embedded.gradient_transform import GradientTransform
from ipufit.engines.embedded.optimizer_state_location import StateMemory
from ipufit.engines.embedded.step_recorder import StepRecorder, UnrecordableError, setting_texts
from ipufit.engines.external_changes import changed_shape
from ipufit.optim.schedules import settings
from ipufit.optim.several import (
    NamedParameters,
    evaluates_again,
    groups_of_members,
    has_step_hooks,
    index_of_group,
    members_of,
)
from ipufit.tracing.flat_storage import FlatBlock, FlatStorage, group_alike
from ipufit.utils.state import is_of_torch

# Settings of each group that are others than now.
_Changes = List[Dict[str, Any]]

_UNCOMPILED = (
    "The optimizer's step takes numbers that change, so updates run as recorded, not compiled."
)

# Attributes of every optimizer.
_OF_TORCH = frozenset(vars(torch.optim.SGD([torch.zeros(1)], lr=0.0)))


@dataclasses.dataclass(eq=False)
class TracedOptimizer(FlatOptimizer):
    """Any other torch optimizer, through its own ``step``; its state is where torch keeps it.

    The step is recorded over the flat tensors. One that can't be recorded runs as it is.

    Attributes:
        optimizer: torch's.
        finish: makes of an accumulated gradient what the optimizer gets.
        memory: where the state is between two updates.
        compiler: of graphs that take tensors alone; None: there is none.
        first_group: index of its first parameter group, in blocks.
        waiting: takes steps that run as they are, which others are to make with those of other
            parts of the optimizer; None: there are none.
        why_not: why the step runs as it is, as the end of a sentence; None where it is recorded.
    """

    optimizer: torch.optim.Optimizer
    finish: GradientTransform
    memory: StateMemory
    compiler: Optional[Backend] = None
    first_group: int = 0
    waiting: Optional[Waiting] = None

    def __post_init__(self) -> None:
        self._recorder = StepRecorder(self.optimizer, self.finish, self.first_group)
        self.why_not: Optional[str] = None
        self._storage = FlatStorage([])
        self._settings = [setting_texts(group) for group in self.optimizer.param_groups]
        # For each coming update, the settings that are others than now, and by their identity what
        # recordings are for.
        self._rows: List[_Changes] = []
        self._purposes: Dict[int, object] = {}
        self._next = 0
        # State in host memory, while updates need it elsewhere.
        self._aside: Dict[Tuple[int, str], Tensor] = {}

    def layout(self, named: NamedParameters, ages: Mapping[str, float]) -> List[FlatBlock]:
        """Parameters of one group, dtype and device stand together."""
        blocks = group_alike(self.optimizer, named, ages, lambda *_: 0)
        first = self.first_group
        return [dataclasses.replace(block, group=first + block.group) for block in blocks]

    def bind(self, storage: FlatStorage, run_eagerly: bool) -> None:
        """Take over parameters, and record the update."""
        self._storage, self._aside = storage, {}
        self._recorder.bind(storage)
        self.own_parameters = {id(slot.parameter) for _, slot in self._recorder.slots}
        self._put_aside()
        self.why_not = "run_eagerly=True" if run_eagerly else None
        if has_step_hooks(self.optimizer):
            self.why_not = "it has hooks"
        if evaluates_again(self.optimizer):
            self.why_not = "it evaluates the loss again"
        self.refresh([self.optimizer.param_groups])
        if self.why_not is None:
            self._bring_back()
            try:
                self._recorder.record(self._recorder.purpose())
            except UnrecordableError as error:
                self.why_not = str(error)
            self._put_aside()

    def explain(self) -> List[str]:
        """Describe in a sentence how the step runs."""
        kind = type(self.optimizer)
        name = kind.__name__
        if self.why_not is None:
            whose = f"that of {kind.__module__}.{name}"
            if is_of_torch(self.optimizer):
                whose = "torch's own"
            recorded = f"The step of {name} is {whose}, recorded."
            return [recorded] if self.compiler is None else [recorded, _UNCOMPILED]
        return [f"The step of {name} runs as it is, after the recorded gradients: {self.why_not}."]

    def refresh(self, rows: Rows) -> None:
        """Take the settings of the coming updates; before every execution.

        Args:
            rows: for each of them the settings of every parameter group.
        """
        groups, changing = self.optimizer.param_groups, self._recorder.changing
        now = list(map(setting_texts, groups))
        by_row: Dict[int, _Changes] = {}
        for row in rows:
            if row is groups:
                by_row[id(row)] = []
            elif id(row) not in by_row:
                changes = [
                    {name: group[name] for name, text in new.items() if old.get(name) != text}
                    for group, new, old in zip(row, map(setting_texts, row), now)
                ]
                by_row[id(row)] = changes if any(changes) else []
                changing.update(name for change in changes for name in change)
        for new, old in zip(now, self._settings):
            changing.update(name for name, text in new.items() if old.get(name) != text)
        self._settings = now
        self._rows, self._next, self._purposes = [by_row[id(row)] for row in rows], 0, {}
        if self.why_not is None:
            self._recorder.look()

    def apply(self, gradients: Sequence[Tensor]) -> None:
        """One weight update, from gradients as they were accumulated."""
        if self.waiting is None or self.why_not is None:
            self.step_with(gradients, [])
        else:
            self.waiting.setdefault(id(self.optimizer), []).append((self, gradients))

    def step_with(self, gradients: Sequence[Tensor], others: Steps) -> None:
        """One weight update, with those of other parts of the optimizer that run as they are."""
        parts = [(self, gradients), *((p, g) for p, g in others if isinstance(p, TracedOptimizer))]
        for part, _ in parts[1:]:
            part._next += 1
            part._bring_back()
        changes = self._rows[self._next]
        self._next += 1
        before = self._set(changes)
        self._bring_back()
        try:
            if self.why_not is None:
                if id(changes) not in self._purposes:
                    self._purposes[id(changes)] = self._recorder.purpose()
                try:
                    self._recorder.run(self._purposes[id(changes)], gradients)
                except UnrecordableError as error:
                    self.why_not = str(error)
            if self.why_not is not None:
                self._call_step(parts)
        finally:
            for part, _ in parts:
                part._put_aside()
            self._set(before)

    def _set(self, changes: _Changes) -> _Changes:
        """Give the optimizer other settings, and return what they were."""
        before: _Changes = []
        for group, now, change in zip(
            self.optimizer.param_groups, settings.read(self.optimizer) if changes else (), changes
        ):
            before.append({name: now[name] for name in change})
            for name, value in change.items():
                settings.write(group, (name, None), value)
        return before

    def _call_step(self, parts: Sequence[Tuple[TracedOptimizer, Sequence[Tensor]]]) -> None:
        """Call the optimizer's step, over the user's parameters, with the gradients of parts."""
        parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        before = [parameter.grad for parameter in parameters]
        for parameter in parameters:
            parameter.grad = None
        try:
            for part, gradients in parts:
                part._assign(gradients)
            with torch.no_grad(), refuse_missing_half():
                step: Callable[..., object] = self.optimizer.step
                step(*([] if self.evaluate is None else [self._evaluate_again]))
        finally:
            for parameter, gradient in zip(parameters, before):
                parameter.grad = gradient
            for part, _ in parts:
                part._storage.follow(changed_shape)

    @torch.no_grad()
    def _evaluate_again(self) -> Tensor:
        """The closure of an optimizer: return the loss, and have its gradients in parameters."""
        assert self.evaluate is not None
        self._storage.follow(changed_shape)
        loss, gradients = self.evaluate()
        self._assign(gradients)
        return loss

    def _assign(self, gradients: Sequence[Tensor]) -> None:
        """Give the user's parameters their gradients."""
        storage = self._storage
        finished = self.finish(gradients, storage.blocks, storage.flats)
        for block, slot in self._recorder.slots:
            gradient, indices = slot.view(finished[block]), storage.indices.get(slot.name)
            if indices is not None:
                values = gradient[tuple(indices)]
                gradient = torch.sparse_coo_tensor(indices, values, gradient.shape)
            slot.parameter.grad = gradient

    def _put_aside(self) -> None:
        """Bring the state to where it is between two updates."""
        if not self.memory.is_apart:
            return
        for key, value in self._recorder.state_items():
            if not isinstance(value, Tensor) or value.dim() == 0:
                continue
            aside = self._aside.get(key)
            if aside is not None and aside.shape == value.shape:
                self._aside[key] = self.memory.renew(aside, value)
            else:
                self._aside[key] = self.memory.keep(value)
        self._recorder.write(self._aside.items())

    def _bring_back(self) -> None:
        """Bring the state to where an update needs it."""
        keys = list(self._aside)
        if keys:
            self._recorder.write(zip(keys, self.memory.fetch(self._recorder.read(keys))))

    def skip(self) -> None:
        """Leave a weight update out."""
        self._next += 1

    def snapshot(self) -> object:
        """A copy of the state, and of what else the optimizer has that its step may change."""
        optimizer, memo = self.optimizer, self._parameters()
        state = {p: values for p, values in optimizer.state.items() if id(p) in memo}
        data = {n: v for n, v in vars(optimizer).items() if n not in _OF_TORCH and _is_data(v)}
        return copy.deepcopy((state, data), memo), settings.keep(optimizer)

    def restore(self, snapshot: Any) -> None:
        """Go back to a copy of the state; as often as one likes."""
        optimizer, memo = self.optimizer, self._parameters()
        copies, put_back = snapshot
        state, data = copy.deepcopy(copies, memo)
        for parameter in [p for p in optimizer.state if id(p) in memo]:
            del optimizer.state[parameter]
        optimizer.state.update(state)
        vars(optimizer).update(data)
        put_back()
        self._aside = dict(zip(self._aside, self._recorder.read(list(self._aside))))

    def _parameters(self) -> Dict[int, object]:
        """The parameters, which a copy shares, by their identity."""
        return {id(p): p for group in self.optimizer.param_groups for p in group["params"]}

    def export(self) -> None:
        """Let the torch optimizer have the state for good, once no update follows."""
        if self.memory.ended:
            for_torch = [self.memory.for_torch(tensor) for tensor in self._aside.values()]
            self._recorder.write(zip(self._aside, for_torch))
            self._aside = {}

    def state_tensors(self) -> List[Tensor]:
        """The tensors of the state, where it is between two updates."""
        return [value for _, value in self._recorder.state_items() if isinstance(value, Tensor)]

    def release(self) -> None:
        """Let go of the parameters; safe twice."""
        self._storage, self._aside = FlatStorage([]), {}
        self._recorder.bind(self._storage)

    def recorded(self) -> Optional[fx.GraphModule]:
        """The graph that was recorded last; None where the step runs as it is."""
        return self._recorder.latest() if self.why_not is None else None


def _is_data(value: object) -> bool:
    """Tell whether a value is a number, text or tensor, or a container of such."""
    if isinstance(value, dict):
        return all(map(_is_data, value.values()))
    if isinstance(value, (list, tuple, set, collections.deque)):
        return all(map(_is_data, value))
    return value is None or isinstance(value, (bool, int, float, str, Tensor))


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

    def layout(self, named: NamedParameters, ages: Mapping[str, float]) -> List[FlatBlock]:
        """Each part divides its parameters."""
        blocks: List[FlatBlock] = []
        for part, groups in zip(self.parts, self._groups):
            named_here = [(n, p) for n, p in named if self._owners[id(p)] in groups]
            blocks += part.layout(named_here, ages)
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
    for member, groups in zip(members, groups_of_members(optimizer).values()):
        if by_rule[groups.start] is None:
            traced = TracedOptimizer(member, plain, memory, compiler, groups.start, waiting)
            parts.append((traced, groups, slice(groups.start, groups.stop)))
    return MixedOptimizer(parts, index_of_group(optimizer), finish)
