"""Signatures of traced micro-batches: enough to tell whether another one is the same."""

from __future__ import annotations

import dataclasses
from typing import Dict, Optional, Set, Tuple

import torch
from torch import Tensor, fx

from ipufit.tracing.aliases import Memories
from ipufit.tracing.capture import draws

__all__ = ["GraphSignature", "operator_name", "same_constants"]


@dataclasses.dataclass(frozen=True)
class GraphSignature:
    """A graph as text, and what in it forbids to merge.

    Attributes:
        text: what its operators compute from what, but for those that nobody reads.
        constants: tensors in it.
        drawn: an operator that draws random numbers, or None.
        changed: the number of an argument that it writes to, or None.
    """

    text: str
    constants: Tuple[Tensor, ...]
    drawn: Optional[str]
    changed: Optional[int]

    @staticmethod
    def of(graph: fx.GraphModule) -> GraphSignature:
        """Make the signature of a graph, which may be changed afterwards."""
        nodes = list(graph.graph.nodes)
        constants = [getattr(graph, str(n.target)) for n in nodes if n.op == "get_attr"]
        drawn = [operator_name(n) for n in nodes if draws(n.target, n.args, n.kwargs)]
        memories = Memories(graph.graph)
        changed = memories.changed
        return GraphSignature(
            _text(graph.graph, memories),
            tuple(c for c in constants if isinstance(c, Tensor)),
            drawn[0] if drawn else None,
            changed[0] if changed else None,
        )

    def equals(self, other: GraphSignature) -> bool:
        """Tell whether both compute the same from the same arguments."""
        return self.text == other.text and same_constants(self.constants, other.constants)


def _text(graph: fx.Graph, memories: Memories) -> str:
    """Nodes by their numbers: torch counts in names what it has dropped, too."""
    alive: Set[fx.Node] = set()
    for node in reversed(list(graph.nodes)):
        if (
            node.op != "call_function"
            or memories.written_by.get(node)
            or any(user in alive for user in node.users)
        ):
            alive.add(node)
    numbers: Dict[fx.Node, str] = {}
    lines = []
    for node in graph.nodes:
        if node in alive:
            numbers[node] = f"%{len(numbers)}"
            target = node.target if node.op == "call_function" else node.op
            given = fx.node.map_arg((node.args, node.kwargs), lambda read: _Number(numbers[read]))
            lines.append(f"{target} {given}")
    return "\n".join(lines)


class _Number(str):
    """The number of a node, in a text without quotes."""

    def __repr__(self) -> str:
        return str(self)


def same_constants(first: Tuple[Tensor, ...], second: Tuple[Tensor, ...]) -> bool:
    """Tell whether two lists of tensors hold the same values."""
    return len(first) == len(second) and all(
        a is b or (a.dtype == b.dtype and a.device == b.device and torch.equal(a, b))
        for a, b in zip(first, second)
    )


def operator_name(node: fx.Node) -> str:
    """Such as ``aten.mean.dim``, without the name of a default overload."""
    name = str(node.target)
    return name[: -len(".default")] if name.endswith(".default") else name
