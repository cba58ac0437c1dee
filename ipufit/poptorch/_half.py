"""Half precision where torch lacks it: computed in float32, and rounded once.

torch's kernels for the CPU know float16 in part, torch 2.0 hardly at all. A device multiplies half
matrices with float32 partial sums by default, and rounds their result, so this is the nearest.
"""

from __future__ import annotations

import contextlib
from typing import (
    Any,
    ContextManager,
    Dict,
    Iterable,
    Mapping,
    Sequence,
    Set,
    Tuple,
)

import torch
from torch import Tensor, fx
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from ipufit.poptorch._operators.graph import tensors_in, written_tensors

__all__ = ["half_computed", "makes_half"]

_HALF = torch.float16
_MISSING = "not implemented for 'Half'"

# Operators that have said so: being told takes torch longer than computing. And convolutions, whose
# kernels round partial sums on some processors.
_LACKING: Set[Any] = {
    torch.ops.aten.convolution.default,
    torch.ops.aten.convolution_backward.default,
}


def makes_half(graph: fx.GraphModule) -> bool:
    """Return True if a graph has a float16 constant, or converts something to float16."""
    return any(
        getattr(graph, node.target).dtype == _HALF
        if node.op == "get_attr"
        else _has_half([*node.args, *node.kwargs.values()])
        for node in graph.graph.nodes
    )


def half_computed(makes_half_values: bool, tensors: Iterable[Tensor]) -> ContextManager[Any]:
    """Let every operator take float16 while a graph runs.

    Args:
        makes_half_values: whether the graph itself makes float16 tensors.
        tensors: inputs of the graph.
    """
    if makes_half_values or _has_half(list(tensors)):
        return _HalfComputed()  # type: ignore[no-untyped-call]
    return contextlib.nullcontext()


class _HalfComputed(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Calls each operator, and computes in float32 those that torch lacks for float16."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func not in _LACKING or not _has_half([*args, *kwargs.values()]):
            try:
                return func(*args, **kwargs)
            except RuntimeError as fault:
                # Said before anything is computed or changed.
                if _MISSING not in str(fault):
                    raise
            _LACKING.add(func)
        return _in_single(func, args, kwargs)


def _has_half(values: Sequence[Any]) -> bool:
    dtypes = (value for value in values if isinstance(value, torch.dtype))
    return _HALF in dtypes or any(tensor.dtype == _HALF for tensor in tensors_in(values))


def _in_single(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Call an operator on float32 copies, and round its results to float16."""
    wide: Dict[int, Tensor] = {}

    def widened(value: object) -> Any:
        if isinstance(value, Tensor) and value.dtype == _HALF:
            return wide.setdefault(id(value), value.float())
        return torch.float32 if isinstance(value, torch.dtype) and value == _HALF else value

    result = func(*tree_map(widened, tuple(args)), **tree_map(widened, dict(kwargs)))
    originals: Dict[int, Tensor] = {}
    for value in written_tensors(func, args, kwargs):
        if id(value) in wide:
            copy = wide[id(value)]
            originals[id(copy)] = value.copy_(copy)
    rounds = _rounds([*args, *kwargs.values()])

    def rounded(value: object) -> Any:
        if not isinstance(value, Tensor):
            return value
        if id(value) in originals:
            return originals[id(value)]
        return value.to(_HALF) if rounds and value.dtype == torch.float32 else value

    return tree_map(rounded, result)


def _rounds(values: Sequence[Any]) -> bool:
    """Return True if results are float16: by a dtype argument, or by torch's type promotion."""
    dtypes = [value for value in values if isinstance(value, torch.dtype)]
    if dtypes:
        return dtypes[0] == _HALF
    return not any(tensor.dtype == torch.float32 and tensor.dim() for tensor in tensors_in(values))
