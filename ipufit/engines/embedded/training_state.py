"""All that training changes, with one owner: weights, buffers, optimizer state, averages, scale."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import TYPE_CHECKING, Any, Collection, Dict, List, Mapping, Optional, Sequence, Tuple

import torch
from torch import Tensor, nn

from ipufit.core.precision import warn_of_vanishing_eps
from ipufit.engines.embedded.ema import MovingAverages, OptimizerMode
from ipufit.engines.embedded.flat_optimizer import FlatOptimizer, Graphs, Rows
from ipufit.engines.embedded.gradient_transform import Scaler, ScaleState
from ipufit.engines.embedded.overlapped_reduction import Overlap, buckets_of
from ipufit.engines.embedded.turns import TurnOptimizer, TurnState, parts_of
from ipufit.engines.external_changes import OptimizerStateVersion, changed_shape, refuse_replaced
from ipufit.engines.program import ProgramSpec, TrainState
from ipufit.optim.several import groups_of_members, index_of_group
from ipufit.tracing.flat_storage import FlatBlock, FlatStorage, flatten_like, is_shared, set_apart
from ipufit.tracing.grad_step import ModuleWithLoss, public_name
from ipufit.tracing.validate import on_host, refuse_complex, refuse_shared_memory
from ipufit.utils import tree
from ipufit.utils.state import copy_optimizer_state, load_optimizer_state, same_values

if TYPE_CHECKING:
    from ipufit.engines.embedded.fsdp import ShardedWeights
    from ipufit.engines.embedded.traced_step import TracedStep
    from ipufit.engines.embedded.zero import StateParts


Buffers = Dict[str, Tensor]


def copy_of(buffers: Mapping[str, Tensor]) -> Buffers:
    """Independent copies."""
    return {name: tensor.detach().clone() for name, tensor in buffers.items()}


def put_back(buffers: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> None:
    """Write values into the buffers, in place."""
    for name, value in values.items():
        buffers[name].copy_(value)


class ReplicaMemory:
    """Buffers of every replica as a training program left them.

    The module holds those of replica 0 of all processes. A later program with as many replicas
    goes on where the others stopped, unless the module's own buffers have been changed in between.
    """

    def __init__(self) -> None:
        self._buffers: List[Buffers] = []
        self._module: Buffers = {}

    def keep(self, buffers: List[Buffers], module: Buffers) -> None:
        """Remember those of this process's replicas, and of the module."""
        self._buffers = [copy_of(own) for own in buffers]
        self._module = copy_of(module)

    def of_row(self, row: int, names: Mapping[str, str]) -> ReplicaMemory:
        """Make the memory of one of several models, whose buffers have a row for each of them.

        Args:
            row: its number.
            names: of these buffers; other ones are those of all models.
        """
        memory = ReplicaMemory()
        *memory._buffers, memory._module = (
            {names.get(name, name): t[row] if name in names else t for name, t in each.items()}
            for each in (*self._buffers, self._module)
        )
        return memory

    def recall(self, replicas: int, module: Buffers, apart: bool = False) -> List[Buffers]:
        """Buffers for each replica.

        Args:
            replicas: how many there are in this process.
            module: the module's own.
            apart: whether these belong to another process's replica; if not, to the first here.
        """
        before = self._module
        unchanged = (
            len(self._buffers) == replicas
            and before.keys() == module.keys()
            and all(same_values(before[name], module[name]) for name in module)
        )
        copies = [copy_of(each) for each in (self._buffers if unchanged else [module] * replicas)]
        return copies if apart else [module, *copies[1:]]


class CarriedState:
    """State that outlives a training program, and that the next one of the engine goes on from.

    Attributes:
        replicas: buffers of every replica.
        averages: moving averages of weights, by parameter, which callbacks may rename.
        scale: the loss scale; None before a program had one.
        optimizer_graphs: recorded optimizer updates, by all that they depend on.
        state_parts: this process's part of the optimizer's state, where it lies in parts and no
            program has it.
        weights: those of which each process has a part, while a training program lives.
        overlap: says when several processes add gradients that are in several buckets.
    """

    def __init__(self) -> None:
        self.replicas = ReplicaMemory()
        self.averages: Dict[Tensor, Tensor] = {}
        self.scale: Optional[ScaleState] = None
        self.optimizer_graphs: Graphs = {}
        self.state_parts: Optional[StateParts] = None
        self.weights: Optional[ShardedWeights] = None
        self.overlap: Optional[Overlap] = None


