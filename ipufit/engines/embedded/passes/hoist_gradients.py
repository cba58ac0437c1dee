"""Make the gradients that a graph returns as soon as what they are made of is there."""

from __future__ import annotations

from typing import Dict, List, Tuple

from torch import fx

from ipufit.engines.embedded.passes.data_flow import Flow
from ipufit.tracing.node_meta import is_backward

__all__ = ["hoist_gradients"]


def hoist_gradients(graph: fx.Graph, count: int) -> None:
    """Move what follows the backward pass up to behind what it reads.

    A recording packs gradients at its end, when the last one is known; the first ones to be known
    could have gone to other processes long before.

    Args:
        graph: of a micro-batch; changed in place.
        count: how many of its last outputs are gradients.
    """
    if not count:
        return
    nodes = list(graph.nodes)
    place = {node: i for i, node in enumerate(nodes)}
    behind = 1 + max(i for i, node in enumerate(nodes) if is_backward(node))
    lowest = max(i for i, node in enumerate(nodes) if node.op == "placeholder")
    flow = Flow(graph)
    # By the place in the old order behind which they stand now: the last one moved there.
    tails: Dict[int, fx.Node] = {}
    ranks: Dict[fx.Node, Tuple[int, int]] = {}
    late: List[fx.Node] = [node for node in nodes[behind:] if node.op == "call_function"]
    for number, node in enumerate(late, 1):
        if any(flow.is_written(each) for each in [node, *node.all_input_nodes]):
            ranks[node] = (place[node], 0)
            continue
        read = [ranks.get(each, (place[each], 0)) for each in node.all_input_nodes]
        anchor = max([lowest, *(rank[0] for rank in read)])
        tail = tails.get(anchor, nodes[anchor])
        if tail.next is not node:
            tail.append(node)
        tails[anchor] = node
        ranks[node] = (anchor, number)
