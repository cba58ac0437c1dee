"""Passes that leave every bit as it is: fewer calls, fewer copies, shorter ways to operators.

A recorded graph names operators of the dispatcher, whose calls from Python look up a schema each
time; torch's own functions of the same meaning don't.
"""

from __future__ import annotations

import operator
from typing import Any, Callable, Dict, List, Mapping, NamedTuple, Optional, Sequence

import torch
from torch import Tensor, fx

from ipufit.tracing import recurrent
from ipufit.tracing.graph_analysis import Memories
from ipufit.utils.malloc_policy import reused_empty


def value_of(node: object) -> Optional[Tensor]:
    """The tensor without data that a node stands for; None where it is none, or a sparse one."""
    value = node.meta.get("val") if isinstance(node, fx.Node) else None
    return value if isinstance(value, Tensor) and value.layout is torch.strided else None


def elements(nodes: Sequence[object]) -> int:
    """Number of elements of the tensors that nodes stand for, together."""
    values = [value_of(node) for node in nodes]
    return sum(value.numel() for value in values if value is not None)


class Flow:
    """Order in which the memory of a graph's values is written.

    Args:
        graph: recorded, of ATen operators.
    """

    def __init__(self, graph: fx.Graph) -> None:
        self._order: Dict[fx.Node, int] = {node: i for i, node in enumerate(graph.nodes)}
        self._memories = Memories(graph)
        self._given = {self._memories.of(n) for n in graph.nodes if n.op == "placeholder"}

    def is_given(self, node: fx.Node) -> bool:
        """Tell whether the memory of the node is an input's."""
        return self._memories.of(node) in self._given

    def is_own(self, node: fx.Node) -> bool:
        """Tell whether the memory of the node is the graph's, and nothing in it is returned."""
        members = self._memories.members[self._memories.of(node)]
        return all(
            member.op == "call_function" and all(user.op != "output" for user in member.users)
            for member in members
        )

    def is_written(self, node: fx.Node) -> bool:
        """Tell whether anything writes into the memory of the node."""
        return self._memories.of(node) in self._memories.writes

    def is_written_after(self, node: fx.Node) -> bool:
        """Tell whether anything writes into the memory of the node once it is there."""
        writes = self._memories.writes.get(self._memories.of(node), [])
        return any(self._order[write] > self._order[node] for write in writes)


_aten = torch.ops.aten

# What does nothing but return something: without users, nothing.
_WITHOUT_EFFECT = {
    _aten.clone.default,
    _aten.detach.default,
    _aten.expand.default,
    _aten.permute.default,
    _aten.select.int,
    _aten.slice.Tensor,
    _aten.split.Tensor,
    _aten.t.default,
    _aten.transpose.int,
    _aten.unbind.int,
    _aten.unsqueeze.default,
    _aten.view.default,
    operator.getitem,
}


def simplify(graph: fx.Graph) -> None:
    """Take out transposes of transposes, and copies of what is contiguous and never written."""
    flow = Flow(graph)
    for node in list(graph.nodes):
        if node.target is _aten.t.default:
            inner = node.args[0]
            if inner.target is _aten.t.default:
                node.replace_all_uses_with(inner.args[0])
        elif node.target is _aten.clone.default and _is_idle(node, flow):
            node.replace_all_uses_with(node.args[0])
    drop_unused(graph)


def _is_idle(node: fx.Node, flow: Flow) -> bool:
    """Tell whether a copy has its source's layout, and neither is written afterwards."""
    source_node = node.args[0]
    source, copy = value_of(source_node), value_of(node)
    if source is None or copy is None or not isinstance(source_node, fx.Node):
        return False
    if flow.is_given(source_node) or flow.is_written(node) or flow.is_written_after(source_node):
        return False
    return source.stride() == copy.stride()


def drop_unused(graph: fx.Graph) -> None:
    """Take out views and copies that nobody reads."""
    for node in reversed(list(graph.nodes)):
        if not node.users and node.target in _WITHOUT_EFFECT:
            graph.erase_node(node)


