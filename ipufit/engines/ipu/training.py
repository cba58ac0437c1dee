"""The training program: which compiled program runs an update, and who has the newest weights."""

from __future__ import annotations

import copy
import dataclasses
import math
from typing import TYPE_CHECKING, Any, Dict, FrozenSet, List, Optional, Sequence, Tuple

import torch

from ipufit.engines.embedded.fingerprint import fingerprint
from ipufit.engines.embedded.precision import check_precision, warn_of_vanishing_eps
from ipufit.engines.embedded.reduction import Reduction
from ipufit.engines.embedded.step import StepModule, public_name
from ipufit.engines.embedded.training import signature
from ipufit.engines.ipu.copies import Host, Trained, plain
from ipufit.engines.ipu.device import OWNER, alone
from ipufit.engines.ipu.failures import told
from ipufit.engines.ipu.limits import check_trained
from ipufit.engines.ipu.options import make_options, seed_of
from ipufit.engines.ipu.reading import anchors_of
from ipufit.engines.ipu.size import Size
from ipufit.engines.ipu.tails import filled, padded, padding_needed, samples_stand_apart
from ipufit.engines.ipu.unit import Result, Unit, cut_rows
from ipufit.errors import ConfigurationError, LossError, NonFiniteLossError, PlanError
from ipufit.program import (
    Anchors,
    CombinedBatch,
    MicroBatch,
    Prepared,
    ProgramSpec,
    TrainState,
)

if TYPE_CHECKING:
    from ipufit.engines.ipu.engine import IpuEngine

__all__ = ["TrainingProgram", "unwrapped"]

_LEVELS = ("none", "micro-batches", "samples")


