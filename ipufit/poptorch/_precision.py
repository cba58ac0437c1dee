"""Number formats of the device: casts at its edge, half precision, and float64 for comparisons.

torch's kernels for the CPU know float16 in part, torch 2.0 hardly at all. A device multiplies half
matrices with float32 partial sums by default, and rounds their result; what is computed here in
float32, and rounded once, is the nearest.
"""

from __future__ import annotations

import contextlib
import math
import re
from typing import Any, Callable, ContextManager, Dict, Mapping, Optional, Sequence, Set, Tuple

import torch
from torch import Tensor, fx
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from ipufit.poptorch._logging import error
from ipufit.poptorch._tracing import tensors_in, written_tensors
from ipufit.poptorch.poptorch_core import UnrecoverableError
from ipufit.tracing.graph_analysis import needed_nodes
from ipufit.tracing.interpreter import Listener, OperatorCall
from ipufit.utils import tree
from ipufit.utils.state import replaced


class _Present:
    """State of the block that is running.

    Attributes:
        preserves: whether programs that are compiled keep float64 and int64.
        clips: whether results in float16 are clipped to its range.
    """

    preserves = False
    clips = True


def keeps_float64() -> bool:
    """Return True if models that are compiled now compute in float64 where the user does."""
    return _Present.preserves


def keep_float64() -> ContextManager[None]:
    """Preserve float64 and int64 in programs compiled inside, to compare with other engines."""
    return replaced((_Present, "preserves", True))


# A tensor of the left type is on the device one of the right type. What is not here can't go there.
DEVICE_DTYPES: Dict[torch.dtype, torch.dtype] = {
    torch.uint8: torch.uint8,
    torch.int8: torch.int8,
    torch.int16: torch.int16,
    torch.int32: torch.int32,
    torch.int64: torch.int32,
    torch.float16: torch.float16,
    torch.bfloat16: torch.float32,
    torch.float32: torch.float32,
    torch.float64: torch.float32,
    torch.bool: torch.bool,
}


def device_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype that a tensor of this dtype has on the device."""
    return DEVICE_DTYPES.get(dtype, dtype)


# On the way out bfloat16 is half, other than on the way in.
_OUTPUTS = {
    torch.int64: torch.int32,
    torch.float64: torch.float32,
    torch.bfloat16: torch.float16,
}


def check_input(tensor: Tensor, name: str) -> None:
    """Refuse a tensor that a device can't hold.

    Args:
        name: what it is called in a message.
    Raises:
        Error: it has no elements, or its dtype is not in ``DEVICE_DTYPES``.
    """
    if tensor.dtype not in DEVICE_DTYPES:
        supported = ", ".join(sorted(str(dtype)[len("torch.") :] for dtype in DEVICE_DTYPES))
        raise error(
            f"Unsupported input type {tensor.dtype} of the input {name}. Convert it to one of "
            f"{supported}; a complex tensor fits as torch.view_as_real(tensor)."
        )
    if not tensor.numel():
        raise error(
            f"Zero-sized tensors are unsupported (Got shape {list(tensor.shape)}). Leave the input "
            f"{name} out of this call, or pad it."
        )


def narrowed(tensor: Tensor) -> Tensor:
    """Cast an input to what the recorded program reads: float64 and bfloat16 become float32.

    int64 stays, although the device has int32: torch's operators index with int64.
    """
    dtype = DEVICE_DTYPES[tensor.dtype]
    return tensor if dtype is torch.int32 else tensor.to(dtype)


def output_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which an output of this dtype leaves the device."""
    return _OUTPUTS.get(dtype, dtype)


def narrowed_output(tensor: Tensor) -> Tensor:
    """Cast an output as a device does: int64 to int32, float64 to float32, bfloat16 to half."""
    return tensor.to(output_dtype(tensor.dtype))


# Comparisons that have no answer for a NaN.
_ORDERING = ("aten::lt", "aten::le", "aten::gt", "aten::ge")

# What these make holds whatever was in the memory.
_UNFILLED = ("aten::empty", "aten::new_empty")


