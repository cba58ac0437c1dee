"""The optimizer's part of an update: from flat gradients to new weights, recorded as one graph."""

from __future__ import annotations

import abc
import copy
import dataclasses
from typing import AbstractSet, Any, Callable, Dict, List, Mapping, Optional, Sequence, Tuple, Type

import torch
from torch import Tensor, fx, nn

from ipufit.core.compile_arguments import Backend
from ipufit.core.precision import computes_in_half, try_out
from ipufit.core.train_config import HyperparameterSchedule
from ipufit.engines.embedded.fused_optimizers import FusedKernel, fused_for, numbers_for
from ipufit.engines.embedded.gradient_transform import GradientTransform
from ipufit.engines.embedded.optimizer_state_location import StateMemory
from ipufit.engines.embedded.passes.torch_compile import compile_update
from ipufit.optim.rules import OptimizerRule
from ipufit.optim.several import NamedParameters, index_of_group, kinds_by_group, settings_of
from ipufit.optim.state import make_step_counter
from ipufit.tracing.capture import capture
from ipufit.tracing.flat_storage import FlatBlock, FlatStorage, flat_of, group_alike
from ipufit.utils.malloc_policy import give_back_freed_memory

# Hyper-parameters of each group.
Settings = Sequence[Mapping[str, object]]

# Recorded updates, by all that they depend on.
Graphs = Dict[Tuple[object, ...], Callable[..., List[Tensor]]]

# Computes the loss of an update and its gradients, as they are accumulated, at the present weights.
Evaluate = Callable[[], Tuple[Tensor, Sequence[Tensor]]]

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


@dataclasses.dataclass(frozen=True)
class _UpdateForm:
    """The arithmetic of updates under which the same settings are on, such as a momentum.

    Attributes:
        rules: one for each block.
        counts: for each block 1 where an update counts for its state, else 0.
        state: the tensors of the state that the rules have, in the order of the blocks.
        kernels: a kernel for each block, where torch has one for all of them.
        run: makes an update, where there are no kernels.
        compiled_as: what is on if it runs compiled; None where it can't.
    """

    rules: Sequence[OptimizerRule]
    counts: Sequence[float]
    state: Sequence[Tensor]
    kernels: Sequence[FusedKernel]
    run: Callable[..., List[Tensor]]
    compiled_as: Optional[Tuple[object, ...]]


# The settings of each group in an update, and its form.
FormedUpdate = Tuple[Settings, _UpdateForm]
# For updates, settings and form of each; and counts of each block before them and after each.
FormedUpdates = Tuple[Sequence[FormedUpdate], Sequence[Sequence[float]]]


class FlatOptimizer(abc.ABC):
    """Applies one optimizer to flat tensors.

    To :meth:`bind` state and weights, to :meth:`refresh` the hyper-parameters before every
    execution, then to :meth:`apply` or :meth:`skip` each update.

    Attributes:
        memory: where the state is between two updates.
        own_parameters: identities of the parameters whose state is in torch's optimizer alone.
        evaluate: of the coming update, where the optimizer's step evaluates the loss again.
    """

    memory: StateMemory
    evaluate: Optional[Evaluate] = None
    own_parameters: AbstractSet[int] = frozenset()

    @abc.abstractmethod
    def layout(self, named: NamedParameters, ages: Mapping[str, float]) -> List[FlatBlock]:
        """Divide parameters into blocks that are updated alike.

        Args:
            named: the parameters.
            ages: how many updates those had that are bound, when they were.
        """

    @abc.abstractmethod
    def bind(self, storage: FlatStorage, run_eagerly: bool) -> None:
        """Take over the optimizer's state and record the update."""

    @abc.abstractmethod
    def refresh(self, rows: Rows) -> None:
        """Take the hyper-parameters of the coming updates."""

    @abc.abstractmethod
    def apply(self, gradients: Sequence[Tensor]) -> None:
        """One weight update, from gradients as they were accumulated."""

    def step_with(self, gradients: Sequence[Tensor], others: Steps) -> None:
        """One weight update that has waited, with those of other parts of its optimizer."""
        raise NotImplementedError

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

    def compiled_as(self, rows: Rows) -> Sequence[Optional[Tuple[object, ...]]]:
        """Tell of each update what is on in its settings if it runs compiled; None if it can't."""
        return [None] * len(rows)

    def aside(self, times: int) -> Optional[Callable[[Sequence[Tensor]], None]]:
        """Weight updates like the next one, on copies of weights and state; None where none are."""
        return None

    def explain(self) -> List[str]:
        """Describe in sentences what is particular about how updates are made."""
        return []