class TrainingProgram:
    """Updates on an IPU.

    The main program works on the user's own module, from the first :meth:`prepare` until
    :meth:`close`. It has one shape; updates that do not fill it run in smaller programs on copies
    of the module, to and from which weights and optimizer state go through the host.
    """

    def __init__(self, engine: IpuEngine, spec: ProgramSpec) -> None:
        assert spec.optimizer is not None
        assert spec.loss is not None
        self._engine = engine
        self._spec = spec
        self._optimizer = spec.optimizer
        self._host = Host(spec)
        if not self._host.trained:
            raise LossError(
                f"{type(spec.module).__name__} must have a trainable parameter, but none that the "
                "optimizer holds requires gradients any more. Unfreeze one with "
                "requires_grad_(True), and call compile again if it was frozen then."
            )
        check_trained(
            spec.optimizer, list(self._host.trained), self._host.parameters, self._host.buffers()
        )
        check_precision(spec.recipe.precision, spec.module)
        warn_of_vanishing_eps(spec.optimizer)
        # What it does depends on all that these hold.
        self._whole = StepModule(spec.module, spec.loss)
        self._reduction = Reduction(spec)
        self._scheduled = _scheduled(spec)
        self._size = Size.of(spec.plan)
        schedule = spec.recipe.schedule
        if schedule is not None and schedule.per_update:
            # Settings change between calls only.
            self._size = dataclasses.replace(self._size, iterations=1)
        self.updates = spec.first_update
        self._programs: Dict[Size, Trained] = {}
        self._current: Optional[Trained] = None
        self._example: Optional[MicroBatch] = None
        self._closed = False
        self._frozen: object = None
        self._held: object = None
        self._versions: List[int] = []
        self._apart: Optional[bool] = None
        self._unstored = 0
        self._published: object = None
        self._published_at = self.updates

    # Building.

    @alone
    def prepare(self, example: MicroBatch) -> Prepared:
        """Compile for micro-batches like this one, or look again what was compiled.

        Raises:
            ConfigurationError: a parameter was frozen since the program was built, or the last
                update of an epoch can't be run exactly.
        """
        if self._example is None or example.size == self._size.micro_batch:
            self._example = padded(example, self._size.micro_batch)
            program = self._prepared_main()
            if example.size == self._size.micro_batch:
                return _prepared(program.unit, example.size)
        sizes = self._last_sizes()
        if sizes is None or sizes[-1] != example.size:
            sizes = (example.size,)
        return _prepared(self._program_for(sizes).unit, example.size)

    def _prepared_main(self) -> Trained:
        self._refuse_frozen()
        frozen, held = fingerprint(self._whole)
        if self._frozen is not None and unwrapped(frozen) != self._frozen:
            self._drop()
        self._frozen, self._held = unwrapped(frozen), held
        if self._size in self._programs:
            self._take_over_changes()
        return self._built(self._size)

    def _refuse_frozen(self) -> None:
        for name, parameter in self._host.trained.items():
            if not parameter.requires_grad:
                raise ConfigurationError(
                    f"{public_name(name)!r} was frozen during fit, but which parameters are "
                    "trained is fixed when fit starts. Freeze it between two calls of fit."
                )

    def _built(self, size: Size) -> Trained:
        """The program of a size; compiled now if it is new."""
        if size in self._programs:
            return self._programs[size]
        assert self._example is not None
        example = self._example
        if size.micro_batch != example.size:
            example = example.cut(size.micro_batch)
        self._leave()
        engine, spec = self._engine, self._spec
        options = make_options(engine.sdk, spec.options, spec, size)
        with engine.timed():
            program = Trained(
                engine.sdk,
                spec,
                self._host,
                options,
                size,
                example,
                self._scheduled,
                own=bool(self._programs),
                wide=engine.wide,
            )
            self._programs[size] = program
            program.compile(example)
        engine.compiled += 1
        self._refuse_shared_count(program)
        self._enter(program)
        if self._published is None:
            self._note_published()
        return program

    def _refuse_shared_count(self, program: Trained) -> None:
        if program.unit.traced.reported.counted and program.unit.size.per_update > 1:
            raise ConfigurationError(
                "on an IPU an update of a loss that counts its own tokens or weights must have one "
                f"micro-batch, got {program.unit.size.per_update} from gradient_accumulation and "
                "ipus: only the device knows the counts, and only after the gradients were joined. "
                "Use normalize='samples' and sample_weight_reduction='sum_over_batch_size', one "
                "micro-batch per update, or engine='embedded'."
            )

    # Who has the newest weights.

    def _enter(self, program: Trained) -> None:
        self._current = program
        self._versions = self._host.versions()

    def _leave(self) -> None:
        """Bring everything to the user's module and torch's optimizer."""
        if self._current is not None:
            self._current.store(self._unstored)
            self._unstored, self._current = 0, None
            self._note_published()

    def _turn_to(self, program: Trained) -> None:
        """Let a program have the device, with the newest weights and optimizer state."""
        with told(self._engine.sdk, "taking the device"):
            if self._current is program:
                fresh = OWNER.take(program.executor)
                if not fresh and self._host.versions() != self._versions:
                    _send_weights(program.executor)
                self._versions = self._host.versions()
                return
            self._leave()
            program.load()
            OWNER.take(program.executor)
        self._enter(program)

    def _take_over_changes(self) -> None:
        """Callbacks may have changed weights, buffers or the state of the optimizer."""
        if signature(self._optimizer) != self._published:
            self._leave()
            self._note_published()
        program = self._current
        if program is not None and program.own:
            # It works on a copy, and has not run: else it would have been left.
            self._leave()
            return
        if program is None:
            return
        if OWNER.has(program.executor) and program.executor.isAttachedToDevice():
            with told(self._engine.sdk, "bringing weights to the device"):
                _send_weights(program.executor)
        self._versions = self._host.versions()

    def _follow_the_optimizer(self) -> None:
        """Take over what a callback has made of the optimizer's state.

        Raises:
            ConfigurationError: it changed a state that was not up to date.
        """
        if self._published is None or signature(self._optimizer) == self._published:
            return
        if self._published_at != self.updates:
            raise ConfigurationError(
                "the optimizer's state was changed during an epoch through a reference of your "
                "own, where it was that of an earlier update. Read it as model.optimizer, which "
                "brings it up to date, or change it at the end of an epoch."
            )
        self._take_over_changes()

    # Running.

    @alone
    def run(self, batch: CombinedBatch) -> Anchors:
        """One execution: every update in turn, its micro-batches in stream order."""
        self._host.refuse_changes()
        self._follow_the_optimizer()
        per_update = self._size.per_update
        work = list(batch.micro_batches)
        updates = [work[i : i + per_update] for i in range(0, len(work), per_update)]
        schedule, start = self._spec.recipe.schedule, self.updates
        before = schedule.snapshot() if schedule is not None else None
        rows: Sequence[Any] = [self._optimizer.param_groups] * len(updates)
        if schedule is not None:
            rows = schedule.rows(len(updates))
        try:
            results = self._run_all(updates, rows)
        except BaseException:
            if schedule is not None:
                schedule.restore(before)
                schedule.rows(self.updates - start)
            raise
        return self._anchors(results, rows, work)

    def _run_all(self, updates: Sequence[List[MicroBatch]], rows: Sequence[Any]) -> List[Result]:
        size = self._size
        results: List[Result] = []
        full = [len(u) == size.per_update and _all_of(u, size.micro_batch) for u in updates]
        step = size.iterations
        for first in range(0, len(updates), step):
            group = updates[first : first + step]
            if len(group) == step and all(full[first : first + step]):
                main = self._built(size)
                self._turn_to(main)
                main.send(rows[first])
                joined = [micro_batch for update in group for micro_batch in update]
                results += self._done(main, main.unit.run(joined, self._seed()), len(group))
                continue
            for index, update in enumerate(group, first):
                results += self._run_one(update, rows[index])
        return results

    def _run_one(self, update: List[MicroBatch], row: Any) -> List[Result]:
        """One update that does not fill the main program, or stands beside one that does not."""
        sizes = tuple(each.size for each in update)
        program = self._program_for(sizes)
        size = program.unit.size
        self._turn_to(program)
        program.send(row)
        batch, valid = filled(update, size)
        shares = self._shares(sizes, size, program.unit.traced.reported.counted)
        shares += [0.0] * (len(batch) - len(shares))
        results = program.unit.run(batch, self._seed(), shares, valid)[: len(update)]
        results = self._done(program, results, 1)
        if program.own:
            # The user's module, which callbacks look at, belongs to the main program.
            self._leave()
        return results

    def _seed(self) -> int:
        return seed_of(self._spec, self.updates)

    def _done(self, program: Trained, results: List[Result], updates: int) -> List[Result]:
        """Count, and look at the losses.

        Raises:
            NonFiniteLossError: one is no finite number.
        """
        size, first = program.unit.size, self.updates
        self.updates += updates
        self._unstored += updates
        for name, times in program.unit.traced.counters.items():
            self._host.count(name, times * updates * size.accumulation)
        for place, result in enumerate(results):
            if not math.isfinite(result.numbers[0]):
                lost = first + place // max(1, len(results) // updates)
                raise NonFiniteLossError(
                    f"the loss must be finite, but it became {result.numbers[0]} in update {lost}. "
                    f"An IPU can't go back: the weights and the optimizer state are those after "
                    f"update {self.updates - 1}, the last one of its call. Look for a learning "
                    "rate that is too high, a log or division of zero, or non-finite data.",
                    lost,
                    result.numbers[0],
                )
        return results

    def _shares(self, sizes: Sequence[int], size: Size, counted: bool) -> List[float]:
        """What the loss of each micro-batch is multiplied with before PopTorch's reduction."""
        if counted:
            return [1.0] * len(sizes)
        divisor = size.per_update if self._spec.recipe.gradient_reduction == "mean" else 1
        return [share * divisor for share in self._reduction.coefficients(sizes)]

    # Updates that are not full.

    def _last_sizes(self) -> Optional[Tuple[int, ...]]:
        """Sizes of the micro-batches of an epoch's last update, if that is not full."""
        plan = self._spec.plan
        if plan.tail is None:
            return None
        return list(plan.updates(plan.tail.samples))[-1]

    def _program_for(self, sizes: Sequence[int]) -> Trained:
        """The program for one update of micro-batches of these sizes.

        Raises:
            PlanError: no program can run it exactly.
        """
        size = dataclasses.replace(self._size, iterations=1)
        need = padding_needed(sizes, size)
        if need == "none" and size == self._size:
            return self._built(size)
        self._built(self._size)
        if not self._may_be(need):
            return self._built(self._smaller(sizes, size))
        # One program for all of them: where an epoch ends in an update that needs more, it is
        # prepared for that as well.
        last = self._last_sizes()
        coming = padding_needed(last, size) if last is not None else "none"
        if _LEVELS.index(coming) > _LEVELS.index(need) and self._may_be(coming):
            need = coming
        there = [
            known
            for known in self._programs
            if dataclasses.replace(known, padding="none") == size
            and known != self._size
            and _LEVELS.index(known.padding) >= _LEVELS.index(need)
        ]
        return self._built(there[0] if there else dataclasses.replace(size, padding=need))

    def _may_be(self, need: str) -> bool:
        """Whether such padding changes nothing."""
        if need == "none":
            return True
        traced = self._built(self._size).unit.traced
        if traced.changed or traced.counters:
            return False
        if need == "micro-batches":
            return True
        if self._apart is None:
            assert self._example is not None
            logs = set(traced.reported.rules) - set(self._spec.loss.part_names)  # type: ignore[union-attr]
            self._apart = not logs and samples_stand_apart(self._spec, self._example)
        return self._apart

    def _smaller(self, sizes: Sequence[int], size: Size) -> Size:
        """The size of a program for just these micro-batches.

        Raises:
            PlanError: there is none.
        """
        if len(set(sizes)) == 1 and len(sizes) % size.replicas == 0:
            smaller = dataclasses.replace(
                size, accumulation=len(sizes) // size.replicas, micro_batch=sizes[0]
            )
            shares = self._shares(sizes, smaller, False)
            plain = all(abs(share - 1) < 1e-12 for share in shares)
            return smaller if plain else dataclasses.replace(smaller, padding="micro-batches")
        traced = self._built(self._size).unit.traced
        if traced.changed or traced.counters:
            which = public_name(sorted([*traced.changed, *traced.counters])[0])
            why = f"forward changes the buffer {which!r}, which padding would change too"
        else:
            why = "the loss, or what the module logs, can't be told sample by sample"
        raise PlanError(
            [
                f"every update must be one that an IPU can run exactly, but the last one of an "
                f"epoch has micro-batches of {', '.join(map(str, sizes))} samples instead of "
                f"{size.per_update} of {size.micro_batch}, and {why}. Use drop_last=True in the "
                "loader, a batch_size and gradient_accumulation that divide the samples, or "
                "engine='embedded'."
            ]
        )

    # Results and state.

    def _anchors(
        self, results: List[Result], rows: Sequence[Any], batch: Sequence[MicroBatch]
    ) -> Anchors:
        settings: Dict[str, float] = {}
        if self._spec.recipe.schedule is not None:
            settings["learning_rate"] = float(rows[-1][0]["lr"])
        if self._spec.recipe.loss_scale is not None:
            settings["loss_scale"] = self._spec.recipe.loss_scale.initial
        return anchors_of(results, self._spec, settings)

    @alone
    def publish(self) -> None:
        """Write the optimizer's state where torch keeps it."""
        if self._current is not None and self._unstored:
            with told(self._engine.sdk, "reading the optimizer's state"):
                self._current.optimizer.store(self._unstored)
            self._unstored = 0
        self._note_published()

    def _note_published(self) -> None:
        self._published = signature(self._optimizer)
        self._published_at = self.updates

    @alone
    def read_state(self) -> TrainState:
        """Copies of everything that training has changed; of buffers, those of replica 0."""
        self.publish()
        schedule, scale = self._spec.recipe.schedule, self._spec.recipe.loss_scale
        return TrainState(
            {public_name(name): plain(p) for name, p in self._host.parameters.items()},
            [{public_name(name): plain(b) for name, b in self._host.buffers().items()}],
            copy.deepcopy(self._optimizer.state_dict()),
            self._spec.seed,
            self.updates,
            loss_scale=None if scale is None else (scale.initial, 0),
            schedule=schedule.state_dict() if schedule is not None else None,
        )

    @alone
    def write_state(self, state: TrainState) -> None:
        """Continue from another state; all replicas begin with the buffers of the first."""
        self._leave()
        with torch.no_grad():
            for name, parameter in self._host.parameters.items():
                parameter.copy_(state.weights[public_name(name)])
            for name, buffer in self._host.buffers().items():
                buffer.copy_(state.buffers[0][public_name(name)])
        self._optimizer.load_state_dict(state.optimizer)
        if self._spec.recipe.schedule is not None and state.schedule is not None:
            self._spec.recipe.schedule.load_state_dict(state.schedule)
        self.updates = state.updates
        self._note_published()

    def swap_averages(self) -> None:
        """There are no averages."""

    def adopt_averages(self) -> None:
        """There are no averages."""

    def _drop(self) -> None:
        """Let go of all programs; the next ones are compiled from what the module is now."""
        self._leave()
        programs, self._programs = list(self._programs.values()), {}
        for program in reversed(programs):
            program.destroy()
        self._apart = None

    @alone
    def close(self) -> None:
        """Weights and optimizer state are the user's again, the module is unwrapped; safe twice."""
        if not self._closed:
            self._closed = True
            self._drop()


