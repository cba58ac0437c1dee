"""Which values of a graph lie in the same memory, and where that memory is written."""

from __future__ import annotations

import operator
from typing import Any, Dict, Iterator, List, Set, Tuple

import torch
from torch import fx

__all__ = ["NORMS", "Memories", "nodes_in", "schema_of"]

# They write running statistics (arguments 3 and 4) while training (argument 5), which their schemas
# don't say.
NORMS = {
    getattr(torch.ops.aten, name).default
    for name in ("native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm")
}


class Memories:
    """The values of a graph, grouped by the memory they may lie in.

    Args:
        graph: of ATen operators.

    Attributes:
        members: all nodes of each memory.
        writes: the nodes that write to it.
        changed: which of the graph's inputs are written to, by number.
    """

    def __init__(self, graph: fx.Graph) -> None:
        self._parent: Dict[fx.Node, fx.Node] = {}
        constants: Dict[Any, fx.Node] = {}
        written: List[Tuple[fx.Node, fx.Node]] = []
        for node in graph.nodes:
            self._parent[node] = node
            if node.op == "get_attr":
                self._join(node, constants.setdefault(node.target, node))
            elif node.op == "call_function":
                for other, writes in _aliased(node):
                    if writes:
                        written.append((node, other))
                    if not writes or _returns(node, other):
                        self._join(node, other)
        self.members: Dict[fx.Node, List[fx.Node]] = {}
        for node in graph.nodes:
            self.members.setdefault(self.of(node), []).append(node)
        self.writes: Dict[fx.Node, List[fx.Node]] = {}
        self.written_by: Dict[fx.Node, Set[fx.Node]] = {}
        for node, other in written:
            self.writes.setdefault(self.of(other), []).append(node)
            self.written_by.setdefault(node, set()).add(self.of(other))
        given = [node for node in graph.nodes if node.op == "placeholder"]
        self.changed = [i for i, node in enumerate(given) if self.of(node) in self.writes]

    def of(self, node: fx.Node) -> fx.Node:
        """The memory of a value: one node that stands for it."""
        while self._parent[node] is not node:
            node = self._parent[node]
        return node

    def _join(self, node: fx.Node, other: fx.Node) -> None:
        first, second = self.of(node), self.of(other)
        if first is not second:
            self._parent[first] = second


def schema_of(node: fx.Node) -> Any:
    """Return the schema of the operator that a node calls, or None if it calls no operator."""
    return getattr(node.target, "_schema", None)


def nodes_in(value: Any) -> Iterator[fx.Node]:
    """The nodes in an argument, those in lists included."""
    if isinstance(value, fx.Node):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from nodes_in(item)


def _aliased(node: fx.Node) -> Iterator[Tuple[fx.Node, bool]]:
    """The arguments whose memory the node's value shares or the node writes to; which of both."""
    if node.target is operator.getitem:
        # Of an operator's several results, views share the memory of what they are views of.
        source: Any = node.args[0]
        if any(True for _ in _aliased(source)) and source.target not in NORMS:
            yield source, False
        return
    if node.target in NORMS and node.args[5]:
        for other in nodes_in(node.args[3:5]):
            yield other, True
        return
    if node.target is torch.ops.aten._unsafe_view.default:
        # A view all the same, though its schema is silent.
        yield node.all_input_nodes[0], False
        return
    schema = schema_of(node)
    for place, argument in enumerate(schema.arguments if schema is not None else ()):
        if argument.alias_info is None:
            continue
        given = node.args[place] if place < len(node.args) else node.kwargs.get(argument.name)
        for other in nodes_in(given):
            yield other, bool(argument.alias_info.is_write)


def _returns(node: fx.Node, other: fx.Node) -> bool:
    """Tell whether an operator that writes to an argument returns it."""
    schema = schema_of(node)
    return schema is not None and any(result.alias_info is not None for result in schema.returns)
