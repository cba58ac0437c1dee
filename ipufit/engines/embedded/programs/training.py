"""The training program: records micro-batches, and runs the updates of an execution."""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING, Any, Dict, List, Optional, Sequence, Tuple

import torch

from ipufit.core.batch import CombinedBatch, MicroBatch, ProcessShard, split_by_update
from ipufit.core.compile_arguments import AUTO, INDUCTOR, KERNELS
from ipufit.core.logged_values import merge_rules
from ipufit.core.train_config import Clip
from ipufit.engines.embedded.context import EngineContext
from ipufit.engines.embedded.cuda_graphs import graph_maker
from ipufit.engines.embedded.execution import ExecutionWork, UpdateWay
from ipufit.engines.embedded.flat_optimizer import FlatOptimizer, Rows, RuleOptimizer, Waiting
from ipufit.engines.embedded.gradient_transform import GradientTransform
from ipufit.engines.embedded.inductor.requirements import missing
from ipufit.engines.embedded.optimizer_state_location import HostMemory, StateMemory
from ipufit.engines.embedded.overlapped_reduction import Overlap
from ipufit.engines.embedded.passes.select_kernels import Lowered
from ipufit.engines.embedded.programs.base import BaseProgram
from ipufit.engines.embedded.traced_step import TracedStep, Update, computing
from ipufit.engines.embedded.training_state import CarriedState, StatePlacement, TrainingState
from ipufit.engines.embedded.turns import TurnOptimizer, TurnState, moves_of, turn_states
from ipufit.engines.embedded.update_runner import UpdateRunner
from ipufit.engines.program import ExecutionResult, Form, Prepared, ProgramSpec, TrainState
from ipufit.errors import CaptureError, ConfigurationError, NonFiniteLossError, OptimizerError
from ipufit.optim.resolve import sparse_parameters
from ipufit.optim.rules import rules_by_group
from ipufit.optim.several import groups_of_members
from ipufit.tracing.fingerprint import FrozenValues
from ipufit.tracing.grad_step import ModuleWithLoss, public_name
from ipufit.utils.console import warn_user
from ipufit.utils.malloc_policy import give_back_freed_memory
from ipufit.utils.random_streams import LOCK
from ipufit.utils.state import fork_rng

if TYPE_CHECKING:
    from ipufit.engines.embedded.batching import BatchedStep, Decision
    from ipufit.tracing.comparison import Comparison, Tolerance

_TURNS = "Operators can be timed for one loss, but the updates have several in turn."