def _send_weights(executor: Any) -> None:
    """Bring weights that somebody may have changed to the device.

    If nobody has looked at them since the last run, nobody has changed them.
    """
    if not executor.copyWeightsToHostIfNeeded():
        executor.copyWeightsToDevice()


def _scheduled(spec: ProgramSpec) -> FrozenSet[str]:
    """Settings of the optimizer that a schedule changes, as the groups have them."""
    schedule = spec.recipe.schedule
    names = schedule.names if schedule is not None else frozenset()
    return frozenset("betas" if name.startswith("beta") else name for name in names)


def _all_of(update: Sequence[MicroBatch], size: int) -> bool:
    return all(each.size == size for each in update)


def _prepared(unit: Unit, samples: int) -> Prepared:
    """What is known of the results for a micro-batch with so many samples that count."""
    traced = unit.traced
    if not unit.step.wants_outputs:
        return Prepared(None, traced.reported.rules)
    tensors = cut_rows(traced.outputs.tensors, unit.size.micro_batch, samples)
    return Prepared(traced.outputs.rebuild(tensors), traced.reported.rules)


def unwrapped(frozen: Tuple[Any, ...]) -> Tuple[Any, ...]:
    """A fingerprint in which parameters are of the same class, whether PopTorch has them or not."""
    last = len(frozen)
    return tuple(
        (part[0], part[2]) if index < last and _is_parameter(part[1]) else part
        for index, part in enumerate(frozen)
    )


def _is_parameter(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, torch.nn.Parameter)
