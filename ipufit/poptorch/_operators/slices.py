"""Slices of a fixed size whose start is a tensor, and may change from run to run."""

from __future__ import annotations

from typing import Any, Optional, Tuple

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes

from ipufit.poptorch._logging import error
from ipufit.poptorch._precision import device_dtype
from ipufit.poptorch._tracing import need_kind, node_of, tracing
from ipufit.tracing.graph_analysis import schema_of
from ipufit.tracing.recording import current_tracer

_WHOLE_NUMBERS = (torch.int16, torch.int32, torch.int64)

# What torch.tensor makes of Python numbers.
_LITERALS = (torch.ops.aten.lift_fresh_copy.default, torch.ops.aten.detach.default)


def _check_start(start: Tensor, name: str) -> None:
    if start.dtype not in (*_WHOLE_NUMBERS, torch.uint8, torch.int8) or start.numel() != 1:
        raise error(
            f"{name}: Expected integer typed start tensor of one element, got shape "
            f"{tuple(start.shape)} and {start.dtype}. Convert it with start.to(torch.int32)."
        )


def _check_size(size: int) -> None:
    if size == 0:
        raise error(
            "The start and end of a slice must be different. Got a slice of size 0; make it at "
            "least 1."
        )
    if size < 0:
        raise error(
            "Taking a slice of a tensor with the end less than the start is not supported. Got a "
            f"slice of size {size}; make it at least 1."
        )


def _check_step(step: int) -> None:
    if step < 1:
        raise error(
            f"Slicing step must be at least 1, got {step}. Reverse a slice with torch.flip."
        )


def _axis(tensor: Tensor, dim: int, name: str) -> int:
    if not -tensor.dim() <= dim < tensor.dim():
        raise error(
            f"{name}: the tensor has {tensor.dim()} dimensions, got dim {dim}. Give one from "
            f"{-tensor.dim()} to {tensor.dim() - 1}."
        )
    return dim % tensor.dim()


def _positions(start: Tensor, size: int, step: int, length: int) -> Tensor:
    """Return the positions of a slice; past the end it wraps around, as on the device."""
    offsets = torch.arange(0, size, step, device=start.device)
    return torch.remainder(start.reshape(1).to(torch.int64) + offsets, length)


def _recorded_slice(tensor: Tensor, axis: int, start: Tensor, size: int, step: int) -> Tensor:
    _check_size(size)
    _check_step(step)
    length = tensor.shape[axis]
    if length % size:
        raise error(
            f"The size of the slice ({size}) must be a factor of the slicing dimension "
            f"({length}). Choose another size, or pad the tensor."
        )
    return tensor.index_select(axis, _positions(start, size, step, length))


def _check_kinds(name: str, tensor: object, dim: object, start: object, advice: str) -> None:
    """Refuse arguments that both operators take and that are of another kind.

    Args:
        name: of the operator, for messages.
        tensor, dim, start: its arguments.
        advice: what to do where the start is fixed.
    """
    need_kind(tensor, Tensor, f"{name} must take a torch.tensor input.")
    if not isinstance(dim, int):
        raise error(f"Dimension must be an integer. Got {type(dim)}.")
    expectation = f"Slice start argument to {name} must be a torch.tensor."
    need_kind(start, Tensor, expectation, f"For a fixed start {advice}.")


def _check_fixed(size: object, name: str = "Size") -> None:
    if not isinstance(size, int):
        raise error(f"{name} must be an integer. Got {type(size)}: it may not change between runs.")


def dynamic_slice(tensor: Tensor, dim: int, start: Tensor, size: int, step: int) -> Tensor:
    """Return ``tensor[start:start + size:step]`` of one dimension; start may change every run.

    In a compiled model a slice that passes the end of the dimension goes on at its beginning.

    Args:
        tensor: any shape.
        dim: the dimension; negative ones count from the last.
        start: one whole number.
        size: fixed; in a compiled model it divides the dimension.
        step: fixed, at least 1.
    Raises:
        Error: an argument of another kind, or a size or step that a device can't slice by.
    """
    _check_kinds("dynamic_slice", tensor, dim, start, "write x[start:start + size]")
    _check_fixed(size)
    _check_fixed(step, "Step")
    _check_start(start, "dynamic_slice")
    axis = _axis(tensor, dim, "dynamic_slice")
    if tracing() is not None:
        return _recorded_slice(tensor, axis, start, size, step)
    first = int(start.item())
    sliced: Tensor = torch.ops.aten.slice(tensor, axis, first, first + size, step)
    return sliced


