"""Computing values of a layer again in the backward pass, instead of keeping them.

The recorded graph holds forward and backward of a micro-batch. Of a chosen layer only the inputs,
the outputs and what must not run twice are kept: random numbers, and what reads memory that is
written later. All else that the backward pass wants of it is computed a second time from these,
by the same operators in the same order, right before it is first wanted.
"""

from __future__ import annotations

import operator
from typing import Dict, List, Set

from torch import fx

from ipufit.tracing.graph_analysis import NORMS, Memories, schema_of
from ipufit.tracing.recording import is_backward, mark_again, mark_backward, segment_of
from ipufit.utils.random_operators import draws


def recompute_layers(graph: fx.GraphModule) -> int:
    """Change the graph in place, so that its marked layers are computed again.

    Returns:
        How many nodes are computed a second time.
    """
    segments: Dict[int, List[fx.Node]] = {}
    for node in graph.graph.nodes:
        number = segment_of(node)
        if number is not None and not is_backward(node) and node.op == "call_function":
            segments.setdefault(number, []).append(node)
    memories = Memories(graph.graph)
    place = {node: index for index, node in enumerate(graph.graph.nodes)}
    repeated: List[fx.Node] = []
    # All are looked at before anything is changed.
    plans = [_Segment(nodes, memories, place) for nodes in segments.values()]
    for segment in plans:
        repeated += segment.repeat()
    for node in sorted(repeated, key=place.__getitem__, reverse=True):
        if not node.users and not memories.written_by.get(node):
            graph.graph.erase_node(node)
    graph.graph.lint()
    graph.recompile()
    return len(repeated)


class _Segment:
    """Forward nodes of one call of a layer.

    Args:
        nodes: in their order.
        memories: of the graph.
        place: of each node in the graph.
    """

    def __init__(self, nodes: List[fx.Node], memories: Memories, place: Dict[fx.Node, int]) -> None:
        self._nodes = nodes
        self._own = set(nodes)
        self._memories = memories
        self._place = place
        self._kept = self._find_kept()
        self._wanted = self._find_wanted()

    def _find_kept(self) -> Set[fx.Node]:
        """Values that are not computed again."""
        stored = {node for node in self._nodes if self._leaves(node) or not _repeatable(node)}
        while True:
            more = {n for n in self._nodes if n not in stored and self._depends_on_time(n, stored)}
            if not more:
                return stored
            stored |= more

    def _leaves(self, node: fx.Node) -> bool:
        """Tell whether the rest of the forward pass, or the caller, uses the value."""
        return any(user not in self._own and not is_backward(user) for user in node.users)

    def _depends_on_time(self, node: fx.Node, stored: Set[fx.Node]) -> bool:
        """Tell whether the node would give another value later, or change what others read."""
        is_part = node.target is operator.getitem and node.args[0] in stored
        if is_part or self._is_fixed(self._memories.of(node), stored):
            return True
        for memory in self._memories.written_by.get(node, ()):
            if node.target not in NORMS and self._is_fixed(memory, stored):
                return True
        for read in node.all_input_nodes:
            memory = self._memories.of(read)
            own_statistics = node.target in NORMS and memory in self._memories.written_by.get(
                node, ()
            )
            if own_statistics or not self._is_fixed(memory, stored):
                continue
            if any(self._place[w] > self._place[node] for w in self._memories.writes[memory]):
                return True
        return False

    def _is_fixed(self, memory: fx.Node, stored: Set[fx.Node]) -> bool:
        """Tell whether memory is written that is not the layer's own, or not repeatably."""
        writes = self._memories.writes.get(memory, ())
        if not writes:
            return False
        if any(node not in self._own or node in stored for node in writes):
            return True
        # Views that the backward pass makes go over to the second computation.
        members = self._memories.members[memory]
        return any(n in stored or not (n in self._own or is_backward(n)) for n in members)

    def _find_wanted(self) -> List[fx.Node]:
        """List what is computed again, in order: what the backward pass uses, and its causes."""
        todo = [
            node
            for node in self._nodes
            if node not in self._kept and any(is_backward(user) for user in node.users)
        ]
        wanted: Set[fx.Node] = set()
        while todo:
            node = todo.pop()
            if node in wanted or node not in self._own or node in self._kept:
                continue
            wanted.add(node)
            todo += _inputs(node)
            # Memory that is written is repeated with all that is written to it.
            todo += self._memories.writes.get(self._memories.of(node), ())
        return [node for node in self._nodes if node in wanted]

    def repeat(self) -> List[fx.Node]:
        """Compute what is wanted again, and let the backward pass use that; the nodes."""
        users = {node: [user for user in node.users if is_backward(user)] for node in self._wanted}
        if not any(users.values()):
            return []
        first = min((u for readers in users.values() for u in readers), key=self._place.__getitem__)
        copies: Dict[fx.Node, fx.Node] = {}
        with first.graph.inserting_before(first):
            for node in self._wanted:
                copies[node] = _copy(node, copies)
        for node, readers in users.items():
            for user in readers:
                user.replace_input_with(node, copies[node])
        return self._wanted


def _repeatable(node: fx.Node) -> bool:
    """Tell whether an operator gives the same values when it runs again."""
    if node.target is operator.getitem:
        return True
    if schema_of(node) is None:
        return False
    if node.target in NORMS:
        # One that normalises with running statistics reads them: that is told by their memory.
        return True
    return not draws(node.target, node.args, node.kwargs)


def _statistics_left_out(node: fx.Node) -> bool:
    return node.target in NORMS and bool(node.args[5])


def _inputs(node: fx.Node) -> List[fx.Node]:
    """List the values that the second computation reads."""
    if not _statistics_left_out(node):
        return node.all_input_nodes
    statistics = {a for a in node.args[3:5] if isinstance(a, fx.Node)}
    return [read for read in node.all_input_nodes if read not in statistics]


def _copy(node: fx.Node, copies: Dict[fx.Node, fx.Node]) -> fx.Node:
    copied = node.graph.node_copy(node, lambda read: copies.get(read, read))
    copied.meta = dict(node.meta)
    mark_backward(copied)
    mark_again(copied, node)
    if _statistics_left_out(node):
        # The batch's own statistics are what counts; the running ones have moved on already.
        args = copied.args
        copied.args = (*args[:3], None, None, *args[5:])
    return copied
