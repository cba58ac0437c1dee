"""Base of the training and inference programs of the embedded engine."""

from __future__ import annotations

import contextlib
import functools
from typing import Dict, Iterator, List, Mapping, Sequence, Tuple

import torch
from torch import Tensor, nn

from ipufit.core.batch import CombinedBatch, MicroBatch
from ipufit.core.precision import check_precision
from ipufit.engines.embedded.context import EngineContext
from ipufit.engines.embedded.traced_step import TracedStep
from ipufit.engines.program import Form, Prepared, Program, ProgramSpec, Recordings, in_words
from ipufit.losses import LossFacts
from ipufit.tracing.grad_step import public_name
from ipufit.tracing.untraced_random import reachable_generators
from ipufit.utils.devices import check_devices
from ipufit.utils.malloc_policy import keep_freed_memory
from ipufit.utils.random_streams import (
    LOCK,
    Generators,
    micro_batch_key,
    seed_generators,
    update_key,
)


class BaseProgram(Program):
    """The tensors of a program, and what is recorded for each form of micro-batch."""

    def __init__(self, engine: EngineContext, spec: ProgramSpec) -> None:
        self._engine = engine
        self._spec = spec
        # Whether code that is not recorded may draw from generators other than torch's.
        self._draws_freely = spec.run_eagerly
        check_precision(spec.config.precision, spec.module)
        self._step = step = engine.step_module(spec.module, spec.loss)
        self._parameters: Dict[str, nn.Parameter] = dict(step.named_parameters())
        self._buffers: Dict[str, Tensor] = dict(step.named_buffers())
        named = [*self._parameters.items(), *self._buffers.items()]
        # The module may have been moved since it was compiled.
        check_devices((public_name(name), tensor) for name, tensor in named)
        self._device = named[0][1].device if named else torch.device("cpu")
        if self._device.type == "cpu":
            keep_freed_memory()
        self._by_form: Dict[object, TracedStep] = {}
        self.recordings = None if spec.run_eagerly else Recordings(spec.config.max_recordings)
        # Those of Python, NumPy and the user, which code that runs eagerly may draw from.
        self._generators = Generators()
        self._drawing: List[Tuple[str, object]] = []

    def _record(self, example: MicroBatch, turn: int, spec: ProgramSpec) -> TracedStep:
        raise NotImplementedError

    def _recorded(self, batch: MicroBatch, turn: int = 0) -> TracedStep:
        # The module itself, run eagerly, takes all shapes and dtypes.
        leaves = () if self.recordings is None else batch.leaves
        tensors = [(t.shape, t.dtype, t.stride()) for t in leaves if isinstance(t, Tensor)]
        form = batch.structure, tuple(tensors)
        if (form, turn) not in self._by_form:
            record = functools.partial(self._record_form, form, batch.to(self._device), turn)
            if self.recordings is None:
                self._by_form[form, turn] = record()
            else:
                self._by_form[form, turn] = self.recordings.add(form, self._engine, record)
        return self._by_form[form, turn]

    def _record_form(self, form: Form, example: MicroBatch, turn: int) -> TracedStep:
        """Record a form of micro-batch, or run the module itself where that can't be done."""
        spec, fallback = self._spec, self._spec.fallback
        if spec.run_eagerly or not fallback.mixes(spec.mode):
            return self._record(example, turn, spec)
        if (spec.mode, form) not in fallback.reasons:
            try:
                return self._record(example, turn, spec)
            except Exception as error:
                if not self._engine.can_run_eagerly(spec.config, error):
                    raise
                with fallback.trying(error, spec.mode, spec.module, form, in_words([form])[0]):
                    return self._run_itself(form, example, turn)
        return self._run_itself(form, example, turn)

    def _run_itself(self, form: Form, example: MicroBatch, turn: int) -> TracedStep:
        """Have the module itself run a form of micro-batch, among others that are recorded."""
        self._draws_freely = True
        self._drawing = reachable_generators(self._step)
        recorded = self._record(example, turn, self._spec.eager)
        assert self.recordings is not None
        self.recordings.eager.add(form)
        return recorded

    def _trace(
        self, batches: Sequence[MicroBatch]
    ) -> Tuple[List[Tuple[MicroBatch, TracedStep]], bool, bool]:
        """Find, or record, what runs each micro-batch.

        Returns:
            Each with that; whether all are on the device; whether any may draw random numbers.
        """
        steps: List[TracedStep] = []
        is_here, is_random = True, False
        for index, batch in enumerate(batches):
            # Rows of the same tensors are alike in all but their values.
            if index and batch.shares_storage_with(batches[index - 1]):
                steps.append(steps[-1])
                continue
            steps.append(self._recorded(batch))
            is_random = is_random or steps[-1].random
            for leaf in batch.leaves:
                if isinstance(leaf, Tensor) or hasattr(leaf, "device"):
                    is_here = is_here and leaf.device == self._device
        return [*zip(batches, steps)], is_here, is_random

    def prepare(self, example: MicroBatch) -> Prepared:
        """Record the program for micro-batches like this one."""
        spec = self._spec
        if spec.run_eagerly:
            self._drawing = reachable_generators(self._step)
        recorded = self._recorded(example)
        if not spec.run_eagerly:
            spec.fallback.recorded.add(spec.mode)
        outputs = recorded.micro.outputs.rebuild(recorded.micro.outputs.tensors)
        micro = recorded.micro
        return Prepared(outputs, micro.reported.rules, micro.facts or LossFacts())

    def _seed(self, recorded: TracedStep, update: int, place: int = 0, stream: str = "") -> None:
        if recorded.random:
            seed_generators(self._key(update, place, stream), self._device)
        if recorded.graph is None:
            self._generators.start(self._key(update, place, stream))

    @contextlib.contextmanager
    def _isolated_generators(self) -> Iterator[None]:
        """Leave generators that are not torch's own as they were."""
        # The data pipeline may draw as well, but not while this is held.
        with LOCK:
            self._generators = Generators(self._drawing)
            try:
                yield
            finally:
                self._generators.restore()

    def _key(self, update: int, place: int, stream: str = "") -> int:
        domain = self._spec.domain + stream
        return micro_batch_key(update_key(self._spec.seed, domain, update), place)


class ModuleWeights:
    """Weights that an inference program works on: the module's own, as they are now.

    Args:
        parameters: by name.
        device: of the module.

    Attributes:
        device: where a recording runs.
    """

    def __init__(self, parameters: Mapping[str, Tensor], device: torch.device) -> None:
        self._parameters = parameters
        self.device = device

    def tensors(self) -> List[Tensor]:
        """Return what a recording takes; hooks may set the data of a parameter."""
        return [parameter.detach() for parameter in self._parameters.values()]

    def attach(self, recorded: TracedStep) -> None:
        """Let a recording know the weights that it takes, where these are not its arguments."""

    def finish(self, batch: CombinedBatch) -> None:
        """Do what other processes need after an execution."""

    def gather(self) -> None:
        """Bring the module's parameters up to date, where they lie in parts."""

    def release(self) -> None:
        """Let go of the tensors; safe twice."""
        self._parameters = {}
