"""Record functions of ``poptorch.ops`` as a model's forward is recorded, without an executor."""

from __future__ import annotations

from typing import Any, Callable, List

import torch
from torch import Tensor, fx
from torch.overrides import TorchFunctionMode

from ipufit.poptorch._operators.routing import call
from ipufit.poptorch._precision import half_computed, makes_half
from ipufit.poptorch._tracing import Trace, traced
from ipufit.tracing.capture import capture


class _Routed(TorchFunctionMode):
    """As the core does: every torch function goes through the table."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return call(func, args, kwargs or {})


class Recorded:
    """A recorded function: call it with tensors of the same shapes."""

    def __init__(self, graph: fx.GraphModule, trace: Trace) -> None:
        self.graph, self.trace = graph, trace

    def __call__(self, *tensors: Tensor) -> List[Tensor]:
        with torch.no_grad(), half_computed(makes_half(self.graph), tensors):
            return list(self.graph(*[tensor.clone() for tensor in tensors]))

    @property
    def operators(self) -> List[str]:
        return [str(n.target) for n in self.graph.graph.nodes if n.op == "call_function"]


def record(function: Callable[..., Any], *tensors: Tensor, training: bool = False) -> Recorded:
    """Record; the function returns a tensor, or a list or tuple of them."""
    trace = Trace(training=training)

    def listed(*given: Tensor) -> List[Tensor]:
        with _Routed():
            returned = function(*given)
        return [returned] if isinstance(returned, Tensor) else list(returned)

    with traced(trace):
        graph = capture(listed, tensors, whole_layers=False)
    return Recorded(graph, trace)
