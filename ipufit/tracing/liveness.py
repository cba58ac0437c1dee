"""How much memory the values of a graph take while it runs."""

from __future__ import annotations

from typing import Dict, List, Tuple

from torch import Tensor, fx

from ipufit.tracing.aliases import Memories

__all__ = ["alive_bytes", "peak_bytes"]


def peak_bytes(graph: fx.GraphModule) -> int:
    """The most memory that intermediate values and results take at one time, in bytes."""
    return max((alive for _, alive in alive_bytes(graph)), default=0)


def alive_bytes(graph: fx.GraphModule) -> List[Tuple[fx.Node, int]]:
    """The memory that intermediate values and results take while each node runs, in bytes.

    Counted from shapes: each value takes its memory when it is computed, and gives it back after
    its last use. Arguments, and what operators need for themselves, are left out.
    """
    memories = Memories(graph.graph)
    nodes: List[fx.Node] = list(graph.graph.nodes)
    given = {memories.of(n) for n in nodes if n.op in ("placeholder", "get_attr")}
    last: Dict[fx.Node, int] = {}
    for index, node in enumerate(nodes):
        for value in (node, *node.all_input_nodes):
            last[memories.of(value)] = index
    ends: Dict[int, List[fx.Node]] = {}
    for memory, index in last.items():
        ends.setdefault(index, []).append(memory)
    size: Dict[fx.Node, int] = {}
    now = 0
    curve: List[Tuple[fx.Node, int]] = []
    for index, node in enumerate(nodes):
        memory = memories.of(node)
        if memory not in given and memory not in size and isinstance(node.meta.get("val"), Tensor):
            size[memory] = _bytes(node.meta["val"])
            now += size[memory]
        curve.append((node, now))
        for ended in ends.get(index, ()):
            now -= size.get(ended, 0)
    return curve


def _bytes(value: Tensor) -> int:
    try:
        return int(value.untyped_storage().nbytes())
    except (RuntimeError, NotImplementedError):
        return int(value.numel() * value.element_size())