class TrainingProgram(BaseProgram):
    """Forward, loss, backward, reduction and optimizer for every update of an execution.

    Composed of what owns the state, wherever that lies, and of the way in which updates run, both
    chosen when it is built.

    Attributes:
        state: all that training changes, from the first :meth:`prepare` until :meth:`close`.
        way: runs executions.
        lowered: how full micro-batches run; None before one came.
        merging: whether larger batches are made of micro-batches; None where an update has but one.
    """

    def __init__(self, engine: EngineContext, spec: ProgramSpec) -> None:
        super().__init__(engine, spec)
        assert spec.optimizer is not None
        assert spec.loss is not None
        self._optimizer = spec.optimizer
        self._takes_turns = bool(spec.loss.turns)
        graphs = None if self._takes_turns else graph_maker(spec, self._device, engine.tape)
        placement = _choose_placement(engine, spec, self._step, self._device, graphs is not None)
        self.state = TrainingState(
            spec,
            self._step,
            engine.carried,
            placement,
            turn_states(spec, engine.step_module) if self._takes_turns else (),
        )
        on_host = self._device.type == "cpu" and not engine.as_device
        # What an earlier turn has moved is taken back with the whole execution. Gradients of the
        # module itself may reach other parameters each time: what is not by name is not taken back.
        is_whole = not self._takes_turns and (on_host or spec.run_eagerly)
        watches = spec.config.detect_nan
        self._runner = UpdateRunner(engine, self.state, self._seed, is_whole or watches, watches)
        self.way: UpdateWay = self._runner
        if graphs is not None:
            # Imported here, as below: what few runs need.
            from ipufit.engines.embedded.programs.cuda_graph import CapturedExecutions

            self.way = CapturedExecutions(engine, self.state, graphs, self._key, self._runner)
        elif not self._takes_turns:
            self._compile_updates()
        self.lowered: Optional[Lowered] = None
        self.merging: Optional[Decision] = None
        self._may_merge = (
            spec.plan.own_micro_batches_per_update > 1
            and not self._takes_turns
            and spec.config.jit in (AUTO, KERNELS)
            and not spec.divides_weights
        )
        self._closed = False
        self._frozen_values = None if spec.run_eagerly else FrozenValues(self._step)

    def _compile_updates(self) -> None:
        """Let updates run compiled, where ``jit`` asks for it or it may pay."""
        jit, runner = self._spec.config.jit, self._runner
        several = self._spec.processes.is_distributed
        is_auto = jit == AUTO and runner.at_once and missing() is None
        is_auto = is_auto and not several and not self._spec.config.detect_nan
        if jit != INDUCTOR and not is_auto:
            return
        from ipufit.engines.embedded.autotune import AutotunedWay, CompiledWay

        way = AutotunedWay if is_auto else CompiledWay
        self.way = way(self.state, runner, self._engine.libraries, self._seed)

    def expect(self, updates: int) -> None:
        """So many updates are to come; what pays in a long run is done for no short one."""
        self.way.expect(updates)

    @property
    def updates(self) -> int:
        """Number of weight updates since ``compile``, including skipped ones."""
        return self.state.updates

    def _record(self, example: MicroBatch, turn: int, spec: ProgramSpec) -> TracedStep:
        state = self.state
        if not state.with_gradient and self._takes_turns:
            self._bind_turns(example, spec)
        recorded = self._record_turn(state.turns[turn], example, spec)
        if not state.with_gradient:
            micro = recorded.micro
            names = [name for name in micro.with_gradient if name in micro.with_grad]
            with self._engine.timed():
                state.bind(tuple(names))
            self._spec.fallback.unreached = [n for n in state.trained if n not in set(names)]
        if self.lowered is None and spec is self._spec:
            self.lowered = recorded.lowered
        state.placement.attach(recorded)
        return recorded

    def _run_itself(self, form: Form, example: MicroBatch, turn: int) -> TracedStep:
        state, fallback = self.state, self._spec.fallback
        if not state.with_gradient and not self._takes_turns:
            # Not what it reaches in this micro-batch, but what it does in recordings.
            names = tuple(n for n in state.trained if n not in set(fallback.unreached))
            state.turns[0].with_gradient = names
            with self._engine.timed():
                state.bind(names)
        recorded = super()._run_itself(form, example, turn)
        if recorded.micro.varies:
            # As in a program that runs eagerly as a whole.
            state.varies = True
            self._runner.at_once = self._runner.at_once or not self._takes_turns
        return recorded

    def _bind_turns(self, example: MicroBatch, spec: ProgramSpec) -> None:
        """Take over the state in the parts that the turns train.

        Which parameters get a gradient in a turn shows when it is recorded.
        """
        state = self.state
        for turn in state.turns:
            self._record_turn(turn, example, spec)
        with self._engine.timed():
            state.bind(())

    def _record_turn(self, turn: TurnState, example: MicroBatch, spec: ProgramSpec) -> TracedStep:
        state = self.state
        if not turn.hands_out:
            spec = dataclasses.replace(spec, want_outputs=False)
        arguments = turn.states[0] if turn.states else state.arguments(self._buffers, turn)
        fixed = [*turn.others, *state.buffers]
        # Among recordings, the module itself has gradients of what they have.
        bound = turn.with_gradient if spec.run_eagerly and not self._spec.run_eagerly else ()
        gradients_apart = functools.partial(state.lay_out_gradients, turn)
        layout = gradients_apart if state.varies or spec.varies else state.lay_out
        recorded = self._engine.record(
            spec, example, turn.trained, fixed, arguments, layout, turn.step, bound
        )
        written = recorded.micro.written
        if written and state.note_written(written):
            self.way.forget()
        names, sparse = recorded.micro.with_gradient, sparse_parameters(spec.optimizer)
        dense = recorded.micro.with_grad.difference(recorded.micro.indices)
        for name in names if sparse else ():
            if id(state.parameters[name]) in sparse and name in dense:
                raise OptimizerError(
                    f"SparseAdam takes only sparse gradients, but that of {public_name(name)!r} "
                    "is dense. Build its layer with sparse=True, or give it another optimizer: "
                    "{'words.*': torch.optim.SparseAdam, '*': 'adam'}."
                )
        turn.with_gradient = turn.with_gradient or names
        if names != turn.with_gradient and not (self._by_form or self._takes_turns):
            # A callback has set another stage or task: the first recording of an epoch says which.
            self._let_go()
            return self._record_turn(turn, example, spec)
        if names != turn.with_gradient:
            different = sorted(set(names) ^ set(turn.with_gradient))[0]
            raise CaptureError(
                "the same parameters must get a gradient for every size of micro-batch, but "
                f"with {example.size} samples {public_name(different)!r} differs. Remove the "
                "branch on the batch size."
            )
        return recorded

    def prepare(self, example: MicroBatch) -> Prepared:
        """Record the program, or look again what it was recorded from.

        Raises:
            ConfigurationError: a parameter was frozen or unfrozen since the program was built.
            ProcessError: callbacks of some processes have changed the optimizer's state, and those
                of others have not, where it lies in parts.
        """
        state = self.state
        if state.with_gradient:
            if state.placement.must_take_over():
                self._let_go()
            if not self._spec.run_eagerly:
                self._by_form = {}
        prepared = super().prepare(example)
        if self._frozen_values is not None:
            self._frozen_values.note()
        example = example.to(self._device)
        recorded = self._recorded(example)
        if self._takes_turns:
            return self._prepare_turns(example, prepared)
        is_full = example.size == self._spec.plan.micro_batch_size
        is_full = is_full and (recorded.graph is not None or self._spec.run_eagerly)
        if is_full:
            self.lowered = recorded.lowered
        if is_full or self._runner.overlap is None:
            self._runner.overlap = self._find_overlap(recorded)
        self._runner.counted = recorded.micro.reported.counted
        if is_full and self._may_merge:
            self._merge(example, recorded)
        return prepared

    def _prepare_turns(self, example: MicroBatch, prepared: Prepared) -> Prepared:
        """Record the other turns, and join what is known of all."""
        state, rules = self.state, dict(prepared.rules)
        steps: Dict[str, int] = {}
        for turn in state.turns:
            micro = self._recorded(example, turn.number).micro
            assert turn.turn is not None
            for name in micro.reported.rules:
                if steps.setdefault(name, turn.turn.step) != turn.turn.step:
                    raise ConfigurationError(
                        f"steps must log values under names of their own, but two of them have "
                        f"{name!r}. Rename it in one of them."
                    )
            rules = merge_rules(rules, micro.reported.rules)
            if turn.hands_out:
                outputs = micro.outputs.rebuild(micro.outputs.tensors)
                prepared = dataclasses.replace(prepared, outputs=outputs)
        return dataclasses.replace(prepared, rules=rules)

    def _find_overlap(self, recorded: TracedStep) -> Optional[Overlap]:
        """Return what times the sums over processes, where there are several buckets."""
        meeting, carried = recorded.lowered.meeting, self._engine.carried
        if meeting is None:
            is_apart = recorded.graph is None and not self._spec.run_eagerly
            is_apart = is_apart and self._spec.processes.is_distributed
            if is_apart and carried.overlap is None and len(self.state.storage.blocks) > 1:
                raise CaptureError(
                    "over several processes the first batch of a fit must be one that can be "
                    "recorded, but that of this process can't be. Let the loader begin with "
                    "another one, or use compile(..., run_eagerly=True)."
                )
            return carried.overlap if is_apart else None
        if carried.overlap is None or carried.overlap.order != meeting.order:
            carried.overlap = Overlap(self._spec.processes, meeting.order)
        return carried.overlap

    def _merged(self, updates: Sequence[Update]) -> Dict[TracedStep, BatchedStep]:
        """Return, by recorded micro-batch, what takes several at once where an update allows it.

        Which they are depends on each update alone, and so on no division into executions.
        """
        plan = self._spec.plan
        merged: Dict[TracedStep, BatchedStep] = {}
        for update in updates:
            if len({recorded for _, recorded in update}) != 1:
                continue
            batch, recorded = update[0]
            is_whole = len(update) == plan.own_micro_batches_per_update
            is_whole = is_whole or batch.size == plan.micro_batch_size
            if recorded not in merged and is_whole and recorded.graph is not None:
                step = self._merge(batch, recorded)
                if step is not None:
                    merged[recorded] = step
        return merged

    def _merge(self, example: MicroBatch, recorded: TracedStep) -> Optional[BatchedStep]:
        """Return the step that takes several micro-batches like this one at once, if any."""
        # Imported here: what few models need.
        from ipufit.engines.embedded.batching import Merger

        merger = Merger(self._spec, recorded, example, self.state.states[0])
        self.merging = self._engine.merge(merger, self.state.replicas)
        return self.merging.merged

    def run(self, batch: CombinedBatch) -> ExecutionResult:
        """One execution: every update in turn, its micro-batches in stream order.

        Raises:
            NonFiniteLossError: the state is that before the update named in it.
        """
        state, schedule = self.state, self._spec.config.schedule
        if state.averages is not None and state.averages.swapped:
            raise ConfigurationError(
                "training needs the weights, but the module holds their moving averages now. "
                "Call model.swap_ema_weights() again before training continues."
            )
        if state.mode is not None:
            state.mode.train(state.storage)
        if self._frozen_values is not None:
            self._frozen_values.look()
        placement, start = state.placement, state.updates
        is_bound = bool(state.with_gradient)
        # Both look and take over what they can, so neither is left out for the other.
        if is_bound and placement.follow_the_module() | placement.follow_the_optimizer(start):
            self._let_go()
        work, is_here, is_random = self._trace(batch.micro_batches)
        updates, shares = self._by_update(work, batch)
        merged = self._merged(updates) if self._may_merge else {}
        rows: Rows = [self._optimizer.param_groups] * len(updates)
        if schedule is not None:
            before, steps = schedule.snapshot(), batch.accumulation_steps(self._spec.plan)
            rows = schedule.rows(len(updates), steps)
        execution = ExecutionWork(batch, updates, rows, shares, is_here, is_random, merged)
        if isinstance(state.updater, TurnOptimizer):
            execution.moves = state.updater.moves = moves_of(state.turns, start, len(updates))
            execution.rows = [rows[move.update] for move in execution.moves]
            execution.updates = [
                [(each, self._recorded(each, move.turn.number)) for each, _ in updates[move.update]]
                for move in execution.moves
            ]
            recorded_steps = [recorded for update in execution.updates for _, recorded in update]
            execution.is_random = any(recorded.random for recorded in recorded_steps)
        try:
            if self._draws_freely:
                with self._isolated_generators():
                    return self.way.run(execution)
            return self.way.run(execution)
        except BaseException as error:
            if schedule is not None:
                schedule.restore(before)
                schedule.rows(state.updates - start, steps)
            if isinstance(error, NonFiniteLossError):
                # All processes have it, at the same update.
                state.placement.gather_weights()
                if not (self._takes_turns or self._spec.processes.is_distributed):
                    raise self._traced(error, execution, state.updates - start) from None
            raise

    def _traced(
        self, error: NonFiniteLossError, execution: ExecutionWork, lost: int
    ) -> NonFiniteLossError:
        """Return the error with the layer, the line and the samples where it began, if possible.

        Args:
            error: of an update that was not made.
            execution: that the update belongs to.
            lost: its place there.
        """
        from ipufit.engines.embedded.replay_update import Replay

        updates = execution.updates
        before = sum(batch.size for update in updates[:lost] for batch, _ in update)
        update = [(batch.to(self._device), recorded) for batch, recorded in updates[lost]]
        replay = Replay(self.state, self._seed, self._spec.config.detect_nan)
        try:
            with computing(self._device, execution.is_random), fork_rng():
                return replay.explain(error, update, before)
        except Exception:
            # Such as one of a module that can't run operator by operator, or for lack of memory.
            return error

    def _by_update(
        self, work: Update, batch: CombinedBatch
    ) -> Tuple[List[Update], Optional[List[ProcessShard]]]:
        """The micro-batches of each update, and what they are of those of all processes."""
        plan = self._spec.plan
        if batch.layout is None:
            group = plan.micro_batches_per_update
            return [work[i : i + group] for i in range(0, len(work), group)], None
        shares = batch.shares(plan)
        return [*split_by_update(work, shares)], shares

    def stage(self, batch: CombinedBatch) -> CombinedBatch:
        """Start to bring a batch to the device, ahead of its execution."""
        return self.way.stage(batch)

    def compare(self, batch: MicroBatch, reference: str, tolerance: Tolerance) -> Comparison:
        """Hold the recorded micro-batch against a reference; nothing is trained.

        Args:
            batch: one micro-batch.
            reference: "eager" or "float64".
            tolerance: what is no difference.
        """
        from ipufit.engines.embedded.compare_with_reference import ReferenceComparison

        batch = batch.to(self._device)
        recorded = self._recorded(batch)
        seed = functools.partial(self._seed, recorded, self.updates)
        with computing(self._device, recorded.random):
            comparison = ReferenceComparison(self.state, recorded, batch, seed, tolerance)
            return comparison.run(reference)

    def profile(self, batch: MicroBatch) -> Dict[str, Any]:
        """Time the operators of a micro-batch, on copies; nothing is trained.

        Args:
            batch: one micro-batch.
        """
        from ipufit.engines.embedded.profiling.profile import DIVIDED, OperatorProfiler

        if self._takes_turns:
            return {"missing": _TURNS}
        if self.state.placement.weights is not None:
            # A micro-batch meets the other processes on its way.
            return {"missing": DIVIDED}
        batch = batch.to(self._device)
        recorded = self._recorded(batch)
        is_full = batch.size == self._spec.plan.micro_batch_size
        may_merge = is_full and self._may_merge and recorded.graph is not None
        merged = self._merge(batch, recorded) if may_merge else None
        seed = functools.partial(self._seed, recorded, self.updates)
        # Forward runs once more to be recorded, and may draw from any of them.
        with LOCK, fork_rng(), torch.no_grad():
            at_once, jit = self._runner.at_once, self.way.jit
            args = (self.state, recorded, batch, jit, merged, seed, at_once)
            return OperatorProfiler(*args).run()

    def read_state(self) -> TrainState:
        """Copies of everything that training has changed, whichever weights are in the module."""
        return self.state.read()

    def write_state(self, state: TrainState) -> None:
        """Continue from another state. Replicas that it does not know start like its first."""
        self.state.write(state)
        self._forget()

    def share_buffers(self) -> None:
        """The module's buffers, and weights in parts, become in all processes the present ones."""
        self._spec.processes.broadcast(list(self._buffers.values()))
        self.state.placement.gather_weights()

    def gather_weights(self) -> None:
        """Bring the module's parameters up to date, where they lie in parts."""
        self.state.placement.gather_weights()

    def enter_eval(self) -> None:
        """Put an optimizer's separate weights for evaluation into the module."""
        if self.state.mode is not None:
            self.state.mode.eval(self.state.storage)

    def gather_optimizer(self) -> None:
        """Give torch's optimizer the whole state, where it lies in parts."""
        self.state.gather_optimizer()

    def swap_averages(self) -> None:
        """Exchange weights and averages; without averages, nothing."""
        self.state.swap_averages()

    def adopt_averages(self) -> None:
        """The averages become the weights; without averages, nothing."""
        self.state.adopt_averages()

    def publish(self) -> None:
        """Write the optimizer's state where torch keeps it, unless it lies in parts."""
        self.state.publish()

    def _let_go(self) -> None:
        """Give back parameters and state; the next recording takes over what is there then."""
        self.state.publish()
        self.state.unbind()
        self._forget()

    def _forget(self) -> None:
        """Let go of what works on a state that is elsewhere now."""
        self._by_form = {}
        for turn in self.state.turns:
            turn.with_gradient = turn.present = ()
        self.way.forget()

    def close(self) -> None:
        """The module gets memory of its own again, the optimizer its state; safe twice."""
        if self._closed:
            return
        self._closed = True
        self.way.close()
        try:
            self.state.close()
        except RuntimeError as error:
            # What ended the use of a GPU is on its way to the user, and must not be hidden.
            if not str(error).startswith("CUDA error: "):
                raise
            warn_user(
                "this process can't use the GPU any more, and the training since the last "
                "checkpoint is lost. Restart Python."
            )
        if self._device.type == "cpu":
            give_back_freed_memory()
        self.way.forget()


