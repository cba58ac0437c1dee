"""A proof that a module treats the samples of a batch one by one.

The module's forward is recorded for a micro-batch and for several of them in one. Both recordings
must be the same operators in the same order on the same numbers, up to sizes; and from the inputs
on, the dimension of the samples is followed through every operator. By induction each result of the
larger batch is then, sample by sample, that of its micro-batch.
"""

from __future__ import annotations

import operator
from typing import Any, Dict, List, Sequence, Tuple

import torch
from torch import Tensor, fx

from ipufit.engines.embedded.batching.batch_dim import (
    NOT_MAPPED,
    UNREAD,
    BatchDim,
    RefusalError,
    State,
)
from ipufit.engines.embedded.batching.rules import BATCHING_RULES, IN_PLACE, SIZED, OperatorPair
from ipufit.tracing.graph_analysis import Memories, operator_name, same_constants
from ipufit.utils.random_operators import draws


def prove(
    small: fx.GraphModule, large: fx.GraphModule, fixed: int, samples: Tuple[int, int]
) -> List[State]:
    """Find the batch dimensions of the results, or refuse.

    Args:
        small, large: forward of a micro-batch, and of several of them in one.
        fixed: how many arguments come before those along whose first dimension the samples lie.
        samples: in the two.

    Raises:
        RefusalError: samples may see each other, or what is done depends on their number.
    """
    return _Proof(small, large, samples).states(fixed)