def dynamic_update(input: Tensor, src: Tensor, dim: int, start: Tensor, size: int) -> Tensor:
    """Return a copy of ``input`` with ``src`` in ``[start:start + size]`` of one dimension.

    In a compiled model what passes the end of the dimension is written to its beginning.

    Args:
        input: any shape; it stays as it is.
        src: of the dtype of ``input`` and its shape, but for ``size`` on the dimension.
        dim: the dimension; negative ones count from the last.
        start: one whole number, another one at every run if you like.
        size: fixed; other than that of a slice it need not divide the dimension.
    Raises:
        Error: an argument of another kind, or a ``src`` that does not fit.
    """
    _check_kinds("dynamic_update", input, dim, start, "write into a copy of the input")
    need_kind(src, Tensor, "Src argument to dynamic_update must be a torch.tensor.")
    _check_fixed(size)
    if input.dim() != src.dim():
        raise error(
            "input and src tensors must have same dimensionality. "
            f"({input.dim()}) vs ({src.dim()}) Reshape src."
        )
    recording = tracing() is not None
    # On the device there are no 64-bit types that could differ.
    types = [device_dtype(t.dtype) if recording else t.dtype for t in (input, src)]
    if types[0] != types[1]:
        raise error(
            f"input and src tensor must have same dtype. ({types[0]} vs {types[1]}) Convert src "
            "with src.to(input.dtype)."
        )
    _check_start(start, "dynamic_update")
    axis = _axis(input, dim, "dynamic_update")
    if not recording:
        first = int(start.item())
        updated: Tensor = torch.ops.aten.slice_scatter(input, src, axis, first, first + size, 1)
        return updated
    return _recorded_update(input, src, axis, start, size)


def _recorded_update(input: Tensor, src: Tensor, axis: int, start: Tensor, size: int) -> Tensor:
    _check_size(size)
    expected = list(input.shape)
    expected[axis] = size
    if list(src.shape) != expected or size > input.shape[axis]:
        raise error(
            f"dynamic_update: a slice of size {size} on dimension {axis} of {tuple(input.shape)} "
            f"has shape {tuple(expected)}, got src of shape {tuple(src.shape)}. Give size as long "
            "as src is, and at most as long as the input is there."
        )
    positions = _positions(start, size, 1, input.shape[axis])
    return input.index_copy(axis, positions, src.to(input.dtype))


def has_tensor_bounds(index: object) -> bool:
    """Return True if ``x[index]`` has a slice whose start or end is a tensor."""
    parts = index if isinstance(index, tuple) else (index,)
    return any(
        isinstance(p, slice) and (isinstance(p.start, Tensor) or isinstance(p.stop, Tensor))
        for p in parts
    )


def getitem(tensor: Tensor, index: Any) -> Tensor:
    """Return ``tensor[index]`` where :func:`has_tensor_bounds` is true, while recording.

    The size of such a slice is the difference of its bounds, which must be sums of one tensor and
    numbers. Bounds that are computed from tensors of the host alone make an ordinary slice.
    """
    parts = list(index) if isinstance(index, tuple) else [index]
    consumed = sum(_consumes(part) for part in parts)
    axis, rest = 0, []
    for part in parts:
        if isinstance(part, slice):
            start, stop = _constant_value(part.start), _constant_value(part.stop)
            if isinstance(start, Tensor) or isinstance(stop, Tensor):
                tensor = _slice_between(tensor, axis, start, stop, part.step)
                part = slice(None)
            else:
                part = slice(start, stop, part.step)
        rest.append(part)
        axis += tensor.dim() - consumed if part is Ellipsis else _consumes(part)
    if all(isinstance(part, slice) and part == slice(None) for part in rest):
        return tensor
    return tensor[tuple(rest)]


