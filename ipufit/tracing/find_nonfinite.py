"""Find the operator that made the first value that is not finite, while a micro-batch runs.

Not every such value is a fault: a mask of ``-inf`` is there on purpose, and what ``torch.where``
leaves aside reaches nothing. So the search begins at a result, the loss or a gradient, and goes
back through the operators that its NaN or infinity came through.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Callable, Dict, List, Mapping, Optional, Sequence, Tuple

import torch
from torch import Tensor

from ipufit.core.batch import MicroBatch
from ipufit.errors import NonFiniteValue, Operand
from ipufit.tracing.interpreter import Listener, OperatorCall
from ipufit.tracing.source_map import Origin
from ipufit.tracing.validate import public_name
from ipufit.utils import tree

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


class _RowTracker:
    """Follows the rows of a micro-batch from operator to operator.

    An element with the place L in the row-major order of its tensor belongs to row
    ``(L // span) % size``. Views keep L, and most operators keep the dimension along which the rows
    lie; where nobody can tell, the rows are lost.

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
        """Forget the rows of a tensor, whose memory another one has now."""
        self._spans.pop(_key(tensor), None)

    def note(self, name: str, args: Sequence[object], outputs: Sequence[Tensor]) -> None:
        """An operator of this name was called."""
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

    def _span_after(self, name: str, args: Sequence[object], output: Tensor) -> Optional[int]:
        operands = [a for arg in args for a in (arg if isinstance(arg, (list, tuple)) else (arg,))]
        tensors = [t for t in operands if isinstance(t, Tensor)]
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
            moved_span = self._moved(name, args, source, span, output)
            if moved_span is not None:
                return moved_span
        return None

    def _moved(
        self, name: str, args: Sequence[object], source: Tensor, span: int, output: Tensor
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
    """Say whether all results of an operator are parts of one tensor."""
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


def _dims(args: Sequence[object], dims: int) -> Sequence[int]:
    """Return the dimensions that an operator reduces; all where its arguments name none."""
    reduced = args[1] if len(args) > 1 else None
    if isinstance(reduced, int):
        reduced = [reduced]
    if not isinstance(reduced, (list, tuple)) or not reduced:
        return range(dims)
    return [int(d) % dims for d in reduced]


# They read nothing of the tensor that they write to, which may never have been written before.
_OVERWRITING = (
    "bernoulli_",
    "copy_",
    "exponential_",
    "fill_",
    "normal_",
    "random_",
    "uniform_",
    "zero_",
)

_View = Tuple[Tuple[int, ...], Tuple[int, ...], int]


@dataclasses.dataclass(frozen=True)
class _NonFinite:
    """A tensor with values that are not finite, and what made it.

    Attributes:
        nan: whether it has NaN; if not, it has infinities.
        view: which part of its memory it is.
        sources: what it may come from, NaN first; empty where the operator made it of finite ones.
        cause: as of NonFiniteValue, or "constant" for what Python wrote into it.
        operator, origin, operands, samples: of what made it.
        name: of a parameter or buffer.
    """

    nan: bool
    view: _View
    sources: Sequence[_NonFinite] = ()
    cause: str = ""
    operator: str = ""
    origin: Origin = dataclasses.field(default_factory=Origin)
    operands: Sequence[Operand] = ()
    samples: Tuple[int, ...] = ()
    name: Optional[str] = None


class NonFiniteSearch(Listener):
    """Looks at the results of every operator.

    Args:
        now: tells where the operator that is being called comes from.
        batch: whose rows are samples.
        tensors: parameters and buffers, by name.
    """

    def __init__(
        self, now: Callable[[], Origin], batch: MicroBatch, tensors: Mapping[str, Tensor]
    ) -> None:
        self._now = now
        self._rows = _RowTracker(batch.size)
        # By memory, in the order in which they were made.
        self._nonfinite: Dict[int, List[_NonFinite]] = {}
        # Of the operator that runs.
        self._origin = Origin()
        self._inputs: List[Tensor] = []
        self._looks: List[Optional[str]] = []
        self._sources: List[_NonFinite] = []
        self._operands: List[Operand] = []
        for leaf in batch.leaves:
            self._rows.begin(leaf)
            self._keep_given(leaf, "data", None)
        for name, tensor in tensors.items():
            self._keep_given(tensor, "weights", public_name(name))

    def _keep_given(self, tensor: Tensor, cause: str, name: Optional[str]) -> None:
        kind = _kind_of(tensor)
        if kind is None:
            return
        samples = self._rows.marked(tensor, ~tensor.isfinite())
        if (cause == "weights" and kind == "inf") or (cause == "data" and _is_mask(tensor)):
            cause = "constant"
        nonfinite = _NonFinite(
            kind == "nan", _view(tensor), cause=cause, samples=samples, name=name
        )
        self._nonfinite.setdefault(_memory(tensor), []).append(nonfinite)

    def before(self, call: OperatorCall) -> None:
        """Look at the operands, of which an operator that works in place leaves nothing."""
        if not isinstance(call.operator, torch._ops.OpOverload):
            return
        self._origin = self._now()
        read = call.args[1:] if _name(call) in _OVERWRITING else call.args
        self._inputs = [t for t in tree.tensors((read, call.kwargs)) if _is_number(t)]
        self._looks = [_kind_of(t) for t in self._inputs]
        sources = [
            self._source(t, kind) for t, kind in zip(self._inputs, self._looks) if kind is not None
        ]
        self._sources = sorted((s for s in sources if s is not None), key=lambda s: not s.nan)
        is_mutable = call.operator._schema.is_mutable
        self._operands = [_operand(t) for t in self._inputs] if is_mutable else []

    def after(self, call: OperatorCall, result: object) -> None:
        """Look at the results, and note where those that are not finite come from."""
        if not isinstance(call.operator, torch._ops.OpOverload):
            return
        origin, inputs, sources = self._origin, self._inputs, self._sources
        outputs = tree.tensors(result)
        old = {_memory(t) for t in call.inputs}
        for output in outputs:
            if _memory(output) not in old:
                self._nonfinite.pop(_memory(output), None)
                self._rows.forget(output)
        self._rows.note(_name(call).rstrip("_"), call.args, outputs)
        for output in outputs:
            kind = _kind_of(output)
            if kind is None or "empty" in _name(call):
                continue
            if kind == "nan":
                is_origin = not any(s.nan for s in sources) and "nan" not in self._looks
            else:
                is_origin = not sources and not any(self._looks)
            bad = output.isnan() if kind == "nan" else output.isinf()
            cause = "backward" if origin.is_backward else "forward"
            if is_origin and kind == "inf" and _is_written(call, inputs):
                cause = "constant"
            self._nonfinite.setdefault(_memory(output), []).append(
                _NonFinite(
                    kind == "nan",
                    _view(output),
                    sources,
                    cause,
                    str(call.operator),
                    origin,
                    (self._operands or [_operand(t) for t in inputs]) if is_origin else (),
                    self._rows.marked(output, bad) if is_origin else (),
                )
            )

    def _source(self, tensor: Tensor, kind: str) -> Optional[_NonFinite]:
        """Find the origin of such a value of a tensor; for parts of memory, the same part first."""
        candidates = [
            each for each in self._nonfinite.get(_memory(tensor), ()) if each.nan or kind == "inf"
        ] or self._nonfinite.get(_memory(tensor), [])
        view = _view(tensor)
        same = [each for each in candidates if each.view == view]
        return next(reversed(same or candidates), None)

    def cause_of(self, result: Tensor) -> Optional[NonFiniteValue]:
        """Find the cause of a value that is not finite; None if the search has not seen it.

        Args:
            result: one with such a value.
        """
        kind = _kind_of(result)
        nonfinite = None if kind is None else self._source(result, kind)
        if nonfinite is None:
            return None
        first = _first(nonfinite)
        if first.cause == "constant":
            # Written on purpose: what met it afterwards should not have.
            first = _after_constant(nonfinite)
        return NonFiniteValue(
            first.cause,
            "nan" if first.nan else "inf",
            module=first.origin.module,
            kind=first.origin.kind,
            operator=first.operator or None,
            file=first.origin.file,
            line=first.origin.line,
            source=first.origin.source,
            samples=first.samples,
            operands=first.operands,
            parameter=first.name,
        )


def _first(nonfinite: _NonFinite) -> _NonFinite:
    """Follow a value back to what made it."""
    while True:
        nans = [source for source in nonfinite.sources if source.nan]
        if nonfinite.nan and nans:
            nonfinite = nans[0]
            continue
        if not nonfinite.sources:
            return nonfinite
        # Infinite operands: one that an operator computed is where it began.
        firsts = [_first(source) for source in nonfinite.sources]
        begun = [first for first in firsts if first.cause != "constant"]
        if begun:
            return begun[0]
        return nonfinite if nonfinite.nan else firsts[0]


def _after_constant(nonfinite: _NonFinite) -> _NonFinite:
    """Find the first operator that chose from a value that Python wrote."""
    path = [nonfinite]
    while path[-1].sources and path[-1].cause != "constant":
        path.append(path[-1].sources[0])
    for source, result in zip(path[::-1], path[-2::-1]):
        if math.prod(result.view[0]) < math.prod(source.view[0]):
            return result
    return path[-2] if len(path) > 1 else nonfinite


def _is_number(value: object) -> bool:
    if not isinstance(value, Tensor) or value.is_quantized or value.layout is not torch.strided:
        return False
    return value.is_floating_point() or value.is_complex()


def _kind_of(tensor: Tensor) -> Optional[str]:
    """Classify a tensor: "nan", or "inf" where there are infinities alone; None if finite."""
    if not _is_number(tensor) or not tensor.numel() or bool(tensor.isfinite().all()):
        return None
    return "nan" if bool(tensor.isnan().any()) else "inf"


def _is_mask(tensor: Tensor) -> bool:
    """Tell whether all that is not finite is ``-inf``, as in a mask that is added to scores."""
    return bool((tensor.isfinite() | (tensor == -torch.inf)).all())


def _name(call: OperatorCall) -> str:
    return str(call.operator._schema.name.partition("::")[2])


def _is_written(call: OperatorCall, inputs: Sequence[Tensor]) -> bool:
    """Tell whether Python gave the infinity, or the operator makes a tensor of nothing."""
    leaves = tree.flatten((call.args, call.kwargs))[0]
    numbers = [leaf for leaf in leaves if isinstance(leaf, float)]
    return not inputs or any(number in (torch.inf, -torch.inf) for number in numbers)


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _view(tensor: Tensor) -> _View:
    return tuple(tensor.shape), tuple(tensor.stride()), int(tensor.storage_offset())


def _operand(tensor: Tensor) -> Operand:
    values = torch.view_as_real(tensor.detach()) if tensor.is_complex() else tensor.detach()
    finite = values[values.isfinite()]
    least = float(finite.min()) if finite.numel() else None
    most = float(finite.max()) if finite.numel() else None
    nans, infinities = int(values.isnan().sum()), int(values.isinf().sum())
    return Operand(tuple(tensor.shape), least, most, nans, infinities)
