"""Where the nodes of a graph that runs come from, also those that lowering has put there."""

from __future__ import annotations

import bisect
from typing import Dict, Sequence, Tuple

from torch import fx

from ipufit.engines.embedded.marks import is_backward, recorded_as
from ipufit.engines.embedded.noted import Call
from ipufit.engines.embedded.origins import Origin

__all__ = ["GRADIENTS", "origins_of"]

# Stands for the module of what joins the gradients of all modules.
GRADIENTS = "gradients"


def origins_of(
    graph: fx.GraphModule, recorded: fx.GraphModule, calls: Sequence[Call]
) -> Dict[str, Tuple[Origin, bool]]:
    """The origin of every node by its name, and whether it belongs to the backward pass.

    A node that stands in the place of a recorded one comes from where that came from; one that was
    put before another one, from where that comes from.

    Args:
        graph: that runs.
        recorded: of which it was made.
        calls: of which that was made.
    """
    noted = {name: call.origin for call in calls for name in call.nodes}
    nodes = list(graph.graph.nodes)
    left = {node.name for node in nodes}
    order = {node.name: place for place, node in enumerate(recorded.graph.nodes)}
    names = list(order)
    gone = [order[name] for name in names if name not in left]
    following = [len(order)] * len(nodes)
    for place in reversed(range(len(nodes) - 1)):
        following[place] = order.get(nodes[place + 1].name, following[place + 1])
    as_recorded = {node.name: recorded_as(node) for node in recorded.graph.nodes}
    found: Dict[str, Tuple[Origin, bool]] = {}
    last, turned = -1, False
    for place, node in enumerate(nodes):
        if node.op != "call_function":
            last = order.get(node.name, last)
            continue
        name = recorded_as(node)
        if node.name in order:
            last = order[node.name]
        else:
            before = bisect.bisect_left(gone, following[place]) - 1
            stands_for = following[place]
            if before >= 0 and gone[before] > last:
                stands_for = gone[before]
            name = as_recorded[names[min(stands_for, len(names) - 1)]]
        origin = noted.get(name, Origin())
        # What comes after the way back joins what it has found.
        turned = turned or origin.is_backward or is_backward(node)
        found[node.name] = origin, turned
    return found