def _slice_between(tensor: Tensor, axis: int, start: Any, stop: Any, step: Any) -> Tensor:
    if isinstance(step, Tensor):
        raise error(
            "Slicing step must be a constant, got a tensor. Give a Python int of at least 1."
        )
    size = _size_between(start, stop)
    _check_start(start, "a slice")
    return _recorded_slice(tensor, axis, start, size, 1 if step is None else step)


def _constant_value(bound: object) -> Any:
    """Return the value of a bound that the host can compute; otherwise the bound."""
    if not isinstance(bound, Tensor):
        return bound
    if not isinstance(bound, FakeTensor):
        return _read(bound)
    constant = getattr(bound, "constant", None)
    if constant is not None:
        return _read(constant)
    node = node_of(bound)
    if node is None:
        return bound
    source, more = _sum_of(node)
    value = _number(source)
    return bound if value is None else value + more


def _consumes(part: object) -> int:
    """Return how many dimensions of the tensor a part of an index covers."""
    if part is None or part is Ellipsis or isinstance(part, bool):
        return 0
    if isinstance(part, Tensor) and part.dtype in (torch.bool, torch.uint8):
        return part.dim()
    return 1


def _not_constant(because: str) -> Exception:
    return error(
        "The size of the sliced tensor must be a constant for each execution of the model when "
        f"running on the IPU. {because} Compute the end from the start by adding a Python "
        "number, or use poptorch.dynamic_slice."
    )


def _size_between(start: object, stop: object) -> int:
    if not isinstance(start, Tensor) or not isinstance(stop, Tensor):
        raise _not_constant("Only one of start and end changes from run to run.")
    nodes = node_of(start), node_of(stop)
    if nodes[0] is None or nodes[1] is None:
        raise _not_constant("A bound comes from outside of the body that uses it.")
    (first, a), (last, b) = _sum_of(nodes[0]), _sum_of(nodes[1])
    if first is not last:
        raise _not_constant("Start and end are not computed from the same tensor by sums.")
    size = b - a
    _check_size(size)
    return size


# Operators that keep the number.
_KEEPS = {"_to_copy", "alias", "clone", "detach", "lift_fresh_copy", "reshape", "squeeze", "to"}
_KEEPS |= {"unsqueeze", "view", "_unsafe_view", "expand"}


def _sum_of(node: fx.Node) -> Tuple[fx.Node, int]:
    """Return the node to which numbers are added to get a bound, and the sum of the numbers."""
    total = 0
    while node.op == "call_function":
        schema = schema_of(node)
        kind = schema.name.partition("::")[2].rstrip("_") if schema else ""
        if kind in _KEEPS:
            node = node.all_input_nodes[0]
        elif kind in ("add", "sub"):
            step = _step(node, kind)
            if step is None:
                break
            node, amount = step
            total += amount
        else:
            break
    return node, total


def _step(node: fx.Node, kind: str) -> Optional[Tuple[Any, int]]:
    """Return the other operand and the number of a sum with a number; None for any other."""
    left, right = node.args[:2]
    factor = node.kwargs.get("alpha", 1)
    sign = -1 if kind == "sub" else 1
    numbers = [_number(left), _number(right)]
    if numbers[1] is not None:
        amount: Any = sign * factor * numbers[1]  # type: ignore[operator]
        other = left
    elif numbers[0] is not None and kind == "add" and factor == 1:
        amount, other = numbers[0], right
    else:
        return None
    if isinstance(amount, float):
        raise _not_constant(
            "In this case, there is a float added to the slice indices meaning it may change "
            "between runs."
        )
    return other, int(amount)


def _number(operand: object) -> Any:
    """Return the value of an operand that is a constant; None for any other."""
    if isinstance(operand, (int, float)):
        return operand
    if not isinstance(operand, fx.Node):
        return None
    if operand.op == "call_function" and operand.target in _LITERALS:
        operand = operand.args[0]
    if isinstance(operand, fx.Node) and operand.op == "get_attr":
        value = getattr(current_tracer().root, str(operand.target), None)  # type: ignore[union-attr]
        if isinstance(value, Tensor) and not isinstance(value, FakeTensor) and value.numel() == 1:
            return _read(value)
    return None


def _read(value: Tensor) -> object:
    with _disable_current_modes():
        return value.item()
