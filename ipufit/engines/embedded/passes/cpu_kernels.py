"""Kernels that are faster on a CPU than those that torch takes by itself.

Pictures with channels last suit torch's convolutions and poolings: each takes its pictures in that
layout, and what comes between them keeps it; values and shapes stay what they are, strides inside
of the graph don't. Torch multiplies float32 matrices with the BLAS it was built with; on processors
of another make than that library's, oneDNN, which torch has for its convolutions, can be twice as
fast.
"""

from __future__ import annotations

import functools
from typing import Callable, Dict, Iterable, List, Optional, Sequence, Tuple

import torch
from torch import Tensor, fx

from ipufit.engines.embedded.passes.simplify import VIEWS, Flow, elements, value_of
from ipufit.engines.embedded.timing import fastest
from ipufit.tracing.interpreter import OperatorCall
from ipufit.utils import tree

__all__ = ["agree", "restore_outputs", "results_of_torch", "to_channels_last", "use_onednn_matmul"]

_aten = torch.ops.aten

# How far apart, of the largest value of a tensor, two orders of summation may be.
_TOLERANCES = {torch.float64: 1e-9, torch.complex128: 1e-9, torch.float32: 1e-3}
_TOLERANCE_OF_OTHERS = 5e-2

# Elements of tensors that are compared at once.
_PIECE = 2**16

# Operators, with the arguments that are pictures.
_PICTURES: Dict[object, Tuple[int, ...]] = {
    _aten.convolution.default: (0, 1),
    _aten.convolution_backward.default: (0, 1, 2),
    _aten.max_pool2d_with_indices.default: (0,),
    _aten.max_pool2d_with_indices_backward.default: (0, 1, 7),
    _aten.avg_pool2d.default: (0,),
    _aten.avg_pool2d_backward.default: (0, 1),
}

# With no more elements in all the time is that of the calls.
_SMALLEST_PICTURE = 2**17

# What goes by strides, and so by the layout.
_BY_STRIDES = {"as_strided", "as_strided_", "set_", "resize_", "_reshape_alias"}


def to_channels_last(graph: fx.Graph) -> int:
    """Rewrite a graph; how many operators work on pictures, 0 if it stays as it was."""
    nodes = [node for node in graph.nodes if _is_of_pictures(node)]
    flow = Flow(graph)
    if elements([node.args[0] for node in nodes]) <= _SMALLEST_PICTURE or not all(
        _allows_strides(node, flow, 2) for node in graph.nodes
    ):
        return 0
    last: Dict[fx.Node, fx.Node] = {}
    for node in nodes:
        for place in _PICTURES[node.target]:
            source = node.args[place]
            assert isinstance(source, fx.Node)
            if source not in last or flow.is_written(source):
                with graph.inserting_before(node):
                    last[source] = graph.call_function(channels_last, (source,))
                last[source].meta["val"] = value_of(source)
            node.update_arg(place, last[source])
    _copy_in_views(graph.nodes)
    return len(nodes)


def results_of_torch(call: OperatorCall) -> List[Tensor]:
    """Return what torch's own kernel computes where a call may be of another, else nothing."""
    if call.operator in _PICTURES:
        args = [arg.contiguous() if isinstance(arg, Tensor) else arg for arg in call.args]
        return tree.tensors(call.operator(*args))
    if call.operator is not _linear():
        return []
    result = torch.nn.functional.linear(*call.args[:3])  # type: ignore[arg-type]
    return [result.relu() if call.args[3] == "relu" else result]


def agree(one: Tensor, other: Tensor) -> bool:
    """Tell whether tensors of one form are equal up to the order of summation."""
    if not (one.is_floating_point() or one.is_complex()):
        return torch.equal(one, other)
    if not one.numel():
        return True
    pairs = zip(_in_pieces(one), _in_pieces(other))
    largest = [torch.stack([a.abs().amax(), (a - b).abs().amax()]) for a, b in pairs]
    scale, away = torch.stack(largest).amax(0)
    tolerance = _TOLERANCES.get(one.dtype, _TOLERANCE_OF_OTHERS)
    # A comparison that finds no NaN needs no mask of them, which large tensors feel.
    if torch.isfinite(away):
        return bool(away <= tolerance * scale)
    finite = one[torch.isfinite(one)].abs()
    scale = finite.amax() if finite.numel() else torch.zeros(())
    return torch.allclose(one, other, rtol=0.0, atol=float(tolerance * scale), equal_nan=True)


