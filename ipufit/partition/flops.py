"""FLOPs and bytes of operators: a table of our own, for torch has none before 2.1."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Callable, Dict, Mapping, Sequence

import torch
from torch import Tensor

from ipufit.utils import tree

# What a tile can do per clock at best: FLOPs of a matrix product in 32 and in 16 bits, and bytes
# between its memory and its registers. Only the ratio of two operators' times is ever used.
_FLOPS_32, _FLOPS_16, _BYTES = 32, 128, 24

# Arguments that an operator's schema types.
_Arguments = Sequence[Any]
_Counter = Callable[[_Arguments, Any], int]


@dataclasses.dataclass
class OperatorWork:
    """Work of one or several operators.

    Attributes:
        flops: of matrix products, convolutions and attention, two per multiply-add.
        clocks: of one tile, had it to do all of it at its best rate: a measure to compare with,
            no prediction.
    """

    flops: int = 0
    clocks: float = 0.0

    def add(self, other: OperatorWork) -> None:
        """Count another sum in."""
        self.flops += other.flops
        self.clocks += other.clocks


def work_of(
    operator: torch._ops.OpOverload,
    args: Sequence[object],
    kwargs: Mapping[str, object],
    result: object,
) -> OperatorWork:
    """The work of one call of an ATen operator; a view has none.

    An operator takes the longer of computing its matrix product and of moving its tensors.
    """
    if is_view(operator):
        return OperatorWork()
    inputs, outputs = tree.tensors((args, kwargs)), tree.tensors(result)
    flops = flops_of(operator, args, result)
    rate = _FLOPS_16 if outputs and outputs[0].element_size() <= 2 else _FLOPS_32
    moved = sum(t.numel() * t.element_size() for t in (*inputs, *outputs))
    return OperatorWork(flops, max(flops / rate, moved / _BYTES))


def is_view(operator: torch._ops.OpOverload) -> bool:
    """True if the operator returns a view of its argument, without a copy."""
    if operator is torch.ops.aten.detach.default:
        return True
    returns = operator._schema.returns
    return any(r.alias_info is not None and not r.alias_info.is_write for r in returns)


def flops_of(operator: torch._ops.OpOverload, args: Sequence[object], result: object) -> int:
    """Two per multiply-add of matrix products, convolutions and attention; 0 for all else.

    The same as ``torch.utils.flop_counter`` has, but for what that leaves out, which is products
    with vectors (mv, addmv, dot, vdot), addbmm and attention in one operator on a CPU, and for the
    gradient of the weights of a convolution in groups, which it takes for one without groups.
    """
    name = _name(operator)
    if name in _TABLE:
        return _TABLE[name](args, result)
    if name.startswith("_scaled_dot_product_") and "attention" in name:
        return _attention_backward(args) if name.endswith("_backward") else _attention(args)
    return 0


def bytes_of(
    operator: torch._ops.OpOverload,
    args: Sequence[object],
    kwargs: Mapping[str, object],
    result: object,
) -> int:
    """Bytes that one call of an ATen operator reads and writes in memory; of a view, none.

    Each argument and each result once, and of what is expanded only what is there. What is looked
    up in a table is read as often as it is wanted, and no more of the table.
    """
    name = _name(operator)
    if is_view(operator) or name in _ONLY_MAKE:
        return 0
    outputs = tree.tensors(result)
    written = sum(map(_held, outputs))
    if name in _FILL:
        return written
    out_tensors = {id(tensor) for tensor in tree.tensors(kwargs.get("out"))}
    inputs = [tensor for tensor in tree.tensors((args, kwargs)) if id(tensor) not in out_tensors]
    if name == "copy_":
        inputs = inputs[1:]
    read = [_held(tensor) for tensor in inputs]
    if name in _LOOK_UP and read:
        read[0] = min(read[0], written)
    return sum(read) + written


def _held(tensor: Tensor) -> int:
    """Bytes of its elements, those that are one in memory counted once."""
    sizes = [size for size, stride in zip(tensor.shape, tensor.stride()) if stride or not size]
    return math.prod(sizes) * tensor.element_size()


def _name(operator: torch._ops.OpOverload) -> str:
    return str(operator._schema.name.partition("::")[2])


def _product(first: int) -> _Counter:
    """Count FLOPs of a matrix product whose left factor is the argument of that index."""
    return lambda args, result: 2 * result.numel() * args[first].shape[-1]


def _convolution(args: _Arguments, result: Any) -> int:
    """Every input value of a transposed one meets a filter, and so does every output of others."""
    weight, transposed = args[1], args[6]
    places = args[0].numel() if transposed else result.numel()
    return int(2 * places * math.prod(weight.shape[1:]))


def _convolution_backward(args: _Arguments, result: object) -> int:
    """Count as much for the gradient of the input, and for that of the weight, as forward."""
    gradient, inputs, weight, transposed, mask = args[0], args[1], args[2], args[7], args[10]
    places = inputs.numel() if transposed else gradient.numel()
    return int(2 * places * math.prod(weight.shape[1:])) * (int(mask[0]) + int(mask[1]))


def _attention(args: _Arguments) -> int:
    """Scores, and their product with the values."""
    query, key, value = args[:3]
    pairs = query.numel() // query.shape[-1] * key.shape[-2]
    return int(2 * pairs * (query.shape[-1] + value.shape[-1]))


def _attention_backward(args: _Arguments) -> int:
    """Scores anew, then gradients of values, of scores, of queries and of keys."""
    query, key, value = args[1:4]
    pairs = query.numel() // query.shape[-1] * key.shape[-2]
    return int(2 * pairs * (3 * query.shape[-1] + 2 * value.shape[-1]))


def _recurrent(args: _Arguments, result: object) -> int:
    """Every weight of a layer meets every time step of every sample."""
    tensors = args[0]
    weights = sum(tensor.numel() for tensor in tensors if tensor.dim() == 2)
    return int(2 * math.prod(tensors[0].shape[:2]) * weights)


def _recurrent_backward(args: _Arguments, result: object) -> int:
    """Count the operations of a recurrent layer's gradients.

    The forward operations come again for each weight that wants a gradient, and for gradients that
    go on to the layer and the step before.
    """
    _, _, tensors, wanted, directions = args
    time, batch, _ = tensors[0].shape
    weights = [(place, t.numel()) for place, t in enumerate(tensors) if t.dim() == 2]
    cells, first_weight = tensors[1].shape[0], weights[0][0]
    of_a_cell = len(weights) // cells
    steps = 0
    for number, (place, size) in enumerate(weights):
        cell, role = divmod(number, of_a_cell)
        # The first layer's input, and the state before the first step, may have no gradient.
        back = time
        if role == 0 and cell < directions:
            back = time if 0 in wanted else 0
        elif role == 1:
            back = time if set(wanted).intersection(range(1, first_weight)) else time - 1
        steps += size * (back + (time if place in wanted else 0))
    return int(2 * batch * steps)


# They make a tensor that nobody has written to.
_ONLY_MAKE = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}

# They write without reading.
_FILL = {
    "arange",
    "fill_",
    "full",
    "full_like",
    "new_full",
    "new_ones",
    "new_zeros",
    "ones",
    "ones_like",
    "zero_",
    "zeros",
    "zeros_like",
}

# They read of their first argument what their result has.
_LOOK_UP = {"embedding", "gather", "index", "index_select"}

_TABLE: Dict[str, _Counter] = {
    **dict.fromkeys(("mm", "bmm", "mv", "dot", "vdot"), _product(0)),
    **dict.fromkeys(("addmm", "baddbmm", "addmv"), _product(1)),
    **dict.fromkeys(("_linear_pointwise", "_scaled_mm"), _product(0)),
    "addbmm": lambda args, result: 2 * args[1].numel() * args[2].shape[-1],
    "convolution": _convolution,
    "convolution_backward": _convolution_backward,
    "recurrent": _recurrent,
    "recurrent_backward": _recurrent_backward,
}
