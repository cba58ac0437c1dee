"""A program as it was recorded, and what it returns."""

from __future__ import annotations

import dataclasses
from typing import (
    Any,
    List,
    Mapping,
    NamedTuple,
    Optional,
    Sequence,
    Tuple,
)

import torch
from torch import Tensor, fx

from ipufit.poptorch._parsers import reconstructTensorStructure
from ipufit.poptorch._tracing import Trace

__all__ = ["Outputs", "Recorded", "Returned"]


@dataclasses.dataclass
class Outputs:
    """What forward returned: tensors of the device by place, and the rest as it was.

    Attributes:
        structure: what forward returned, its tensors without data.
        computed: for each tensor of the structure, whether a micro-batch computes it.
        constants: the tensors that none computes, None elsewhere.
    """

    structure: Any
    computed: List[bool]
    constants: List[Optional[Tensor]]

    def forget(self) -> None:
        """Let go of the tensors of the recording, which have no values; keep those of the host."""
        self.constants = [None if t is None else t.detach().clone() for t in self.constants]
        if self.structure is not None:
            empty = [torch.empty(0) if t is None else t for t in self.constants]
            self.structure = reconstructTensorStructure(self.structure, empty)

    def rebuild(self, tensors: Sequence[Tensor]) -> Any:
        """The same containers around the tensors that were computed."""
        if self.structure is None:
            return None
        source = iter(tensors)
        every = [
            next(source) if computed else constant
            for computed, constant in zip(self.computed, self.constants)
        ]
        return reconstructTensorStructure(self.structure, every)


class Returned(NamedTuple):
    """What a micro-batch gives.

    Attributes:
        outputs: the computed ones of forward.
        loss: None for inference.
        large: number of large elements of gradients; None where they are not counted.
        gradients: by the parameter's name.
    """

    outputs: Sequence[Tensor]
    loss: Optional[Tensor]
    large: Optional[Tensor]
    gradients: Mapping[str, Tensor]


@dataclasses.dataclass(frozen=True)
class Recorded:
    """A micro-batch as a graph over (parameters and buffers, inputs, loss scale).

    Attributes:
        graph: returns the computed outputs, the loss when training, the number of large elements
            of gradients where they are counted, and the gradients of ``reached``.
        outputs: how its outputs become those of forward.
        reached: the parameters that a gradient reached, when training.
        changed_inputs: places of the inputs that forward changes.
        changed_state: names of what forward changes of parameters and buffers.
        random: whether it draws random numbers.
        overlapped: whether a transfer was asked to overlap with computing.
        trace: what was noted meanwhile.
        counted: number of elements of gradients of which large ones are counted.
        activations: for names of what lies between its operators, those of the graph's nodes.
    """

    graph: fx.GraphModule
    outputs: Outputs
    reached: Tuple[str, ...]
    changed_inputs: Tuple[int, ...]
    changed_state: Tuple[str, ...]
    random: bool
    overlapped: bool
    trace: Trace
    counted: int = 0
    activations: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def returned(self, tensors: Sequence[Tensor]) -> Returned:
        """What the graph returned, by what it is."""
        outputs = sum(self.outputs.computed)
        gradients = len(tensors) - len(self.reached)
        return Returned(
            tensors[:outputs],
            tensors[outputs] if self.trace.training else None,
            tensors[gradients - 1] if self.counted else None,
            dict(zip(self.reached, tensors[gradients:])),
        )
