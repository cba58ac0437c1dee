"""Where a recorded micro-batch meets the other processes: before and behind its use of weights.

Weights come in pieces. In the graph a piece is filled before the first operator that reads it and
freed behind the last one, once in the forward and once in the backward pass; its gradient is added
over all processes as soon as it is there. So SimpleFSDP does it (Zhang et al. 2024), where
torch.distributed.fsdp hangs the same on the calls of modules, which a recording has not.
"""

from __future__ import annotations

from typing import Any, Dict, List, Optional, Sequence, Set, Tuple

import torch
from torch import fx, nn

from ipufit.engines.embedded.passes.simplify import Flow
from ipufit.errors import CaptureError
from ipufit.tracing.grad_step import public_name
from ipufit.tracing.graph_analysis import Memories
from ipufit.tracing.recording import is_backward

FILL, FREE, SUM = "fill", "free", "sum"

# What happens, and to which piece.
Event = Tuple[str, int]

_aten = torch.ops.aten

# They look at a shape alone.
_SHAPE_ONLY = {
    _aten.empty_like.default,
    _aten.new_empty.default,
    _aten.new_zeros.default,
    _aten.ones_like.default,
    _aten.zeros_like.default,
}


class CollectiveHooks(nn.Module):
    """Stands in a graph for whoever has the weights.

    Attributes:
        order: in which sums are met.
        host: has a method for each kind of event. Without one, sums are what is to be added.
    """

    def __init__(self) -> None:
        super().__init__()
        self.host: object = None
        self.order: Tuple[int, ...] = ()

    def forward(self, what: str, piece: int, *tensors: torch.Tensor) -> Any:
        """Handle one event of the graph."""
        if self.host is None:
            return tensors[-1]
        return getattr(self.host, what)(piece, *tensors)


def insert_weight_hooks(
    module: fx.GraphModule, inputs: Sequence[str], pieces: Sequence[Sequence[str]], gradients: int
) -> List[Event]:
    """Have weights there when a graph reads them, and not before or after.

    Args:
        module: of a micro-batch; changed in place, with a submodule ``meeting``.
        inputs: names of its first inputs.
        pieces: names of the parameters in each piece.
        gradients: how many of its last outputs are gradients, of the first pieces.
    Returns:
        Its events in order.
    Raises:
        CaptureError: a weight is changed in place.
    """
    graph = module.graph
    module.add_submodule("meeting", CollectiveHooks())
    hoist_gradients(graph, gradients)
    nodes = list(graph.nodes)
    spans = _spans(graph, nodes, inputs, pieces)
    for piece, uses in enumerate(spans):
        for first, last in uses:
            with graph.inserting_before(nodes[first]):
                graph.call_module("meeting", (FILL, piece))
            with graph.inserting_after(nodes[last]):
                graph.call_module("meeting", (FREE, piece))
    _add_sums(graph, gradients)
    graph.lint()
    met = [node for node in graph.nodes if node.op == "call_module"]
    return [(node.args[0], node.args[1]) for node in met]


def insert_gradient_hooks(module: fx.GraphModule, gradients: int) -> CollectiveHooks:
    """Meet the others as soon as a gradient is there.

    Args:
        module: of a micro-batch; changed in place, with a submodule ``meeting``.
        gradients: how many of its last outputs are gradients.
    """
    meeting = CollectiveHooks()
    module.add_submodule("meeting", meeting)
    hoist_gradients(module.graph, gradients)
    _add_sums(module.graph, gradients)
    met = [node for node in module.graph.nodes if node.op == "call_module"]
    meeting.order = tuple(node.args[1] for node in met)
    return meeting


def _spans(
    graph: fx.Graph,
    nodes: Sequence[fx.Node],
    inputs: Sequence[str],
    pieces: Sequence[Sequence[str]],
) -> List[List[Tuple[int, int]]]:
    """From which node to which one each piece is read, by number: forward and backward."""
    weights = dict(zip(inputs, (node for node in nodes if node.op == "placeholder")))
    memories = Memories(graph)
    for name, node in weights.items():
        if any(name in piece for piece in pieces) and memories.of(node) in memories.writes:
            raise CaptureError(
                "with shard='weights' a weight must stay as it is until its update, but forward "
                f"changes {public_name(name)!r} in place. Change a copy, or leave shard='weights' "
                "out."
            )
    back = next((i for i, node in enumerate(nodes) if is_backward(node)), len(nodes))
    owner: Dict[fx.Node, int] = {
        memories.of(weights[name]): number for number, piece in enumerate(pieces) for name in piece
    }
    readers = [(place, _read(node, memories, owner)) for place, node in enumerate(nodes)]
    all_spans: List[List[Tuple[int, int]]] = []
    for number in range(len(pieces)):
        uses = [place for place, read in readers if number in read]
        both = [[u for u in uses if u < back], [u for u in uses if u >= back]]
        spans = [(places[0], places[-1]) for places in both if places]
        if len(spans) == 2:
            (first, last), (again, end) = spans
            others = any(read - {number} for place, read in readers if last < place < again)
            spans = spans if others else [(first, end)]
        all_spans.append(spans)
    return all_spans


def _read(node: fx.Node, memories: Memories, owner: Dict[fx.Node, int]) -> Set[int]:
    """The pieces that a node reads, or makes views of."""
    if node.op != "call_function" or node.target in _SHAPE_ONLY:
        return set()
    numbers = {owner.get(memories.of(each)) for each in node.all_input_nodes}
    return {number for number in numbers if number is not None}


def _add_sums(graph: fx.Graph, count: int) -> None:
    if not count:
        return
    output = next(iter(reversed(graph.nodes)))
    results: List[Optional[fx.Node]] = list(output.args[0])
    for number, gradient in enumerate(results[-count:]):
        assert isinstance(gradient, fx.Node)
        with graph.inserting_after(gradient):
            summed = graph.call_module("meeting", (SUM, number, results[0], gradient))
        results[len(results) - count + number] = summed
    output.args = (results,)


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
