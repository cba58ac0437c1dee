"""The optimizer's part of an update: from flat gradients to new weights, recorded as one graph."""

from __future__ import annotations

import abc
import copy
from typing import AbstractSet, Any, Callable, Dict, List, Mapping, Optional, Sequence, Tuple, Type

import torch
from torch import Tensor, fx, nn

from ipufit.core.compile_arguments import Backend
from ipufit.core.precision import computes_in_half, try_out
from ipufit.core.train_config import HyperparameterSchedule
from ipufit.engines.embedded.clipping import GradientTransform
from ipufit.engines.embedded.fused_optimizers import FusedKernel, fused_for, numbers_for
from ipufit.engines.embedded.optimizer_state_location import StateMemory
from ipufit.engines.embedded.passes.torch_compile import compile_update
from ipufit.errors import OptimizerError
from ipufit.optim.rules import OptimizerRule
from ipufit.optim.several import kinds_by_group, name_of_optimizer
from ipufit.optim.state import make_step_counter
from ipufit.tracing.capture import capture
from ipufit.tracing.flat_storage import FlatBlock, FlatStorage, flat_of, group_alike

__all__ = [
    "CompositeOptimizer",
    "FlatOptimizer",
    "Graphs",
    "Rows",
    "RuleOptimizer",
    "apply_rules",
]


# Recorded updates, by all that they depend on.
Graphs = Dict[Tuple[object, ...], Callable[..., object]]

# For every coming update, the settings of every parameter group.
Rows = Sequence[Sequence[Mapping[str, Any]]]


def apply_rules(
    blocks: Sequence[FlatBlock],
    rules: Sequence[OptimizerRule],
    finish: Callable[[Sequence[Tensor], Sequence[FlatBlock], Sequence[Tensor]], Sequence[Tensor]],
    tensors: Sequence[Tensor],
) -> List[Tensor]:
    """Update flat weights and the state of their optimizer once; this is what is recorded.

    Args:
        blocks: which part of a flat tensor belongs to which parameter.
        rules: one for each block.
        finish: makes of the accumulated gradients, blocks and weights the gradients for the rules.
        tensors: the coefficients of each block, its weights, its gradient; then all states, in
            the order of the blocks and of the names that their rules have for them.

    Returns:
        The weights, which have changed in place as the states have.
    """
    count = len(blocks)
    rows, flats, state = tensors[:count], tensors[count : 2 * count], iter(tensors[3 * count :])
    gradients = finish(tensors[2 * count : 3 * count], blocks, flats)
    for block, rule, row, flat, gradient in zip(blocks, rules, rows, flats, gradients):
        block_state = {name: next(state) for name in rule.tensors}
        segments = [slice(slot.start, slot.stop) for slot in block.slots]
        rule.update(flat, gradient, block_state, row.unbind(), segments)
    return list(flats)


class FlatOptimizer(abc.ABC):
    """Applies one optimizer to flat tensors.

    To :meth:`bind` state and weights, to :meth:`refresh` the hyper-parameters before every
    execution, then to :meth:`apply` or :meth:`skip` each update.

    Attributes:
        memory: where the state is between two updates.
        own_parameters: identities of the parameters whose state is in torch's optimizer alone.
    """

    memory: StateMemory
    own_parameters: AbstractSet[int] = frozenset()

    @abc.abstractmethod
    def layout(self, named: Sequence[Tuple[str, nn.Parameter]]) -> List[FlatBlock]:
        """Divide parameters into blocks that are updated alike."""

    @abc.abstractmethod
    def bind(self, storage: FlatStorage, run_eagerly: bool) -> None:
        """Take over the optimizer's state and record the update."""

    @abc.abstractmethod
    def refresh(self, rows: Rows) -> None:
        """Take the hyper-parameters of the coming updates."""

    @abc.abstractmethod
    def apply(self, gradients: Sequence[Tensor]) -> None:
        """One weight update, from gradients as they were accumulated."""

    @abc.abstractmethod
    def skip(self) -> None:
        """Leave a weight update out."""

    @abc.abstractmethod
    def snapshot(self) -> object:
        """A copy of the state."""

    @abc.abstractmethod
    def restore(self, snapshot: Any) -> None:
        """Go back to a copy of the state."""

    @abc.abstractmethod
    def export(self) -> None:
        """Let the torch optimizer have the state, under torch's names and dtypes."""

    @abc.abstractmethod
    def state_tensors(self) -> List[Tensor]:
        """The tensors of the state, where it is between two updates."""

    @abc.abstractmethod
    def release(self) -> None:
        """Let go of the state, which no update needs any more; safe twice."""

    def recorded(self) -> Optional[fx.GraphModule]:
        """The graph of an update; None where it runs without one."""
        return None

    def aside(self, times: int) -> Optional[Callable[[Sequence[Tensor]], None]]:
        """Weight updates like the next one, on copies of weights and state; None where none are."""
        return None

    def explain(self) -> List[str]:
        """Describe in sentences what is particular about how updates are made."""
        return []


