"""Let matrix products write where their results are gathered: the same bits with fewer copies."""

from __future__ import annotations

from typing import List, NamedTuple, Optional, Sequence

import torch
from torch import fx

from ipufit.engines.embedded.passes.data_flow import Flow, value_of

__all__ = ["fuse_concats"]

_aten = torch.ops.aten

# Elements of a product that is worth a view of its own.
_SMALLEST = 2**14


class _Part(NamedTuple):
    """An input of a concatenation.

    Attributes:
        node: the flat tensor.
        size: its elements.
        product: the matrix product that it is a view of, if it may write there; None otherwise.
    """

    node: fx.Node
    size: int
    product: Optional[fx.Node]


def fuse_concats(graph: fx.Graph) -> int:
    """Make large matrix products write into the flat tensors that they are joined in.

    Returns:
        How many do.
    """
    flow = Flow(graph)
    done = 0
    for node in list(graph.nodes):
        if node.target is _aten.cat.default and len(node.args) == 1 and not node.kwargs:
            parts = _parts(node, flow)
            products = [part.product for part in parts if part.product is not None]
            if products:
                _rewrite(graph, node, parts)
                done += len(products)
    return done


def _parts(node: fx.Node, flow: Flow) -> List[_Part]:
    """List the inputs of a concatenation; none if they are not flat tensors of one kind."""
    whole, given = value_of(node), node.args[0]
    assert isinstance(given, (list, tuple))
    values = [value_of(part) for part in given]
    if whole is None or any(
        value is None or value.dim() != 1 or value.dtype != whole.dtype for value in values
    ):
        return []
    found = []
    for part, value in zip(given, values):
        assert isinstance(part, fx.Node)
        assert value is not None
        product = _product_of(part, flow) if value.numel() >= _SMALLEST else None
        found.append(_Part(part, value.numel(), product))
    return found


def _product_of(part: fx.Node, flow: Flow) -> Optional[fx.Node]:
    """The product that nothing else is made of than this view of all of it."""
    node = part
    while node.target is _aten.view.default and len(node.users) == 1:
        source = node.args[0]
        assert isinstance(source, fx.Node)
        node = source
    value = value_of(node)
    if node is part or node.target is not _aten.mm.default or len(node.users) != 1:
        return None
    if value is None or not value.is_contiguous() or flow.is_written(node):
        return None
    return node


def _rewrite(graph: fx.Graph, node: fx.Node, parts: Sequence[_Part]) -> None:
    products = {part.product for part in parts if part.product is not None}
    first = next(each for each in graph.nodes if each in products)
    with graph.inserting_before(first):
        size = sum(part.size for part in parts)
        whole = graph.call_function(_aten.new_empty.default, (first.args[0], [size]))
    begin, rest = 0, []
    for part in parts:
        if part.product is None:
            rest.append(part.node)
        else:
            _join(graph, node, whole, begin, rest)
            begin, rest = begin + _elements(rest), []
            _redirect(graph, part.product, whole, begin)
            begin += part.size
    _join(graph, node, whole, begin, rest)
    node.replace_all_uses_with(whole)
    graph.erase_node(node)
    for part in parts:
        _drop_views(graph, part.node)


def _elements(nodes: Sequence[fx.Node]) -> int:
    values = [value_of(node) for node in nodes]
    return sum(value.numel() for value in values if value is not None)


def _join(
    graph: fx.Graph, before: fx.Node, whole: fx.Node, begin: int, nodes: Sequence[fx.Node]
) -> None:
    """Copy these there, one after another."""
    if not nodes:
        return
    with graph.inserting_before(before):
        place = graph.call_function(torch.narrow, (whole, 0, begin, _elements(nodes)))
        if len(nodes) == 1:
            graph.call_function(_aten.copy_.default, (place, nodes[0]))
        else:
            graph.call_function(_aten.cat.out, (list(nodes),), {"out": place})


def _redirect(graph: fx.Graph, product: fx.Node, whole: fx.Node, begin: int) -> None:
    """Make the product write there."""
    value = value_of(product)
    assert value is not None
    with graph.inserting_before(product):
        place = graph.call_function(torch.narrow, (whole, 0, begin, value.numel()))
        shaped = graph.call_function(_aten.view.default, (place, list(value.shape)))
        graph.call_function(_aten.mm.out, product.args, {"out": shaped})


def _drop_views(graph: fx.Graph, node: fx.Node) -> None:
    """Remove what is left of a product that writes elsewhere now."""
    while not node.users and node.target in (_aten.view.default, _aten.mm.default):
        source = node.args[0]
        graph.erase_node(node)
        if not isinstance(source, fx.Node):
            return
        node = source
