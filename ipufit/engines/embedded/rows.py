"""Which rows of a micro-batch an element of a tensor was computed from, operator by operator.

An element with the place L in the row-major order of its tensor belongs to row ``(L // span) %
size``. Views keep L, and most operators keep the dimension along which the rows lie; where nobody
can tell, the rows are lost.
"""

from __future__ import annotations

import math
from typing import Any, Dict, Optional, Sequence, Tuple

import torch
from torch import Tensor

__all__ = ["Rows"]

_Key = Tuple[int, Tuple[int, ...], Tuple[int, ...]]

# The same elements in the same order.
_SAME_ORDER = (
    "_to_copy",
    "_unsafe_view",
    "alias",
    "clone",
    "detach",
    "reshape",
    "squeeze",
    "unsqueeze",
    "view",
)

# Of the operands of a product, the one whose rows are those of the result.
_PRODUCTS = {"addmm": 1, "baddbmm": 1, "bmm": 0, "mm": 0, "mv": 0}

# Others join the rows, or spread what has been joined.
_MIXING = ("sort", "topk", "cumsum", "flip", "roll", "index", "gather", "scatter", "embedding")


class Rows:
    """Follows the rows of a micro-batch.

    Args:
        size: samples in it.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._spans: Dict[_Key, int] = {}

    def begin(self, leaf: Tensor) -> None:
        """A tensor of the batch, with samples along its first dimension if it has them."""
        if leaf.dim() and leaf.shape[0] == self._size and leaf.numel():
            self._spans[_key(leaf)] = leaf.numel() // self._size

    def forget(self, tensor: Tensor) -> None:
        """Its memory is that of another one now."""
        self._spans.pop(_key(tensor), None)

    def note(self, func: Any, args: Sequence[Any], outputs: Sequence[Tensor]) -> None:
        """An operator was called."""
        name = func._schema.name.partition("::")[2].rstrip("_")
        for place, output in enumerate(outputs):
            span = self._span_after(name, args, output) if not place or _alike(name) else None
            if span is None:
                self.forget(output)
            else:
                self._spans[_key(output)] = span

    def marked(self, tensor: Tensor, bad: Tensor) -> Tuple[int, ...]:
        """The rows with marked elements; () where they are lost.

        Args:
            tensor: the last operator's.
            bad: bool, of its shape.
        """
        span = self._spans.get(_key(tensor))
        if span is None:
            return ()
        places = bad.reshape(-1).nonzero().reshape(-1)
        rows = torch.div(places, span, rounding_mode="floor") % self._size
        return tuple(torch.unique(rows).tolist())

    def _span_after(self, name: str, args: Sequence[Any], output: Tensor) -> Optional[int]:
        given = [a for arg in args for a in (arg if isinstance(arg, (list, tuple)) else (arg,))]
        tensors = [t for t in given if isinstance(t, Tensor)]
        if name in _PRODUCTS and len(tensors) > _PRODUCTS[name]:
            tensors = [tensors[_PRODUCTS[name]]]
        if not output.numel() or name.startswith(_MIXING):
            return None
        for source in tensors:
            span = self._spans.get(_key(source))
            if span is None:
                continue
            if name in _SAME_ORDER and source.numel() == output.numel():
                return span
            found = self._moved(name, args, source, span, output)
            if found is not None:
                return found
        return None

    def _moved(
        self, name: str, args: Sequence[Any], source: Tensor, span: int, output: Tensor
    ) -> Optional[int]:
        """The span where the rows lie along one dimension, wherever that has gone."""
        dim = next((d for d in range(source.dim()) if math.prod(source.shape[d + 1 :]) <= span), 0)
        inner = math.prod(source.shape[dim + 1 :])
        if span % inner or source.shape[dim] % (span // inner * self._size):
            return None
        length, target = source.shape[dim], dim
        if name in ("t", "transpose", "permute"):
            target = _order(name, args, source.dim()).index(dim)
        elif name in ("sum", "mean", "amax", "amin", "any", "all", "prod", "var", "std", "select"):
            gone = _dims(args, source.dim())
            if dim in gone:
                return None
            if output.dim() < source.dim():
                target = dim - sum(each < dim for each in gone)
        elif name in _PRODUCTS and dim == source.dim() - 1 and dim:
            return None
        elif output.dim() > source.dim():
            # Broadcast against something with more dimensions.
            target = dim + output.dim() - source.dim()
        if target >= output.dim() or output.shape[target] != length:
            return None
        return span // inner * math.prod(output.shape[target + 1 :])


def _alike(name: str) -> bool:
    """Whether all results of an operator are parts of one."""
    return name in ("split", "split_with_sizes", "chunk", "unbind")


def _key(tensor: Tensor) -> _Key:
    return tensor.data_ptr(), tuple(tensor.shape), tuple(tensor.stride())


def _order(name: str, args: Sequence[Any], dims: int) -> Sequence[int]:
    """Which dimension each of a transposed tensor was."""
    order = list(range(dims))
    if name == "permute":
        return [int(d) % dims for d in args[1]]
    first, second = (0, 1) if name == "t" else (int(args[1]) % dims, int(args[2]) % dims)
    if dims > 1:
        order[first], order[second] = order[second], order[first]
    return order


def _dims(args: Sequence[Any], dims: int) -> Sequence[int]:
    """Those that an operator takes together; all where it says none."""
    given = args[1] if len(args) > 1 else None
    if isinstance(given, int):
        given = [given]
    if not isinstance(given, (list, tuple)) or not given:
        return range(dims)
    return [int(d) % dims for d in given]
