"""Access to the tracer that is recording, its graph, and the nodes of tensors."""

from __future__ import annotations

from typing import Any, List, Optional

from torch import Tensor, fx

__all__ = ["graph_so_far", "node_of", "tracer"]


def tracer() -> Optional[Any]:
    """Return the innermost tracer that is recording; None outside of a capture."""
    # Imported here: it is slow to import.
    from torch.fx.experimental import proxy_tensor
    from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

    if hasattr(proxy_tensor, "get_proxy_mode"):
        innermost = proxy_tensor.get_proxy_mode()
        return None if innermost is None else innermost.tracer
    # Before torch 2.4 a mode that is set aside stays on the stack, switched off.
    for mode in reversed(_get_current_dispatch_mode_stack()):
        if isinstance(mode, proxy_tensor.ProxyTorchDispatchMode) and getattr(
            mode, "enable_tracing", True
        ):
            return mode.tracer
    return None


def node_of(tensor: Tensor) -> Optional[fx.Node]:
    """Return the node that computes a tensor; None where this tracer doesn't know it."""
    from torch.fx.experimental import proxy_tensor

    current = tracer()
    if current is None or not proxy_tensor.has_proxy_slot(tensor, current):
        return None
    node: fx.Node = proxy_tensor.get_proxy_slot(tensor, current).proxy.node
    return node


def graph_so_far() -> List[fx.Node]:
    """Return the nodes recorded so far by the innermost tracer."""
    current = tracer()
    return [] if current is None else list(current.graph.nodes)
