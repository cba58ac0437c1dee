"""An engine that computes nothing and remembers everything."""

from __future__ import annotations

import dataclasses
from typing import Any, Dict, List

import torch

from ipufit.core.batch import CombinedBatch, MicroBatch, Mode
from ipufit.engines import Engine, Program
from ipufit.engines.program import ExecutionResult, Prepared, ProgramSpec, TrainState


class RecordingEngine(Engine):
    """Builds programs that record their inputs, for tests.

    ``ipufit.Model(net, engine=lambda: engine)`` shows what the loop does, without computing
    anything.

    Attributes:
        programs: everything built so far, in order.
    """

    name = "recording"

    def __init__(self) -> None:
        self.programs: List[RecordingProgram] = []

    def build(self, spec: ProgramSpec) -> RecordingProgram:
        """Build a program that records its inputs."""
        program = RecordingProgram(spec)
        self.programs.append(program)
        return program


@dataclasses.dataclass
class RecordingProgram(Program):
    """Accepts every batch, and returns losses of zero and the first input as output.

    It returns what the config requires: outputs by its ``outputs``, the learning rate of the
    schedule, the initial loss scale. No update is skipped, and nothing is averaged.

    Attributes:
        spec: what it was built from.
        examples: the micro-batches of :meth:`prepare`, in order.
        executions: the batches of :meth:`run`, in order.
        rows: with a schedule, the settings of every parameter group for each update.
        updates: number of weight updates that a real program would have made.
        written: the states of :meth:`write_state`, in order.
        calls: the names of all methods called, in order.
        closed: number of calls of :meth:`close`.
    """

    spec: ProgramSpec
    examples: List[MicroBatch] = dataclasses.field(default_factory=list, init=False)
    executions: List[CombinedBatch] = dataclasses.field(default_factory=list, init=False)
    rows: List[Any] = dataclasses.field(default_factory=list, init=False)
    updates: int = dataclasses.field(default=0, init=False)
    written: List[TrainState] = dataclasses.field(default_factory=list, init=False)
    calls: List[str] = dataclasses.field(default_factory=list, init=False)
    closed: int = dataclasses.field(default=0, init=False)

    def __post_init__(self) -> None:
        self.updates = self.spec.first_update

    def _echo(self, batch: MicroBatch) -> Any:
        return batch.leaves[0]

    def prepare(self, example: MicroBatch) -> Prepared:
        """Record the example; there is nothing to build."""
        self.calls.append("prepare")
        self.examples.append(example)
        return Prepared(self._echo(example).to("meta"))

    def run(self, batch: CombinedBatch) -> ExecutionResult:
        """Record the batch."""
        self.calls.append("run")
        self.executions.append(batch)
        count = len(batch.micro_batches)
        settings = self._train(batch) if self.spec.mode is Mode.TRAIN else {}
        outputs, places = self.spec.choose_outputs([*map(self._echo, batch.micro_batches)])
        losses = 0 if self.spec.mode is Mode.PREDICT else count
        zeros = torch.zeros(losses, dtype=torch.float64)
        return ExecutionResult(zeros, outputs, places, settings=settings)

    def _train(self, batch: CombinedBatch) -> Dict[str, float]:
        plan = self.spec.plan
        updates = -(-len(batch.micro_batches) // plan.micro_batches_per_update)
        self.updates += updates
        config = self.spec.config
        settings = {}
        if config.schedule is not None:
            rows = config.schedule.rows(updates, batch.accumulation_steps(plan))
            self.rows += rows
            settings["learning_rate"] = float(rows[-1][0]["lr"])
        if config.loss_scale is not None:
            settings["loss_scale"] = config.loss_scale.initial
        return settings

    def read_state(self) -> TrainState:
        """Return the module's weights, which have not changed."""
        self.calls.append("read_state")
        weights = {n: p.detach().clone() for n, p in self.spec.module.named_parameters()}
        return TrainState(weights, [], {}, self.spec.seed, self.updates)

    def write_state(self, state: TrainState) -> None:
        """Record the state, of which only the counter is used."""
        self.calls.append("write_state")
        self.written.append(state)
        self.updates = state.updates

    def publish(self) -> None:
        """Do nothing: the optimizer has no state here."""
        self.calls.append("publish")

    def swap_averages(self) -> None:
        """Do nothing: there are no averages."""
        self.calls.append("swap_averages")

    def adopt_averages(self) -> None:
        """Do nothing: there are no averages."""
        self.calls.append("adopt_averages")

    def close(self) -> None:
        """Count the calls."""
        self.calls.append("close")
        self.closed += 1