class CompositeOptimizer(FlatOptimizer):
    """Several that apply optimizers as one, each with blocks of its own.

    Attributes:
        parts: these, from :meth:`bind` on.
        places: of each part, places of its blocks in the storage; empty where it has none.
    """

    parts: Sequence[FlatOptimizer] = ()
    places: Sequence[Sequence[int]] = ()

    def bind(self, storage: FlatStorage, run_eagerly: bool) -> None:
        """Take over the state of all parts and record an update of each."""
        for part, places in zip(self.parts, self.places):
            part.memory = self.memory
            if places:
                part.bind(storage.part(places), run_eagerly)
        self.own_parameters = {p for part in self.parts for p in part.own_parameters}

    def apply(self, gradients: Sequence[Tensor]) -> None:
        """One weight update of all parts, from gradients as they were accumulated."""
        for part, places in zip(self.parts, self.places):
            if places:
                part.apply([gradients[place] for place in places])

    def skip(self) -> None:
        """Leave a weight update out of all parts."""
        for part in self.parts:
            part.skip()

    def snapshot(self) -> List[object]:
        """A copy of the state of all parts."""
        return [part.snapshot() for part in self.parts]

    def restore(self, snapshot: Any) -> None:
        """Go back to a copy of the state of all parts, in place."""
        for part, state in zip(self.parts, snapshot):
            part.restore(state)

    def export(self) -> None:
        """Let the torch optimizers have their state, under torch's names and dtypes."""
        for part in self.parts:
            part.export()

    def state_tensors(self) -> List[Tensor]:
        """The tensors of the state of all parts, where it is between two updates."""
        return [tensor for part in self.parts for tensor in part.state_tensors()]

    def release(self) -> None:
        """Let go of the state, which no update needs any more; safe twice."""
        for part in self.parts:
            part.release()

    def explain(self) -> List[str]:
        """Describe in sentences what is particular about how updates are made."""
        return list(dict.fromkeys(line for part in self.parts for line in part.explain()))


