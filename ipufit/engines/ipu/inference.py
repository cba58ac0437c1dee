"""The inference program: forward passes on an IPU, with the loss when evaluating."""

from __future__ import annotations

from typing import TYPE_CHECKING, List, Sequence

import torch

from ipufit.engines.embedded.step import public_name
from ipufit.engines.ipu.copies import Host, plain
from ipufit.engines.ipu.device import OWNER, alone
from ipufit.engines.ipu.failures import told
from ipufit.engines.ipu.options import seed_of
from ipufit.engines.ipu.reading import anchors_of
from ipufit.engines.ipu.size import Size
from ipufit.engines.ipu.unit import Result, Unit
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

__all__ = ["InferenceProgram"]


class InferenceProgram:
    """Works on the module's present weights.

    What does not fill a call is filled up with micro-batches whose results are left aside; a
    smaller last one has a program of its own.
    """

    def __init__(self, engine: IpuEngine, spec: ProgramSpec) -> None:
        self._engine = engine
        self._spec = spec
        self._host = Host(spec)
        self._size = Size.of(spec.plan)
        self._passes = 0
        self._versions: List[int] = []
        self.updates = spec.first_update

    def _unit(self, example: MicroBatch) -> Unit:
        size = self._size
        if example.size != size.micro_batch:
            size = Size(1, 1, 1, example.size)
        return self._engine.inference_unit(self._spec, size, example)

    @alone
    def prepare(self, example: MicroBatch) -> Prepared:
        """Compile for micro-batches like this one, and bring the present weights over."""
        unit = self._unit(example)
        with told(self._engine.sdk, "bringing weights to the device"):
            if not OWNER.take(unit.executor):
                unit.executor.copyWeightsToDevice()
        self._versions = self._host.all_versions()
        traced = unit.traced
        outputs = traced.outputs.rebuild(traced.outputs.tensors)
        return Prepared(outputs if self._spec.want_outputs else None, traced.reported.rules)

    @alone
    def run(self, batch: CombinedBatch) -> Anchors:
        """One execution."""
        results: List[Result] = []
        work = list(batch.micro_batches)
        while work:
            count = 1
            while count < len(work) and work[count].size == work[0].size:
                count += 1
            alike, work = work[:count], work[count:]
            unit = self._unit(alike[0])
            results += self._run_alike(unit, alike)
        return anchors_of(results, self._spec, {})

    def _run_alike(self, unit: Unit, work: Sequence[MicroBatch]) -> List[Result]:
        count = unit.size.micro_batches
        results: List[Result] = []
        versions = self._host.all_versions()
        with told(self._engine.sdk, "taking the device"):
            # A callback may have changed weights.
            if not OWNER.take(unit.executor) and versions != self._versions:
                unit.executor.copyWeightsToDevice()
        self._versions = versions
        for first in range(0, len(work), count):
            part = list(work[first : first + count])
            full = part + [part[-1]] * (count - len(part))
            results += unit.run(full, seed_of(self._spec, self._passes))[: len(part)]
            self._passes += len(part)
        return results

    def read_state(self) -> TrainState:
        """The module's weights and buffers."""
        weights = {public_name(name): plain(p) for name, p in self._host.parameters.items()}
        buffers = {public_name(name): plain(b) for name, b in self._host.buffers().items()}
        return TrainState(weights, [buffers], {}, self._spec.seed, self.updates)

    @alone
    def write_state(self, state: TrainState) -> None:
        """Other weights and buffers, in place; the device gets them with the next program."""
        with torch.no_grad():
            for name, parameter in self._host.parameters.items():
                parameter.copy_(state.weights[public_name(name)])
            for name, buffer in self._host.buffers().items():
                buffer.copy_(state.buffers[0][public_name(name)])
        self._engine.release_inference()

    def publish(self) -> None:
        """There is no optimizer."""

    def swap_averages(self) -> None:
        """There are no averages."""

    def adopt_averages(self) -> None:
        """There are no averages."""

    def close(self) -> None:
        """The compiled program is kept for the next one; safe twice."""
