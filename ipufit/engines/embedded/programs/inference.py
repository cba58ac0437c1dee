"""The inference program: forward passes, with the loss when evaluating."""

from __future__ import annotations

from typing import Sequence

import torch

from ipufit.core.batch import CombinedBatch, MicroBatch, Mode, local_indices
from ipufit.engines.embedded.context import EngineContext
from ipufit.engines.embedded.execution_outputs import ExecutionOutputs
from ipufit.engines.embedded.programs.base import BaseProgram, on_host
from ipufit.engines.embedded.traced_step import TracedStep
from ipufit.engines.program import ExecutionResult, ProgramSpec, TrainState
from ipufit.tracing.grad_step import public_name

__all__ = ["InferenceProgram"]


class InferenceProgram(BaseProgram):
    """Forward passes, with the loss when evaluating. Works on the module's present weights."""

    def __init__(self, engine: EngineContext, spec: ProgramSpec) -> None:
        super().__init__(engine, spec)
        parameters = [p.detach() for p in self._parameters.values()]
        self._state = [*parameters, *self._buffers.values()]
        self._passes = 0

    @property
    def updates(self) -> int:
        """Weight updates done since ``compile``: inference makes none."""
        return self._spec.first_update

    def _record(self, example: MicroBatch) -> TracedStep:
        fixed = [*self._parameters, *self._buffers]
        return self._engine.record(self._spec, example, (), fixed, self._state, None)

    def run(self, batch: CombinedBatch) -> ExecutionResult:
        """One execution. Replicas share the module's buffers: inference does not set them apart."""
        results = ExecutionOutputs()
        micro_batches = batch.micro_batches
        if not self._is_here(micro_batches):
            micro_batches = [micro_batch.to(self._device) for micro_batch in micro_batches]
        programs = self._recorded_for(micro_batches)
        with self._computing(programs):
            numbers: Sequence[int] = range(len(micro_batches))
            if batch.layout is not None:
                numbers = local_indices(batch.shares(self._spec.plan))
            for place, (micro_batch, recorded) in enumerate(zip(micro_batches, programs)):
                self._seed(recorded, self._passes + numbers[place])
                result = list(recorded.run(*self._state, *micro_batch.leaves))
                if self._spec.mode is Mode.EVALUATE:
                    results.numbers.append(([recorded.reported()], result.pop(0)))
                if self._spec.want_outputs:
                    results.add_outputs(recorded, result, place)
        self._passes += sum(map(len, batch.sizes(self._spec.plan)))
        return self._engine.fetch(results)[0]

    def read_state(self) -> TrainState:
        """The module's weights and buffers."""
        weights, buffers = on_host(self._parameters), on_host(self._buffers)
        return TrainState(weights, [buffers], {}, self._spec.seed, self.updates)

    def write_state(self, state: TrainState) -> None:
        """Other weights and buffers, in place."""
        with torch.no_grad():
            for name, parameter in self._parameters.items():
                parameter.copy_(state.weights[public_name(name)])
            for name, buffer in self._buffers.items():
                buffer.copy_(state.buffers[0][public_name(name)])

    def close(self) -> None:
        """Nothing is held; safe twice."""
        self._state = []
        self._by_form = {}
