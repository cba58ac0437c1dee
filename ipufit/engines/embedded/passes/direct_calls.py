"""Call torch's operators the short way.

A recorded graph names operators of the dispatcher, whose calls from Python look up a schema each
time; torch's own functions of the same meaning don't.
"""

from __future__ import annotations

from typing import Any, Callable, Dict, Mapping, Optional

import torch
from torch import fx

from ipufit.tracing import recurrent

__all__ = ["SHORT", "call_directly", "operator_called"]

_aten = torch.ops.aten

# Each takes the operator's arguments in the operator's order, and calls nothing else.
SHORT: Dict[object, Callable[..., object]] = {
    _aten._log_softmax.default: torch._log_softmax,
    _aten._log_softmax_backward_data.default: torch._log_softmax_backward_data,
    _aten._softmax.default: torch._softmax,
    _aten._softmax_backward_data.default: torch._softmax_backward_data,
    _aten.add.Tensor: torch.add,
    _aten.addmm.default: torch.addmm,
    _aten.bmm.default: torch.bmm,
    _aten.cat.default: torch.cat,
    _aten.cat.out: torch.cat,
    _aten.clone.default: torch.clone,
    _aten.div.Tensor: torch.div,
    _aten.expand.default: torch.Tensor.expand,
    _aten.mm.default: torch.mm,
    _aten.mm.out: torch.mm,
    _aten.mul.Tensor: torch.mul,
    _aten.ne.Scalar: torch.ne,
    _aten.new_empty.default: torch.Tensor.new_empty,
    _aten.ones_like.default: torch.ones_like,
    _aten.permute.default: torch.permute,
    _aten.relu.default: torch.relu,
    _aten.reshape.default: torch.reshape,
    _aten.select.int: torch.select,
    _aten.squeeze.dim: torch.squeeze,
    _aten.sub.Tensor: torch.sub,
    _aten.sum.dim_IntList: torch.sum,
    _aten.t.default: torch.t,
    _aten.transpose.int: torch.transpose,
    _aten.unbind.int: torch.unbind,
    _aten.unsqueeze.default: torch.unsqueeze,
    _aten.view.default: torch.Tensor.view,
    recurrent.FORWARD: recurrent.run_forward,
    recurrent.BACKWARD: recurrent.run_backward,
}


def call_directly(graph: fx.Graph) -> None:
    """Replace the operators of a graph by functions that call the very same."""
    for node in graph.nodes:
        node.target = SHORT.get(node.target, node.target)


def operator_called(target: Any, kwargs: Mapping[str, Any]) -> Optional[Any]:
    """The operator that a node calls, the short way or not; None where it is another function.

    Args:
        target: of the node.
        kwargs: that it is called with.
    """
    if hasattr(target, "_schema"):
        return target
    return _LONG.get((target, "out" in kwargs))


_LONG: Dict[Any, Any] = {(short, str(long).endswith(".out")): long for long, short in SHORT.items()}
_LONG[torch.narrow, False] = _aten.narrow.default
