"""What training and inference programs of the embedded engine have in common."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Dict, List, Mapping, Tuple

import torch
from torch import Tensor, nn

from ipufit.engines.embedded.step import public_name
from ipufit.program import Anchors, MicroBatch, ProgramSpec
from ipufit.randomness import seed_generators, stream_key

if TYPE_CHECKING:
    from ipufit.engines.embedded.engine import EmbeddedEngine, Recorded

__all__ = ["BaseProgram", "Collected", "on_host"]


class Collected:
    """What the micro-batches of an execution have produced, still on the device."""

    def __init__(self) -> None:
        self.losses: List[Tensor] = []
        self.outputs: List[Tuple[Recorded, List[Tensor]]] = []

    def to_anchors(self, engine: EmbeddedEngine) -> Anchors:
        """Everything an execution hands back, in one copy."""
        flat = [torch.stack(self.losses).to(torch.float64)] if self.losses else []
        for _, tensors in self.outputs:
            flat += tensors
        host = iter(engine.transfer.to_host(flat))
        values = next(host) if self.losses else torch.empty(0, dtype=torch.float64)
        outputs = [
            recorded.outputs.rebuild([next(host) for _ in tensors])
            for recorded, tensors in self.outputs
        ]
        return Anchors(values, outputs)


class BaseProgram:
    """The tensors of a program, and what is recorded for each size of micro-batch."""

    def __init__(self, engine: EmbeddedEngine, spec: ProgramSpec) -> None:
        self._engine = engine
        self._spec = spec
        self._step = step = engine.step_module(spec.module, spec.loss)
        self._parameters: Dict[str, nn.Parameter] = dict(step.named_parameters())
        self._buffers: Dict[str, Tensor] = dict(step.named_buffers())
        tensors = [*self._parameters.values(), *self._buffers.values()]
        self._device = tensors[0].device if tensors else torch.device("cpu")
        self._by_form: Dict[object, Recorded] = {}

    def _record(self, example: MicroBatch) -> Recorded:
        raise NotImplementedError

    def _recorded(self, batch: MicroBatch) -> Recorded:
        # The data layer sees to it that micro-batches differ in nothing but size and memory layout.
        form = (batch.size, *(leaf.stride() for leaf in batch.leaves))
        if form not in self._by_form:
            self._by_form[form] = self._record(batch)
        return self._by_form[form]

    def prepare(self, example: MicroBatch) -> Any:
        """Record the program for micro-batches like this one."""
        outputs = self._recorded(example.to(self._device)).outputs
        return outputs.rebuild(outputs.tensors)

    def _seed(self, recorded: Recorded, *place: int) -> None:
        if recorded.random:
            key = stream_key(self._spec.seed, self._spec.domain, *place)
            seed_generators(key, self._device)


def on_host(tensors: Mapping[str, Tensor]) -> Dict[str, Tensor]:
    """Copies under the user's names."""
    return {public_name(name): tensor.detach().cpu().clone() for name, tensor in tensors.items()}