class _Proof:
    """Comparison of the two graphs, node by node."""

    def __init__(
        self, small: fx.GraphModule, large: fx.GraphModule, samples: Tuple[int, int]
    ) -> None:
        self._modules = (small, large)
        self._samples = samples
        graphs = (_without_copies(small.graph), _without_copies(large.graph))
        self._memories = Memories(graphs[0])
        pair = [list(graph.nodes) for graph in graphs]
        if [(n.op, _target(n)) for n in pair[0]] != [(n.op, _target(n)) for n in pair[1]]:
            raise self._depends("forward")
        self._pairs = list(zip(*pair))
        self._twin: Dict[fx.Node, fx.Node] = dict(self._pairs)
        self._states: Dict[fx.Node, State] = {}

    def _depends(self, what: str) -> RefusalError:
        few, many = self._samples
        return RefusalError(f"{what} does something else with {many} samples than with {few}")

    def states(self, fixed: int) -> List[State]:
        """Batch dimensions of all results."""
        placeholders = 0
        for small, large in self._pairs:
            if small.op == "placeholder":
                self._states[small] = NOT_MAPPED if placeholders < fixed else BatchDim(0)
                placeholders += 1
            elif small.op == "output":
                self._same(small.args, large.args)
                return [
                    self._states[n] if isinstance(n, fx.Node) else NOT_MAPPED for n in small.args[0]
                ]
            elif small.op == "get_attr":
                self._states[small] = self._constant(small, large)
            elif small.target is operator.getitem:
                self._states[small] = self._part(small, large)
            else:
                self._states[small] = self._called(small, large)
            self._check(small, self._states[small], small.meta.get("val"), large.meta.get("val"))
        raise AssertionError("a graph ends with its output")

    def _constant(self, small: fx.Node, large: fx.Node) -> State:
        pair = [
            (getattr(module, str(node.target)),)
            for module, node in zip(self._modules, (small, large))
        ]
        if not same_constants(*pair):
            raise self._depends("forward")
        return NOT_MAPPED

    def _part(self, small: fx.Node, large: fx.Node) -> State:
        self._same(small.args, large.args)
        source, place = small.args
        state = self._states[source]  # type: ignore[index]
        if isinstance(state, tuple):
            state = state[place]  # type: ignore[index]
        return state

    def _called(self, small: fx.Node, large: fx.Node) -> State:
        if draws(small.target, small.args, small.kwargs):
            raise RefusalError(f"{operator_name(small)} in forward draws random numbers")
        schema = str(getattr(small.target, "_schema", ""))
        library, _, name = schema.partition("(")[0].partition("::")
        unknown = RefusalError(
            f"{operator_name(small)} in forward is not known to treat samples one by one"
        )
        if library not in ("aten", "ipufit"):
            raise unknown
        base, _, overload = name.partition(".")
        in_place = base.endswith("_") and not base.endswith("__") and base[:-1] in IN_PLACE
        base = base[:-1] if in_place else base
        rule_name = f"{base}.{overload}" if f"{base}.{overload}" in BATCHING_RULES else base
        call = OperatorPair(small, large, self._states, self._samples)
        same = self._compare(small, large, SIZED.get(rule_name, ()), call.name)
        inputs = [self._states[node] for node in small.all_input_nodes]
        if UNREAD in inputs:
            raise unknown
        if same and all(state == NOT_MAPPED for state in inputs):
            return NOT_MAPPED
        if rule_name not in BATCHING_RULES:
            raise unknown
        state = BATCHING_RULES[rule_name](call)
        if in_place:
            self._check_write(call, state)
        return state

    def _check_write(self, call: OperatorPair, state: State) -> None:
        """Refuse a write elsewhere than to the samples, under any name of the memory."""
        members = self._memories.members[self._memories.of(call.first)]
        states = [self._states[member] for member in members if member in self._states]
        if state != call.state(call.first) or NOT_MAPPED in states:
            raise call.coupled()

    def _compare(self, small: fx.Node, large: fx.Node, sized: Sequence[str], name: str) -> bool:
        """Refuse arguments that differ in anything but sizes."""
        schema = small.target._schema  # type: ignore[union-attr]
        names = [argument.name for argument in schema.arguments]
        if len(small.args) != len(large.args) or small.kwargs.keys() != large.kwargs.keys():
            raise self._depends(f"{name} in forward")
        same = True
        arguments = [*zip(names, small.args, large.args)]
        arguments += [(key, small.kwargs[key], large.kwargs[key]) for key in small.kwargs]
        for key, first, second in arguments:
            if not self._alike(first, second):
                if key not in sized:
                    raise self._depends(f"{name} in forward")
                same = False
        return same

    def _same(self, first: object, second: object) -> None:
        if not self._alike(first, second):
            raise self._depends("forward")

    def _alike(self, first: object, second: object) -> bool:
        if isinstance(first, fx.Node):
            return self._twin[first] is second
        if isinstance(first, (list, tuple)):
            return (
                isinstance(second, (list, tuple))
                and len(first) == len(second)
                and all(self._alike(a, b) for a, b in zip(first, second))
            )
        return type(first) is type(second) and bool(first == second)

    def _check(self, node: fx.Node, state: State, small: Any, large: Any) -> None:
        """Shapes must be what the state says."""
        if isinstance(state, tuple):
            for part, one, other in zip(state, small, large):
                self._check(node, part, one, other)
        elif isinstance(small, (list, tuple)):
            for one, other in zip(small, large):
                self._check(node, state, one, other)
        elif isinstance(small, Tensor) and state != UNREAD:
            shapes = [list(small.shape), list(large.shape)]
            is_same = len(shapes[0]) == len(shapes[1]) and small.dtype == large.dtype
            if is_same and isinstance(state, BatchDim):
                sizes = [shape.pop(state.dim) for shape in shapes]
                is_same = sizes == [state.size(count) for count in self._samples]
            if not is_same or shapes[0] != shapes[1]:
                raise self._depends(f"{operator_name(node)} in forward")


def _without_copies(graph: fx.Graph) -> fx.Graph:
    """Copy a graph without operators that only place values, which may depend on sizes."""
    result = fx.Graph()
    result.output(result.graph_copy(graph, {}))
    memories = Memories(result)
    for node in list(result.nodes):
        if node.target is torch.ops.aten._unsafe_view.default:
            node.target = torch.ops.aten.view.default
        source = node.args[0] if node.args else None
        if not isinstance(source, fx.Node) or node.target not in _SAME_VALUES:
            continue
        shapes = [each.meta["val"].shape for each in (node, source)]
        written = any(memories.writes.get(memories.of(each)) for each in (node, source))
        if shapes[0] == shapes[1] and not (written and node.target is _CLONE):
            node.replace_all_uses_with(source)
            result.erase_node(node)
    return result


_CLONE = torch.ops.aten.clone.default
# They give back their first argument if it has the same shape.
_SAME_VALUES = (
    _CLONE,
    torch.ops.aten.alias.default,
    torch.ops.aten.expand.default,
    torch.ops.aten.view.default,
)


def _target(node: fx.Node) -> object:
    """Names of arguments and constants are counted, and mean nothing."""
    return None if node.op in ("placeholder", "get_attr", "output") else node.target
