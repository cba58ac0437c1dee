"""Batching rules: where samples lie in an operator's results, by where they lie in its inputs.

An operator is here if every element of its results belongs to one sample and depends on that
sample and on fixed tensors alone, and if its derivative is that of such a function: a sum over the
samples, in which none counts what others have. What is not here is refused.
"""

from __future__ import annotations

from typing import Any, Callable, Dict, List, Mapping, Sequence, Tuple

from torch import Tensor, fx

from ipufit.engines.embedded.batching.batch_dim import (
    NOT_MAPPED,
    UNREAD,
    BatchDim,
    RefusalError,
    State,
    regroup,
)
from ipufit.tracing.graph_analysis import nodes_in, operator_name


class OperatorPair:
    """An operator, as recorded for a micro-batch and for several of them.

    Args:
        small, large: the two nodes.
        states: of the nodes for a micro-batch.
        samples: of the two.
    """

    def __init__(
        self,
        small: fx.Node,
        large: fx.Node,
        states: Mapping[fx.Node, State],
        samples: Tuple[int, int],
    ) -> None:
        self.name = operator_name(small)
        self.samples = samples
        self._small, self._large = small, large
        self._states = states
        self._given = _by_name(small)
        self._twins: Dict[fx.Node, fx.Node] = dict(
            zip(small.all_input_nodes, large.all_input_nodes)
        )

    def __getitem__(self, name: str) -> Any:
        """Return the argument with this name of the operator's schema."""
        return self._given.get(name)

    @property
    def first(self) -> fx.Node:
        """Tensor that the operator is called on."""
        node: fx.Node = next(iter(self._given.values()))
        return node

    @property
    def tensors(self) -> List[fx.Node]:
        """Tensor arguments of the operator, those in lists included."""
        return [node for value in self._given.values() for node in nodes_in(value)]

    @property
    def results(self) -> Tuple[Any, Any]:
        """The operator's results for both sizes, without values."""
        return self._small.meta["val"], self._large.meta["val"]

    def state(self, node: object) -> State:
        """Batch dimension of an argument; what is no tensor is fixed."""
        return self._states[node] if isinstance(node, fx.Node) else NOT_MAPPED

    def shape(self, node: fx.Node) -> Sequence[int]:
        """Return the shape of an argument, for a micro-batch."""
        return tuple(node.meta["val"].shape)

    def large_shape(self, node: fx.Node) -> Sequence[int]:
        """Return the shape of an argument, for several micro-batches."""
        return tuple(self._twins[node].meta["val"].shape)

    def along(self, node: object) -> BatchDim:
        """Batch dimension of an argument that must have one."""
        state = self.state(node)
        if not isinstance(state, BatchDim):
            raise self.coupled()
        return state

    def common(self, nodes: Sequence[fx.Node]) -> BatchDim:
        """Batch dimension of several arguments that must all have this one."""
        states = {self.along(node) for node in nodes}
        if len(states) != 1:
            raise self.coupled()
        return states.pop()

    def fixed(self, *nodes: object) -> None:
        """Make sure that no sample is in these arguments."""
        if any(self.state(node) != NOT_MAPPED for node in nodes):
            raise self.coupled()

    def dims(self, value: Any, rank: int) -> List[int]:
        """Dimensions, counted from the first; no value means all."""
        dims = [value] if isinstance(value, int) else list(value or range(rank))
        return [dim % max(rank, 1) for dim in dims]

    def off(self, value: object, node: fx.Node) -> List[int]:
        """Dimensions of an argument, along none of which the samples lie."""
        dims = self.dims(value, len(self.shape(node)))
        if self.along(node).dim in dims:
            raise self.coupled()
        return dims

    def coupled(self) -> RefusalError:
        """Make the refusal of an operator that lets samples see each other."""
        return RefusalError(f"{self.name} in forward joins the samples of a batch")


# Finds where the samples are in the results.
Rule = Callable[[OperatorPair], State]
BATCHING_RULES: Dict[str, Rule] = {}

