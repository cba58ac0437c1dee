"""What a recorded program writes into, of what it is given."""

from __future__ import annotations

from typing import Any, Dict, List

from torch import fx

__all__ = ["changed"]


def changed(graph: fx.GraphModule) -> List[int]:
    """Which placeholders the graph changes in place, through whatever views of them."""
    place: Dict[fx.Node, int] = {}
    found: List[int] = []
    for node in graph.graph.nodes:
        if node.op == "placeholder":
            place[node] = len(place)
            continue
        schema = getattr(node.target, "_schema", None)
        if schema is None:
            # A member of several results: of a split, say.
            source = node.args[0] if node.args else None
            if isinstance(source, fx.Node) and source in place:
                place[node] = place[source]
            continue
        _follow(node, schema, place, found)
    return sorted(set(found))


def _follow(node: fx.Node, schema: Any, place: Dict[fx.Node, int], changed: List[int]) -> None:
    batch_norm = "batch_norm" in schema.name
    given: Dict[str, Any] = dict(zip((a.name for a in schema.arguments), node.args))
    given.update(node.kwargs)
    for argument in schema.arguments:
        value = given.get(argument.name)
        for each in value if isinstance(value, (list, tuple)) else [value]:
            if not isinstance(each, fx.Node) or each not in place:
                continue
            alias = argument.alias_info
            if alias is not None:
                if alias.is_write:
                    changed.append(place[each])
                place[node] = place[each]
            elif batch_norm and argument.name in ("running_mean", "running_var"):
                # It changes them without saying so in its schema.
                changed.append(place[each])