class RuleOptimizer(FlatOptimizer):
    """One rule per parameter group over flat tensors.

    Args:
        optimizer: torch's.
        rules: for each of its groups; None for one whose parameters come in no block.
        graphs: what has been recorded already.
        finish: makes of an accumulated gradient what the optimizer gets.
        schedule: changes hyper-parameters from update to update; None: nothing does.
        memory: where the state is between two updates.
        tabled: whether hyper-parameters that change must reach an update as tensors.
        compiler: compiles the recorded update; None: it runs by torch's own operators.

    Attributes:
        memory: where the state is between two updates.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        rules: Sequence[Optional[Type[OptimizerRule]]],
        graphs: Graphs,
        finish: GradientTransform,
        schedule: Optional[HyperparameterSchedule],
        memory: StateMemory,
        tabled: bool = False,
        compiler: Optional[Backend] = None,
    ) -> None:
        self._optimizer = optimizer
        self._compiler = compiler
        # A decay that is zero now and then is still a decay: times zero it changes nothing.
        decays = schedule is not None and "weight_decay" in schedule.names
        self._always = {"weight_decay": 1.0} if decays else {}
        self._kinds = list(rules)
        self._group_of = {
            id(p): index
            for index, group in enumerate(optimizer.param_groups)
            for p in group["params"]
        }
        self._graphs = graphs
        self._finish = finish
        self._is_finished = finish.is_identity
        self.memory = memory
        self._storage = FlatStorage([])
        self._rules: List[OptimizerRule] = []
        self._states: List[Dict[str, Tensor]] = []
        self._tabled = tabled and schedule is not None
        # The tensors of all states, in the order of the blocks.
        self._kept: List[Tensor] = []
        # Per block: updates done before this execution, and the coefficients of its updates.
        self._counts: List[float] = []
        self._rows: Rows = ()
        self._coming: List[Tuple[Tensor, ...]] = []
        # How many updates of this execution are done.
        self._made = 0
        # What the rules take in these updates, where something else than they makes some.
        self._table: List[Tuple[Tensor, ...]] = []
        self._switches = self._switches_of(optimizer.param_groups)
        # Settings of the groups when they were last compared with the switches.
        self._settings: List[Dict[str, object]] = []
        # Rows that were read last, and the settings of their groups.
        self._read: Tuple[Rows, Dict[int, List[Dict[str, object]]]] = ((), {})
        self._run: Callable[..., object] = self._update
        # A kernel for each block, where torch has one for all of them, and its settings by update.
        self._fused: List[FusedKernel] = []
        self._kernel_settings: List[List[Dict[str, object]]] = []

    def _switches_of(
        self, groups: Sequence[Mapping[str, object]]
    ) -> Tuple[Tuple[object, ...], ...]:
        return tuple(
            () if kind is None else kind.switches({**group, **self._always})
            for kind, group in zip(self._kinds, groups)
        )

    def _rule_of(self, group: int) -> Type[OptimizerRule]:
        kind = self._kinds[group]
        assert kind is not None
        return kind

    def _steps(self, parameter: nn.Parameter) -> float:
        state = self._optimizer.state.get(parameter, {})
        if self._rule_of(self._group_of[id(parameter)]).counted:
            return float(state.get("step", 0))
        # SGD has an entry without a value before its first update.
        return float(any(value is not None for value in state.values()))

    def layout(self, named: Sequence[Tuple[str, nn.Parameter]]) -> List[FlatBlock]:
        """Parameters of one group, dtype, device and age stand together."""
        return group_alike(self._optimizer, named, self._steps)

    def bind(self, storage: FlatStorage, run_eagerly: bool) -> None:
        """Take over the optimizer's state and record the update."""
        self._storage = storage
        blocks, groups = storage.blocks, self._optimizer.param_groups
        self._rules = [
            self._rule_of(block.group)({**groups[block.group], **self._always}) for block in blocks
        ]
        self._states = [self._load(*each) for each in zip(blocks, storage.flats, self._rules)]
        self._kept = [tensor for state in self._states for tensor in state.values()]
        self.counts = [block.updates for block in blocks]
        self._fused = self._kernels()
        self.refresh([groups])
        if not self._fused:
            self._record(run_eagerly)
        self.export()

    def _record(self, run_eagerly: bool) -> None:
        storage = self._storage
        at_work = self.memory.fetch(self._kept)
        arguments = self._arguments(self._finish.examples(storage.flats), at_work)
        key = (tuple(self._kinds), self._switches, storage.form, self._finish, self._compiler)
        if not run_eagerly:
            if key not in self._graphs:
                self._graphs[key] = self._compiled(capture(self._update, arguments))
            self._run = self._graphs[key]
        if arguments[-1].device.type == "cpu" and computes_in_half(arguments):
            try_out(self._run, arguments)

    def _compiled(self, graph: fx.GraphModule) -> Callable[..., object]:
        if self._compiler is None:
            return graph
        return compile_update(self._compiler, graph, self._arguments((), ()))

    def _kernels(self) -> List[FusedKernel]:
        # They take hyper-parameters as numbers, and are no graph that could be compiled.
        if self._tabled or self._compiler is not None:
            return []
        fused = [fused_for(rule, flat) for rule, flat in zip(self._rules, self._storage.flats)]
        kernels = [kernel for kernel in fused if kernel is not None]
        return kernels if len(kernels) == len(fused) else []

    def _load(self, block: FlatBlock, flat: Tensor, rule: OptimizerRule) -> Dict[str, Tensor]:
        state = {name: torch.zeros_like(flat) for name in rule.tensors}
        for slot in block.slots:
            torch_state = self._optimizer.state.get(slot.parameter, {})
            for name, whole in state.items():
                if torch_state.get(name) is not None:
                    slot.view(whole).copy_(torch_state[name])
        return {name: self.memory.keep(whole) for name, whole in state.items()}

    def refresh(self, rows: Rows) -> None:
        """Work out the coefficients of the coming updates; before every execution.

        Args:
            rows: their hyper-parameters.
        """
        tables = self.tables(rows)
        self.take(rows, [t.to(flat.device) for t, flat in zip(tables, self._storage.flats)])

    def tables(self, rows: Rows) -> List[Tensor]:
        """The coefficients of the coming updates: for each block a tensor on the host, by update.

        Args:
            rows: their hyper-parameters.
        """
        settings = self._read_settings(rows)
        if self._fused:
            steps = [[[done + 1 + i] for i in range(len(rows))] for done in self.counts]
            return [torch.tensor(step, dtype=torch.float32) for step in steps]
        return self._coefficients(rows, settings)

    def _read_settings(self, rows: Rows) -> Dict[int, List[Dict[str, object]]]:
        """Read the settings of all groups, by the identity of the row, and compare the switches."""
        if rows is self._read[0]:
            return self._read[1]
        by_row: Dict[int, List[Dict[str, object]]] = {}
        for row in rows:
            if id(row) in by_row:
                continue
            settings = [_numbers(group) for group in row]
            if settings != self._settings:
                if self._switches_of(row) != self._switches:
                    raise OptimizerError(
                        f"a setting of {name_of_optimizer(self._optimizer)} that shapes the "
                        "program changed during fit: one that is on or off, such as nesterov, or a "
                        "momentum, dampening or weight decay between zero and non-zero. Change it "
                        "between two calls of fit."
                    )
                self._settings = settings
            by_row[id(row)] = settings
        self._read = rows, by_row
        return by_row

    def _coefficients(
        self, rows: Rows, settings: Mapping[int, Sequence[Mapping[str, object]]]
    ) -> List[Tensor]:
        """Compute the numbers that the rules of all blocks take in each update, on the host."""
        tables = []
        for block, flat, rule, done in zip(
            self._storage.blocks, self._storage.flats, self._rules, self.counts
        ):
            table = [
                rule.coefficients(settings[id(row)][block.group], done + 1 + i)
                for i, row in enumerate(rows)
            ]
            dtype = torch.float64 if flat.dtype == torch.float64 else torch.float32
            tables.append(torch.tensor(table, dtype=dtype))
        return tables

    def coming(self) -> Tuple[Tensor, ...]:
        """The coefficients of the next update, for each block."""
        if not self._table:
            # Updates that are done count already.
            self._table = self._on_device(self._rows[self._made :])
            self._table[:0] = [()] * self._made
        return self._table[self._made]

    def like_coming(self) -> Tuple[Tensor, ...]:
        """Tensors like these, also where no update is coming."""
        return self._on_device([self._optimizer.param_groups])[0]

    def _on_device(self, rows: Rows) -> List[Tuple[Tensor, ...]]:
        """Compute what the rules take in each of these updates."""
        tables = self._coefficients(rows, self._read_settings(rows))
        moved = [table.to(flat.device) for table, flat in zip(tables, self._storage.flats)]
        return list(zip(*(table.unbind() for table in moved)))

    def rules(self) -> List[Tuple[str, Dict[str, bool]]]:
        """For each block the name of its rule, and which settings of its group are on."""
        groups = [self._optimizer.param_groups[block.group] for block in self._storage.blocks]
        named = [_numbers({**group, **self._always}) for group in groups]
        return [
            (type(rule).__name__, {name: bool(value) for name, value in settings.items()})
            for rule, settings in zip(self._rules, named)
        ]

    def states(self) -> List[Tensor]:
        """For each parameter, in the order of the blocks, its part of each of its states."""
        return [
            whole[slot.start : slot.stop]
            for block, state in zip(self._storage.blocks, self._states)
            for slot in block.slots
            for whole in state.values()
        ]

    def take(self, rows: Rows, tables: Sequence[Tensor]) -> None:
        """Go by these tables, on the device, in the coming updates."""
        self.counts = self.counts
        self._rows = rows
        self._coming = list(zip(*(table.unbind() for table in tables)))
        self._kernel_settings = self._kernel_settings_of(rows) if self._fused else []

    def constants(self, rows: Rows) -> Tuple[object, ...]:
        """Return what the coming updates depend on that is in no table."""
        if not self._fused:
            return ()
        return tuple(
            tuple(settings.values())
            for by_block in self._kernel_settings_of(rows)
            for settings in by_block
        )

    @property
    def counts(self) -> Sequence[float]:
        """Updates done, by block; set where others have counted."""
        return [count + self._made for count in self._counts]

    @counts.setter
    def counts(self, counts: Sequence[float]) -> None:
        self._counts, self._made = list(counts), 0
        self._rows, self._coming, self._table = (), [], []

    def _kernel_settings_of(self, rows: Rows) -> List[List[Dict[str, object]]]:
        """Return the numbers that the kernels take, for each update and block."""
        read = self._read_settings(rows)
        counts, blocks = self.counts, self._storage.blocks
        known: Dict[Tuple[int, Tuple[bool, ...]], List[Dict[str, object]]] = {}
        arguments = []
        for i, row in enumerate(rows, 1):
            key = id(row), tuple([done + i > 0 for done in counts])
            if key not in known:
                known[key] = [
                    numbers_for(read[id(row)][block.group], done + i)
                    for block, done in zip(blocks, counts)
                ]
            arguments.append(known[key])
        return arguments

    def _arguments(self, gradients: Sequence[Tensor], state: Sequence[Tensor]) -> List[Tensor]:
        return [*self._coming[self._made], *self._storage.flats, *gradients, *state]

    def _update(self, *tensors: Tensor) -> List[Tensor]:
        return apply_rules(self._storage.blocks, self._rules, self._finish, tensors)

    def apply(self, gradients: Sequence[Tensor]) -> None:
        """One weight update, from gradients as they were accumulated."""
        kept: Sequence[Tensor] = self._kept
        at_work = self.memory.fetch(kept) if self.memory.is_apart else kept
        if self._fused:
            flats, coming = self._storage.flats, self._coming[self._made]
            if not self._is_finished:
                gradients = self._finish(gradients, self._storage.blocks, flats)
            state = iter(at_work)
            for i, kernel in enumerate(self._fused):
                settings = self._kernel_settings[self._made][i]
                first, second = [next(state)], [next(state)]
                largest = [next(state)] if settings["amsgrad"] else []
                step = [coming[i][0]]
                kernel([flats[i]], [gradients[i]], first, second, largest, step, **settings)
        else:
            self._run(*self._arguments(gradients, at_work))
        if self.memory.is_apart:
            for tensor, updated in zip(kept, at_work):
                self.memory.renew(tensor, updated)
        self._made += 1

    def count(self) -> None:
        """One weight update was made elsewhere."""
        self._made += 1

    def skip(self) -> None:
        """Leave a weight update out; what depends on its number is worked out again."""
        rows = self._rows[self._made + 1 :]
        self.counts = self.counts
        if rows:
            self.refresh(rows)

    def snapshot(self) -> object:
        """A copy of the state."""
        states = [{name: t.clone() for name, t in state.items()} for state in self._states]
        return states, self.counts

    def restore(self, snapshot: Any) -> None:
        """Go back to a copy of the state, in place."""
        states, self.counts = snapshot
        for state, values in zip(self._states, states):
            for name, tensor in state.items():
                tensor.copy_(values[name])

    def export(self) -> None:
        """Let the torch optimizer have the state, under torch's names and dtypes.

        Until :meth:`release` its tensors look into the flat ones: a copy would take as much
        memory again, and be out of date after one update.
        """
        kinds = kinds_by_group(self._optimizer)
        for block, state, updates in zip(self._storage.blocks, self._states, self.counts):
            group = self._optimizer.param_groups[block.group]
            if updates == 0:
                continue
            on_device = group.get("capturable") or group.get("fused")
            for slot in block.slots:
                torch_state = self._optimizer.state[slot.parameter]
                for name, whole in state.items():
                    torch_state[name] = slot.window(whole)
                if self._rule_of(block.group).counted:
                    device = slot.parameter.device if on_device else torch.device("cpu")
                    torch_state["step"] = make_step_counter(kinds[block.group], updates, device)

    def state_tensors(self) -> List[Tensor]:
        """The tensors of the state, where it is between two updates."""
        return self._kept

    def release(self) -> None:
        """Let go of the state, which no update needs any more; safe twice.

        Where no update follows at all, a torch optimizer that still looks into it gets its own.
        """
        for block, state in zip(self._storage.blocks, self._states) if self.memory.ended else ():
            flats = list(state.values())
            for slot in block.slots:
                torch_state = self._optimizer.state.get(slot.parameter, {})
                for name, value in torch_state.items():
                    if isinstance(value, Tensor) and flat_of(value, flats) is not None:
                        torch_state[name] = self.memory.for_torch(value)
        self._storage, self._states, self._kept = FlatStorage([]), [], []
        self.counts = []

    def recorded(self) -> Optional[fx.GraphModule]:
        """The graph of an update; None where it runs without one."""
        return self._run if isinstance(self._run, fx.GraphModule) else None

    def aside(self, times: int) -> Optional[Callable[[Sequence[Tensor]], None]]:
        """Weight updates like the next one, on copies of weights and state, so often."""
        if type(self.memory) is not StateMemory or not (self._fused or self.recorded()):
            return None
        other = copy.copy(self)
        other._storage = copy.copy(self._storage)
        other._storage.flats = [flat.clone() for flat in self._storage.flats]
        other._states = [
            {name: t.clone() for name, t in block_state.items()} for block_state in self._states
        ]
        other._kept = [tensor for state in other._states for tensor in state.values()]
        other.refresh([self._optimizer.param_groups] * times)
        return other.apply


def _numbers(group: Mapping[str, object]) -> Dict[str, object]:
    """The group's settings without parameters, a learning rate that is a tensor as a number."""
    return {
        name: value.item() if isinstance(value, Tensor) else value
        for name, value in group.items()
        if name != "params"
    }