# Each takes the operator's arguments in the operator's order, and calls nothing else.
SHORT: Dict[object, Callable[..., object]] = {
    _aten._log_softmax.default: torch._log_softmax,
    _aten._log_softmax_backward_data.default: torch._log_softmax_backward_data,
    _aten._softmax.default: torch._softmax,
    _aten._softmax_backward_data.default: torch._softmax_backward_data,
    _aten.add.Tensor: torch.add,
    _aten.addmm.default: torch.addmm,
    _aten.bmm.default: torch.bmm,
    _aten.cat.default: torch.cat,
    _aten.cat.out: torch.cat,
    _aten.clone.default: torch.clone,
    _aten.div.Tensor: torch.div,
    _aten.expand.default: torch.Tensor.expand,
    _aten.mm.default: torch.mm,
    _aten.mm.out: torch.mm,
    _aten.mul.Tensor: torch.mul,
    _aten.ne.Scalar: torch.ne,
    _aten.new_empty.default: torch.Tensor.new_empty,
    _aten.ones_like.default: torch.ones_like,
    _aten.permute.default: torch.permute,
    _aten.relu.default: torch.relu,
    _aten.reshape.default: torch.reshape,
    _aten.select.int: torch.select,
    _aten.squeeze.dim: torch.squeeze,
    _aten.sub.Tensor: torch.sub,
    _aten.sum.dim_IntList: torch.sum,
    _aten.t.default: torch.t,
    _aten.transpose.int: torch.transpose,
    _aten.unbind.int: torch.unbind,
    _aten.unsqueeze.default: torch.unsqueeze,
    # Some kernels return another layout than torch expects in a recording, as batch_norm does of
    # what is transposed: what could be a view there has to be a copy then.
    _aten.view.default: torch.Tensor.reshape,
    recurrent.FORWARD: recurrent.run_forward,
    recurrent.BACKWARD: recurrent.run_backward,
}


def call_directly(graph: fx.Graph) -> None:
    """Replace the operators of a graph by functions that call the very same."""
    flow = Flow(graph)
    for node in graph.nodes:
        # What is written through a view must not be a copy.
        if node.target is not _aten.view.default or not flow.is_written_after(node):
            node.target = SHORT.get(node.target, node.target)


def operator_called(target: object, kwargs: Mapping[str, object]) -> Optional[Any]:
    """The operator that a node calls, the short way or not; None where it is another function.

    Args:
        target: of the node.
        kwargs: that it is called with.
    """
    if hasattr(target, "_schema"):
        return target
    return _LONG.get((target, "out" in kwargs))


_LONG: Dict[object, object] = {
    (short, str(long).endswith(".out")): long for long, short in SHORT.items()
}
_LONG[torch.narrow, False] = _aten.narrow.default


# Elements of a product that is worth a view of its own, of what is not to wait for the others, and
# of a flat tensor whose memory is worth keeping.
_SMALLEST_PRODUCT, _SMALLEST_COPY, _SMALLEST_WHOLE = 2**14, 2**16, 2**20


class _Part(NamedTuple):
    """An input of a concatenation.

    Attributes:
        node: the flat tensor.
        size: its elements.
        source: what it is a view of, where that does not wait for the others: a matrix product
            writes into the whole, other large tensors are copied as soon as they are there.
    """

    node: fx.Node
    size: int
    source: Optional[fx.Node]


def fuse_concats(graph: fx.Graph) -> int:
    """Make large matrix products write into the flat tensors that they are joined in.

    Into large flat tensors other large inputs are copied one by one, so that not all are in memory
    beside the whole. Large flat tensors have the memory of those before. What is joined with
    nothing is no copy.

    Returns:
        How many products do.
    """
    flow = Flow(graph)
    done = 0
    for node in list(graph.nodes):
        if node.target is _aten.cat.default and len(node.args) == 1 and not node.kwargs:
            parts = _parts(node, flow)
            targets = [part.source.target for part in parts if part.source is not None]
            products = targets.count(_aten.mm.default)
            if len(parts) == 1 and not products:
                (source,) = (part.node for part in parts)
                if flow.is_own(source) and not flow.is_written_after(source):
                    node.replace_all_uses_with(source)
                    graph.erase_node(node)
            elif products or sum(part.size for part in parts) >= _SMALLEST_WHOLE:
                _rewrite(graph, node, parts)
                done += products
    return done