class FloatCheck(Listener):
    """Checks the results of the operators of a graph that runs.

    NaN and infinities among the inputs are passed on, as a device does: moving one is no exception.
    Making one of numbers is, and so is comparing a NaN by size. What nothing depends on is not in
    the program of a device.

    Args:
        graph: that runs.
    """

    def __init__(self, graph: fx.Graph) -> None:
        self._needed = needed_nodes(graph)

    def before(self, call: OperatorCall) -> None:
        """Look at the arguments, which the operator may change."""
        inputs = _values((call.args, call.kwargs))
        self._nan, self._infinite = _any(torch.isnan, inputs), _any(torch.isinf, inputs)

    def after(self, call: OperatorCall, result: object) -> None:
        """Look at the result.

        Raises:
            UnrecoverableError: the operator made a NaN or an infinity, or compared a NaN.
        """
        schema = getattr(call.operator, "_schema", None)
        if schema is None or call.node not in self._needed:
            return
        exception = _exception(schema.name, self._nan, self._infinite, _values(result))
        if exception is not None:
            raise UnrecoverableError(
                f"a floating-point exception: {call.operator} {exception}. Look at its inputs, or "
                "leave Precision.enableFloatingPointExceptions off.",
                "poplar_unrecoverable_runtime_error",
            )


def _exception(name: str, nan: bool, infinite: bool, results: Sequence[Tensor]) -> Optional[str]:
    """Describe the exception that an operator has raised, or return None."""
    if nan and name.startswith(_ORDERING):
        return "compared a NaN"
    if name.startswith(_UNFILLED):
        return None
    if not nan and _any(torch.isnan, results):
        return "made a NaN of numbers"
    if not infinite and _any(torch.isinf, results):
        return "made an infinity of finite numbers"
    return None


def _any(question: Callable[[Tensor], Tensor], values: Sequence[Tensor]) -> bool:
    return any(bool(question(value).any()) for value in values)


def _values(value: object) -> Sequence[Tensor]:
    """Return the floating-point tensors and numbers in a structure that may not be finite."""
    leaves = tree.flatten(value)[0]
    tensors = [torch.as_tensor(leaf) for leaf in leaves if isinstance(leaf, (Tensor, float))]
    # A finite sum has only finite terms: most tensors need no other look.
    return [one for one in tensors if one.is_floating_point() and not one.sum().isfinite()]


_HALF = torch.float16

# Said by torch before anything is computed or changed: no kernel, or too large a number.
_MISSING = re.compile(r"not implemented for 'Half'|to type \S+::Half without overflow")

# Operators that have said so: being told takes torch longer than computing. And convolutions, whose
# kernels round partial sums on some processors.
_LACKING: Set[object] = {
    torch.ops.aten.convolution.default,
    torch.ops.aten.convolution_backward.default,
}


# Operators of matrices, which torch multiplies with others of their own type alone, and in float16
# many times slower than in float32 where a processor has no instructions for it.
_PRODUCTS = {
    getattr(torch.ops.aten, name) for name in ("addmm", "addmv", "baddbmm", "bmm", "mm", "mv")
}


def record_half(func: OpOverload, args: Sequence[object], kwargs: Mapping[str, object]) -> object:
    """Call an operator while a model is recorded, in float32 where torch has none for its types.

    What has no kernel for tensors without values is run on zeros by torch 2.0, so that a recording
    needs one for float16, too. A product of float16 and float32 is float32, as PopTorch casts it.
    """
    dtypes = {tensor.dtype for tensor in tensors_in((args, kwargs))}
    if func.overloadpacket in _PRODUCTS and dtypes == {_HALF, torch.float32}:
        return _in_single(func, args, kwargs)
    try:
        result: object = func(*args, **kwargs)
    except RuntimeError as fault:
        if not _MISSING.search(str(fault)):
            raise
        return _in_single(func, args, kwargs)
    return result


def makes_half(graph: fx.GraphModule) -> bool:
    """Return True if a graph has a float16 constant, or converts something to float16."""
    return any(
        getattr(graph, node.target).dtype == _HALF
        if node.op == "get_attr"
        else _has_half([*node.args, *node.kwargs.values()])
        for node in graph.graph.nodes
    )