# Parts of one optimizer, each with its gradients.
Steps = List[Tuple[FlatOptimizer, Sequence[Tensor]]]
# Steps that wait until there are those of all parts, by the identity of their optimizer.
Waiting = Dict[int, Steps]


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
        self._compiled_as = {"weight_decay": 1.0} if decays else {}
        self._kinds = list(rules)
        self._group_of = index_of_group(optimizer)
        self._graphs = graphs
        self._finish = finish
        self._is_finished = finish.is_identity
        self.memory = memory
        self._storage = FlatStorage([])
        self._run_eagerly = False
        self._states: List[Dict[str, Tensor]] = []
        self._tabled = tabled and schedule is not None
        # By what is on in the settings of all groups.
        self._forms: Dict[Tuple[object, ...], _UpdateForm] = {}
        self._fused = False
        # The updates of this execution, with counts of each block, and their coefficients.
        self._updates: Sequence[FormedUpdate] = ()
        self._counts: Sequence[Sequence[float]] = ((),)
        self._coming: List[Tuple[Tensor, ...]] = []
        # How many updates of this execution are done.
        self._made = 0
        # What the rules take in these updates, where something else than they makes some.
        self._table: List[Tuple[Tensor, ...]] = []
        # The update that was read last; rows that were, and what was made of them.
        self._latest: Optional[FormedUpdate] = None
        self._read: Tuple[Rows, FormedUpdates] = ((), ((), ((),)))
        # Settings of the kernels by update and block.
        self._kernel_settings: List[List[Dict[str, object]]] = []

    def switches(self, groups: Settings, more: Mapping[str, object]) -> Tuple[object, ...]:
        """Tell what is on in the settings of all groups; some settings in place of theirs."""
        return tuple(
            () if kind is None else kind.switches({**group, **more})
            for kind, group in zip(self._kinds, groups)
        )

    def _rule_of(self, group: int) -> Type[OptimizerRule]:
        kind = self._kinds[group]
        assert kind is not None
        return kind

    def _steps(self, name: str, parameter: nn.Parameter) -> float:
        state = self._optimizer.state.get(parameter, {})
        if self._rule_of(self._group_of[id(parameter)]).counted:
            return float(state.get("step", 0))
        # SGD has an entry without a value before its first update.
        return float(any(value is not None for value in state.values()))

    def layout(self, named: NamedParameters, ages: Mapping[str, float]) -> List[FlatBlock]:
        """Parameters of one group, dtype, device and age stand together."""
        return group_alike(self._optimizer, named, ages, self._steps)

    def bind(self, storage: FlatStorage, run_eagerly: bool) -> None:
        """Take over the optimizer's state and record the update."""
        self._storage, self._run_eagerly = storage, run_eagerly
        self._states = [self._load(*each) for each in zip(storage.blocks, storage.flats)]
        self.counts = [block.updates for block in storage.blocks]
        self.refresh([self._optimizer.param_groups])
        self.export()

    def _make_form(self, settings: Settings, switches: Tuple[object, ...]) -> _UpdateForm:
        blocks, flats = self._storage.blocks, self._storage.flats
        rules: List[OptimizerRule] = []
        counts: List[float] = []
        state: List[Tensor] = []
        for index, block in enumerate(blocks):
            rules.append(self._rule_of(block.group)(settings[block.group]))
            counts.append(rules[-1].counted or bool(rules[-1].tensors))
            for name in rules[-1].tensors:
                states = self._states[index]
                if name not in states:
                    states[name] = self.memory.keep(torch.zeros_like(flats[index]))
                state.append(states[name])
        kernels = self._kernels(rules)
        self._fused = bool(kernels)

        def update(*tensors: Tensor) -> List[Tensor]:
            return apply_rules(blocks, rules, self._finish, tensors)

        on = None if self._finish.group_clips else self.switches(settings, self._compiled_as)
        form = _UpdateForm(rules, counts, state, kernels, update, on)
        # Of a turn, an optimizer may move nothing.
        if kernels or not blocks:
            return form
        tables = self._coefficients([(settings, form)], [self.counts])
        first = [*(t[0].to(flat.device) for t, flat in zip(tables, flats)), *flats]
        arguments = [*first, *self._finish.examples(flats), *self.memory.fetch(state)]
        run, backend = form.run, self._compiler
        if not self._run_eagerly:
            key = (tuple(self._kinds), switches, self._storage.form, self._finish, backend)
            if key not in self._graphs:
                graph = capture(update, arguments)
                self._graphs[key] = compile_update(backend, graph, first) if backend else graph
            run = self._graphs[key]
        if arguments[-1].device.type == "cpu" and computes_in_half(arguments):
            try_out(run, arguments)
        return dataclasses.replace(form, run=run)

    def _kernels(self, rules: Sequence[OptimizerRule]) -> List[FusedKernel]:
        # They take hyper-parameters as numbers, and are no graph that could be compiled.
        if self._tabled or self._compiler is not None:
            return []
        fused = [fused_for(rule, flat) for rule, flat in zip(rules, self._storage.flats)]
        kernels = [kernel for kernel in fused if kernel is not None]
        return kernels if len(kernels) == len(fused) else []

    def _load(self, block: FlatBlock, flat: Tensor) -> Dict[str, Tensor]:
        """The state that torch has, also what updates leave alone at present.

        Torch's tensors look into it from then on, so that not all are in memory twice.
        """
        state: Dict[str, Tensor] = {}
        states = [(slot, self._optimizer.state.get(slot.parameter, {})) for slot in block.slots]
        for name in self._rule_of(block.group).all_tensors:
            present = [each for each in states if each[1].get(name) is not None]
            if present:
                tensors = {
                    slot.name: torch.zeros_like(slot.parameter) if each is None else each
                    for slot, each in ((slot, each.get(name)) for slot, each in states)
                }
                whole = block.flat(tensors).to(flat)
                state[name] = self.memory.keep(whole)
                for slot, torch_state in present:
                    torch_state[name] = slot.window(state[name])
                if len(states) > 1:
                    give_back_freed_memory(whole.numel() * whole.element_size())
        return state

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
        updates, counts = self._read_rows(rows)
        if self._fused:
            steps = torch.tensor(counts[1:], dtype=torch.float32)
            return list(steps.reshape(len(updates), len(self._storage.blocks), 1).unbind(1))
        return self._coefficients(updates, counts)

    def _read_rows(self, rows: Rows) -> FormedUpdates:
        """Read the settings of the coming updates, and find or make what makes them."""
        counts = [self.counts]
        if rows is self._read[0] and counts[0] == self._read[1][1][0]:
            return self._read[1]
        updates: List[FormedUpdate] = []
        by_row: Dict[int, FormedUpdate] = {}
        for row in rows:
            if id(row) not in by_row:
                settings: Settings = list(map(settings_of, row))
                if self._latest is None or settings != self._latest[0]:
                    switches = self.switches(settings, {})
                    if switches not in self._forms:
                        self._forms[switches] = self._make_form(settings, switches)
                    self._latest = settings, self._forms[switches]
                by_row[id(row)] = self._latest
            updates.append(by_row[id(row)])
            counts.append(list(map(sum, zip(counts[-1], updates[-1][1].counts))))
        self._read = rows, (updates, counts)
        return self._read[1]

    def _coefficients(
        self, updates: Sequence[FormedUpdate], counts: Sequence[Sequence[float]]
    ) -> List[Tensor]:
        """Compute the numbers that the rules of all blocks take in each update, on the host."""
        tables = []
        for i, (block, flat) in enumerate(zip(self._storage.blocks, self._storage.flats)):
            table = [
                form.rules[i].coefficients(settings[block.group], done[i] + 1)
                for (settings, form), done in zip(updates, counts)
            ]
            dtype = torch.float64 if flat.dtype == torch.float64 else torch.float32
            tables.append(torch.tensor(table, dtype=dtype))
        return tables

    def coming(self) -> Tuple[Tensor, ...]:
        """The coefficients of the next update, for each block."""
        if not self._table:
            self._table = self._on_device(self._updates, self._counts)
        return self._table[self._made]

    def like_coming(self, groups: Settings) -> Tuple[Tensor, ...]:
        """Tensors like these, of an update with these settings."""
        return self._on_device(*self._read_rows([groups]))[0]

    def _on_device(
        self, updates: Sequence[FormedUpdate], counts: Sequence[Sequence[float]]
    ) -> List[Tuple[Tensor, ...]]:
        """Compute what the rules take in each of these updates."""
        tables = self._coefficients(updates, counts)
        moved = [table.to(flat.device) for table, flat in zip(tables, self._storage.flats)]
        return list(zip(*(table.unbind() for table in moved)))

    def compiled_as(self, rows: Rows) -> Sequence[Optional[Tuple[object, ...]]]:
        """Tell of each update what is on in its settings if it runs compiled; None if it can't."""
        return [form.compiled_as for _, form in self._read_rows(rows)[0]]

    def rules(self, groups: Settings) -> List[Tuple[str, Dict[str, bool]]]:
        """For each block the name of its rule, and which of the settings are on if compiled."""
        blocks = self._storage.blocks
        named = [settings_of({**groups[block.group], **self._compiled_as}) for block in blocks]
        return [
            (self._rule_of(block.group).__name__, {n: bool(value) for n, value in settings.items()})
            for block, settings in zip(self._storage.blocks, named)
        ]

    def states(self, names: Sequence[Sequence[str]]) -> List[Tensor]:
        """For each parameter, in the order of the blocks, its part of each of its states.

        Args:
            names: of the states of each block.
        """
        return [
            self._states[index][name][slot.start : slot.stop]
            for index, block in enumerate(self._storage.blocks)
            for slot in block.slots
            for name in names[index]
        ]

    def take(self, rows: Rows, tables: Sequence[Tensor]) -> None:
        """Go by these tables, on the device, in the coming updates."""
        updates, counts = self._read_rows(rows)
        self.counts = counts[0]
        self._updates, self._counts = updates, counts
        self._coming = list(zip(*(table.unbind() for table in tables)))
        self._kernel_settings = self._kernel_settings_of(updates, counts) if self._fused else []

    def constants(self, rows: Rows) -> Tuple[object, ...]:
        """Return what the coming updates depend on that is in no table."""
        updates, counts = self._read_rows(rows)
        settings = self._kernel_settings_of(updates, counts) if self._fused else ()
        return (
            *(id(form) for _, form in updates),
            *(tuple(each.values()) for by_block in settings for each in by_block),
        )

    @property
    def counts(self) -> Sequence[float]:
        """Updates done, by block; set where others have counted."""
        return self._counts[self._made]

    @counts.setter
    def counts(self, counts: Sequence[float]) -> None:
        self._updates, self._counts, self._made = (), [counts], 0
        self._coming, self._table = [], []

    def counts_after(self, rows: Rows) -> Sequence[float]:
        """Updates done, by block, once these are."""
        return self._read_rows(rows)[1][-1]

    def _kernel_settings_of(
        self, updates: Sequence[FormedUpdate], counts: Sequence[Sequence[float]]
    ) -> List[List[Dict[str, object]]]:
        """Return the numbers that the kernels take, for each update and block."""
        known: Dict[Tuple[int, Tuple[bool, ...]], List[Dict[str, object]]] = {}
        arguments = []
        for (settings, _), after in zip(updates, counts[1:]):
            key = id(settings), tuple([count > 0 for count in after])
            if key not in known:
                known[key] = [
                    numbers_for(settings[block.group], count)
                    for block, count in zip(self._storage.blocks, after)
                ]
            arguments.append(known[key])
        return arguments

    def apply(self, gradients: Sequence[Tensor]) -> None:
        """One weight update, from gradients as they were accumulated."""
        form, coming = self._updates[self._made][1], self._coming[self._made]
        kept, flats = form.state, self._storage.flats
        at_work = self.memory.fetch(kept) if self.memory.is_apart else kept
        if form.kernels:
            if not self._is_finished:
                gradients = self._finish(gradients, self._storage.blocks, flats)
            state = iter(at_work)
            for i, kernel in enumerate(form.kernels):
                settings = self._kernel_settings[self._made][i]
                first, second = [next(state)], [next(state)]
                largest = [next(state)] if settings["amsgrad"] else []
                step = [coming[i][0]]
                kernel([flats[i]], [gradients[i]], first, second, largest, step, **settings)
        else:
            form.run(*coming, *flats, *gradients, *at_work)
        if self.memory.is_apart:
            for tensor, updated in zip(kept, at_work):
                self.memory.renew(tensor, updated)
        self._made += 1

    def count(self) -> None:
        """One weight update was made elsewhere."""
        self._made += 1

    def skip(self) -> None:
        """Leave a weight update out; what depends on its number is worked out again."""
        rows = [settings for settings, _ in self._updates[self._made + 1 :]]
        self.counts = self.counts
        if rows:
            self.refresh(rows)

    def snapshot(self) -> Tuple[List[Dict[str, Tensor]], Sequence[float]]:
        """A copy of the state."""
        states = [{name: t.clone() for name, t in state.items()} for state in self._states]
        return states, self.counts

    def restore(self, snapshot: Any) -> None:
        """Go back to a copy of the state, in place."""
        states, self.counts = snapshot
        for state, values in zip(self._states, states):
            for name, tensor in state.items():
                # One that was made since began with zeros.
                tensor.copy_(values[name] if name in values else torch.zeros_like(tensor))

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
        return [tensor for state in self._states for tensor in state.values()]

    def release(self) -> None:
        """Let go of the state, which no update needs any more; safe twice.

        Where no update follows at all, a torch optimizer that still looks into it gets its own.
        """
        self._forms, self._latest, self._read, self._updates = {}, None, ((), ((), ((),))), ()
        for block, state in zip(self._storage.blocks, self._states) if self.memory.ended else ():
            while state:
                # One after another: a copy takes as much memory again.
                _, flat = state.popitem()
                is_own = len(block.slots) == 1 and not self.memory.is_apart
                for slot in () if is_own else block.slots:
                    torch_state = self._optimizer.state.get(slot.parameter, {})
                    for name, value in torch_state.items():
                        if isinstance(value, Tensor) and flat_of(value, [flat]) is not None:
                            torch_state[name] = self.memory.for_torch(value)
        self._storage, self._states, self.counts = FlatStorage([]), [], []

    def recorded(self) -> Optional[fx.GraphModule]:
        """The graph of an update; None where it runs without one."""
        run = self._latest[1].run if self._latest else None
        return run if isinstance(run, fx.GraphModule) else None

    def aside(self, times: int) -> Optional[Callable[[Sequence[Tensor]], None]]:
        """Weight updates like the next one, on copies of weights and state, so often."""
        if type(self.memory) is not StateMemory or not (self._fused or self.recorded()):
            return None
        other = copy.copy(self)
        other._storage = copy.copy(self._storage)
        other._storage.flats = [flat.clone() for flat in self._storage.flats]
        other._states, _ = self.snapshot()
        other._forms, other._latest, other._read = {}, None, ((), ((), ((),)))
        other.refresh([self._optimizer.param_groups] * times)
        return other.apply
