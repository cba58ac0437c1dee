"""Time and work of operators, added up by the layer and line that their nodes come from."""

from __future__ import annotations

import bisect
import dataclasses
from typing import Any, Callable, Dict, List, Mapping, Optional, Sequence, Tuple

from torch import fx

from ipufit.engines.embedded.passes.simplify import operator_called
from ipufit.engines.embedded.profiling.profiling_interpreter import OpRecord
from ipufit.tracing.node_meta import is_backward, recorded_name
from ipufit.tracing.source_map import LOSS, Origin, TracedCall

__all__ = ["GRADIENTS", "OperatorSource", "places_of", "rows_of"]

# Stands for the module of what joins the gradients of all modules.
GRADIENTS = "gradients"


@dataclasses.dataclass(frozen=True)
class OperatorSource:
    """Module, line and pass that an operator comes from.

    Attributes:
        origin: its module and line.
        direction: "forward", "backward" or "optimizer".
    """

    origin: Origin
    direction: str

    @property
    def module(self) -> str:
        """Its name; of what belongs to no module, what it does."""
        if self.origin.module is not None:
            return self.origin.module
        return GRADIENTS if self.direction == "backward" else LOSS


def rows_of(
    records: Mapping[str, OpRecord],
    places: Mapping[str, OperatorSource],
    seconds: Callable[[str], float],
) -> List[Dict[str, Any]]:
    """Add up the calls of an operator that come from one line, the longest first.

    Args:
        records: what each call does, by its name.
        places: where it comes from.
        seconds: tells how long it takes.
    """
    rows: Dict[Any, Dict[str, Any]] = {}
    for name, each in records.items():
        place = places[name]
        row = rows.setdefault(_key(each.operator, place), _empty(each.operator, place))
        row["calls"] += 1
        row["seconds"] += seconds(name)
        row["flops"] += each.flops
        row["bytes"] += each.bytes
    return sorted(rows.values(), key=lambda row: -row["seconds"])


def _key(operator: str, place: OperatorSource) -> Tuple[object, ...]:
    origin = place.origin
    return operator, place.direction, place.module, origin.kind, origin.file, origin.line


def _empty(operator: str, place: OperatorSource) -> Dict[str, Any]:
    origin = place.origin
    return {
        "operator": operator,
        "direction": place.direction,
        "module": place.module,
        "kind": origin.kind,
        "file": origin.file,
        "line": origin.line,
        "source": origin.source,
        "calls": 0,
        "seconds": 0.0,
        "flops": 0,
        "bytes": 0,
    }


# Of what lowering puts there, what computes a value that was recorded: by which operators.
_INSTEAD = {
    "mm": ("mm",),
    "_linear_pointwise": ("mm", "addmm"),
    "cat": ("cat",),
    "copy_": ("cat",),
}
_ALL = tuple(kind for kinds in _INSTEAD.values() for kind in kinds)


def places_of(
    graph: fx.GraphModule, recorded: fx.GraphModule, calls: Sequence[TracedCall]
) -> Dict[str, OperatorSource]:
    """Find the source of every operator, by the name of its node.

    A node that stands in the place of a recorded one comes from where that came from; one that was
    put before another one, from where that comes from.

    Args:
        graph: that runs.
        recorded: of which it was made.
        calls: of which that was made.
    """
    origins = {name: call.origin for call in calls for name in call.nodes}
    nodes = list(graph.graph.nodes)
    left = {node.name for node in nodes}
    order = {node.name: place for place, node in enumerate(recorded.graph.nodes)}
    names = list(order)
    gone = [node for node in recorded.graph.nodes if node.name not in left]
    gone_at = [order[node.name] for node in gone]
    following = [len(order)] * len(nodes)
    for place in reversed(range(len(nodes) - 1)):
        following[place] = order.get(nodes[place + 1].name, following[place + 1])
    as_recorded = {node.name: recorded_name(node) for node in recorded.graph.nodes}
    places: Dict[str, OperatorSource] = {}
    last, turned = -1, False
    for place, node in enumerate(nodes):
        if node.op != "call_function":
            last = order.get(node.name, last)
            continue
        name = recorded_name(node)
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
        origin = origins.get(name, Origin())
        # What comes after the way back joins what it has found.
        turned = turned or origin.is_backward or is_backward(node)
        places[node.name] = OperatorSource(origin, "backward" if turned else "forward")
    return places


def _counterpart(node: fx.Node, gone: Sequence[fx.Node]) -> Optional[fx.Node]:
    """Which of the nodes that are gone the node stands for."""
    instead = _INSTEAD.get(_kind(node), _ALL)
    return next((each for each in gone if _kind(each) in instead), gone[-1] if gone else None)


def _kind(node: fx.Node) -> str:
    """The name of its operator, in whichever form it is called."""
    operator = operator_called(node.target, node.kwargs)
    return "" if operator is None else str(operator._schema.name.partition("::")[2])