def _choose_placement(
    engine: EngineContext,
    spec: ProgramSpec,
    step: ModuleWithLoss,
    device: torch.device,
    tabled: bool,
) -> StatePlacement:
    """Choose where weights and optimizer state of a training program lie, and who updates them.

    Args:
        engine: has what an earlier program has left.
        spec: of the program.
        step: the user's module with the loss.
        device: of the module.
        tabled: whether hyper-parameters that change must reach an update as tensors.
    """
    carried, config = engine.carried, spec.config
    # What is in the host's own memory can't be moved there.
    is_apart = device.type != "cpu" or engine.as_device
    memory = HostMemory(device) if config.offload_optimizer_state and is_apart else StateMemory()
    # Imported here: what few runs need.
    if spec.divides_weights or (config.shard_optimizer and spec.processes.is_distributed):
        from ipufit.engines.embedded.programs.sharded import FSDPPlacement, ShardedPlacement

        kind = FSDPPlacement if spec.divides_weights else ShardedPlacement
        return kind(spec, step, carried, memory, device)
    assert spec.optimizer is not None
    assert spec.loss is not None
    groups = groups_of_members(spec.optimizer)
    group_clips = tuple((groups[name], clip) for name, clip in config.optimizer_clips)
    finish = GradientTransform(config.clip, config.accumulation_dtype, group_clips)
    make = functools.partial(_make_updater, spec, carried, memory, tabled)
    updater = make(finish)
    if spec.loss.turns:
        plain = GradientTransform(Clip(), None)
        updater = TurnOptimizer(functools.partial(make, plain), finish)
    return StatePlacement(spec, step, carried, updater, device)


def _make_updater(
    spec: ProgramSpec,
    carried: CarriedState,
    memory: StateMemory,
    tabled: bool,
    finish: GradientTransform,
    waiting: Optional[Waiting] = None,
) -> FlatOptimizer:
    """Flat rules for the optimizers that have one, the optimizer's own ``step`` for any other."""
    optimizer, config = spec.optimizer, spec.config
    assert optimizer is not None
    graphs, schedule, compiler = carried.optimizer_graphs, config.schedule, config.compiler
    by_rule = rules_by_group(optimizer)
    if all(by_rule):
        return RuleOptimizer(optimizer, by_rule, graphs, finish, schedule, memory, tabled, compiler)
    # Imported here: what few runs need.
    from ipufit.engines.embedded.traced_optimizer import make_mixed

    plain = GradientTransform(Clip(), None)
    rules = RuleOptimizer(optimizer, by_rule, graphs, plain, schedule, memory, tabled, compiler)
    return make_mixed(optimizer, by_rule, rules, finish, memory, compiler, waiting)
