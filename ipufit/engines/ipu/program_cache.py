"""The compiled programs of one training, and which of them has the newest weights."""

from __future__ import annotations

from typing import Any, Dict, FrozenSet, List, Optional, Tuple

import torch

from ipufit.core.batch import MicroBatch
from ipufit.engines.embedded.external_changes import OptimizerStateVersion
from ipufit.engines.ipu.context import IpuContext
from ipufit.engines.ipu.device import OWNER
from ipufit.engines.ipu.failures import translate_errors
from ipufit.engines.ipu.module_copy import Host, Trained
from ipufit.engines.ipu.options import make_options
from ipufit.engines.ipu.size import Size
from ipufit.engines.program import ProgramSpec
from ipufit.errors import ConfigurationError

__all__ = ["ProgramCache"]


class ProgramCache:
    """Programs by the size of their calls.

    The first one works on the user's own module, all others on copies. Weights and optimizer state
    are with one program at a time, or with the user's module and torch's optimizer.

    Args:
        engine: what they are built for.
        spec: what is built.
        host: the user's tensors.
        optimizer: torch's.

    Attributes:
        updates: made since ``compile``.
        example: a full micro-batch; None before there is one.
    """

    def __init__(
        self,
        engine: IpuContext,
        spec: ProgramSpec,
        host: Host,
        optimizer: torch.optim.Optimizer,
    ) -> None:
        self._engine = engine
        self._spec = spec
        self._host = host
        self._optimizer = optimizer
        self._scheduled = _scheduled(spec)
        self.updates = spec.first_update
        self.example: Optional[MicroBatch] = None
        self._programs: Dict[Size, Trained] = {}
        self._current: Optional[Trained] = None
        self._versions: List[int] = []
        self._unstored = 0
        self._published = OptimizerStateVersion(optimizer)

    @property
    def sizes(self) -> Tuple[Size, ...]:
        """The sizes of the programs that there are."""
        return tuple(self._programs)

    def built(self, size: Size) -> Trained:
        """The program of a size; compiled now if it is new."""
        if size in self._programs:
            return self._programs[size]
        assert self.example is not None
        example = self.example
        if size.micro_batch != example.size:
            example = example.head(size.micro_batch)
        self.leave()
        self._meet()
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
        if not self._published.is_noted:
            self.note_published()
        return program

    def _refuse_shared_count(self, program: Trained) -> None:
        processes = self._spec.processes.num_processes
        count = program.unit.size.per_update * processes
        if program.unit.traced.reported.counted and count > 1:
            sources = "gradient_accumulation and ipus"
            if processes > 1:
                sources = f"gradient_accumulation, ipus and {processes} processes"
            raise ConfigurationError(
                "on an IPU an update of a loss that counts its own tokens or weights must have one "
                f"micro-batch, got {count} from {sources}: only the device knows the counts, and "
                "only after the gradients were joined. "
                "Use normalize='samples' and sample_weight_reduction='sum_over_batch_size', one "
                "micro-batch per update, or engine='embedded'."
            )

    def _enter(self, program: Trained) -> None:
        self._current = program
        self._versions = self._host.versions()

    def leave(self) -> None:
        """Bring everything to the user's module and torch's optimizer."""
        if self._current is not None:
            self._current.store(self._unstored)
            self._unstored, self._current = 0, None
            self.note_published()

    def turn_to(self, program: Trained) -> None:
        """Let a program have the device, with the newest weights and optimizer state."""
        with translate_errors(self._engine.sdk, "taking the device"):
            if self._current is program:
                if not self._is_attached(program):
                    self._meet()
                fresh = program.take()
                if not fresh and self._host.versions() != self._versions:
                    _send_weights(program.executor)
                self._versions = self._host.versions()
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
        if program is not None and program.own:
            # It works on a copy, and has not run: else it would have been left.
            self.leave()
            return
        if program is None:
            return
        if self._is_attached(program):
            with translate_errors(self._engine.sdk, "bringing weights to the device"):
                _send_weights(program.executor)
        self._versions = self._host.versions()

    def _is_attached(self, program: Trained) -> bool:
        return OWNER.has(program.executor) and bool(program.executor.isAttachedToDevice())

    @property
    def changes_buffers(self) -> bool:
        """True where forward changes floating-point buffers, which replicas have apart."""
        all_traced = [program.unit.traced for program in self._programs.values()]
        # The statistics of a BatchNorm change unseen, beside its counter.
        return any(traced.changed or traced.counters for traced in all_traced)

    def _meet(self) -> None:
        """Let all processes' replicas begin with the buffers of the first of all.

        They are about to take them from the host, as those of one process do.
        """
        if self._spec.processes.is_distributed and self.changes_buffers:
            self._host.share_buffers(self._spec.processes)

    def follow_the_optimizer(self) -> None:
        """Take over what a callback has made of the optimizer's state."""
        if self._published.to_take_over(self.updates):
            self.take_over_changes()

    def publish(self) -> None:
        """Write the optimizer's state where torch keeps it."""
        if self._published.is_ahead(self.updates):
            return  # what a callback has made of it is the newer one
        if self._current is not None and self._unstored:
            with translate_errors(self._engine.sdk, "reading the optimizer's state"):
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


def _send_weights(executor: Any) -> None:
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
