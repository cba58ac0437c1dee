"""Base of the training and inference programs of the embedded engine."""

from __future__ import annotations

import contextlib
from typing import Dict, Iterator, List, Mapping, Sequence

import torch
from torch import Tensor, nn

from ipufit.core.batch import MicroBatch
from ipufit.core.precision import check_precision
from ipufit.engines.embedded.context import EngineContext
from ipufit.engines.embedded.traced_step import TracedStep
from ipufit.engines.program import Prepared, Program, ProgramSpec
from ipufit.tracing.grad_step import public_name
from ipufit.utils.malloc_policy import keep_freed_memory
from ipufit.utils.random_streams import (
    check_keyed_devices,
    isolated,
    micro_batch_key,
    seed_generators,
    update_key,
)

__all__ = ["BaseProgram", "on_host"]


class BaseProgram(Program):
    """The tensors of a program, and what is recorded for each size of micro-batch."""

    def __init__(self, engine: EngineContext, spec: ProgramSpec) -> None:
        self._engine = engine
        self._spec = spec
        check_precision(spec.config.precision, spec.module)
        self._step = step = engine.step_module(spec.module, spec.loss)
        self._parameters: Dict[str, nn.Parameter] = dict(step.named_parameters())
        self._buffers: Dict[str, Tensor] = dict(step.named_buffers())
        named = [*self._parameters.items(), *self._buffers.items()]
        # The module may have been moved since it was compiled.
        check_keyed_devices((public_name(name), tensor) for name, tensor in named)
        self._device = named[0][1].device if named else torch.device("cpu")
        if self._device.type == "cpu":
            keep_freed_memory()
        self._by_form: Dict[object, TracedStep] = {}

    def _record(self, example: MicroBatch) -> TracedStep:
        raise NotImplementedError

    def _recorded(self, batch: MicroBatch) -> TracedStep:
        # The data layer sees to it that micro-batches differ in nothing but size and memory layout.
        form = (batch.size, *[leaf.stride() for leaf in batch.leaves])
        if form not in self._by_form:
            self._by_form[form] = self._record(batch.to(self._device))
        return self._by_form[form]

    def _recorded_for(self, batches: Sequence[MicroBatch]) -> List[TracedStep]:
        """Return the traced step of each micro-batch."""
        found: List[TracedStep] = []
        for batch, previous in zip(batches, (None, *batches)):
            alike = previous is not None and batch.shares_storage_with(previous)
            found.append(found[-1] if alike else self._recorded(batch))
        return found

    def _is_here(self, batches: Sequence[MicroBatch]) -> bool:
        """Tell whether all micro-batches are on the device."""
        for batch, previous in zip(batches, (None, *batches)):
            if previous is not None and batch.shares_storage_with(previous):
                continue
            if any(leaf.device != self._device for leaf in batch.leaves):
                return False
        return True

    def prepare(self, example: MicroBatch) -> Prepared:
        """Record the program for micro-batches like this one."""
        recorded = self._recorded(example)
        outputs = recorded.outputs.rebuild(recorded.outputs.tensors)
        return Prepared(outputs, recorded.reported().rules, recorded.micro.labels or ())

    @contextlib.contextmanager
    def _computing(self, recorded: Sequence[TracedStep]) -> Iterator[None]:
        """Without gradients of torch's own, and with random numbers of the program's own."""
        random = any(each.random for each in recorded)
        # Torch's generator has one user at a time: without need the data pipeline is not kept from
        # it.
        with torch.no_grad(), isolated(self._device) if random else contextlib.nullcontext():
            yield

    def _seed(self, recorded: TracedStep, update: int, place: int = 0) -> None:
        if recorded.random:
            seed_generators(self._key(update, place), self._device)

    def _key(self, update: int, place: int) -> int:
        return micro_batch_key(update_key(self._spec.seed, self._spec.domain, update), place)


def on_host(tensors: Mapping[str, Tensor]) -> Dict[str, Tensor]:
    """Copies under the user's names."""
    return {public_name(name): tensor.detach().cpu().clone() for name, tensor in tensors.items()}