@dataclasses.dataclass(frozen=True)
class Snapshot:
    """Copies of everything in a :class:`TrainingState`.

    Attributes:
        whole: all of it by name, and the names of what was bound, where another update may bind
            other parameters; then the rest is empty.
    """

    flats: List[Tensor]
    buffers: List[Dict[str, Tensor]]
    optimizer: object
    averages: Optional[List[Tensor]]
    scale: Optional[ScaleState]
    updates: int
    whole: Optional[Tuple[TrainState, Tuple[str, ...]]] = None

    def tensors(self) -> List[Tensor]:
        """All copies, in one order."""
        return tree.tensors((self.flats, self.buffers, self.optimizer, self.averages))


@dataclasses.dataclass(eq=False)
class StatePlacement:
    """Where weights and optimizer state lie between updates: whole, in every process.

    Owns both between :meth:`bind` and :meth:`unbind`.

    Attributes:
        spec: of the training program.
        step: the user's module with the loss.
        carried: what an earlier program has left.
        updater: applies the optimizer, and holds its state.
        device: of the module.
        memory: where that state is between two updates.
        storage: the trained parameters; empty while nothing is bound.
        cuts: of each block, where each process gets a part of its gradient; None: all get it whole.
        weights: the weights, where each process has a part of them; None: all have all.
    """

    spec: ProgramSpec
    step: ModuleWithLoss
    carried: CarriedState
    updater: FlatOptimizer
    device: torch.device

    def __post_init__(self) -> None:
        assert self.spec.optimizer is not None
        self.memory = self.updater.memory
        self.storage = FlatStorage([])
        self.cuts: Optional[Sequence[Sequence[int]]] = None
        self.weights: Optional[ShardedWeights] = None
        self._optimizer = self.spec.optimizer
        self._version = OptimizerStateVersion(self.spec.optimizer)
        # All tensors of the module, which must stay the same objects; one that runs eagerly may
        # give its buffers others.
        self._tensors = self.step.tensors()
        if self.spec.run_eagerly:
            self._tensors = dict(self.step.named_parameters())

    def bind(
        self, blocks: List[FlatBlock], others: Sequence[Tuple[str, nn.Parameter]], updates: int
    ) -> FlatStorage:
        """Take over parameters and optimizer state.

        Args:
            blocks: the parameters that a gradient reaches.
            others: by name, the others.
            updates: weight updates done so far.

        Returns:
            The trained parameters.
        """
        self.storage = self._make_storage(blocks, others)
        try:
            self.updater.bind(self.storage, self.spec.run_eagerly)
        except BaseException:
            self.storage.release()
            raise
        self._note(updates)
        return self.storage

    def _make_storage(
        self, blocks: List[FlatBlock], others: Sequence[Tuple[str, nn.Parameter]]
    ) -> FlatStorage:
        return FlatStorage(blocks, others)

    def _note(self, updates: int) -> None:
        """Remember that torch's optimizer has the state after so many updates."""
        updater = self.updater
        self._version.note(updates, updater.state_tensors(), updater.own_parameters)

    def attach(self, recorded: TracedStep) -> None:
        """Let a recording know the weights that it takes, where these are not its arguments."""

    def must_take_over(self) -> bool:
        """Tell before an epoch, in all processes, whether callbacks have changed the state."""
        return False

    def follow_the_optimizer(self, updates: int) -> bool:
        """Tell before an execution whether a callback has changed the optimizer's state.

        Args:
            updates: weight updates done so far.

        Raises:
            ConfigurationError: it changed a state that can't be taken over.
        """
        return self._version.to_take_over(updates)

    def follow_the_module(self) -> bool:
        """Take over what a callback has put into parameters by other means than in place.

        Returns:
            Whether that can't be done in place: somebody holds what was there before.

        Raises:
            ConfigurationError: a parameter or buffer is another object now.
        """
        refuse_replaced(self.step, self._tensors)
        for _, parameter, view in self.storage.places:
            data = parameter.data
            is_elsewhere = data.data_ptr() != view.data_ptr()
            if is_elsewhere and is_shared(view):
                return True
            if is_elsewhere or data.stride() != view.stride():
                self.storage.follow(changed_shape)
        return False

    def publish(self, updates: int) -> None:
        """Write the optimizer's state, after so many updates, where torch keeps it."""
        # What a callback has made of it is the newer one, until the next update takes it over.
        if not self._version.is_ahead(updates):
            self.updater.export()
            self._note(updates)

    def gather_optimizer(self, updates: int) -> None:
        """Give torch's optimizer the whole state after so many updates, where it lies in parts."""

    def gather_weights(self) -> None:
        """Bring the module's parameters up to date, where they lie in parts."""

    def read_optimizer(self) -> Dict[str, Any]:
        """Return a copy of the optimizer's state, once published, as torch has it."""
        return copy_optimizer_state(self._optimizer)

    def forget(self) -> None:
        """Take another optimizer state, which torch's optimizer has, from now on."""

    def unbind(self) -> None:
        """Give back parameters and state, to where the next owner finds them; safe twice."""
        self.updater.release()
        self.storage.release()

    def release(self) -> None:
        """Let go of what the program worked on: somebody may hold on to the program."""
        self._version.release()


