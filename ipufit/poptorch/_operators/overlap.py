"""Marks of inputs and outputs whose transfer overlaps with computation."""

from __future__ import annotations

from typing import Any, Dict, NamedTuple, Sequence

import torch
from torch import Tensor, fx

from ipufit.poptorch._errors import error
from ipufit.poptorch._operators.library import define
from ipufit.poptorch._parsers import flattenTensorStructure, reconstructTensorStructure
from ipufit.poptorch._tracing import tracing
from ipufit.tracing.ipu_only import report_hint

__all__ = ["Overlaps", "resolve", "set_overlap_for_input", "set_overlap_for_output"]


def _run(tensor: Tensor, mode: str) -> Tensor:
    return tensor.clone()


_SCHEMA = "{}(Tensor tensor, str mode) -> Tensor"
_INPUT = define(_SCHEMA.format("overlap_input"), _run, lambda t, mode: torch.empty_like(t))
_OUTPUT = define(_SCHEMA.format("overlap_output"), _run, lambda t, mode: torch.empty_like(t))


class _Same(torch.autograd.Function):
    """Passes the gradient of a mark on to the marked tensor."""

    @staticmethod
    def forward(ctx: Any, operator: Any, tensor: Tensor, mode: str) -> Tensor:
        marked: Tensor = operator(tensor, mode)
        return marked

    @staticmethod
    def backward(ctx: object, *gradients: Any) -> Any:
        return None, gradients[0], None


def _mark(structure: Any, mode: Any, operator: Any, kind: str) -> Any:
    def marked(tensor: Any) -> Tensor:
        if not isinstance(tensor, Tensor):
            raise error(
                f"You may only set overlap for torch.tensor {kind}s. {type(tensor)} is not "
                "supported. Leave out what is not a tensor."
            )
        report_hint(f"set_overlap_for_{kind}", tensor)
        if tracing() is None:
            return tensor
        result: Tensor = _Same.apply(  # type: ignore[no-untyped-call]
            operator, tensor, mode.value
        )
        return result

    tensors = flattenTensorStructure(structure)
    return reconstructTensorStructure(structure, map(marked, tensors))


def set_overlap_for_input(input_tensors: object, mode: object) -> Any:
    """Mark inputs that are sent to the IPU while it computes; call it first in ``forward``.

    Args:
        input_tensors: a tensor, or tuples, lists and dicts of them.
        mode: an :class:`poptorch.OverlapMode`. No value depends on it.
    Returns:
        The same structure; use these tensors, and not the inputs any more.
    """
    return _mark(input_tensors, mode, _INPUT, "input")


def set_overlap_for_output(output_tensors: object, mode: object) -> Any:
    """Mark outputs that leave the IPU while it computes; call it right before returning them.

    Args:
        output_tensors: a tensor, or tuples, lists and dicts of them.
        mode: an :class:`poptorch.OverlapMode`. No value depends on it.
    Returns:
        The same structure; return these tensors.
    """
    return _mark(output_tensors, mode, _OUTPUT, "output")


class Overlaps(NamedTuple):
    """Overlap modes of the marked inputs and outputs, by position."""

    inputs: Dict[int, str]
    outputs: Dict[int, str]


def resolve(
    graph: fx.GraphModule, inputs: Sequence[fx.Node], outputs: Sequence[fx.Node]
) -> Overlaps:
    """Remove the marks from a recorded graph, and return them.

    Args:
        graph: changed in place.
        inputs: nodes of the model's tensor inputs, in order.
        outputs: nodes of the tensors that the model returns, in order, one for each time that a
            tensor is returned.
    Raises:
        Error: a mark stands elsewhere than first on an input or last before an output.
    """
    overlaps = Overlaps({}, {})
    marks = [node for node in graph.graph.nodes if node.target in (_INPUT, _OUTPUT)]
    for position, node in enumerate(inputs):
        marked = [user for user in node.users if user.target is _INPUT]
        if marked and len(node.users) > 1:
            raise error(
                "poptorch.set_overlap_for_input must be the only op applied to an input. This is "
                f"not the case for input {position} to the model. Use its result wherever the "
                "input was used."
            )
        if marked:
            overlaps.inputs[position] = str(marked[0].args[1])
            marks.remove(marked[0])
            _erase(graph, marked[0])
    returned = list(outputs)
    for position, node in enumerate(outputs):
        if node.target is not _OUTPUT:
            continue
        if returned.count(node) + returned.count(node.all_input_nodes[0]) > 1:
            raise error(
                "poptorch.set_overlap_for_output cannot be used with a tensor that is returned "
                "twice. Please check all returned tensors including those nested in "
                "tuples/lists."
            )
        overlaps.outputs[position] = str(node.args[1])
        marks.remove(node)
        _erase(graph, node)
    for node in marks:
        kind = "input" if node.target is _INPUT else "output"
        place = "first of all" if kind == "input" else "right before returning"
        raise error(
            f"poptorch.set_overlap_for_{kind} applied on a node which is not a tensor {kind} to "
            f"the model. Call it {place}, on the {kind} itself."
        )
    graph.recompile()
    return overlaps


def _erase(graph: fx.GraphModule, node: fx.Node) -> None:
    node.replace_all_uses_with(node.all_input_nodes[0])
    graph.graph.erase_node(node)
