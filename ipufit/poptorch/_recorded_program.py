"""A recorded program, its outputs, and the tensors that it changes in place."""

from __future__ import annotations

import dataclasses
from typing import Any, Dict, List, Mapping, NamedTuple, Optional, Sequence, Tuple

import torch
from torch import Tensor, fx

from ipufit.poptorch._parsers import reconstructTensorStructure
from ipufit.poptorch._tracing import Trace
from ipufit.tracing.graph_analysis import schema_of

__all__ = ["MicroBatchResults", "Outputs", "RecordedProgram", "Writes", "find_writes"]


@dataclasses.dataclass
class Outputs:
    """Outputs of forward: tensors that the device computes, and everything else as forward made it.

    Attributes:
        structure: the return value of forward, its tensors without data.
        computed: for each tensor of the structure, whether a micro-batch computes it.
        constants: the tensors that no micro-batch computes, None elsewhere.
    """

    structure: Any
    computed: List[bool]
    constants: List[Optional[Tensor]]

    def forget(self) -> None:
        """Drop the tensors of the recording, which have no values; those of the host stay."""
        self.constants = [None if t is None else t.detach().clone() for t in self.constants]
        if self.structure is not None:
            empty = [torch.empty(0) if t is None else t for t in self.constants]
            self.structure = reconstructTensorStructure(self.structure, empty)

    def rebuild(self, tensors: Sequence[Tensor]) -> Any:
        """Return what forward returned, with these tensors in place of the computed ones."""
        if self.structure is None:
            return None
        source = iter(tensors)
        every = [
            next(source) if computed else constant
            for computed, constant in zip(self.computed, self.constants)
        ]
        return reconstructTensorStructure(self.structure, every)


class MicroBatchResults(NamedTuple):
    """Results of one micro-batch.

    Attributes:
        outputs: the computed outputs of forward.
        loss: None for inference.
        large: number of large elements of gradients; None where they are not counted.
        gradients: gradients by the parameter's name.
    """

    outputs: Sequence[Tensor]
    loss: Optional[Tensor]
    large: Optional[Tensor]
    gradients: Mapping[str, Tensor]


@dataclasses.dataclass(frozen=True)
class RecordedProgram:
    """A micro-batch as a graph over (parameters and buffers, inputs, loss scale).

    Attributes:
        graph: returns the computed outputs, the loss when training, the number of large elements
            of gradients where they are counted, and the gradients of ``with_gradient``.
        outputs: how the graph's outputs become those of forward.
        with_gradient: names of the parameters that the loss depends on, when training.
        changed_inputs: positions of the inputs that forward changes in place.
        changed_state: names of the parameters and buffers that forward changes in place.
        statistics: names of the buffers that only batch normalisation changes.
        random: whether the program draws random numbers.
        overlapped: whether a transfer is to overlap with computing.
        trace: what the model declared while it was recorded.
        counted: number of elements of gradients of which large ones are counted.
        activations: names of the graph's nodes, by the names under which tensors can be anchored.
    """

    graph: fx.GraphModule
    outputs: Outputs
    with_gradient: Tuple[str, ...]
    changed_inputs: Tuple[int, ...]
    changed_state: Tuple[str, ...]
    random: bool
    overlapped: bool
    trace: Trace
    counted: int = 0
    activations: Mapping[str, str] = dataclasses.field(default_factory=dict)
    statistics: Tuple[str, ...] = ()

    def returned(self, tensors: Sequence[Tensor]) -> MicroBatchResults:
        """Name the tensors that the graph returned."""
        outputs = sum(self.outputs.computed)
        gradients = len(tensors) - len(self.with_gradient)
        return MicroBatchResults(
            tensors[:outputs],
            tensors[outputs] if self.trace.training else None,
            tensors[gradients - 1] if self.counted else None,
            dict(zip(self.with_gradient, tensors[gradients:])),
        )


_STATISTICS = ("running_mean", "running_var")


class Writes(NamedTuple):
    """Positions of the placeholders that a graph changes in place.

    Attributes:
        changed: changed by operators whose purpose is to write into them.
        statistics: running statistics that batch normalisation updates, and that no operator
            writes into otherwise.
    """

    changed: Tuple[int, ...]
    statistics: Tuple[int, ...]


def find_writes(graph: fx.GraphModule) -> Writes:
    """Find the placeholders that a graph changes in place, directly or through views."""
    place: Dict[fx.Node, int] = {}
    changed: List[int] = []
    statistics: List[int] = []
    for node in graph.graph.nodes:
        if node.op == "placeholder":
            place[node] = len(place)
            continue
        schema = schema_of(node)
        if schema is None:
            # A member of several results: of a split, say.
            source = node.args[0] if node.args else None
            if isinstance(source, fx.Node) and source in place:
                place[node] = place[source]
            continue
        arguments: Dict[str, Any] = dict(zip((a.name for a in schema.arguments), node.args))
        arguments.update(node.kwargs)
        # Some of its overloads change statistics without saying so in their schema.
        normalises = "batch_norm" in schema.name
        for argument in schema.arguments:
            value = arguments.get(argument.name)
            for each in value if isinstance(value, (list, tuple)) else [value]:
                if not isinstance(each, fx.Node) or each not in place:
                    continue
                alias = argument.alias_info
                if normalises and argument.name in _STATISTICS:
                    declared = alias is not None and alias.is_write
                    if arguments.get("training", declared):
                        statistics.append(place[each])
                elif alias is not None:
                    if alias.is_write:
                        changed.append(place[each])
                    place[node] = place[each]
    return Writes(tuple(sorted({*changed})), tuple(sorted({*statistics} - {*changed})))