class TrainingState:
    """Owns all that training changes, from when a program takes it over until it lets go.

    Between :meth:`bind` and :meth:`unbind` the module's trained parameters are views of flat
    tensors, and the buffers of replica 0 are the module's own.

    Args:
        spec: of the training program.
        step: the user's module with the loss.
        carried: what an earlier program has left; takes what this one leaves.
        placement: where weights and optimizer state lie.

    Attributes:
        spec, step, placement: as passed.
        device: of the module.
        parameters, buffers: of the step, by name.
        trained: names of the parameters that are trained.
        with_gradient: names of those that a gradient reaches; empty while nothing is bound.
        updater: applies the optimizer, and holds its state.
        scaler: follows the loss scale; None without one.
        replicas: buffers of each replica; those of replica 0 are the module's own.
        written: parameters that micro-batches themselves change in place, by name.
        in_place: all that these change: buffers of each replica, and such parameters.
        updates: weight updates done since ``compile``, skipped ones included.
        storage: the trained parameters.
        averages: their moving averages; None without averaging.
        mode: of the optimizer, where it has weights of its own for evaluation; else None.
        turns: losses that an update computes one after another, with what each moves; one of a
            program with one loss.
        varies: whether an update may reach other parameters than the one before.
    """

    def __init__(
        self,
        spec: ProgramSpec,
        step: ModuleWithLoss,
        carried: CarriedState,
        placement: StatePlacement,
        turns: Sequence[TurnState] = (),
    ) -> None:
        assert spec.optimizer is not None
        self.spec = spec
        self.step = step
        self._carried = carried
        self.device = placement.device
        self._optimizer = spec.optimizer
        self.parameters: Dict[str, nn.Parameter] = dict(step.named_parameters())
        self.buffers: Dict[str, Tensor] = dict(step.named_buffers())
        owned = index_of_group(spec.optimizer)
        self.trained = [
            name for name, p in self.parameters.items() if p.requires_grad and id(p) in owned
        ]
        if spec.config.shard_optimizer and spec.processes.is_distributed:
            refuse_complex(self.trained, self.parameters)
        self._staying = refuse_shared_memory(step, self.trained, spec.divides_weights)
        warn_of_vanishing_eps(spec.optimizer)
        self.placement = placement
        self.updater = placement.updater
        scale = spec.config.loss_scale
        self.scaler = Scaler(scale, carried.scale) if scale else None
        self.replicas = carried.replicas.recall(
            spec.plan.replicas, self.buffers, apart=not spec.processes.is_rank_zero
        )
        self.written: Buffers = {}
        self.in_place = [*self.replicas, self.written]
        self.updates = spec.first_update
        self.storage = placement.storage
        self.averages: Optional[MovingAverages] = None
        # Of each of the optimizers that it is made of.
        self._first_groups = [each.start for each in groups_of_members(spec.optimizer).values()]
        has_modes = hasattr(spec.optimizer, "train") and hasattr(spec.optimizer, "eval")
        self.mode = OptimizerMode(spec.optimizer) if has_modes else None
        self._parts: List[List[str]] = []
        frozen = [name for name in self.parameters if name not in set(self.trained)]
        self.turns = [*turns] or [TurnState(step, self.trained, frozen)]
        self.with_gradient: Tuple[str, ...] = ()
        self.varies = spec.varies
        # Names of the parameters that were bound last, but for a single update.
        self._ever_bound: Tuple[str, ...] = ()

    @property
    def states(self) -> List[List[Tensor]]:
        """For each replica, what a micro-batch is computed from: parameters and its buffers."""
        return self.turns[0].states

    def lay_out(self, names: Sequence[str]) -> List[FlatBlock]:
        """Divide these parameters into blocks that are updated alike, and in the same turns."""
        blocks = self.storage.blocks if self.with_gradient else []
        # Those that are bound stay together: of several ages, all have had an update some day.
        ages = {slot.name: block.updates for block in blocks for slot in block.slots}
        is_shared = self.spec.processes.is_distributed and not self._parts
        result: List[FlatBlock] = []
        for chosen in (*self._parts, set(names).difference(*self._parts)):
            named = [(name, self.parameters[name]) for name in names if name in chosen]
            for bucket in buckets_of(named) if is_shared else [named]:
                for part in set_apart(bucket, self._staying, not (is_shared or self._parts)):
                    result += self.updater.layout(part, ages)
        return result

    def lay_out_gradients(self, turn: TurnState, names: Sequence[str]) -> Sequence[FlatBlock]:
        """Divide these parameters into blocks for the gradients of a module that runs eagerly.

        For a turn it is always the same division: micro-batches of several structures add to one
        sum.
        """
        turn.gradient_blocks = turn.gradient_blocks or self.lay_out(names)
        return turn.gradient_blocks

    def gradients_like(self, turn: TurnState) -> List[Tensor]:
        """Tensors of the form of the gradients of a turn, as its micro-batches have them."""
        if not self.varies:
            return [self.storage.flats[place] for place in turn.blocks]
        return [
            flatten_like(block.slots[0].parameter.new_zeros(1), (0,))[:1].expand(
                block.slots[-1].stop
            )
            for block in turn.gradient_blocks
        ]

    def finish(self, gradients: List[Tensor], turn: TurnState) -> List[Tensor]:
        """Bound the gradients of a turn together: parts of the optimizer get them apart."""
        assert isinstance(self.updater, TurnOptimizer)
        blocks = turn.gradient_blocks if self.varies else self._blocks_of(turn)
        return self.updater.finish(gradients, blocks, self.gradients_like(turn))

    def _blocks_of(self, turn: TurnState) -> List[FlatBlock]:
        return [self.storage.blocks[place] for place in turn.blocks]

    def bind_present(
        self, gradients: List[Tensor], present: Collection[str], turn: TurnState
    ) -> List[Tensor]:
        """Bind the parameters that a gradient came to in an update, and cut the gradient to them.

        An optimizer passes over the others, as torch's do where ``.grad`` is None. They are in
        other parts where there are turns; else those that ever had a gradient are bound again by
        :meth:`bind_all`.

        Args:
            gradients: of the update, laid out by :meth:`lay_out_gradients`.
            present: names of the parameters.
            turn: that the update is of.
        """
        names = tuple(name for name in turn.trained if name in present)
        if isinstance(self.updater, TurnOptimizer):
            if names != turn.present:
                turn.present = names
                self._rebind(())
        elif names != self.with_gradient:
            ever = {*present, *self.with_gradient}
            self._rebind(names)
            self._ever_bound = tuple(name for name in self.trained if name in ever)
        return turn.cut(gradients, self._blocks_of(turn))

    def bind_all(self) -> bool:
        """Bind all parameters that ever had a gradient; return whether some were not bound."""
        if self._ever_bound == self.with_gradient:
            return False
        self._rebind(self._ever_bound)
        return True

    def _rebind(self, names: Tuple[str, ...]) -> None:
        self.placement.publish(self.updates)
        self.unbind()
        self.bind(names)

    def arguments(self, buffers: Mapping[str, Tensor], turn: TurnState) -> List[Tensor]:
        """Return what a micro-batch of a replica with these buffers is computed from."""
        # Not what the module has: somebody who shares that with other processes moves it.
        views, parameters = self.storage.views, self.parameters
        names = [*turn.trained, *turn.others]
        tensors = [views[n] if n in views else parameters[n].detach() for n in names]
        return [*tensors, *buffers.values()]

    def note_written(self, names: Collection[str]) -> bool:
        """Have parameters that micro-batches change in place go back as buffers do.

        Args:
            names: of all that they change in place.

        Returns:
            Whether a parameter among them is new.
        """
        written = set() if self.spec.divides_weights else self.parameters.keys() & names
        is_new = not written <= self.written.keys()
        views = self.storage.views
        self.written.update({n: views.get(n, self.parameters[n].data) for n in written})
        return is_new

    def call_arguments(self, state: Sequence[Tensor], leaves: Sequence[Tensor]) -> List[Tensor]:
        """All that a recording takes: the state, a batch's leaves and the loss scale, if any."""
        scale = [] if self.scaler is None else [self.scaler.tensor(leaves[0].device)]
        return [*state, *leaves, *scale]

    def bind(self, with_gradient: Tuple[str, ...]) -> None:
        """Take over parameters and optimizer state.

        Args:
            with_gradient: names of the parameters that a gradient reaches; turns know theirs.
        """
        updater = self.updater
        if isinstance(updater, TurnOptimizer):
            with_gradient = self._divide(updater)
        if self.mode is not None:
            self.mode.train(self.storage)
        self._ever_bound = with_gradient
        others = [(n, p) for n, p in self.parameters.items() if n not in set(with_gradient)]
        self.storage = self.placement.bind(self.lay_out(with_gradient), others, self.updates)
        self.with_gradient = with_gradient
        if self.written:
            self.note_written(self.written)
        rule, storage = self.spec.config.ema, self.storage
        if rule is not None:
            self.averages = MovingAverages(
                rule, storage.blocks, storage.flats, self._carried.averages
            )
        for turn in self.turns:
            turn.states = [self.arguments(buffers, turn) for buffers in self.replicas]
            if isinstance(updater, TurnOptimizer):
                turn.blocks = [place for part in turn.parts for place in updater.places[part]]
            else:
                turn.blocks = range(len(self.storage.blocks))

    def _divide(self, updater: TurnOptimizer) -> Tuple[str, ...]:
        """Divide parameters into the parts that turns move; return their names in this order."""
        parts = parts_of(self.trained, self.turns)
        for index, turn in enumerate(self.turns):
            turn.parts = [place for place, key in enumerate(parts) if index in key]
        self._parts = list(parts.values())
        updater.divide([len(self.lay_out(part)) for part in self._parts])
        return tuple(name for part in self._parts for name in part)

    def unbind(self) -> None:
        """Give back parameters and state; what is there then is taken over by the next one."""
        if self.mode is not None and self.mode.evaluates:
            self.mode.train(self.storage)
        self._keep_averages()
        self.placement.unbind()
        for turn in self.turns:
            turn.release()
        self.with_gradient, self._parts = (), []

    def close(self) -> None:
        """Give the module memory of its own again, and the optimizer its state."""
        if self.with_gradient:
            self.placement.memory.end()
            self.publish()
            self._carried.replicas.keep(self.replicas, self.buffers)
            if self.averages is not None and self.averages.swapped:
                self.averages.swap(self.storage.flats)
            if self.mode is not None:
                self.mode.eval(self.storage)
        if self.scaler is not None:
            self._carried.scale = self.scaler.state
        self._keep_averages()
        # Callbacks and what explains the run may hold on to the program.
        self.placement.unbind()
        for turn in self.turns:
            turn.release()
        self.placement.release()

    def _keep_averages(self) -> None:
        if self.averages is not None:
            self._carried.averages.update(self.averages.by_parameter())
            self.averages = None

    def publish(self) -> None:
        """Bring the state in torch's optimizer up to date, where it lies whole."""
        if self.with_gradient:
            self.placement.publish(self.updates)
            self.step.refresh_hooks()

    def gather_optimizer(self) -> None:
        """Give torch's optimizer the whole state, where it lies in parts."""
        if self.with_gradient:
            self.placement.gather_optimizer(self.updates)

    def read(self) -> TrainState:
        """Copies of everything that training has changed, whichever weights are in the module."""
        with contextlib.ExitStack() as afterwards:
            if self.averages is not None and self.averages.swapped:
                self.swap_averages()
                afterwards.callback(self.swap_averages)
            if self.mode is not None and self.mode.evaluates:
                self.mode.train(self.storage)
                afterwards.callback(self.mode.eval, self.storage)
            self.placement.gather_weights()
            weights = on_host(self.parameters)
            gathered = self.spec.processes.gather(
                [on_host(replica) for replica in self.replicas], "buffers"
            )
            self.publish()
            optimizer = self.placement.read_optimizer()
            averages = self.averages.by_parameter() if self.averages is not None else {}
            schedule = self.spec.config.schedule
            return TrainState(
                weights,
                [replica for several in gathered for replica in several],
                optimizer,
                self.spec.seed,
                self.updates,
                on_host({n: averages[p] for n, p in self.parameters.items() if p in averages}),
                dataclasses.astuple(self.scaler.state) if self.scaler is not None else None,
                schedule.state_dict() if schedule is not None else None,
            )

    def write(self, state: TrainState) -> None:
        """Continue from another state. Replicas that it does not know start like its first."""
        if self.mode is not None:
            self.mode.train(self.storage)
        state.write_to(self.parameters, {})
        with torch.no_grad():
            if not self.spec.processes.is_rank_zero:
                first = {name: state.buffers[0][public_name(name)] for name in self.buffers}
                put_back(self.buffers, first)
            begin = self.spec.plan.process * self.spec.plan.replicas
            for replica, buffers in enumerate(self.replicas, begin):
                source = replica if replica < len(state.buffers) else 0
                put_back(
                    buffers, {name: state.buffers[source][public_name(name)] for name in buffers}
                )
        load_optimizer_state(self._optimizer, state.optimizer)
        self.unbind()
        self.placement.forget()
        names = {public_name(name): name for name in self.parameters}
        self._carried.averages = {
            self.parameters[names[name]]: tensor.to(self.device)
            for name, tensor in state.averages.items()
        }
        if self.scaler is not None and state.loss_scale is not None:
            self.scaler.state = ScaleState(*state.loss_scale)
        if self.spec.config.schedule is not None and state.schedule is not None:
            self.spec.config.schedule.load_state_dict(state.schedule)
        self.updates = state.updates

    def swap_averages(self) -> None:
        """Exchange weights and averages; without averages, nothing."""
        if self.averages is not None:
            with torch.no_grad():
                self.averages.swap(self.storage.flats)

    def adopt_averages(self) -> None:
        """The averages become the weights; without averages, nothing."""
        if self.averages is not None:
            with torch.no_grad():
                self.averages.adopt(self.storage.flats)

    def describe(self, rows: Rows) -> Dict[str, float]:
        """Return the settings that a program reports after an execution.

        Args:
            rows: settings of the optimizer for each update of the execution.
        """
        described = {}
        if self.spec.config.schedule is not None:
            described["learning_rate"] = float(rows[-1][0]["lr"])
            for number, group in enumerate(self._first_groups[1:], 1):
                described[f"learning_rate_{number}"] = float(rows[-1][group]["lr"])
        if self.scaler is not None:
            described["loss_scale"] = self.scaler.value
        return described

    def snapshot(self) -> Snapshot:
        """Copies of everything."""
        if self.varies or self.spec.run_eagerly:
            whole = self.read(), self.with_gradient
            return Snapshot([], [], None, None, None, self.updates, whole)
        return Snapshot(
            flats=[flat.clone() for flat in self.storage.flats],
            buffers=[copy_of(buffers) for buffers in self.in_place],
            optimizer=self.updater.snapshot(),
            averages=self.averages.snapshot() if self.averages is not None else None,
            scale=self.scaler.state if self.scaler is not None else None,
            updates=self.updates,
        )

    def restore(self, snapshot: Snapshot) -> None:
        """Go back to a snapshot, in place; as often as one likes."""
        if snapshot.whole is not None:
            state, names = snapshot.whole
            self.write(state)
            self.bind(names)
            return
        self.updates = snapshot.updates
        if self.scaler is not None and snapshot.scale is not None:
            self.scaler.state = snapshot.scale
        for flat, value in zip(self.storage.flats, snapshot.flats):
            flat.copy_(value)
        for buffers, values in zip(self.in_place, snapshot.buffers):
            put_back(buffers, values)
        self.updater.restore(snapshot.optimizer)
        if self.averages is not None and snapshot.averages is not None:
            self.averages.restore(snapshot.averages)
