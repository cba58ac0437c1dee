"""Operators that draw random numbers: which they are, and how they are taken out of a graph."""

from __future__ import annotations

from typing import List, Mapping, Optional, Sequence

import torch
from torch import Tensor, fx

__all__ = ["draws", "hoist_draws", "uses_random_numbers"]


def uses_random_numbers(graph: fx.GraphModule) -> bool:
    """Tell whether the graph draws from a random generator."""
    return any(draws(node.target, node.args, node.kwargs) for node in graph.graph.nodes)


def draws(operator: object, args: Sequence[object], kwargs: Mapping[str, object]) -> bool:
    """Say whether a call of an operator draws random numbers.

    Attention and recurrent layers draw them for their dropout alone, which may be 0.

    Args:
        operator: of the dispatcher; another function draws none.
        args, kwargs: of the call.
    """
    if not isinstance(operator, torch._ops.OpOverload):
        return False
    if operator._schema.name.endswith("_backward"):
        return False
    for place, argument in enumerate(operator._schema.arguments):
        if argument.name == "dropout_p":
            positional = args[place] if place < len(args) else argument.default_value
            return bool(kwargs.get("dropout_p", positional) != 0.0)
    return torch.Tag.nondeterministic_seeded in operator.tags


# Operators that make numbers, or write them over what is there, of a shape alone.
_MAKERS = (
    *("aten.rand.default", "aten.randn.default", "aten.randint.default", "aten.randint.low"),
    *("aten.randperm.default", "aten.rand_like.default", "aten.randn_like.default"),
    *("aten.randint_like.default", "aten.randint_like.low_dtype", "aten.bernoulli.p"),
    "aten.normal.float_float",
)
_FILLS = (
    *("aten.bernoulli_.float", "aten.uniform_.default", "aten.normal_.default"),
    *("aten.exponential_.default", "aten.random_.default", "aten.random_.to"),
    *("aten.random_.from", "aten.geometric_.default", "aten.cauchy_.default"),
    "aten.log_normal_.default",
)
_EMPTY = (
    *("aten.empty.memory_format", "aten.empty_like.default", "aten.empty_strided.default"),
    *("aten.new_empty.default", "aten.new_empty_strided.default"),
)


def hoist_draws(owner: fx.GraphModule, graph: fx.Graph) -> Optional[fx.GraphModule]:
    """Make inputs of the random numbers of a graph, behind those that it has.

    In their order, up to the first that depend on more than a shape: what follows would get other
    numbers.

    Args:
        owner: has what the graph reads.
        graph: is changed.

    Returns:
        What draws the numbers, without arguments, in the order of the new inputs; None where there
        are none.
    """
    drawn, order = fx.Graph(), {node: place for place, node in enumerate(graph.nodes)}
    numbers: List[fx.Node] = []
    last = [node for node in graph.nodes if node.op == "placeholder"][-1]

    def empty_like(source: fx.Node) -> fx.Node:
        value: Tensor = source.meta["val"]
        return drawn.call_function(
            torch.ops.aten.empty_strided.default,
            ([*value.shape], [*value.stride()]),
            {"dtype": value.dtype, "device": value.device},
        )

    for node in [each for each in graph.nodes if draws(each.target, each.args, each.kwargs)]:
        name, sources = str(node.target), node.all_input_nodes
        filled = [source for source in sources if name in _FILLS]
        is_new = all(
            str(source.target) in _EMPTY and min(source.users, key=order.__getitem__) is node
            for source in filled
        )
        if not is_new or name not in (*_MAKERS, *_FILLS):
            break
        args = [fx.map_arg(each, empty_like) for each in (node.args, node.kwargs)]
        numbers.append(drawn.call_function(node.target, *args))
        with graph.inserting_after(last):
            last = graph.placeholder(f"drawn_{len(numbers)}")
        last.meta = dict(node.meta)
        for each in (node, *filled):
            each.replace_all_uses_with(last)
            graph.erase_node(each)
    drawn.output(tuple(numbers))
    return fx.GraphModule(owner, drawn) if numbers else None
