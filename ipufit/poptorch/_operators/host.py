"""Calls of Python functions on the host from a running program."""

from __future__ import annotations

import weakref
from typing import Any, Callable, List, Optional, Sequence

import torch
from torch import Tensor

from ipufit.poptorch._errors import error
from ipufit.poptorch._operators.library import define
from ipufit.poptorch._tracing import tracing, untraced

__all__ = ["CPU"]


class _CallSite:
    """A place in a recorded graph that calls a function of the host."""

    def __init__(self, caller: CPU, results: Sequence[Tensor]) -> None:
        self.caller = caller
        self.shapes = [result.shape for result in results]
        self.dtypes = [result.dtype for result in results]


# Held by the recording that made them.
_CALLS: weakref.WeakValueDictionary[int, _CallSite] = weakref.WeakValueDictionary()


def _run(inputs: List[Tensor], call: int) -> List[Tensor]:
    site = _call_site(call)
    device = inputs[0].device if inputs else torch.device("cpu")
    caller = site.caller
    caller.inputs = [tensor.detach().cpu().clone() for tensor in inputs]
    caller.outputs = [torch.zeros(s, dtype=d) for s, d in zip(site.shapes, site.dtypes)]
    with torch.no_grad():
        caller.execute()
    return [tensor.to(device) for tensor in caller.outputs]


def _shapes(inputs: List[Tensor], call: int) -> List[Tensor]:
    site = _call_site(call)
    return [
        torch.empty(shape, dtype=dtype, device="meta")
        for shape, dtype in zip(site.shapes, site.dtypes)
    ]


def _call_site(call: int) -> _CallSite:
    site = _CALLS.get(call)
    if site is None:
        raise error(
            "the function of a poptorch.CPU is gone: expected the model that recorded it to be "
            "alive. Compile the model again."
        )
    return site


_CALL_CPU = define("call_cpu(Tensor[] inputs, int call) -> Tensor[]", _run, _shapes)


class CPU:
    """A function, or module, that an inference model calls on the host while it runs.

    While the model is compiled it is called once with zeros, which tells the shapes of its
    results; these may not change afterwards.

    Args:
        layer_to_call: takes tensors and returns one, or a list or tuple of them. Parameters of a
            module are no longer trained.
        ID: its name.
    """

    def __init__(self, layer_to_call: Callable[..., Any], ID: str) -> None:
        self._layer_to_call = layer_to_call
        if isinstance(layer_to_call, torch.nn.Module):
            layer_to_call.requires_grad_(False)
        self._ID = ID
        self.in_shapes: Optional[List[torch.Size]] = None
        self.out_shapes: Optional[List[torch.Size]] = None
        self.inputs: List[Tensor] = []
        self.outputs: List[Tensor] = []

    def execute(self) -> None:
        """Call the function with ``inputs`` and write what it returns into ``outputs``.

        Raises:
            Error: it returned other shapes, or another number of tensors, than before.
        """
        results = _tensors(self._layer_to_call(*self.inputs), self._ID)
        got, expected = ([tuple(t.shape) for t in group] for group in (results, self.outputs))
        if got != expected:
            raise error(
                f"poptorch.CPU {self._ID!r} must return what it returned when the model was "
                f"compiled: expected shapes {expected}, got {got}. Keep shapes independent of "
                "values."
            )
        for output, result in zip(self.outputs, results):
            output.copy_(result)

    def registerPersistentData(self) -> None:
        """Set ``inputs`` and ``outputs`` to zeros of the shapes of the last call."""
        self.inputs = [torch.zeros(shape) for shape in self.in_shapes or []]
        self.outputs = [torch.zeros(shape) for shape in self.out_shapes or []]

    def __call__(self, *input: Tensor, **kwargs: Any) -> Any:
        """Call the function; while a model is compiled, record a call that every run makes.

        Raises:
            Error: keyword arguments, something other than tensors, or a training model.
        """
        if kwargs:
            raise error(
                f"poptorch.CPU {self._ID!r} takes positional tensors only, got the keywords "
                f"{', '.join(sorted(kwargs))}. Pass them by position."
            )
        trace = tracing()
        if trace is None:
            return self._layer_to_call(*input)
        if trace.training:
            raise error(
                f"poptorch.CPU {self._ID!r}: CPU ops are only supported in inference graphs, but "
                "this is a training model. Compute it before the model, on its inputs."
            )
        returned = self._try(_tensors(input, self._ID, "take"))
        results = _tensors(returned, self._ID)
        self.in_shapes = [tensor.shape for tensor in input]
        self.out_shapes = [tensor.shape for tensor in results]
        call = _CallSite(self, results)
        _CALLS[id(call)] = call
        trace.keep_alive.append(call)
        with torch.no_grad():
            outputs = _CALL_CPU(list(input), id(call))
        return outputs[0] if isinstance(returned, Tensor) else outputs

    def _try(self, inputs: Sequence[Tensor]) -> Any:
        """Call the function on zeros, outside of the recording."""
        # Fake tensors have no values, so only their shapes go in.
        looks = [(tensor.shape, tensor.dtype) for tensor in inputs]
        with untraced():
            zeros = [torch.zeros(shape, dtype=dtype) for shape, dtype in looks]
            with torch.no_grad():
                return self._layer_to_call(*zeros)


def _tensors(value: Any, name: str, verb: str = "return") -> List[Tensor]:
    values = list(value) if isinstance(value, (list, tuple)) else [value]
    for one in values:
        if not isinstance(one, Tensor):
            raise error(
                f"poptorch.CPU {name!r} must {verb} tensors, got {type(one).__name__}. Write "
                "torch.tensor(...) around a number."
            )
    return values
