"""The compiled programs of one training: which has the newest weights, and which runs an update."""

from __future__ import annotations

import dataclasses
from typing import Dict, FrozenSet, List, Optional, Sequence, Tuple

import torch

from ipufit.core.batch import MicroBatch, counts_by_rank
from ipufit.engines.external_changes import OptimizerStateVersion
from ipufit.engines.gradient_reduction import GradientReduction
from ipufit.engines.ipu.executable import Host, Trained
from ipufit.engines.ipu.inference import IpuContext
from ipufit.engines.ipu.options import make_options
from ipufit.engines.ipu.sdk import OWNER, Executor, translate_errors
from ipufit.engines.ipu.size import Size, padded, padding_needed, samples_stand_apart
from ipufit.engines.program import ProgramSpec
from ipufit.errors import ConfigurationError, PlanError
from ipufit.tracing.grad_step import public_name


@dataclasses.dataclass(eq=False)
class ProgramCache:
    """Programs by the form of their micro-batches and the size of their calls.

    The first one works on the user's own module, all others on copies. Weights and optimizer state
    are with one program at a time, or with the user's module and torch's optimizer.

    Attributes:
        engine: what they are built for.
        spec: what is built.
        host: the user's tensors.
        optimizer: torch's.
        updates: made since ``compile``.
        form: of the micro-batches that come next; the programs of others wait.
    """

    engine: IpuContext
    spec: ProgramSpec
    host: Host
    optimizer: torch.optim.Optimizer

    def __post_init__(self) -> None:
        self._scheduled = _scheduled(self.spec)
        self.updates = self.spec.first_update
        self.form: object = None
        self._examples: Dict[object, MicroBatch] = {}
        self._programs: Dict[Tuple[object, Size], Trained] = {}
        self._current: Optional[Trained] = None
        self._versions: List[Tuple[int, int]] = []
        self._unstored = 0
        self._published = OptimizerStateVersion(self.optimizer)

    @property
    def example(self) -> Optional[MicroBatch]:
        """A full micro-batch of the present form; None before there is one."""
        return self._examples.get(self.form)

    def choose(self, batch: MicroBatch, size: int) -> None:
        """Let the form of a micro-batch, of which a full one has so many samples, be the next."""
        self.form = batch.form
        if self.form not in self._examples or batch.size == size:
            self._examples[self.form] = padded(batch, size)

    @property
    def sizes(self) -> Tuple[Size, ...]:
        """The sizes of the programs that there are for the present form."""
        return tuple(size for form, size in self._programs if form == self.form)

    def built(self, size: Size) -> Trained:
        """The program of a size; compiled now if it is new."""
        key = self.form, size
        if key in self._programs:
            return self._programs[key]
        assert self.example is not None
        example = self.example
        if size.micro_batch != example.size:
            example = example.head(size.micro_batch)
        self.leave()
        self._meet()
        engine, spec = self.engine, self.spec
        options = make_options(engine.sdk, spec, size)
        with engine.recording():
            program = Trained(
                engine.sdk,
                spec,
                self.host,
                options,
                size,
                example,
                self._scheduled,
                copies_module=bool(self._programs),
                wide=engine.wide,
            )
            self._programs[key] = program
            program.compile(example)
        engine.compiled += 1
        self._refuse_shared_count(program)
        self._enter(program)
        if not self._published.is_noted:
            self.note_published()
        return program

    def _refuse_shared_count(self, program: Trained) -> None:
        processes = self.spec.processes.num_processes
        count = program.size.per_update * processes
        if program.traced.reported.counted and count > 1:
            sources = "gradient_accumulation and ipus"
            if processes > 1:
                sources = f"gradient_accumulation, ipus and {processes} processes"
            raise ConfigurationError(
                "on an IPU an update of a loss that counts its own tokens or weights must have one "
                f"micro-batch, got {count} from {sources}: only the device knows the counts, and "
                "only after the gradients were summed. Use normalize='samples' and "
                "sample_weights='sum_over_batch_size', one micro-batch per update, or "
                "engine='embedded'."
            )

    def _enter(self, program: Trained) -> None:
        self._current = program
        self._versions = self.host.versions()

    def leave(self) -> None:
        """Bring everything to the user's module and torch's optimizer."""
        if self._current is not None:
            self._current.store(self._unstored)
            self._unstored, self._current = 0, None
            self.note_published()

    def turn_to(self, program: Trained) -> None:
        """Let a program have the device, with the newest weights and optimizer state."""
        with translate_errors(self.engine.sdk, "acquiring the device"):
            if self._current is program:
                if not self._is_attached(program):
                    self._meet()
                fresh = program.take()
                if not fresh and self.host.versions() != self._versions:
                    _send_weights(program.executor)
                self._versions = self.host.versions()
                return
            self.leave()
            self._meet()
            program.load()
            program.take()
        self._enter(program)

    def count(self, updates: int) -> None:
        """So many updates were made by the program that has the weights."""
        self.updates += updates
        self._unstored += updates
        if self._current is not None:
            self._current.optimizer.waits = False

    def take_over_changes(self) -> None:
        """Callbacks may have changed weights, buffers or the state of the optimizer."""
        if self._published.is_changed:
            self.leave()
            self.note_published()
        program = self._current
        if program is not None and program.copies_module:
            # It works on a copy, and has not run: else it would have been left.
            self.leave()
            return
        if program is None:
            return
        if self._is_attached(program):
            with translate_errors(self.engine.sdk, "copying weights to the device"):
                _send_weights(program.executor)
        self._versions = self.host.versions()

    def _is_attached(self, program: Trained) -> bool:
        return OWNER.has(program.executor) and bool(program.executor.isAttachedToDevice())

    @property
    def changes_buffers(self) -> bool:
        """True where forward changes floating-point buffers, which replicas have apart."""
        all_traced = [program.traced for program in self._programs.values()]
        # The statistics of a BatchNorm change unseen, beside its counter.
        return any(traced.changed or traced.counters for traced in all_traced)

    def _meet(self) -> None:
        """Let all processes' replicas begin with the buffers of the first of all.

        They are about to take them from the host, as those of one process do.
        """
        if self.spec.processes.is_distributed and self.changes_buffers:
            self.host.share_buffers(self.spec.processes)

    def follow_the_optimizer(self) -> None:
        """Take over what a callback has made of the optimizer's state."""
        if self._published.to_take_over(self.updates):
            self.take_over_changes()

    def publish(self) -> None:
        """Write the optimizer's state where torch keeps it."""
        if self._published.is_ahead(self.updates):
            return  # what a callback has made of it is the newer one
        if self._current is not None and self._unstored:
            with translate_errors(self.engine.sdk, "reading the optimizer's state"):
                self._current.optimizer.store(self._unstored)
            self._unstored = 0
        self.note_published()

    def note_published(self) -> None:
        """Remember that the torch optimizer holds the state of now."""
        self._published.note(self.updates)

    def drop(self) -> None:
        """Let go of all programs; the next ones are compiled from what the module is now."""
        self.leave()
        programs, self._programs = list(self._programs.values()), {}
        for program in reversed(programs):
            program.destroy()


