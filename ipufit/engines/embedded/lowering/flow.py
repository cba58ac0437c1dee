"""Which nodes of a recorded graph share memory, and which memory is written."""

from __future__ import annotations

import operator
from typing import Any, Dict, Iterator, List, Optional, Set

import torch
from torch import Tensor, fx

__all__ = ["Flow", "value_of"]


def value_of(node: Any) -> Optional[Tensor]:
    """The tensor without data that a node stands for; None where it is none."""
    found = node.meta.get("val") if isinstance(node, fx.Node) else None
    return found if isinstance(found, Tensor) else None


def _schema(node: fx.Node) -> Any:
    return getattr(node.target, "_schema", None)


def _is_view(node: fx.Node) -> bool:
    """Whether it may return the memory of its first argument."""
    if node.target in (operator.getitem, torch.ops.aten._unsafe_view.default):
        return True
    schema = _schema(node)
    return schema is not None and any(r.alias_info is not None for r in schema.returns)


class Flow:
    """Memory in a graph.

    Args:
        graph: recorded, of ATen operators.
    """

    def __init__(self, graph: fx.Graph) -> None:
        self._order: Dict[fx.Node, int] = {node: i for i, node in enumerate(graph.nodes)}
        self._roots: Dict[fx.Node, fx.Node] = {}
        self._last_write: Dict[fx.Node, int] = {}
        for node in graph.nodes:
            first = node.args[0] if node.args else None
            shares = node.op == "call_function" and _is_view(node) and isinstance(first, fx.Node)
            self._roots[node] = self._roots[first] if shares else node  # type: ignore[index]
        for node, place in self._order.items():
            for written in _written(node):
                self._last_write[self._roots[written]] = place

    def is_given(self, node: fx.Node) -> bool:
        """Whether the memory of the node is an input's."""
        return self._roots[node].op == "placeholder"

    def is_written(self, node: fx.Node) -> bool:
        """Whether anything writes into the memory of the node."""
        return self._roots[node] in self._last_write

    def is_written_after(self, node: fx.Node) -> bool:
        """Whether anything writes into the memory of the node when it has been made."""
        return self._last_write.get(self._roots[node], -1) > self._order[node]

    @property
    def written(self) -> Set[fx.Node]:
        """The nodes that made, or brought in, memory that is written."""
        return set(self._last_write)


def _written(node: fx.Node) -> Iterator[fx.Node]:
    schema = _schema(node)
    if node.op != "call_function" or schema is None:
        return
    given: List[Any] = [*node.args, *([None] * len(schema.arguments))]
    for place, argument in enumerate(schema.arguments):
        alias = argument.alias_info
        value = node.kwargs.get(argument.name, given[place])
        if alias is not None and alias.is_write:
            values = value if isinstance(value, (list, tuple)) else [value]
            yield from (each for each in values if isinstance(each, fx.Node))