# Arguments that may depend on the number of samples; rules look at shapes instead.
SIZED: Dict[str, Tuple[str, ...]] = {}


def _by_name(node: fx.Node) -> Dict[str, Any]:
    schema = node.target._schema  # type: ignore[union-attr]
    arguments = {}
    for place, each in enumerate(schema.arguments):
        value = node.args[place] if place < len(node.args) else each.default_value
        arguments[each.name] = node.kwargs.get(each.name, value)
    return arguments


def _rule(names: str, sized: Tuple[str, ...] = ()) -> Callable[[Rule], Rule]:
    """The rule of operators of aten, with or without the name of an overload."""

    def register(rule: Rule) -> Rule:
        for name in names.split():
            BATCHING_RULES[name] = rule
            SIZED[name] = sized
        return rule

    return register


_ELEMENTWISE = """
    abs acos acosh add addcdiv addcmul alias angle asin asinh atan atan2 atanh bitwise_and
    bitwise_not bitwise_or bitwise_xor ceil celu clamp clamp_max clamp_min clone copy cos cosh
    deg2rad detach div elu eq erf erfc erfinv exp exp2 expm1 fill floor floor_divide fmax fmin fmod
    frac full_like ge gelu gt hardshrink hardsigmoid hardswish hardtanh hypot isinf isnan le
    leaky_relu lerp lgamma lift_fresh lift_fresh_copy log log10 log1p log2 logaddexp logical_and
    logical_not logical_or logical_xor logit lt masked_fill max.other maximum min.other minimum mish
    mul nan_to_num ne neg ones_like pow _prelu_kernel rad2deg reciprocal relu relu6 remainder round
    rsqrt rsub selu sgn sigmoid sign silu sin sinc sinh softplus softshrink sqrt square sub tan tanh
    threshold _to_copy true_divide trunc where.self xlogy zero zeros_like
"""

IN_PLACE = frozenset(_ELEMENTWISE.split())


@_rule(_ELEMENTWISE)
def _elementwise(call: OperatorPair) -> State:
    return _broadcast(call, call.tensors)


def _broadcast(call: OperatorPair, nodes: Sequence[fx.Node]) -> BatchDim:
    """Elements that meet belong to the same sample."""
    rank = max(len(call.shape(node)) for node in nodes)
    states = set()
    for node in nodes:
        state = call.state(node)
        if isinstance(state, BatchDim):
            states.add(state.moved(state.dim + rank - len(call.shape(node))))
        elif state != NOT_MAPPED:
            raise call.coupled()
    if len(states) != 1:
        raise call.coupled()
    along = states.pop()
    for node in nodes:
        place = along.dim - rank + len(call.shape(node))
        if call.state(node) == NOT_MAPPED and place >= 0 and call.shape(node)[place] != 1:
            raise call.coupled()
    return along


# Shapes.


@_rule("view _unsafe_view _reshape_alias", ("size", "stride"))
def _view(call: OperatorPair) -> State:
    _, large = call.results
    before = call.large_shape(call.first)
    return regroup(call.along(call.first), before, large.shape, call.samples[1])


@_rule("expand", ("size",))
def _expand(call: OperatorPair) -> State:
    if call.state(call.first) == NOT_MAPPED:
        return _repeated_rows(call)
    small, _ = call.results
    along = call.along(call.first)
    return along.moved(along.dim + small.dim() - len(call.shape(call.first)))


