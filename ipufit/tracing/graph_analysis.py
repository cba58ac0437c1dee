"""Facts about a traced graph: memory that values share, bytes in use, and whether two are alike."""

from __future__ import annotations

import dataclasses
import operator
from typing import Dict, Iterator, List, Optional, Sequence, Set, Tuple

import torch
from torch import Tensor, fx

from ipufit.utils.random_operators import draws

# They write running statistics (arguments 3 and 4) while training (argument 5), which their schemas
# don't say.
NORMS = {
    getattr(torch.ops.aten, name).default
    for name in ("native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm")
}


class Memories:
    """The values of a graph, grouped by the memory they may lie in.

    Args:
        graph: of ATen operators.

    Attributes:
        members: all nodes of each memory.
        writes: the nodes that write to it.
        inputs: the graph's inputs.
        changed: which of the graph's inputs are written to, by number.
        constants: names of the tensors of the graph's own that it writes to, and computes with.
    """

    def __init__(self, graph: fx.Graph) -> None:
        self._parent: Dict[fx.Node, fx.Node] = {}
        constants: Dict[fx.node.Target, fx.Node] = {}
        written: List[Tuple[fx.Node, fx.Node]] = []
        for node in graph.nodes:
            self._parent[node] = node
            if node.op == "get_attr":
                self._join(node, constants.setdefault(node.target, node))
            elif node.op == "call_function":
                for other, writes in _aliased(node):
                    if writes:
                        written.append((node, other))
                    if not writes or _returns_alias(node):
                        self._join(node, other)
        self.members: Dict[fx.Node, List[fx.Node]] = {}
        for node in graph.nodes:
            self.members.setdefault(self.of(node), []).append(node)
        self.writes: Dict[fx.Node, List[fx.Node]] = {}
        self.written_by: Dict[fx.Node, Set[fx.Node]] = {}
        for node, other in written:
            self.writes.setdefault(self.of(other), []).append(node)
            self.written_by.setdefault(node, set()).add(self.of(other))
        self.inputs = [node for node in graph.nodes if node.op == "placeholder"]
        self.changed = [i for i, node in enumerate(self.inputs) if self.of(node) in self.writes]
        self.constants = []
        for name, node in constants.items():
            if self.of(node) in self.writes:
                members = self.members[self.of(node)]
                if any(not each.users.keys() <= set(members) for each in members):
                    self.constants.append(str(name))

    def of(self, node: fx.Node) -> fx.Node:
        """The memory of a value: one node that stands for it."""
        while self._parent[node] is not node:
            node = self._parent[node]
        return node

    def _join(self, node: fx.Node, other: fx.Node) -> None:
        first, second = self.of(node), self.of(other)
        if first is not second:
            self._parent[first] = second


def needed_nodes(graph: fx.Graph) -> Set[fx.Node]:
    """The nodes that something returned, or written to an input, may depend on.

    What is written to a value counts for everything that lies in the same memory.
    """
    memories = Memories(graph)
    needed = {memories.of(memories.inputs[number]) for number in memories.changed}
    nodes: Set[fx.Node] = set()
    for node in reversed(graph.nodes):
        touched = {memories.of(node), *memories.written_by.get(node, ())}
        if node.op == "output" or not needed.isdisjoint(touched):
            nodes.add(node)
            needed.update(map(memories.of, node.all_input_nodes))
    return nodes


def schema_of(node: fx.Node) -> Optional[torch.FunctionSchema]:
    """Return the schema of the operator that a node calls, or None if it calls no operator."""
    target = node.target
    return target._schema if isinstance(target, torch._ops.OpOverload) else None


def nodes_in(value: object) -> Iterator[fx.Node]:
    """The nodes in an argument, those in lists included."""
    if isinstance(value, fx.Node):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from nodes_in(item)


def _aliased(node: fx.Node) -> Iterator[Tuple[fx.Node, bool]]:
    """The arguments whose memory the node's value shares or the node writes to; which of both."""
    if node.target is operator.getitem:
        # Of an operator's several results, views share the memory of what they are views of.
        source = node.all_input_nodes[0]
        if any(True for _ in _aliased(source)) and source.target not in NORMS:
            yield source, False
        return
    if node.target in NORMS and node.args[5]:
        for other in nodes_in(node.args[3:5]):
            yield other, True
        return
    if node.target is torch.ops.aten._unsafe_view.default:
        # A view all the same, though its schema is silent.
        yield node.all_input_nodes[0], False
        return
    schema = schema_of(node)
    for place, argument in enumerate(schema.arguments if schema is not None else ()):
        if argument.alias_info is None:
            continue
        value = node.args[place] if place < len(node.args) else node.kwargs.get(argument.name)
        for other in nodes_in(value):
            yield other, bool(argument.alias_info.is_write)


def _returns_alias(node: fx.Node) -> bool:
    """Tell whether an operator that writes to an argument returns it."""
    schema = schema_of(node)
    return schema is not None and any(result.alias_info is not None for result in schema.returns)


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
    inputs = {memories.of(n) for n in nodes if n.op in ("placeholder", "get_attr")}
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
        if memory not in inputs and memory not in size and isinstance(node.meta.get("val"), Tensor):
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
            args = fx.node.map_arg((node.args, node.kwargs), lambda read: _Number(numbers[read]))
            lines.append(f"{target} {args}")
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


def is_repeated(graph: fx.GraphModule, first: Sequence[fx.Node], second: Sequence[fx.Node]) -> bool:
    """Tell whether a function computes the same in two calls, but for constants that it makes once.

    Args:
        graph: of both; it has the inputs of the first call, and then those of the second.
        first, second: the nodes of each call; what is no longer in the graph is passed over.
    """
    alive, earlier = set(graph.graph.nodes), set(first)
    inputs = [node for node in graph.graph.nodes if node.op == "placeholder"]
    fixed: Set[fx.Node] = set()
    same = dict(zip(inputs[len(inputs) // 2 :], inputs))
    for node in first:
        call = (node.target, node.args, node.kwargs)
        if fixed.issuperset(node.all_input_nodes) and not draws(*call):
            fixed.add(node)
    rest = filter(alive.__contains__, first)
    for node in filter(alive.__contains__, second):
        schema = schema_of(node)
        writes = schema is not None and schema.is_mutable
        if writes and not earlier.isdisjoint(node.all_input_nodes):
            return False
        wanted = _call(graph, node, same)
        for other in rest:
            if wanted == _call(graph, other, {}):
                same[node] = other
                break
            if other not in fixed:
                return False
        else:
            return False
    return fixed.issuperset(rest)


def _call(graph: fx.GraphModule, node: fx.Node, same: Dict[fx.Node, fx.Node]) -> object:
    """Return what a node computes, as a value that equals that of another one like it."""
    if node.op == "get_attr":
        value = getattr(graph, str(node.target))
        return (value.dtype, value.tolist()) if value.numel() < 1000 else id(value)
    args = fx.node.map_arg((node.args, node.kwargs), lambda each: same.get(each, each))
    return node.target, args


def operator_name(node: fx.Node) -> str:
    """Such as ``aten.mean.dim``, without the name of a default overload."""
    name = str(node.target)
    return name[: -len(".default")] if name.endswith(".default") else name