def _in_pieces(tensor: Tensor) -> Sequence[Tensor]:
    """Split a tensor so that what is computed of a piece stays in the processor's cache."""
    rows = tensor if tensor.dim() else tensor.reshape(1)
    return torch.split(rows, max(1, len(rows) * _PIECE // rows.numel()))


def channels_last(pictures: Tensor) -> Tensor:
    """Return a node with these values, channels last; of one channel, marked as such.

    Args:
        pictures: shape (samples, channels, height, width).
    """
    channels, height, width = pictures.shape[1:]
    if channels == 1 and pictures.is_contiguous():
        strides = (height * width, 1, width, 1)
        return pictures.as_strided(pictures.shape, strides, pictures.storage_offset())
    return pictures.contiguous(memory_format=torch.channels_last)


def as_recorded(value: Tensor, strides: Sequence[int]) -> Tensor:
    """Return a node with these values in the strides that were recorded."""
    if value.stride() == tuple(strides):
        return value
    return torch.empty_strided(value.shape, strides, dtype=value.dtype).copy_(value)


def _is_of_pictures(node: fx.Node) -> bool:
    if node.target not in _PICTURES:
        return False
    kinds = ("cpu", torch.float32), ("cpu", torch.int64)
    for place in _PICTURES[node.target]:
        value = value_of(node.args[place])
        if value is None or value.dim() != 4 or (value.device.type, value.dtype) not in kinds:
            return False
    if node.target is _aten.convolution.default:
        return node.args[6] is False
    return node.target is not _aten.convolution_backward.default or node.args[7] is False


def _allows_strides(node: fx.Node, flow: Flow, dims: int) -> bool:
    """Tell whether a node computes the same whatever the strides of its inputs.

    Args:
        node: of a graph.
        flow: of that graph.
        dims: inputs with no more of them keep their strides.
    """
    if node.op != "call_function":
        return True
    if node.target in VIEWS and not flow.is_given(node) and flow.is_written_after(node):
        return False
    value = value_of(node)
    # Random numbers come in the order of memory.
    is_random = torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
    if is_random and (value is None or value.dim() > dims):
        return False
    return str(node.target).split(".")[1:2] not in [[name] for name in _BY_STRIDES]


def _copy_in_views(nodes: Iterable[fx.Node]) -> None:
    """Let views of what has other strides than recorded copy where they must."""
    for node in nodes:
        if node.target in VIEWS:
            node.target = _aten.reshape.default


def restore_outputs(graph: fx.Graph) -> None:
    """Return what a graph returns in the strides that were recorded."""
    (end,) = (node for node in graph.nodes if node.op == "output")
    with graph.inserting_before(end):
        for node in end.all_input_nodes:
            value = value_of(node)
            if value is not None and value.dim() > 2:
                new = graph.call_function(as_recorded, (node, tuple(value.stride())))
                new.meta["val"] = value
                end.replace_input_with(node, new)


# Below so many multiplications the time is that of the calls.
_SMALLEST_PRODUCT = 2**18

# Rows and columns of what is measured.
_LARGEST = 1024


# The ways: as recorded; a @ b as x @ w.T; and as the transpose of b.T @ a.T.
_BLAS, _STRAIGHT, _TURNED = "blas", "straight", "turned"


def use_onednn_matmul(graph: fx.Graph) -> int:
    """Replace products; how many."""
    if _linear() is None:
        return 0
    count, flow = 0, Flow(graph)
    for node in list(graph.nodes):
        if node.target is _aten.mm.default:
            a, b = node.args
            count += _replace(graph, flow, node, a, b, None)
        elif node.target is _aten.addmm.default and not node.kwargs and len(node.args) == 3:
            bias, a, b = node.args
            value, whole = value_of(bias), value_of(node)
            if value is not None and whole is not None and value.shape == whole.shape[1:]:
                count += _replace(graph, flow, node, a, b, bias)
    return count


@functools.lru_cache(maxsize=None)
def _linear() -> Optional[Callable[..., Tensor]]:
    """OneDNN's ``x @ w.T + bias``, where this torch has it."""
    try:
        linear: Callable[..., Tensor] = torch.ops.mkldnn._linear_pointwise.default
        with torch.no_grad():
            for after in ("none", "relu"):
                linear(torch.ones(2, 3), torch.ones(4, 3), torch.ones(4), after, [], "")
    except (AttributeError, NotImplementedError, RuntimeError, TypeError):
        return None
    return linear


def _replace(
    graph: fx.Graph, flow: Flow, node: fx.Node, a: fx.Node, b: fx.Node, bias: Optional[fx.Node]
) -> int:
    left, right, whole = value_of(a), value_of(b), value_of(node)
    if left is None or right is None or whole is None or not _fits(left, right):
        return 0
    way = _fastest(left, right, bias is not None)
    after = _users_of(node) if way == _TURNED else []
    if way == _BLAS or not all(_allows_strides(each, flow, 1) for each in after):
        return 0
    with graph.inserting_before(node):
        if way == _TURNED:
            new = _transposed(graph, _call(graph, _transposed(graph, b), a, None, "none"))
            new.meta["val"] = whole.t().contiguous().t()
            _copy_in_views(after)
        else:
            relu = None if bias is None else _relu_alone(node)
            new = _call(graph, a, _transposed(graph, b), bias, "none" if relu is None else "relu")
            new.meta["val"] = whole
            if relu is not None:
                relu.replace_all_uses_with(relu.args[0])  # type: ignore[arg-type]
                graph.erase_node(relu)
    node.replace_all_uses_with(new)
    graph.erase_node(node)
    return 1


def _call(graph: fx.Graph, x: fx.Node, w: fx.Node, bias: Optional[fx.Node], after: str) -> fx.Node:
    return graph.call_function(_linear(), (x, w, bias, after, [], ""))  # type: ignore[arg-type]


def _transposed(graph: fx.Graph, node: fx.Node) -> fx.Node:
    if node.target is _aten.t.default:
        return node.args[0]  # type: ignore[return-value]
    new = graph.call_function(_aten.t.default, (node,))
    value = value_of(node)
    new.meta["val"] = None if value is None else value.t()
    return new


def _relu_alone(node: fx.Node) -> Optional[fx.Node]:
    """The ReLU that alone uses the result, through a view of it or not."""
    while len(node.users) == 1:
        (node,) = node.users
        if node.target is _aten.relu.default:
            return node
        if node.target not in VIEWS:
            return None
    return None


def _users_of(node: fx.Node) -> List[fx.Node]:
    """All that comes of a node, itself left out."""
    users = list(node.users)
    visited = set(users)
    for each in users:
        users += [user for user in each.users if user not in visited]
        visited.update(each.users)
    return users


def _fits(left: Tensor, right: Tensor) -> bool:
    (m, k), n = left.shape, right.shape[1]
    plain = all(1 in t.stride() and t.storage_offset() == 0 for t in (left, right))
    alike = left.dtype == right.dtype == torch.float32 and left.device.type == "cpu"
    return plain and alike and m * k * n >= _SMALLEST_PRODUCT


def _fastest(left: Tensor, right: Tensor, with_bias: bool) -> str:
    """The way for matrices of this shape and layout; of large ones, of a part of them."""
    (m, k), n = left.shape, right.shape[1]
    m, k, n = (min(size, _LARGEST) for size in (m, k, n))
    columns = left.stride(0) == 1, right.stride(0) == 1
    key = ("product", m, k, n, columns, with_bias)
    return fastest(key, lambda: _ways(m, k, n, columns, with_bias))


def _ways(
    m: int, k: int, n: int, columns: Tuple[bool, bool], with_bias: bool
) -> Dict[str, Callable[[], object]]:
    linear = _linear()
    assert linear is not None
    generator = torch.Generator().manual_seed(0)

    def random_matrix(rows: int, width: int, by_column: bool) -> Tensor:
        shape = (width, rows) if by_column else (rows, width)
        matrix = torch.randn(shape, generator=generator)
        return matrix.t() if by_column else matrix

    a, b = random_matrix(m, k, columns[0]), random_matrix(k, n, columns[1])
    bias = torch.zeros(n) if with_bias else None
    plain: Callable[..., Tensor] = (
        torch.mm if bias is None else functools.partial(torch.addmm, bias)
    )
    ways: Dict[str, Callable[[], object]] = {
        _BLAS: functools.partial(plain, a, b),
        _STRAIGHT: lambda: linear(a, b.t(), bias, "none", [], ""),
    }
    # OneDNN wants the rows of its first factor in one piece. What is tried for nothing stays in
    # its cache, with half a megabyte.
    if columns[0] and bias is None:
        ways[_TURNED] = lambda: linear(b.t(), a, None, "none", [], "")
    return ways
