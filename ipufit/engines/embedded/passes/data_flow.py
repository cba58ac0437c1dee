"""Facts that passes need about the values of a graph: their form, and who writes to them."""

from __future__ import annotations

from typing import Any, Dict, Optional

from torch import Tensor, fx

from ipufit.tracing.graph_analysis import Memories

__all__ = ["Flow", "value_of"]


def value_of(node: Any) -> Optional[Tensor]:
    """The tensor without data that a node stands for; None where it is none."""
    found = node.meta.get("val") if isinstance(node, fx.Node) else None
    return found if isinstance(found, Tensor) else None


class Flow:
    """When the memory of values is written.

    Args:
        graph: recorded, of ATen operators.
    """

    def __init__(self, graph: fx.Graph) -> None:
        self._order: Dict[fx.Node, int] = {node: i for i, node in enumerate(graph.nodes)}
        self._memories = Memories(graph)
        self._given = {self._memories.of(n) for n in graph.nodes if n.op == "placeholder"}

    def is_given(self, node: fx.Node) -> bool:
        """Tell whether the memory of the node is an input's."""
        return self._memories.of(node) in self._given

    def is_written(self, node: fx.Node) -> bool:
        """Tell whether anything writes into the memory of the node."""
        return self._memories.of(node) in self._memories.writes

    def is_written_after(self, node: fx.Node) -> bool:
        """Tell whether anything writes into the memory of the node once it is there."""
        writes = self._memories.writes.get(self._memories.of(node), [])
        return any(self._order[write] > self._order[node] for write in writes)