def _send_weights(executor: Executor) -> None:
    """Bring weights that somebody may have changed to the device.

    If nobody has looked at them since the last run, nobody has changed them.
    """
    if not executor.copyWeightsToHostIfNeeded():
        executor.copyWeightsToDevice()


def _scheduled(spec: ProgramSpec) -> FrozenSet[str]:
    """Settings of the optimizer that a schedule changes, as the groups have them."""
    schedule = spec.config.schedule
    names = schedule.names if schedule is not None else frozenset()
    return frozenset("betas" if name.startswith("beta") else name for name in names)


_LEVELS = ("none", "micro-batches", "samples")


class ProgramSelector:
    """Chooses, and builds what is chosen.

    Args:
        spec: what is built.
        size: of the main program's calls.
        programs: builds them.
    """

    def __init__(self, spec: ProgramSpec, size: Size, programs: ProgramCache) -> None:
        self._spec = spec
        self._size = size
        # Of a program that runs one update in a call.
        self._single = dataclasses.replace(size, iterations=1)
        self._programs = programs
        self._reduction = GradientReduction(spec)
        # By form of micro-batch.
        self._apart: Dict[object, bool] = {}

    def forget(self) -> None:
        """The module is another one now."""
        self._apart = {}

    def program_for(self, update: Sequence[int]) -> Trained:
        """The program for one update, the same one in all processes.

        Args:
            update: samples of its micro-batches, of all processes, by place; 0 where there is none.

        Raises:
            PlanError: no program can run it exactly.
        """
        size = self._single
        need = self._need(update)
        if need == "none" and size == self._size:
            return self._programs.built(size)
        if not self._may_be(need):
            return self._programs.built(self._smaller(update))
        # One program for all of them: where an epoch ends in an update that needs more, it is
        # prepared for that as well.
        last = self.last_sizes()
        coming = self._need(last) if last is not None else "none"
        if _LEVELS.index(coming) > _LEVELS.index(need) and self._may_be(coming):
            need = coming
        there = [
            compiled
            for compiled in self._programs.sizes
            if dataclasses.replace(compiled, padding="none") == size
            and compiled != self._size
            and _LEVELS.index(compiled.padding) >= _LEVELS.index(need)
        ]
        return self._programs.built(there[0] if there else dataclasses.replace(size, padding=need))

    def check_last(self) -> None:
        """Make sure that an epoch's last update can be run, as far as it is known.

        Raises:
            PlanError: it can't.
        """
        last = self.last_sizes()
        if last is not None and not self._may_be(self._need(last)):
            self._smaller(last)

    def _need(self, update: Sequence[int]) -> str:
        return padding_needed([each for each in update if each], self._spec.plan)

    def last_sizes(self) -> Optional[Tuple[int, ...]]:
        """Sizes of the micro-batches of an epoch's last update, if that is not full."""
        plan = self._spec.plan
        if plan.tail is None:
            return None
        return list(plan.updates(plan.tail.samples))[-1]

    def shares(self, sizes: Sequence[int], size: Size, counted: bool) -> List[float]:
        """Return what each loss is multiplied with before PopTorch's reduction.

        Args:
            sizes: samples of the update's micro-batches, of all processes.
            size: of the program.
            counted: whether the loss knows by itself what it is a mean over.
        """
        if counted:
            return [1.0] * len(sizes)
        # PopTorch divides by the replicas of all processes.
        divisor = size.per_update * self._spec.plan.processes
        if self._spec.config.gradient_reduction != "mean":
            divisor = 1
        return [share * divisor for share in self._reduction.coefficients(sizes)]

    def _may_be(self, need: str) -> bool:
        """Tell whether such padding changes nothing."""
        if need == "none":
            return True
        traced = self._example_program().traced
        if traced.changed or traced.counters:
            return False
        if need == "micro-batches":
            return True
        if self._programs.form not in self._apart:
            assert self._programs.example is not None
            logs = set(traced.reported.rules) - set(self._spec.loss.part_names)  # type: ignore[union-attr]
            apart = not logs and samples_stand_apart(self._spec, self._programs.example)
            self._apart[self._programs.form] = apart
        return self._apart[self._programs.form]

    def _example_program(self) -> Trained:
        """A program for the present form, of any size, that has shown what the step does."""
        sizes = self._programs.sizes
        return self._programs.built(sizes[0] if sizes else self._single)

    def _smaller(self, update: Sequence[int]) -> Size:
        """The size of a program for just these micro-batches.

        Raises:
            PlanError: there is none.
        """
        plan, size = self._spec.plan, self._single
        sizes = [each for each in update if each]
        counts = counts_by_rank(update, plan)
        local_count = counts[0]
        if (
            len(set(sizes)) == 1
            and set(counts) == {local_count}
            and local_count % size.replicas == 0
        ):
            smaller = dataclasses.replace(
                size, accumulation=local_count // size.replicas, micro_batch=sizes[0]
            )
            shares = self.shares(sizes, smaller, False)
            plain = all(abs(share - 1) < 1e-12 for share in shares)
            return smaller if plain else dataclasses.replace(smaller, padding="micro-batches")
        traced = self._example_program().traced
        if traced.changed or traced.counters:
            which = public_name(sorted([*traced.changed, *traced.counters])[0])
            why = f"forward changes the buffer {which!r}, which padding would change too"
        else:
            why = "the loss or a logged value can't be computed sample by sample"
        raise PlanError(
            [
                "an IPU must be able to run every update exactly, but the last one of an epoch has "
                f"micro-batches of {', '.join(map(str, sizes))} samples instead of "
                f"{plan.micro_batches_per_update} of {size.micro_batch}, and {why}. Use "
                "drop_last=True in the loader, a batch_size and gradient_accumulation that divide "
                "the samples, or engine='embedded'."
            ]
        )
