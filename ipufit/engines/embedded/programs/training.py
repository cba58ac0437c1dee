"""The training program: who has parameters, buffers and optimizer state, from when until when."""

from __future__ import annotations

import dataclasses
import time
from typing import TYPE_CHECKING, Any, Dict, List, Optional, Sequence, Tuple

import torch
from torch import Tensor

from ipufit.core.batch import CombinedBatch, MicroBatch, ProcessShard, split_by_update
from ipufit.core.compile_arguments import AUTO, INDUCTOR, KERNELS
from ipufit.core.precision import warn_of_vanishing_eps
from ipufit.engines.embedded.clipping import GradientTransform
from ipufit.engines.embedded.context import EngineContext
from ipufit.engines.embedded.cuda_graphs.policy import graph_maker
from ipufit.engines.embedded.ema import EMA
from ipufit.engines.embedded.execution_outputs import ExecutionOutputs
from ipufit.engines.embedded.external_changes import follow_the_module
from ipufit.engines.embedded.flat_optimizer import FlatOptimizer, Rows, make_flat_optimizer
from ipufit.engines.embedded.inductor.requirements import missing
from ipufit.engines.embedded.loss_scale import Scaler, ScaleState
from ipufit.engines.embedded.optimizer_state_location import state_memory
from ipufit.engines.embedded.optimizer_state_version import OptimizerStateVersion
from ipufit.engines.embedded.overlapped_reduction import Overlap, buckets_of
from ipufit.engines.embedded.programs.base import BaseProgram, on_host
from ipufit.engines.embedded.programs.execution import Execution
from ipufit.engines.embedded.replicas import put_back
from ipufit.engines.embedded.traced_step import TracedStep, Update
from ipufit.engines.embedded.training_state import Snapshot, TrainingState
from ipufit.engines.embedded.update_runner import UpdateRunner
from ipufit.engines.program import ExecutionResult, Prepared, ProgramSpec, TrainState
from ipufit.errors import CaptureError, ConfigurationError
from ipufit.tracing.fingerprint import FrozenValues
from ipufit.tracing.flat_storage import FlatBlock, FlatStorage
from ipufit.tracing.grad_step import public_name
from ipufit.tracing.validate import refuse_shared_memory
from ipufit.utils.malloc_policy import give_back_freed_memory
from ipufit.utils.random_streams import LOCK
from ipufit.utils.state import copy_optimizer_state, fork_rng

if TYPE_CHECKING:
    from ipufit.engines.embedded.autotune import JitAutotuner
    from ipufit.engines.embedded.batching import BatchedStep
    from ipufit.engines.embedded.inductor.compiled import CompiledUpdates
    from ipufit.engines.embedded.programs.cuda_graph import CapturedExecutions
    from ipufit.engines.embedded.replay_update import Replay
    from ipufit.tracing.comparison import Comparison, Tolerance

__all__ = ["TrainingProgram"]