@_rule("full new_full new_ones new_zeros ones zeros", ("size",))
def _repeated_rows(call: OperatorPair) -> State:
    """The state of equal rows, whose number alone depends on that of the samples."""
    small, large = call.results
    differing = [d for d, (a, b) in enumerate(zip(small.shape, large.shape)) if a != b]
    if not differing:
        return NOT_MAPPED
    if len(differing) > 1 or small.shape[differing[0]] % call.samples[0]:
        raise call.coupled()
    return BatchDim(differing[0], 1, small.shape[differing[0]] // call.samples[0])


@_rule("repeat", ("repeats",))
def _repeat(call: OperatorPair) -> State:
    small, _ = call.results
    new = small.dim() - len(call.shape(call.first))
    if call.state(call.first) != NOT_MAPPED:
        along = call.along(call.first)
        if call["repeats"][along.dim + new] != 1:
            raise call.coupled()
        return along.moved(along.dim + new)
    state = _repeated_rows(call)
    if isinstance(state, BatchDim) and state.dim >= new:
        # Repeated as a whole, a tensor of several rows gives each sample one of them in turn.
        rows = call.shape(call.first)[state.dim - new]
        if rows != state.inner and rows != 1:
            raise call.coupled()
    return state


@_rule("permute")
def _permute(call: OperatorPair) -> State:
    along = call.along(call.first)
    order = call.dims(call["dims"], len(call.shape(call.first)))
    return along.moved(order.index(along.dim))


@_rule("transpose.int t")
def _transpose(call: OperatorPair) -> State:
    along, rank = call.along(call.first), len(call.shape(call.first))
    pair = [0, 1] if call["dim0"] is None else [call["dim0"] % rank, call["dim1"] % rank]
    if rank < 2 or along.dim not in pair:
        return along
    return along.moved(pair[1 - pair.index(along.dim)])


@_rule("unsqueeze")
def _unsqueeze(call: OperatorPair) -> State:
    along, rank = call.along(call.first), len(call.shape(call.first))
    return along.moved(along.dim + (call["dim"] % (rank + 1) <= along.dim))


@_rule("squeeze squeeze.dim squeeze.dims")
def _squeeze(call: OperatorPair) -> State:
    along, shape = call.along(call.first), call.large_shape(call.first)
    gone = [d for d in call.dims(call["dim"], len(shape)) if shape[d] == 1]
    return along.moved(along.dim - sum(d < along.dim for d in gone))


@_rule("slice.Tensor", ("end",))
def _slice(call: OperatorPair) -> State:
    along, dim = call.along(call.first), call["dim"] % len(call.shape(call.first))
    small, large = call.results
    if along.dim == dim and (
        small.shape != call.shape(call.first) or large.shape != call.large_shape(call.first)
    ):
        raise call.coupled()
    return along


@_rule("select.int unbind.int")
def _select(call: OperatorPair) -> State:
    (gone,) = call.off(call["dim"], call.first)
    along = call.along(call.first)
    return _all_results(call, along.moved(along.dim - (gone < along.dim)))


@_rule("cat")
def _cat(call: OperatorPair) -> State:
    for node in call.tensors:
        call.off(call["dim"], node)
    return call.common(call.tensors)


@_rule("stack")
def _stack(call: OperatorPair) -> State:
    along = call.common(call.tensors)
    dim = call["dim"] % (len(call.shape(call.tensors[0])) + 1)
    return along.moved(along.dim + (dim <= along.dim))


@_rule("constant_pad_nd")
def _pad(call: OperatorPair) -> State:
    along, rank = call.along(call.first), len(call.shape(call.first))
    pairs = list(zip(call["pad"][::2], call["pad"][1::2]))
    padded = [rank - 1 - place for place, pair in enumerate(pairs) if tuple(pair) != (0, 0)]
    if along.dim in padded:
        raise call.coupled()
    return along


@_rule("tril triu")
def _triangle(call: OperatorPair) -> State:
    along = call.along(call.first)
    if along.dim >= len(call.shape(call.first)) - 2:
        raise call.coupled()
    return along


# Along a dimension of its own.


@_rule(
    "_softmax _log_softmax cumsum cumprod logcumsumexp sort sort.stable topk glu cummax cummin flip"
    " roll split.Tensor split_with_sizes unsafe_split.Tensor unsafe_split_with_sizes"
)
def _along_another(call: OperatorPair) -> State:
    # Without dimensions, roll turns all elements as one row.
    call.off(call["dims"] if call["dim"] is None else call["dim"], call.first)
    return _all_results(call, call.along(call.first))


def _all_results(call: OperatorPair, state: State) -> State:
    small, _ = call.results
    return (state,) * len(small) if isinstance(small, (list, tuple)) else state


@_rule(
    "all.dim amax amin any.dim argmax argmin kthvalue linalg_vector_norm logsumexp max.dim mean.dim"
    " median.dim min.dim norm.ScalarOpt_dim prod.dim_int std.correction sum.dim_IntList std.dim"
    " var.correction var.dim var_mean.correction std_mean.correction"
)
def _reduction(call: OperatorPair) -> State:
    gone = call.off(call["dim"], call.first)
    along = call.along(call.first)
    if not call["keepdim"]:
        along = along.moved(along.dim - sum(d < along.dim for d in gone))
    return _all_results(call, along)


@_rule("log_sigmoid_forward")
def _log_sigmoid(call: OperatorPair) -> State:
    return (call.along(call.first), UNREAD)


@_rule("all any dot max mean median min prod std std_mean sum var var_mean view.dtype")
def _joined(call: OperatorPair) -> State:
    raise call.coupled()


# Products.


@_rule("mm bmm addmm baddbmm")
def _product(call: OperatorPair) -> State:
    """The rule for products of matrices, or of stacks of them, with a bias or without."""
    *biases, first, second = call.tensors
    left, right = call.state(first), call.state(second)
    last = len(call.shape(first)) - 1
    if isinstance(left, BatchDim) and left.dim == last - 1 and right == NOT_MAPPED:
        along = left
    elif isinstance(right, BatchDim) and right.dim == last and left == NOT_MAPPED:
        along = right
    elif isinstance(left, BatchDim) and left == right and left.dim < last - 1:
        along = left
    else:
        raise call.coupled()
    for bias in biases:
        state, shape = call.state(bias), call.shape(bias)
        place = along.dim - 1 - last + len(shape)
        is_same = state == NOT_MAPPED and (place < 0 or shape[place] == 1)
        if not is_same and state != along.moved(place):
            raise call.coupled()
    return along


@_rule("mv")
def _mv(call: OperatorPair) -> State:
    call.fixed(call["vec"])
    if call.along(call["self"]).dim != 0:
        raise call.coupled()
    return call.along(call["self"])


# Tables.


@_rule("embedding")
def _embedding(call: OperatorPair) -> State:
    call.fixed(call["weight"])
    if call["scale_grad_by_freq"]:
        # Its derivative divides by how often an index occurs, in the whole batch.
        raise call.coupled()
    return call.along(call["indices"])


@_rule("index_select")
def _index_select(call: OperatorPair) -> State:
    table, chosen = call.state(call["self"]), call.state(call["index"])
    if table == NOT_MAPPED and isinstance(chosen, BatchDim):
        return chosen.moved(*call.dims(call["dim"], len(call.shape(call["self"]))))
    call.fixed(call["index"])
    call.off(call["dim"], call["self"])
    return call.along(call["self"])


@_rule("index.Tensor")
def _index(call: OperatorPair) -> State:
    """Batching rule of indexing by one tensor, along one dimension."""
    indexed = [(dim, index) for dim, index in enumerate(call["indices"]) if index is not None]
    if len(indexed) != 1:
        raise call.coupled()
    ((dim, index),) = indexed
    table, chosen = call.state(call["self"]), call.state(index)
    if table == NOT_MAPPED and isinstance(chosen, BatchDim):
        return chosen.moved(dim + chosen.dim)
    call.fixed(index)
    call.off(dim, call["self"])
    along = call.along(call["self"])
    more = len(call.shape(index)) - 1
    return along.moved(along.dim + (more if dim < along.dim else 0))


@_rule("gather scatter.src scatter.value scatter_add")
def _picked(call: OperatorPair) -> State:
    call.off(call["dim"], call.first)
    return call.common(call.tensors)


# Layers that take the samples along their first dimension.


def _leading(call: OperatorPair, node: fx.Node, rank: int) -> BatchDim:
    along = call.along(node)
    if along.dim != 0 or len(call.shape(node)) != rank:
        raise call.coupled()
    return along


@_rule("convolution")
def _convolution(call: OperatorPair) -> State:
    call.fixed(call["weight"], call["bias"])
    return _leading(call, call["input"], len(call["stride"]) + 2)


def _spatial(rank: int) -> Rule:
    def spatial_layer(call: OperatorPair) -> State:
        return _all_results(call, _leading(call, call.first, rank))

    return spatial_layer


_SPATIAL = {
    3: "avg_pool1d _adaptive_avg_pool1d reflection_pad1d replication_pad1d upsample_nearest1d"
    " upsample_linear1d col2im",
    4: "max_pool2d_with_indices avg_pool2d _adaptive_avg_pool2d adaptive_max_pool2d"
    " reflection_pad2d replication_pad2d upsample_nearest2d upsample_bilinear2d"
    " upsample_bicubic2d pixel_shuffle pixel_unshuffle im2col",
    5: "max_pool3d_with_indices avg_pool3d _adaptive_avg_pool3d adaptive_max_pool3d"
    " reflection_pad3d replication_pad3d upsample_nearest3d upsample_trilinear3d",
}
for _rank, _names in _SPATIAL.items():
    _rule(_names)(_spatial(_rank))


@_rule("native_layer_norm _fused_rms_norm")
def _layer_norm(call: OperatorPair) -> State:
    call.fixed(call["weight"], call["bias"])
    rank = len(call.shape(call["input"]))
    call.off(list(range(rank - len(call["normalized_shape"]), rank)), call["input"])
    return _all_results(call, call.along(call["input"]))


@_rule("native_group_norm", ("N",))
def _group_norm(call: OperatorPair) -> State:
    call.fixed(call["weight"], call["bias"])
    along = call.along(call["input"])
    if along.dim != 0 or call["N"] != along.size(call.samples[0]):
        raise call.coupled()
    return (along,) * 3


@_rule("native_batch_norm cudnn_batch_norm miopen_batch_norm")
def _batch_norm(call: OperatorPair) -> State:
    node = call.first
    along = call.along(node)
    if not call["training"]:
        call.fixed(*call.tensors[1:])
        call.off(1, node)
        return (along, *(UNREAD,) * (len(call.results[0]) - 1))
    per_sample = BatchDim(0, along.outer, along.inner)
    allowed = (NOT_MAPPED, per_sample)
    if along.dim != 1 or any(call.state(other) not in allowed for other in call.tensors[1:]):
        raise RefusalError("batch normalisation takes its statistics from a whole micro-batch")
    # Every sample has channels of its own, as instance normalisation has it.
    return (along, *(UNREAD,) * (len(call.results[0]) - 1))


@_rule("recurrent")
def _recurrent(call: OperatorPair) -> State:
    behind = 1 + call["states"]
    call.fixed(*call["tensors"][behind:])
    along = call.common(call["tensors"][:behind])
    if along.dim != 1:
        raise call.coupled()
    return (*(along,) * behind, UNREAD)


@_rule(
    "_scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_flash_attention"
    " _scaled_dot_product_efficient_attention _scaled_dot_product_cudnn_attention"
)
def _attention(call: OperatorPair) -> State:
    nodes = [call[name] for name in ("query", "key", "value")]
    along = call.common(nodes)
    for node in nodes:
        _leading(call, node, 4)
    mask = call["attn_mask"] if call["attn_mask"] is not None else call["attn_bias"]
    if mask is not None and not _fits(call, mask, along):
        raise call.coupled()
    return tuple(
        along if _has_samples(call, small, large, along) else UNREAD
        for small, large in zip(*call.results)
    )


def _fits(call: OperatorPair, mask: fx.Node, along: BatchDim) -> bool:
    state, shape = call.state(mask), call.shape(mask)
    return state == along or (state == NOT_MAPPED and (len(shape) < 4 or shape[0] == 1))


def _has_samples(call: OperatorPair, small: object, large: Any, along: BatchDim) -> bool:
    return (
        isinstance(small, Tensor)
        and small.dim() > 1
        and (small.shape[0], large.shape[0]) == tuple(map(along.size, call.samples))
    )
