"""Drop operators that change nothing: the same bits with fewer calls."""

from __future__ import annotations

import operator

import torch
from torch import fx

from ipufit.engines.embedded.passes.data_flow import Flow, value_of

__all__ = ["drop_unused", "simplify"]

_aten = torch.ops.aten

# What does nothing but return something: without users, nothing.
_WITHOUT_EFFECT = {
    _aten.clone.default,
    _aten.detach.default,
    _aten.expand.default,
    _aten.permute.default,
    _aten.select.int,
    _aten.slice.Tensor,
    _aten.split.Tensor,
    _aten.t.default,
    _aten.transpose.int,
    _aten.unbind.int,
    _aten.unsqueeze.default,
    _aten.view.default,
    operator.getitem,
}


def simplify(graph: fx.Graph) -> None:
    """Take out transposes of transposes, and copies of what is contiguous and never written."""
    flow = Flow(graph)
    for node in list(graph.nodes):
        if node.target is _aten.t.default:
            inner = node.args[0]
            if inner.target is _aten.t.default:
                node.replace_all_uses_with(inner.args[0])
        elif node.target is _aten.clone.default and _is_idle(node, flow):
            node.replace_all_uses_with(node.args[0])
    drop_unused(graph)


def _is_idle(node: fx.Node, flow: Flow) -> bool:
    """Tell whether a copy has its source's layout, and neither is written afterwards."""
    given = node.args[0]
    source, copy = value_of(given), value_of(node)
    if source is None or copy is None or not isinstance(given, fx.Node):
        return False
    if flow.is_given(given) or flow.is_written(node) or flow.is_written_after(given):
        return False
    return source.stride() == copy.stride()


def drop_unused(graph: fx.Graph) -> None:
    """Take out views and copies that nobody reads."""
    for node in reversed(list(graph.nodes)):
        if not node.users and node.target in _WITHOUT_EFFECT:
            graph.erase_node(node)