def _parts(node: fx.Node, flow: Flow) -> List[_Part]:
    """List the inputs of a concatenation; none if they are not flat tensors of one kind."""
    whole, inputs = value_of(node), node.args[0]
    assert isinstance(inputs, (list, tuple))
    values = [value_of(part) for part in inputs]
    if whole is None or any(
        value is None or value.dim() != 1 or value.dtype != whole.dtype for value in values
    ):
        return []
    parts = []
    for part, value in zip(inputs, values):
        assert isinstance(part, fx.Node)
        assert value is not None
        is_large = value.numel() >= min(_SMALLEST_PRODUCT, _SMALLEST_COPY)
        parts.append(_Part(part, value.numel(), _source_of(part, flow) if is_large else None))
    return parts


# What a flat tensor may be of another one.
VIEWS = (_aten.view.default, _aten._unsafe_view.default, _aten.reshape.default)


def _source_of(part: fx.Node, flow: Flow) -> Optional[fx.Node]:
    """The tensor that this is a view of, if it need not wait for what it is joined with."""
    node = part
    while node.target in VIEWS and len(node.users) == 1:
        source = node.args[0]
        assert isinstance(source, fx.Node)
        node = source
    value = value_of(node)
    if value is None or flow.is_written(node) or flow.is_given(node):
        return None
    is_alone = node is not part and len(node.users) == 1 and value.is_contiguous()
    is_product = node.target is _aten.mm.default
    least = _SMALLEST_PRODUCT if is_product else _SMALLEST_COPY
    return node if (is_alone or not is_product) and value.numel() >= least else None


def _rewrite(graph: fx.Graph, node: fx.Node, parts: Sequence[_Part]) -> None:
    value, size = value_of(node), sum(part.size for part in parts)
    assert value is not None
    starts = {part.source for part in parts if part.source is not None}
    first = next(each for each in graph.nodes if each is node or each in starts)
    empty = reused_empty if size >= _SMALLEST_WHOLE else torch.empty
    with graph.inserting_before(first):
        place = {"device": value.device, "dtype": value.dtype}
        whole = graph.call_function(empty, (size,), place)  # type: ignore[arg-type]
    begin, rest = 0, []
    for part in parts:
        if part.source is None:
            rest.append(part.node)
        else:
            _join(graph, node, whole, begin, rest)
            begin, rest = begin + elements(rest), []
            _redirect(graph, part.source, whole, begin)
            begin += part.size
    _join(graph, node, whole, begin, rest)
    node.replace_all_uses_with(whole)
    graph.erase_node(node)
    for part in parts:
        _drop_views(graph, part.node)


def _join(
    graph: fx.Graph, before: fx.Node, whole: fx.Node, begin: int, nodes: Sequence[fx.Node]
) -> None:
    """Copy these there, one after another."""
    if not nodes:
        return
    with graph.inserting_before(before):
        place = graph.call_function(torch.narrow, (whole, 0, begin, elements(nodes)))
        if len(nodes) == 1:
            graph.call_function(_aten.copy_.default, (place, nodes[0]))
        else:
            graph.call_function(_aten.cat.out, (list(nodes),), {"out": place})


def _redirect(graph: fx.Graph, source: fx.Node, whole: fx.Node, begin: int) -> None:
    """Make a product write there, or copy another tensor there when it is computed."""
    value = value_of(source)
    assert value is not None
    is_product = source.target is _aten.mm.default
    with graph.inserting_before(source if is_product else source.next):
        place = graph.call_function(torch.narrow, (whole, 0, begin, value.numel()))
        shaped = graph.call_function(_aten.view.default, (place, list(value.shape)))
        if is_product:
            graph.call_function(_aten.mm.out, source.args, {"out": shaped})
        else:
            graph.call_function(_aten.copy_.default, (shaped, source))


def _drop_views(graph: fx.Graph, node: fx.Node) -> None:
    """Remove what is left of a product that writes elsewhere now."""
    while not node.users and node.target in (*VIEWS, _aten.mm.default):
        source = node.args[0]
        graph.erase_node(node)
        if not isinstance(source, fx.Node):
            return
        node = source
