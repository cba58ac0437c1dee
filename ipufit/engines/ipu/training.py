"""The training program: executions in stream order, and the state of training."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Callable, Dict, List, Mapping, Optional, Sequence, Tuple

from ipufit.core.batch import CombinedBatch, MicroBatch, ProcessShard, split_by_update
from ipufit.core.precision import check_precision, warn_of_vanishing_eps
from ipufit.engines.ipu.executable import Host, Result, Trained, anchors_of, unwrapped
from ipufit.engines.ipu.inference import ONE_SHAPE, IpuContext
from ipufit.engines.ipu.options import place_of_profile, seed_of
from ipufit.engines.ipu.program_cache import ProgramCache, ProgramSelector
from ipufit.engines.ipu.sdk import alone, translate_errors
from ipufit.engines.ipu.size import Size, filled, padded, padding_needed, refuse_other_shapes
from ipufit.engines.program import ExecutionResult, Prepared, Program, ProgramSpec, TrainState
from ipufit.errors import NAN_ADVICE, DataError, NonFiniteLossError
from ipufit.optim.rules import rules_for
from ipufit.optim.several import refuse_step_hooks
from ipufit.tracing.fingerprint import FrozenValues, fingerprint
from ipufit.tracing.validate import refuse_complex, refuse_shared_memory, refuse_unrecordable
from ipufit.utils.state import copy_optimizer_state

_OF_AN_UPDATE = "the micro-batches of an update on an IPU have one shape"
# Settings of an optimizer in one update, by parameter group.
OptimizerRow = Sequence[Mapping[str, Any]]


@dataclasses.dataclass(frozen=True)
class _Update:
    """One update.

    Attributes:
        layout: samples of its micro-batches, of all processes, by place; 0 where there is none.
        share: what of them is this process's.
        micro_batches: these.
    """

    layout: Sequence[int]
    share: ProcessShard
    micro_batches: List[MicroBatch]


class PoptorchTrainingProgram(Program):
    """Updates on an IPU.

    The main program works on the user's own module, from the first :meth:`prepare` until
    :meth:`close`. It has one shape; updates that do not fill it run in smaller programs on copies
    of the module, to and from which weights and optimizer state go through the host.

    Attributes:
        popvision: folder of its profile; None where none is written.
    """

    def __init__(self, engine: IpuContext, spec: ProgramSpec) -> None:
        assert spec.optimizer is not None
        assert spec.loss is not None
        self._engine = engine
        self._spec = spec
        self._optimizer = spec.optimizer
        self._host = Host(spec)
        trained = list(self._host.trained)
        self._host.whole.refuse_frozen(trained)
        # What torch's own step does, and no program would, here or on any engine.
        refuse_step_hooks(spec.optimizer)
        rules_for(spec.optimizer)
        refuse_complex(trained, self._host.parameters)
        refuse_shared_memory(self._host.whole, trained, all_move=True)
        check_precision(spec.config.precision, spec.module)
        warn_of_vanishing_eps(spec.optimizer)
        self._size = Size.of(spec.plan)
        schedule = spec.config.schedule
        if schedule is not None and schedule.per_update:
            # Settings change between calls only.
            self._size = dataclasses.replace(self._size, iterations=1)
        self.popvision = place_of_profile(engine.sdk, spec)
        self._recordings = engine.start_recordings(spec.config.max_recordings)
        self.recordings = self._recordings
        self._programs = ProgramCache(engine, spec, self._host, spec.optimizer)
        self._shapes = ProgramSelector(spec, self._size, self._programs)
        self._closed = False
        self._lost: Optional[Tuple[int, float]] = None
        self._frozen: object = None
        # What it does depends on all that module and loss hold.
        self._frozen_values = FrozenValues(self._host.whole)
        self._held: object = None

    @property
    def updates(self) -> int:
        """Weight updates done since ``compile``."""
        return self._programs.updates

    def fail(self, action: Optional[str]) -> None:
        """Fail like a device that can be used again after an action, or without one for good.

        Raises:
            RecoverableDeviceError, UnrecoverableDeviceError: as of a device.
        """
        sdk = self._engine.sdk
        kind = sdk.UnrecoverableError if action is None else sdk.RecoverableError
        error = kind("a drill lets it fail")
        if action is not None:
            error.recovery_action = action
        with translate_errors(sdk, "running"):
            raise error

    @alone()
    def prepare(self, example: MicroBatch) -> Prepared:
        """Compile for micro-batches like this one, or look again what was compiled.

        Raises:
            ConfigurationError: a parameter was frozen since the program was built, or the last
                update of an epoch can't be run exactly.
        """
        programs, shapes = self._programs, self._shapes
        is_first = programs.example is None
        self._choose(example)
        if is_first or example.size == self._size.micro_batch:
            program = self._prepared_main()
            shapes.check_last()
            if example.size == self._size.micro_batch:
                return program.prepared(example.size)
        sizes = shapes.last_sizes()
        if sizes is None and self._spec.processes.is_distributed:
            # Not all of them may have begun with a smaller one, and they compile together.
            return programs.built(self._size).prepared(example.size)
        if sizes is None or sizes[-1] != example.size:
            sizes = (example.size,)
        return shapes.program_for(sizes).prepared(example.size)

    def _choose(self, batch: MicroBatch) -> None:
        """Let the programs for the form of a micro-batch be the next ones to run.

        Raises:
            DataError: there are too many forms, or it has more samples than the first one.
            CaptureError: it holds what is no tensor.
        """
        size = self._size.micro_batch
        if batch.size > size:
            raise DataError(
                f"on an IPU a micro-batch has at most as many samples as the first one, {size}, "
                f"got {batch.size}. Use a fixed batch_size, or engine='embedded'."
            )
        if batch.form == self._programs.form:
            return
        refuse_unrecordable(self._spec.module, batch)
        leaves = padded(batch, size).leaves
        form = batch.structure, tuple([(leaf.shape, leaf.dtype, ()) for leaf in leaves])
        self._recordings.add(form, self._engine, lambda: self._programs.choose(batch, size))

    def _counted(self, build: Callable[[], Trained]) -> Trained:
        """Build a program for the present form, or find it, and count the seconds that it takes."""
        before = self._engine.seconds
        program = build()
        self._recordings.add_seconds(self._engine.seconds - before)
        return program

    def _prepared_main(self) -> Trained:
        if self._frozen is not None and unwrapped(fingerprint(self._host.whole)[0]) != self._frozen:
            self._drop()
        if self._size in self._programs.sizes:
            self._programs.take_over_changes()
        program = self._counted(lambda: self._programs.built(self._size))
        frozen, self._held = fingerprint(self._host.whole)
        self._frozen = unwrapped(frozen)
        self._frozen_values.note()
        return program

    @alone()
    def run(self, batch: CombinedBatch) -> ExecutionResult:
        """One execution: every update in turn, its micro-batches in stream order."""
        self._host.refuse_changes()
        if self._spec.processes.is_distributed:
            refuse_other_shapes(batch.micro_batches, self._programs.example, ONE_SHAPE)
        self._frozen_values.look()
        self._programs.follow_the_optimizer()
        updates = self._by_update(batch)
        schedule, start = self._spec.config.schedule, self.updates
        before = schedule.snapshot() if schedule is not None else None
        rows: Sequence[OptimizerRow] = [self._optimizer.param_groups] * len(updates)
        if schedule is not None:
            steps = batch.accumulation_steps(self._spec.plan)
            rows = schedule.rows(len(updates), steps)
        try:
            results = self._run_all(updates, rows)
            self._refuse_lost()
        except BaseException:
            if schedule is not None:
                schedule.restore(before)
                schedule.rows(self.updates - start, steps)
            raise
        return self._anchors(results, rows)

    def _by_update(self, batch: CombinedBatch) -> List[_Update]:
        plan = self._spec.plan
        layouts = batch.sizes(plan) if batch.layout is None else batch.layout
        shares = batch.shares(plan)
        micro_batches = split_by_update(batch.micro_batches, shares)
        return [_Update(*each) for each in zip(layouts, shares, micro_batches)]

    def _run_all(self, updates: Sequence[_Update], rows: Sequence[OptimizerRow]) -> List[Result]:
        """Make the calls that all processes make, whatever their own micro-batches are."""
        size, self._lost = self._size, None
        results: List[Result] = []
        full = [padding_needed(u.share.sizes, self._spec.plan) == "none" for u in updates]
        step = size.iterations
        for first in range(0, len(updates), step):
            group = updates[first : first + step]
            micro_batches = [each for update in group for each in update.micro_batches]
            is_uniform = len({each.form for each in micro_batches}) < 2
            if len(group) == step and all(full[first : first + step]) and is_uniform:
                if micro_batches:
                    self._choose(micro_batches[0])
                main = self._counted(lambda: self._programs.built(size))
                self._programs.turn_to(main)
                main.send(rows[first])
                results += self._done(main, main.run(micro_batches, self._seed()), len(group))
                self._leave(main)
                continue
            for index, update in enumerate(group, first):
                results += self._run_one(update, rows[index])
        return results

    def _run_one(self, update: _Update, row: OptimizerRow) -> List[Result]:
        """One update that does not fill the main program, or stands beside one that does not."""
        if update.micro_batches:
            first = update.micro_batches[0]
            refuse_other_shapes(update.micro_batches, first, _OF_AN_UPDATE)
            self._choose(first)
        program = self._counted(lambda: self._shapes.program_for(update.layout))
        share = update.share
        size = program.size
        self._programs.turn_to(program)
        program.send(row)
        assert self._programs.example is not None
        batch, valid = filled(update.micro_batches, size, self._programs.example)
        counted = program.traced.reported.counted
        shares = self._shapes.shares(share.sizes, size, counted)
        shares = [shares[i] for i in share.indices] + [0.0] * (
            len(batch) - len(update.micro_batches)
        )
        results = program.run(batch, self._seed(), shares, valid)[: len(update.micro_batches)]
        results = self._done(program, results, 1)
        self._leave(program)
        return results

    def _leave(self, program: Trained) -> None:
        if program.copies_module:
            # The user's module, which callbacks look at, belongs to the main program.
            self._programs.leave()

    def _seed(self) -> int:
        return seed_of(self._spec, self.updates)

    def _done(self, program: Trained, results: List[Result], updates: int) -> List[Result]:
        """Count, and look at the losses.

        Raises:
            NonFiniteLossError: one is no finite number, in one process.
        """
        size, first = program.size, self.updates
        self._programs.count(updates)
        for name, times in program.traced.counters.items():
            self._host.count(name, times * updates * size.accumulation)
        for place, result in enumerate(results):
            if not math.isfinite(result.numbers[0]) and self._lost is None:
                lost = first + place // max(1, len(results) // updates)
                self._lost = (lost, result.numbers[0])
        if not self._spec.processes.is_distributed:
            self._refuse_lost()
        return results

    def _refuse_lost(self) -> None:
        """Refuse a lost update in all processes, each of which makes the whole execution.

        Raises:
            NonFiniteLossError: a loss was no finite number.
        """
        if self._lost is None:
            return
        lost, value = self._lost
        what = "execution" if self._spec.processes.is_distributed else "call"
        raise NonFiniteLossError(
            f"the loss must be finite, but it became {value} in update {lost}. An IPU can't go "
            f"back: the weights and the optimizer state are those after update "
            f"{self.updates - 1}, the last one of its {what}. {NAN_ADVICE}",
            lost,
            value,
        )

    def _anchors(self, results: List[Result], rows: Sequence[OptimizerRow]) -> ExecutionResult:
        settings: Dict[str, float] = {}
        if self._spec.config.schedule is not None:
            settings["learning_rate"] = float(rows[-1][0]["lr"])
        if self._spec.config.loss_scale is not None:
            settings["loss_scale"] = self._spec.config.loss_scale.initial
        return anchors_of(results, self._spec, settings)

    @alone()
    def publish(self) -> None:
        """Write the optimizer's state where torch keeps it."""
        self._programs.publish()
        self._host.whole.refresh_hooks()

    @alone()
    def read_state(self) -> TrainState:
        """Copies of everything that training has changed; of buffers, those of replica 0.

        Of several processes it is that of process 0, and all of them call this.
        """
        self.publish()
        weights, buffers = self._host.copies()
        self._spec.processes.broadcast(list(buffers.values()))
        schedule, scale = self._spec.config.schedule, self._spec.config.loss_scale
        return TrainState(
            weights,
            [buffers],
            copy_optimizer_state(self._optimizer),
            self._spec.seed,
            self.updates,
            loss_scale=None if scale is None else (scale.initial, 0),
            schedule=schedule.state_dict() if schedule is not None else None,
        )

    @alone()
    def write_state(self, state: TrainState) -> None:
        """Continue from another state; all replicas begin with the buffers of the first."""
        self._programs.leave()
        self._host.overwrite(state)
        self._optimizer.load_state_dict(state.optimizer)
        if self._spec.config.schedule is not None and state.schedule is not None:
            self._spec.config.schedule.load_state_dict(state.schedule)
        self._programs.updates = state.updates
        self._programs.note_published()

    @alone()
    def share_buffers(self) -> None:
        """The module's buffers become those of the first replica of all."""
        if self._programs.changes_buffers:
            self._host.share_buffers(self._spec.processes)

    def _drop(self) -> None:
        """The next programs are compiled from what the module is then."""
        self._programs.drop()
        self._shapes.forget()

    @alone()
    def close(self) -> None:
        """Weights and optimizer state are the user's again, the module is unwrapped; safe twice."""
        if not self._closed:
            self._closed = True
            self._drop()
