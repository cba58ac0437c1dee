"""Inference on an IPU: forward passes, with the loss when evaluating, and compiled programs kept.

What compiles and keeps them holds what all programs of one engine share: PopTorch and the time.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from types import ModuleType
from typing import Dict, Iterator, List, Optional, Tuple

from ipufit.core.batch import CombinedBatch, MicroBatch, counts_by_rank
from ipufit.engines.ipu.executable import Executable, Host, Result, anchors_of, unwrapped
from ipufit.engines.ipu.options import fixes_replicas, make_options, seed_of
from ipufit.engines.ipu.sdk import OWNER, alone, keeps_float64, translate_errors
from ipufit.engines.ipu.size import Size, padded, refuse_other_shapes
from ipufit.engines.ipu.step import IpuStep
from ipufit.engines.program import (
    Engine,
    ExecutionResult,
    Prepared,
    Program,
    ProgramSpec,
    TrainState,
)
from ipufit.tracing.fingerprint import fingerprint
from ipufit.tracing.grad_step import ModuleWithLoss
from ipufit.tracing.validate import refuse_unrecordable

ONE_SHAPE = "several processes with IPUs compile the same programs, for batches of one shape"
# Compiled inference programs that are kept for later; the least recently used go first.
_KEPT = 8


class IpuContext(Engine):
    """Compiles inference programs and keeps them for later ones, and counts what compiling takes.

    Args:
        sdk: PopTorch, or a module with its API.
        name: "ipu", or "ipu-standin" where the module is the stand-in.

    Attributes:
        sdk, name: as given.
        compiled: number of programs compiled so far.
    """

    mixes_shapes = False

    def __init__(self, sdk: ModuleType, name: str = "ipu") -> None:
        self.sdk = sdk
        self.name = name
        self.compiled = 0
        self._inference: OrderedDict[Tuple[object, ...], Tuple[Executable, object]] = OrderedDict()

    @property
    def wide(self) -> bool:
        """True where float64 is kept, as only the stand-in can."""
        return keeps_float64(self.sdk)

    def inference_unit(self, spec: ProgramSpec, size: Size, example: MicroBatch) -> Executable:
        """The compiled program for the example's shapes; compiled now if it is new."""
        whole = ModuleWithLoss(spec.module, spec.loss)
        key: Tuple[object, ...] = (
            unwrapped(fingerprint(whole)[0]),
            spec.mode,
            spec.want_outputs,
            size,
            example.form,
            id(spec.module),
            id(spec.loss),
            id(spec.options),
        )
        if key not in self._inference:
            unit = self._compiled(spec, size, example)
            frozen, referents = fingerprint(whole)
            key = (unwrapped(frozen), *key[1:])
            self._inference[key] = (unit, (referents, spec))
            if len(self._inference) > _KEPT:
                self._inference.popitem(last=False)[1][0].destroy()
        self._inference.move_to_end(key)
        return self._inference[key][0]

    def _compiled(self, spec: ProgramSpec, size: Size, example: MicroBatch) -> Executable:
        refuse_unrecordable(spec.module, example)
        options = make_options(self.sdk, spec, size)
        step = IpuStep(self.sdk, spec.module, spec.loss, spec, example, size.padding)
        step.training = spec.module.training
        with self.recording(), translate_errors(self.sdk, "wrapping the module"):
            executor = self.sdk.inferenceModel(step, options=options)
            unit = Executable(self.sdk, step, executor, size, self.wide)
            unit.compile(example)
        self.compiled += 1
        return unit

    def release_inference(self) -> None:
        """Take the device from inference programs, so that the next one brings weights over."""
        for unit, _ in self._inference.values():
            OWNER.release(unit.executor)

    @alone()
    def close(self) -> None:
        """Let go of all compiled programs; safe twice."""
        while self._inference:
            self._inference.popitem(last=False)[1][0].destroy()


