"""Where the nodes of a graph that runs come from, also those that lowering has put there."""

from __future__ import annotations

import bisect
from typing import Dict, Optional, Sequence

from torch import fx

from ipufit.engines.embedded.passes.direct_calls import operator_called
from ipufit.engines.embedded.profiling.rows import Place
from ipufit.tracing.node_meta import is_backward, recorded_as
from ipufit.tracing.source_map import Call, Origin

__all__ = ["places_of"]

# Of what lowering puts there, what computes a value that was recorded: by which operators.
_INSTEAD = {
    "mm": ("mm",),
    "_linear_pointwise": ("mm", "addmm"),
    "cat": ("cat",),
    "copy_": ("cat",),
}
_ALL = tuple(kind for kinds in _INSTEAD.values() for kind in kinds)


def places_of(
    graph: fx.GraphModule, recorded: fx.GraphModule, calls: Sequence[Call]
) -> Dict[str, Place]:
    """Where every operator comes from, by the name of its node.

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
    gone = [node for node in recorded.graph.nodes if node.name not in left]
    gone_at = [order[node.name] for node in gone]
    following = [len(order)] * len(nodes)
    for place in reversed(range(len(nodes) - 1)):
        following[place] = order.get(nodes[place + 1].name, following[place + 1])
    as_recorded = {node.name: recorded_as(node) for node in recorded.graph.nodes}
    found: Dict[str, Place] = {}
    last, turned = -1, False
    for place, node in enumerate(nodes):
        if node.op != "call_function":
            last = order.get(node.name, last)
            continue
        name = recorded_as(node)
        if node.name in order:
            last = order[node.name]
        else:
            between = slice(bisect.bisect(gone_at, last), bisect.bisect(gone_at, following[place]))
            stands_for = _counterpart(node, gone[between])
            if stands_for is None:
                # Behind the last one there is nothing but the end.
                name = names[min(following[place], len(names) - 2)]
            else:
                name = stands_for.name
                if _kind(node) in _INSTEAD:
                    last = order[name]
            name = as_recorded[name]
        origin = noted.get(name, Origin())
        # What comes after the way back joins what it has found.
        turned = turned or origin.is_backward or is_backward(node)
        found[node.name] = Place(origin, "backward" if turned else "forward")
    return found


def _counterpart(node: fx.Node, gone: Sequence[fx.Node]) -> Optional[fx.Node]:
    """Which of the nodes that are gone the node stands for."""
    instead = _INSTEAD.get(_kind(node), _ALL)
    return next((each for each in gone if _kind(each) in instead), gone[-1] if gone else None)


def _kind(node: fx.Node) -> str:
    """The name of its operator, in whichever form it is called."""
    operator = operator_called(node.target, node.kwargs)
    return "" if operator is None else str(operator._schema.name.partition("::")[2])
