"""For tests, ours and users': an engine that computes nothing and remembers everything."""

from __future__ import annotations

import dataclasses
from typing import Any, List

import torch

from ipufit.program import (
    Anchors,
    CombinedBatch,
    MicroBatch,
    Mode,
    Prepared,
    ProgramSpec,
    TrainState,
)

__all__ = ["RecordingEngine", "RecordingProgram"]


class RecordingEngine:
    """Builds programs that write down what they are given.

    ``ipufit.Model(net, engine=lambda: engine)`` shows what the loop does, without the cost of doing
    it.

    Attributes:
        programs: everything built so far, in order.
    """

    name = "recording"

    def __init__(self) -> None:
        self.seconds = 0.0
        self.programs: List[RecordingProgram] = []

    def build(self, spec: ProgramSpec) -> RecordingProgram:
        """A program that records."""
        program = RecordingProgram(spec)
        self.programs.append(program)
        return program


@dataclasses.dataclass
class RecordingProgram:
    """Takes every batch, returns losses of zero, and echoes the first input as output.

    Attributes:
        spec: what it was built from.
        executions: the batches of :meth:`run`, in order.
        updates: weight updates that a real program would have made.
        closed: number of calls of :meth:`close`.
    """

    spec: ProgramSpec
    executions: List[CombinedBatch] = dataclasses.field(default_factory=list, init=False)
    updates: int = dataclasses.field(init=False)
    closed: int = dataclasses.field(default=0, init=False)

    def __post_init__(self) -> None:
        self.updates = self.spec.first_update

    def _echo(self, batch: MicroBatch) -> Any:
        return batch.leaves[0]

    def prepare(self, example: MicroBatch) -> Prepared:
        """Nothing to build."""
        return Prepared(self._echo(example).to("meta"))

    def run(self, batch: CombinedBatch) -> Anchors:
        """Remember the batch."""
        self.executions.append(batch)
        count = len(batch.micro_batches)
        if self.spec.mode is Mode.TRAIN:
            self.updates += -(-count // self.spec.plan.micro_batches_per_update)
        outputs = [self._echo(b) for b in batch.micro_batches] if self.spec.want_outputs else []
        places = range(len(outputs))
        losses = 0 if self.spec.mode is Mode.PREDICT else count
        return Anchors(torch.zeros(losses, dtype=torch.float64), outputs, places)

    def read_state(self) -> TrainState:
        """The module's weights, which nothing has changed."""
        weights = {n: p.detach().clone() for n, p in self.spec.module.named_parameters()}
        return TrainState(weights, [], {}, self.spec.seed, self.updates)

    def write_state(self, state: TrainState) -> None:
        """Only the counter is state here."""
        self.updates = state.updates

    def publish(self) -> None:
        """The optimizer has no state here."""

    def swap_averages(self) -> None:
        """Nothing is averaged."""

    def adopt_averages(self) -> None:
        """Nothing is averaged."""

    def close(self) -> None:
        """Count the calls."""
        self.closed += 1
