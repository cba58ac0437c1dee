"""The graph that is being recorded: its tracer and nodes, and the operators that it calls."""

from __future__ import annotations

from typing import Any, Callable, Iterator, List, Mapping, Optional, Sequence

import torch
from torch import Tensor, fx

__all__ = [
    "define",
    "graph_so_far",
    "node_of",
    "tensors_in",
    "tracer",
    "written_tensors",
]

NAMESPACE = "ipufit_poptorch"

# Lives as long as the process: its operators would go with it.
_LIBRARY: Any = torch.library.Library(NAMESPACE, "DEF")  # type: ignore[no-untyped-call]


def define(schema: str, run: Callable[..., Any], shapes: Callable[..., Any]) -> Any:
    """Register an operator and return it.

    It has no gradient: call it in a ``torch.autograd.Function``, or under ``torch.no_grad``.

    Args:
        schema: ``name(Tensor x, ...) -> Tensor``; the results alias nothing.
        run: computes, on any device.
        shapes: returns empty results of the right shape and dtype, for recording.
    """
    _LIBRARY.define(schema)
    name = schema.partition("(")[0]
    _LIBRARY.impl(name, run, "CompositeExplicitAutograd")
    _LIBRARY.impl(name, shapes, "Meta")
    return getattr(getattr(torch.ops, NAMESPACE), name).default


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


def tensors_in(value: object) -> Iterator[Tensor]:
    """Yield the tensors in arguments or results, in their order."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from tensors_in(each)
    elif isinstance(value, dict):
        yield from tensors_in(list(value.values()))


def written_tensors(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[Tensor]:
    """Yield the tensors that an operator writes to."""
    schema = func._schema
    if schema.is_mutable:
        arguments = {**dict(zip((a.name for a in schema.arguments), args)), **kwargs}
        for argument in schema.arguments:
            if argument.alias_info is not None and argument.alias_info.is_write:
                yield from tensors_in(arguments.get(argument.name))