class TrainingProgram(BaseProgram):
    """Forward, loss, backward, reduction and optimizer for every update of an execution.

    From the first :meth:`prepare` until :meth:`close` the module's trained parameters are views of
    the program's flat tensors, and the buffers of replica 0 are the module's own.
    """

    def __init__(self, engine: EngineContext, spec: ProgramSpec) -> None:
        super().__init__(engine, spec)
        assert spec.optimizer is not None
        assert spec.loss is not None
        self._optimizer = spec.optimizer
        owned = {id(p) for group in spec.optimizer.param_groups for p in group["params"]}
        self._trained = [
            name for name, p in self._parameters.items() if p.requires_grad and id(p) in owned
        ]
        trained = set(self._trained)
        self._frozen = [name for name in self._parameters if name not in trained]
        refuse_shared_memory(self._trained, self._parameters, self._buffers)
        warn_of_vanishing_eps(spec.optimizer)
        engine.replaying, engine.replays = None, False
        engine.lowered = engine.merging = None
        makes_graphs = graph_maker(spec.config, self._device, engine.tape)
        self._live = self._make_live(tabled=makes_graphs is not None)
        self._captured: Optional[CapturedExecutions] = None
        if makes_graphs is not None:
            # Imported here, as below: what few runs need.
            from ipufit.engines.embedded.programs.cuda_graph import CapturedExecutions

            self._captured = CapturedExecutions(
                engine, spec, self._live, self._device, makes_graphs, self._key
            )
        self._maker = UpdateRunner(
            spec,
            self._live,
            self._device,
            self._seed,
            at_once=spec.config.detect_nan or (self._device.type == "cpu" and not engine.as_device),
        )
        self._replay: Optional[Replay] = None
        if spec.config.detect_nan:
            from ipufit.engines.embedded.replay_update import Replay

            self._replay = Replay(spec, self._step, self._live, self._seed)
        self._maker.compiled = engine.compiled = engine.autotuner = None
        self._autotuner: Optional[JitAutotuner] = None
        self._make_compiled()
        self._with_gradient: Tuple[str, ...] = ()
        self._closed = False
        self._published = OptimizerStateVersion(self._optimizer)
        self._frozen_values = None if spec.run_eagerly else FrozenValues(self._step)

    def _make_compiled(self) -> None:
        jit, engine = self._spec.config.jit, self._engine
        several = self._spec.processes.is_distributed
        is_auto = jit == AUTO and self._maker.at_once and missing() is None
        is_auto = is_auto and not several and not self._spec.config.detect_nan
        if jit != INDUCTOR and not is_auto:
            return
        from ipufit.engines.embedded.autotune import JitAutotuner
        from ipufit.engines.embedded.inductor.compiled import CompiledUpdates

        compiled = CompiledUpdates(self._spec, self._live, engine.libraries, self._maker.at_once)
        if is_auto:
            self._autotuner = engine.autotuner = JitAutotuner(compiled)
        else:
            self._maker.compiled = engine.compiled = compiled

    def expect(self, updates: int) -> None:
        """So many updates are to come; what pays in a long run is done for no short one."""
        if self._autotuner is not None:
            self._autotuner.expect(updates)

    def _make_live(self, tabled: bool) -> TrainingState:
        spec, engine, config = self._spec, self._engine, self._spec.config
        self._memory = engine.state_memory = state_memory(
            config.offload_optimizer_state, self._device, engine.as_device
        )
        return TrainingState(
            self._make_updater(tabled),
            Scaler(config.loss_scale, engine.scale) if config.loss_scale else None,
            engine.replicas.recall(
                spec.plan.replicas, self._buffers, apart=not spec.processes.is_rank_zero
            ),
            spec.first_update,
        )

    def _make_updater(self, tabled: bool) -> FlatOptimizer:
        config = self._spec.config
        scheduled = None if config.schedule is None else config.schedule.names
        return make_flat_optimizer(
            self._optimizer,
            self._engine.optimizer_graphs,
            GradientTransform(config.clip, config.accumulation_dtype),
            scheduled,
            self._memory,
            tabled and scheduled is not None,
        )

    @property
    def updates(self) -> int:
        """Weight updates done since ``compile``, skipped ones included."""
        return self._live.updates

    def _lay_out(self, names: Sequence[str]) -> List[FlatBlock]:
        named = [(name, self._parameters[name]) for name in names]
        if not self._spec.processes.is_distributed:
            return self._live.updater.layout(named)
        layout = self._live.updater.layout
        return [block for bucket in buckets_of(named) for block in layout(bucket)]

    def _collect_state(self, buffers: Dict[str, Tensor]) -> List[Tensor]:
        # Not what the module has: somebody who shares that with other processes moves it.
        views = self._live.storage.views
        parameters = self._parameters
        names = [*self._trained, *self._frozen]
        tensors = [views[n] if n in views else parameters[n].detach() for n in names]
        return [*tensors, *buffers.values()]

    def _record(self, example: MicroBatch) -> TracedStep:
        state = self._live.states[0] if self._live.states else self._collect_state(self._buffers)
        fixed = [*self._frozen, *self._buffers]
        recorded = self._engine.record(
            self._spec, example, self._trained, fixed, state, self._lay_out
        )
        if not self._with_gradient:
            self._take_over(recorded.with_gradient)
        if recorded.with_gradient != self._with_gradient:
            different = sorted(set(recorded.with_gradient) ^ set(self._with_gradient))[0]
            raise CaptureError(
                "the same parameters must get a gradient whatever the micro-batch's size, but with "
                f"{example.size} samples {public_name(different)!r} differs. Remove the branch on "
                "the batch size."
            )
        return recorded

    def _take_over(self, with_gradient: Tuple[str, ...]) -> None:
        """From here on parameters and optimizer state are the program's."""
        self._live.storage = self._make_storage(with_gradient)
        try:
            with self._engine.timed():
                self._live.updater.bind(self._live.storage, self._spec.run_eagerly)
        except BaseException:
            self._live.storage.release()
            raise
        self._with_gradient = with_gradient
        rule = self._spec.config.averaging
        if rule is not None:
            storage, averages = self._live.storage, self._engine.averages
            self._live.averages = EMA(rule, storage.blocks, storage.flats, averages)
        self._note_published()
        self._live.states = [self._collect_state(buffers) for buffers in self._live.replicas]

    def _make_storage(self, with_gradient: Sequence[str]) -> FlatStorage:
        return FlatStorage(self._lay_out(with_gradient))

    def prepare(self, example: MicroBatch) -> Prepared:
        """Record the program, or look again what it was recorded from.

        Raises:
            ConfigurationError: a parameter was frozen or unfrozen since the program was built.
        """
        if self._with_gradient:
            for name in self._trained:
                if not self._parameters[name].requires_grad:
                    raise ConfigurationError(
                        f"{public_name(name)!r} was frozen during fit, but which parameters are "
                        "trained is fixed when fit starts. Freeze it between two calls of fit."
                    )
            self._by_form = {}
        prepared = super().prepare(example)
        if self._frozen_values is not None:
            self._frozen_values.note()
        example = example.to(self._device)
        is_full = example.size == self._spec.plan.micro_batch_size
        if is_full or self._engine.lowered is None:
            self._engine.lowered = self._recorded(example).lowered
        if is_full:
            if self._autotuner is not None:
                self._autotuner.enter(self._recorded(example), example)
            elif self._maker.compiled is not None:
                self._maker.compiled.start(self._recorded(example), example)
        if is_full or self._maker.overlap is None:
            self._maker.overlap = self._find_overlap(example)
        self._maker.counted = self._recorded(example).reported().counted
        self._find_merged(example)
        return prepared

    def _find_overlap(self, example: MicroBatch) -> Optional[Overlap]:
        """Return what times the sums over processes, where there are several buckets."""
        meeting = self._recorded(example).lowered.meeting
        if meeting is None:
            return None
        known = self._engine.overlap
        if known is None or known.order != meeting.order:
            known = self._engine.overlap = Overlap(self._spec.processes, meeting.order)
        return known

    def _find_merged(self, example: MicroBatch) -> Optional[BatchedStep]:
        """Return the step that takes several micro-batches like this one at once, if any."""
        plan = self._spec.plan
        if (
            plan.own_micro_batches_per_update == 1
            or example.size != plan.micro_batch_size
            or self._spec.config.jit not in (AUTO, KERNELS)
            or self._captured is not None
        ):
            return None
        names = (self._trained, [*self._frozen, *self._buffers])
        return self._engine.merge(
            self._spec,
            example,
            self._recorded(example),
            names,
            self._live.states[0],
            self._live.replicas,
        )

    def run(self, batch: CombinedBatch) -> ExecutionResult:
        """One execution: every update in turn, its micro-batches in stream order."""
        if self._live.averages is not None and self._live.averages.swapped:
            raise ConfigurationError(
                "training works on the weights, but their moving averages stand in their place. "
                "Call model.swap_ema_weights() again before training goes on."
            )
        if self._frozen_values is not None:
            self._frozen_values.look()
        if self._maker.compiled is not None:
            self._maker.compiled.wait()
        self._follow_the_optimizer()
        work = [*zip(batch.micro_batches, self._recorded_for(batch.micro_batches))]
        self._follow_the_module()
        if work:
            self._maker.merged = self._find_merged(work[0][0])
        updates, shares = self._by_update(work, batch)
        start, schedule = self.updates, self._spec.config.schedule
        before = schedule.snapshot() if schedule is not None else None
        rows: Rows = [self._optimizer.param_groups] * len(updates)
        if schedule is not None:
            steps = batch.accumulation_steps(self._spec.plan)
            rows = schedule.rows(len(updates), steps)
        try:
            if self._autotuner is None:
                return self._run(updates, rows, batch, shares)
            self._maker.compiled = self._choose(self._autotuner, updates, rows)
            anchors = self._run(updates, rows, batch, shares)
            self._autotuner.after(len(updates))
            return anchors
        except BaseException:
            if schedule is not None:
                schedule.restore(before)
                schedule.rows(self.updates - start, steps)
            raise

    def _choose(
        self, autotuner: JitAutotuner, updates: Sequence[Update], rows: Rows
    ) -> Optional[CompiledUpdates]:
        """Ask what makes the full updates of an execution; the first of them is there to try."""
        if not autotuner.is_undecided:
            return autotuner.choose(None)
        full = next((each for each in zip(updates, rows) if autotuner.compiled.fits(each[0])), None)
        if full is None:
            return autotuner.choose(None)
        update, row = full
        before: Optional[Snapshot] = None

        def trial(compiled: Optional[CompiledUpdates]) -> float:
            nonlocal before
            # Not before it is needed: what was measured once in a process is not tried again.
            before = before or self._live.snapshot()
            self._maker.compiled = compiled
            self._live.updater.refresh([row])
            try:
                with self._computing([recorded for _, recorded in update]):
                    start = time.perf_counter()
                    self._maker.make(update, 0, set(), ExecutionOutputs(), None)
                    return time.perf_counter() - start
            finally:
                self._live.restore(before)

        return autotuner.choose(trial)

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
        return batch if self._captured is None else self._captured.stage(batch)

    def _run(
        self,
        updates: Sequence[Update],
        rows: Rows,
        batch: CombinedBatch,
        shares: Optional[Sequence[ProcessShard]],
    ) -> ExecutionResult:
        if self._captured is None:
            return self._compute(updates, rows, shares)
        anchors = self._captured.run(updates, rows, batch)
        if anchors is None:
            with self._captured.aside():
                anchors = self._compute(updates, rows)
        return anchors

    def _compute(
        self, updates: Sequence[Update], rows: Rows, shares: Optional[Sequence[ProcessShard]] = None
    ) -> ExecutionResult:
        """Operator by operator."""
        if not self._is_here([batch for update in updates for batch, _ in update]):
            with self._engine.clock.during("to_device"):
                updates = [
                    [(b.to(self._device), recording) for b, recording in update]
                    for update in updates
                ]
        self._live.updater.refresh(rows)
        with self._computing([recorded for update in updates for _, recorded in update]):
            args = (self._engine, self._spec, self._live, self._maker, updates, rows, shares)
            return Execution(*args, self._replay).run()

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

        def seed() -> None:
            self._seed(recorded, self.updates)

        with self._computing([recorded]):
            args = (self._step, self._live, recorded, batch, seed, tolerance)
            return ReferenceComparison(*args).run(reference)

    def profile(self, batch: MicroBatch) -> Dict[str, Any]:
        """Time the operators of a micro-batch, on copies; nothing is trained.

        Args:
            batch: one micro-batch.
        """
        from ipufit.engines.embedded.profiling.profile import OperatorProfiler

        batch = batch.to(self._device)
        recorded = self._recorded(batch)

        def seed() -> None:
            self._seed(recorded, self.updates)

        # Forward runs once more to be recorded, and may draw from any of them.
        with LOCK, fork_rng(), torch.no_grad():
            args = (self._spec, self._step, self._live, recorded, batch, self._maker, seed)
            return OperatorProfiler(*args, captured=self._captured is not None).run()

    def _follow_the_optimizer(self) -> None:
        """Take over what a callback has made of the optimizer's state."""
        if self._with_gradient and self._published.to_take_over(self.updates):
            self._let_go()

    def _follow_the_module(self) -> None:
        """Take over what a callback has put into parameters."""
        follow_the_module(self._step, self._parameters, self._buffers, self._live.storage)

    def read_state(self) -> TrainState:
        """Copies of everything that training has changed, whichever weights are in the module."""
        if self._live.averages is not None and self._live.averages.swapped:
            self.swap_averages()
            try:
                return self.read_state()
            finally:
                self.swap_averages()
        weights = on_host(self._parameters)
        gathered = self._spec.processes.gather(
            [on_host(replica) for replica in self._live.replicas], "buffers"
        )
        buffers = [replica for several in gathered for replica in several]
        optimizer = self._optimizer_state()
        averages = self._live.averages.by_name() if self._live.averages is not None else {}
        schedule = self._spec.config.schedule
        return TrainState(
            weights,
            buffers,
            optimizer,
            self._spec.seed,
            self.updates,
            on_host(averages),
            dataclasses.astuple(self._live.scaler.state) if self._live.scaler is not None else None,
            schedule.state_dict() if schedule is not None else None,
        )

    def _optimizer_state(self) -> Dict[str, Any]:
        """A copy of it, as torch has it."""
        self.publish()
        return copy_optimizer_state(self._optimizer)

    def write_state(self, state: TrainState) -> None:
        """Continue from another state. Replicas that it does not know start like its first."""
        with torch.no_grad():
            for name, parameter in self._parameters.items():
                parameter.copy_(state.weights[public_name(name)])
            if not self._spec.processes.is_rank_zero:
                names = {public_name(name): name for name in self._buffers}
                first = {names[name]: value for name, value in state.buffers[0].items()}
                put_back(self._buffers, first)
            begin = self._spec.plan.process * self._spec.plan.replicas
            for replica, buffers in enumerate(self._live.replicas, begin):
                source = replica if replica < len(state.buffers) else 0
                put_back(
                    buffers, {name: state.buffers[source][public_name(name)] for name in buffers}
                )
        self._optimizer.load_state_dict(state.optimizer)
        self._let_go()
        names = {public_name(name): name for name in self._parameters}
        self._engine.averages = {
            names[name]: tensor.to(self._device) for name, tensor in state.averages.items()
        }
        if self._live.scaler is not None and state.loss_scale is not None:
            self._live.scaler.state = ScaleState(*state.loss_scale)
        if self._spec.config.schedule is not None and state.schedule is not None:
            self._spec.config.schedule.load_state_dict(state.schedule)
        self._live.updates = state.updates

    def share_buffers(self) -> None:
        """The module's buffers become those of the first replica of all."""
        self._spec.processes.broadcast(list(self._buffers.values()))

    def swap_averages(self) -> None:
        """Exchange weights and averages; without averages, nothing."""
        if self._live.averages is not None:
            with torch.no_grad():
                self._live.averages.swap(self._live.storage.flats)

    def adopt_averages(self) -> None:
        """The averages become the weights; without averages, nothing."""
        if self._live.averages is not None:
            with torch.no_grad():
                self._live.averages.adopt(self._live.storage.flats)

    def _keep_averages(self) -> None:
        if self._live.averages is not None:
            self._engine.averages.update(self._live.averages.by_name())
            self._live.averages = None

    def publish(self) -> None:
        """Write the optimizer's state where torch keeps it."""
        # What a callback has made of it is the newer one, until the next update takes it over.
        if self._with_gradient and not self._published.is_ahead(self.updates):
            self._live.updater.export()
            self._note_published()

    def _note_published(self) -> None:
        self._published.note(self.updates, live=self._live.updater.state_tensors())

    def _let_go(self) -> None:
        """Give back parameters and state; the next recording takes over what is there then."""
        self._keep_averages()
        self._live.updater.release()
        self._live.storage.release()
        self._by_form, self._live.states, self._with_gradient = {}, [], ()
        if self._captured is not None:
            self._captured.forget()

    def close(self) -> None:
        """The module gets memory of its own again, the optimizer its state; safe twice."""
        if self._closed:
            return
        self._closed = True
        tuned = self._autotuner
        compiled = self._maker.compiled if tuned is None else tuned.compiled
        if compiled is not None:
            compiled.close()
        if self._with_gradient:
            self._memory.end()
            self.publish()
            self._engine.replicas.keep(self._live.replicas, self._buffers)
            if self._live.averages is not None and self._live.averages.swapped:
                self._live.averages.swap(self._live.storage.flats)
        if self._live.scaler is not None:
            self._engine.scale = self._live.scaler.state
        self._keep_averages()
        # Callbacks and what explains the run may hold on to the program.
        self._live.updater.release()
        self._live.storage.release()
        self._live.states = []
        self._published.release()
        if self._device.type == "cpu":
            give_back_freed_memory()
        if self._captured is not None:
            self._captured.forget()
