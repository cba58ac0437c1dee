"""The inference program: forward passes, with the loss when evaluating."""

from __future__ import annotations

import contextlib
from typing import List, Sequence, Tuple

import torch
from torch import Tensor

from ipufit.core.batch import CombinedBatch, MicroBatch, Mode, local_indices
from ipufit.engines.embedded.context import EngineContext
from ipufit.engines.embedded.execution import ExecutionOutputs
from ipufit.engines.embedded.programs.base import BaseProgram, ModuleWeights
from ipufit.engines.embedded.traced_step import TracedStep, computing
from ipufit.engines.program import ExecutionResult, ProgramSpec, TrainState
from ipufit.tracing.validate import on_host


class InferenceProgram(BaseProgram):
    """Forward passes, with the loss when evaluating. Works on the module's present weights."""

    def __init__(self, engine: EngineContext, spec: ProgramSpec) -> None:
        super().__init__(engine, spec)
        self._weights = self._choose_weights()
        self._device = self._weights.device
        self._passes = 0
        # What steps of the user's own may change, with the values to put back.
        self._values: List[Tuple[Tensor, Tensor]] = []
        if spec.loss is not None and spec.loss.differentiates:
            frozen = [p.detach() for p in self._parameters.values() if not p.requires_grad]
            self._values = [(each, each.clone()) for each in (*frozen, *self._buffers.values())]

    @property
    def updates(self) -> int:
        """Weight updates done since ``compile``: inference makes none."""
        return self._spec.first_update

    def _choose_weights(self) -> ModuleWeights:
        """Choose the weights to work on: the module's, or parts of them."""
        if not self._spec.divides_weights:
            return ModuleWeights(self._parameters, self._device)
        # Imported here: what few runs need.
        from ipufit.engines.embedded.programs.sharded import FSDPWeights

        return FSDPWeights(self._spec, self._engine.carried, self._parameters, self._device)

    def _record(self, example: MicroBatch, turn: int, spec: ProgramSpec) -> TracedStep:
        fixed = [*self._parameters, *self._buffers]
        state = [*self._weights.tensors(), *self._buffers.values()]
        recorded = self._engine.record(spec, example, (), fixed, state, None, self._step)
        self._weights.attach(recorded)
        return recorded

    def run(self, batch: CombinedBatch) -> ExecutionResult:
        """One execution. Replicas share the module's buffers: inference does not set them apart."""
        results = ExecutionOutputs()
        work, is_here, is_random = self._trace(batch.micro_batches)
        if not is_here:
            work = [(micro_batch.to(self._device), recorded) for micro_batch, recorded in work]
        isolated = self._isolated_generators() if self._draws_freely else contextlib.nullcontext()
        with isolated, computing(self._device, is_random):
            numbers: Sequence[int] = range(len(work))
            if batch.layout is not None:
                numbers = local_indices(batch.shares(self._spec.plan))
            state = [*self._weights.tensors(), *self._buffers.values()]
            for place, (micro_batch, recorded) in enumerate(work):
                self._seed(recorded, self._passes + numbers[place])
                tensors = list(recorded.run(*state, *micro_batch.leaves))
                if self._spec.mode is Mode.EVALUATE:
                    results.numbers.append(([recorded.micro.reported], tensors.pop(0)))
                if self._spec.want_outputs:
                    results.add_outputs(recorded, tensors, place)
        self._passes += sum(map(len, batch.sizes(self._spec.plan)))
        result = self._engine.fetch(results)[0]
        self._weights.finish(batch)
        return result

    def read_state(self) -> TrainState:
        """The module's weights and buffers."""
        self._weights.gather()
        weights, buffers = on_host(self._parameters), on_host(self._buffers)
        return TrainState(weights, [buffers], {}, self._spec.seed, self.updates)

    def write_state(self, state: TrainState) -> None:
        """Other weights and buffers, in place."""
        state.write_to(self._parameters, self._buffers)

    def close(self) -> None:
        """Put back what steps have changed; safe twice."""
        with torch.no_grad():
            for tensor, value in self._values:
                tensor.copy_(value)
        self._values = []
        self._by_form = {}
        self._weights.release()