def half_computed(makes_half_values: bool, tensors: Sequence[Tensor]) -> ContextManager[object]:
    """Let every operator take float16 while a graph runs.

    Args:
        makes_half_values: whether the graph itself makes float16 tensors.
        tensors: inputs of the graph.
    """
    if makes_half_values or _has_half(list(tensors)):
        return _HalfComputed()  # type: ignore[no-untyped-call]
    return contextlib.nullcontext()


def trap_overflow(enabled: bool) -> ContextManager[None]:
    """If enabled, float16 overflows to infinities inside, for ``FloatCheck`` to see them."""
    return replaced((_Present, "clips", not enabled))


class _HalfComputed(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Calls each operator, and computes in float32 what torch can't in float16, or overflows there.

    PopART leaves Poplar's ``nanoo`` off, so that a result of half precision that overflows is the
    largest number, not an infinity; with floating-point exceptions it is one of these.
    """

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: object,
        args: Tuple[object, ...] = (),
        kwargs: Optional[Dict[str, object]] = None,
    ) -> Any:
        kwargs = kwargs or {}
        if not _has_half([*args, *kwargs.values()]):
            return func(*args, **kwargs)
        # What is written over can't be computed once more; one that changes a shape writes nothing.
        changes = (
            _Present.clips and func._schema.is_mutable and torch.Tag.inplace_view not in func.tags
        )
        if not changes and func not in _LACKING and func.overloadpacket not in _PRODUCTS:
            try:
                result = func(*args, **kwargs)
            except RuntimeError as fault:
                if not _MISSING.search(str(fault)):
                    raise
                _LACKING.add(func)
            else:
                is_view = any(each.alias_info is not None for each in func._schema.returns)
                if is_view or not _Present.clips or all(map(_is_finite, tensors_in(result))):
                    return result
        return _in_single(func, args, kwargs, _Present.clips)


def _is_finite(tensor: Tensor) -> bool:
    """Return False if a float16 tensor of values has infinities or NaN."""
    if tensor.dtype != _HALF or isinstance(tensor, FakeTensor):
        return True
    return math.isfinite(tensor.sum(dtype=torch.float32))


def _narrowed(tensor: Tensor, clips: bool) -> Tensor:
    """Round to float16; with ``clips``, what is finite stays so."""
    narrow = tensor.to(_HALF)
    if not clips or _is_finite(narrow):
        return narrow
    largest = torch.finfo(_HALF).max
    return torch.where(tensor.isinf(), tensor, tensor.clamp(-largest, largest)).to(_HALF)


def _has_half(values: Sequence[object]) -> bool:
    dtypes = (value for value in values if isinstance(value, torch.dtype))
    return _HALF in dtypes or any(tensor.dtype == _HALF for tensor in tensors_in(values))


def _in_single(
    func: OpOverload, args: Sequence[object], kwargs: Mapping[str, object], clips: bool = False
) -> Any:
    """Call an operator on float32 copies, and round its results to float16."""
    wide: Dict[int, Tensor] = {}

    def widened(value: object) -> object:
        if isinstance(value, Tensor) and value.dtype == _HALF:
            return wide.setdefault(id(value), value.float())
        return torch.float32 if isinstance(value, torch.dtype) and value == _HALF else value

    result = func(*tree_map(widened, tuple(args)), **tree_map(widened, dict(kwargs)))
    originals: Dict[int, Tensor] = {}
    for value in written_tensors(func, args, kwargs):
        copy = wide.get(id(value), value)
        originals[id(copy)] = value if copy is value else value.copy_(_narrowed(copy, clips))
    rounds = _rounds([*args, *kwargs.values()])

    def rounded(value: object) -> object:
        if not isinstance(value, Tensor):
            return value
        if id(value) in originals:
            return originals[id(value)]
        return _narrowed(value, clips) if rounds and value.dtype == torch.float32 else value

    return tree_map(rounded, result)


def _rounds(values: Sequence[object]) -> bool:
    """Return True if results are float16: by a dtype argument, or by torch's type promotion."""
    dtypes = [value for value in values if isinstance(value, torch.dtype)]
    if dtypes:
        return dtypes[0] == _HALF
    return not any(tensor.dtype == torch.float32 and tensor.dim() for tensor in tensors_in(values))