class PoptorchInferenceProgram(Program):
    """Works on the module's present weights.

    What does not fill a call is filled up with micro-batches whose results are left aside; a
    smaller last one has a program of its own. Several processes make the same calls, whatever each
    has to compute: compiling and loading a program is something that they do together.
    """

    def __init__(self, engine: IpuContext, spec: ProgramSpec) -> None:
        self._engine = engine
        self._spec = spec
        self._host = Host(spec)
        self._size = Size.of(spec.plan)
        self._passes = 0
        self._versions: List[Tuple[int, int]] = []
        self._example: Optional[MicroBatch] = None

    @property
    def updates(self) -> int:
        """Weight updates done since ``compile``: inference makes none."""
        return self._spec.first_update

    def _unit(self, example: MicroBatch) -> Executable:
        size = self._size
        if example.size != size.micro_batch:
            several = self._spec.processes.is_distributed or fixes_replicas(self._engine.sdk)
            size = Size(1, 1, size.replicas if several else 1, example.size)
        return self._engine.inference_unit(self._spec, size, example)

    @alone()
    def prepare(self, example: MicroBatch) -> Prepared:
        """Compile for micro-batches like this one, and bring the present weights over."""
        if self._spec.processes.is_distributed and example.size < self._size.micro_batch:
            # Others may have begun with a full one: all compile the same programs in one order.
            self._unit(padded(example, self._size.micro_batch))
        unit = self._unit(example)
        self._example = self._example or example
        with translate_errors(self._engine.sdk, "copying weights to the device"):
            if not OWNER.take(unit.executor):
                unit.executor.copyWeightsToDevice()
        self._versions = self._host.all_versions()
        return unit.prepared(example.size)

    @alone()
    def run(self, batch: CombinedBatch) -> ExecutionResult:
        """One execution."""
        work = batch.micro_batches
        results_by_place: Dict[int, Result] = {}
        for size, places, counts in self._groups(batch):
            unit = self._unit(work[places[0]] if places else self._example_of(size))
            self._take(unit)
            per_call = unit.size.micro_batches
            for first in range(0, max(counts), per_call):
                now = places[first : first + per_call]
                part = [work[place] for place in now]
                rest = [part[-1] if part else self._example_of(size)] * (per_call - len(part))
                results = unit.run([*part, *rest], seed_of(self._spec, self._passes))
                results_by_place.update(zip(now, results))
                self._passes += sum(max(0, min(per_call, each - first)) for each in counts)
        return anchors_of([results_by_place[place] for place in range(len(work))], self._spec, {})

    def _groups(self, batch: CombinedBatch) -> Iterator[Tuple[int, List[int], List[int]]]:
        """Yield micro-batches of one program: samples of each, places, and number by process.

        Those of several processes are grouped by their size, as all make the same calls.
        """
        sizes, layout = [each.size for each in batch.micro_batches], batch.layout
        if layout is None:
            forms = [(each.size, each.form) for each in batch.micro_batches]
            for (size, _), group in itertools.groupby(range(len(sizes)), forms.__getitem__):
                places = list(group)
                yield size, places, [len(places)]
            return
        refuse_other_shapes(batch.micro_batches, self._example, ONE_SHAPE)
        for size in sorted({each for update in layout for each in update if each}, reverse=True):
            columns = zip(*(counts_by_rank(update, self._spec.plan, size) for update in layout))
            places = [place for place, each in enumerate(sizes) if each == size]
            yield size, places, [sum(column) for column in columns]

    def _example_of(self, size: int) -> MicroBatch:
        """A micro-batch to repeat, in a process that has none of this size."""
        assert self._example is not None
        example = padded(self._example, max(size, self._example.size))
        return example if example.size == size else example.head(size)

    def _take(self, unit: Executable) -> None:
        versions = self._host.all_versions()
        with translate_errors(self._engine.sdk, "acquiring the device"):
            # A callback may have changed weights.
            if not OWNER.take(unit.executor) and versions != self._versions:
                unit.executor.copyWeightsToDevice()
        self._versions = versions

    def read_state(self) -> TrainState:
        """The module's weights and buffers."""
        weights, buffers = self._host.copies()
        return TrainState(weights, [buffers], {}, self._spec.seed, self.updates)

    @alone()
    def write_state(self, state: TrainState) -> None:
        """Other weights and buffers, in place; the device gets them with the next program."""
        self._host.overwrite(state)
        self._engine.release_inference()

    def close(self) -> None:
        """The compiled program is kept for the next one; safe twice."""
