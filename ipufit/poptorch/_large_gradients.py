"""Count in a recorded program how many elements of its half-precision gradients are large."""

from __future__ import annotations

from typing import Any, List, Set, Tuple

import torch
from torch import fx

from ipufit.poptorch._errors import error
from ipufit.poptorch._loss_scale import ScalingSettings, Tracked

__all__ = ["count_large"]

_LARGEST = 65504.0

_PRODUCTS = {
    "aten::addmm",
    "aten::baddbmm",
    "aten::bmm",
    "aten::convolution",
    "aten::convolution_backward",
    "aten::mm",
}


def count_large(graph: fx.GraphModule, settings: ScalingSettings, gradients: int) -> int:
    """Make the graph return the number of large elements too, before its gradients.

    Looked at is what the gradient of the loss goes through, in float16, and is not a view: what
    the compiler of a device sees of it is the same but for the operators that each makes of one
    of torch.

    Args:
        graph: changed in place; its last input is the scale of the loss.
        settings: from where on an element is large, and which gradients are looked at.
        gradients: how many gradients it returns, last of all.
    Returns:
        How many elements are looked at.
    Raises:
        Error: none is: no gradient is in half precision.
    """
    nodes = _tracked(graph, settings.tracked)
    if not nodes:
        raise error(
            "No tracked gradient tensors of type fp16 were found. Automatic loss scaling follows "
            "gradients of half precision: call model.half(), or leave "
            "Training.setAutomaticLossScaling off."
        )
    ops = torch.ops.aten
    edge = settings.edge * _LARGEST
    total: Any = None
    for node in nodes:
        with graph.graph.inserting_before(node.next):
            # In single precision, which holds the edge. Not `>=`: what is no number is not small.
            wide = graph.graph.call_function(ops._to_copy.default, (node,), {"dtype": torch.float})
            size = graph.graph.call_function(ops.abs.default, (wide,))
            small = graph.graph.call_function(ops.lt.Scalar, (size, edge))
            large = graph.graph.call_function(ops.bitwise_not.default, (small,))
            number = graph.graph.call_function(ops.sum.default, (large,))
            if total is not None:
                number = graph.graph.call_function(ops.add.Tensor, (total, number))
            total = number
    (output,) = (node for node in graph.graph.nodes if node.op == "output")
    returned = list(output.args[0])
    returned.insert(len(returned) - gradients, total)
    output.args = (returned,)
    graph.graph.lint()
    graph.recompile()
    return sum(node.meta["val"].numel() for node in nodes)


def _tracked(graph: fx.GraphModule, method: Tracked) -> List[fx.Node]:
    scale = [node for node in graph.graph.nodes if node.op == "placeholder"][-1]
    seed = _seed(scale)
    below: Set[fx.Node] = set()
    found = []
    for node in graph.graph.nodes:
        if not below.intersection(node.all_input_nodes) and node not in seed:
            continue
        below.add(node)
        if node not in seed and _is_half(node) and node.users and _computes(node, method):
            found.append(node)
    return found


def _seed(scale: fx.Node) -> Tuple[fx.Node, ...]:
    """What is computed of the scale alone: the gradient of the loss itself is not looked at."""
    converted = [user for user in scale.users if user.target is torch.ops.aten._to_copy.default]
    return (scale, *converted, *(user for node in [scale, *converted] for user in node.users))


def _is_half(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.dtype == torch.float16


def _computes(node: fx.Node, method: Tracked) -> bool:
    source = node
    while getattr(source.target, "_schema", None) is None and source.all_input_nodes:
        # One of several results.
        source = source.all_input_nodes[0]
    schema = getattr(source.target, "_schema", None)
    if schema is None or node.op != "call_function":
        return False
    if method == Tracked.Products:
        return schema.name in _PRODUCTS
    aliases = [result.alias_info for result in schema.returns]
    return not any(alias is not None and not alias.is_write for alias in aliases)
