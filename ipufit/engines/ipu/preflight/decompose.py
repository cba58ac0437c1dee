"""Decomposition of operators as PopTorch's dispatcher gets them, whole or in parts."""

from __future__ import annotations

from typing import Any, Callable, Dict, Mapping, Optional, Protocol, Sequence

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ipufit.engines.ipu.preflight.facts import Call, CodeLocation
from ipufit.engines.ipu.preflight.operators import WHOLE, outplace

__all__ = ["Operators", "Watcher"]


def shaped_by_poptorch(name: str, arguments: Mapping[str, Any]) -> Optional[Tensor]:
    """Make the empty result of an operator whose shape torch takes from values.

    PopTorch takes it from the arguments: poptorch/source/dispatch_tracer/RegisterMetaOps.cpp.inc,
    lines 30 to 180. None for an operator that torch can run without values.
    """
    if name == "aten::ctc_loss":
        log_probs = arguments["log_probs"]
        # Without reduction, one number for each sample.
        shape = log_probs.shape[1:2] if arguments["reduction"] == 0 else ()
        return _empty(log_probs, shape, log_probs.dtype)
    if name == "aten::one_hot" and arguments["num_classes"] > 0:
        classes = arguments["self"]
        return _empty(classes, (*classes.shape, arguments["num_classes"]), classes.dtype)
    if name == "aten::bincount" and arguments["minlength"] > 0:
        weights = arguments["weights"]
        dtype = torch.int64 if weights is None else weights.dtype
        return _empty(arguments["self"], (arguments["minlength"],), dtype)
    return None


def _empty(like: Tensor, shape: Any, dtype: torch.dtype) -> Tensor:
    return torch.empty(tuple(shape), dtype=dtype, device=like.device)


_IMPLICIT, _EXPLICIT = "CompositeImplicitAutograd", "CompositeExplicitAutograd"


class Watcher(Protocol):
    """Interface of a listener to operators.

    Attributes:
        knows: whether there are facts about an operator.
    """

    knows: Callable[[str], bool]

    def looked(self) -> CodeLocation:
        """Called before an operator that may make no tensor; returns its location."""

    def note(self, operator: Any, arguments: Dict[str, Any], is_whole: bool) -> Call:
        """Called before an operator that makes tensors."""

    def ran(self, call: Call, result: Any) -> None:
        """Called with the result of an operator."""


class Operators(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Mode below autograd that takes operators apart as far as PopTorch has them."""

    def __init__(self, watcher: Watcher) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._watcher = watcher

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Optional[Dict[str, Any]] = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten.lift_fresh.default:
            # What torch.tensor makes of Python numbers: its parts would leave it a real tensor.
            return func(*args, **kwargs)
        if func.namespace == "prim" or not _makes_tensors(func):
            self._watcher.looked()
            parts = _parts(func, _IMPLICIT)
            if parts is None:
                return func(*args, **kwargs)
            with self:
                return parts(*args, **kwargs)
        parts = self._parts(func)
        arguments = _bound(func, args, kwargs)
        call = self._watcher.note(func, arguments, parts is None)
        shaped = shaped_by_poptorch(call.name, arguments)
        if shaped is not None:
            result = shaped
        elif parts is None:
            result = func(*args, **kwargs)
        else:
            with self:
                result = parts(*args, **kwargs)
        self._watcher.ran(call, result)
        return result

    def _parts(self, func: Any) -> Optional[Callable[..., Any]]:
        """Return the decomposition of an operator; None for one that PopTorch takes whole."""
        if func.name() in WHOLE:
            return None
        if func is torch.ops.aten.scaled_dot_product_attention.default:
            # PopTorch's device is none of those for which torch has a kernel.
            return _attention
        implicit = _parts(func, _IMPLICIT)
        if implicit is not None:
            return implicit
        if self._watcher.knows(outplace(func._schema.name)):
            return None
        return _parts(func, _EXPLICIT)


def _parts(func: Any, kind: str) -> Optional[Callable[..., Any]]:
    if func.namespace == "prim":
        return None
    if not torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), kind):
        return None
    key = getattr(torch._C.DispatchKey, kind)
    return lambda *args, **kwargs: func._op_dk(key, *args, **kwargs)


def _attention(*args: Any, **kwargs: Any) -> Any:
    return torch.ops.aten._scaled_dot_product_attention_math.default(*args, **kwargs)[0]


def _makes_tensors(func: Any) -> bool:
    return any("Tensor" in str(result.type) for result in func._schema.returns)


def _bound(func: Any, args: Sequence[Any], kwargs: Dict[str, Any]) -> Dict[str, Any]:
    """Bind arguments by name, with the defaults of missing ones."""
    bound = {}
    for place, argument in enumerate(func._schema.arguments):
        if argument.name in kwargs:
            bound[argument.name] = kwargs[argument.name]
        elif place < len(args) and not argument.kwarg_only:
            bound[argument.name] = args[place]
        elif argument.has_default_value():
            bound[argument.name] = argument.default_value
    return bound
