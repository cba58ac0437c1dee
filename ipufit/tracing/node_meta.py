"""Notes on the nodes of a graph while it is recorded: whose layer, and which pass."""

from __future__ import annotations

import contextlib
from typing import Callable, Iterator, List, Optional, Sequence

from torch import Tensor, fx, nn
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from ipufit.partition.recomputation import watch_calls

__all__ = [
    "graph_in_recording",
    "is_backward",
    "listen_to_backward",
    "mark_again",
    "mark_backward",
    "mark_backward_pass",
    "mark_layers",
    "recorded_name",
    "segment_of",
]

_AGAIN = "ipufit_again"
_BACKWARD = "ipufit_backward"
_SEGMENT = "ipufit_segment"

# Called with what torch is about to follow back, and with None when it has.
Listener = Callable[[Optional[Tensor]], None]

_LISTENERS: List[Listener] = []


def is_backward(node: fx.Node) -> bool:
    """Tell whether the node was recorded while torch followed the loss back."""
    return _BACKWARD in node.meta


def mark_backward(node: fx.Node) -> None:
    """Count the node among those of the backward pass."""
    node.meta[_BACKWARD] = True


def mark_again(node: fx.Node, first: fx.Node) -> None:
    """Note that the node computes again what another one was recorded for."""
    node.meta[_AGAIN] = recorded_name(first)


def recorded_name(node: fx.Node) -> str:
    """The name that the node, or the one that it computes again, had in the recording."""
    name: str = node.meta.get(_AGAIN, node.name)
    return name


def segment_of(node: fx.Node) -> Optional[int]:
    """The number of the call of a marked layer in which the node was recorded, or None."""
    segment: Optional[int] = node.meta.get(_SEGMENT)
    return segment


def graph_in_recording() -> Optional[fx.Graph]:
    """The graph that is being recorded; None where the function runs on values."""
    for mode in reversed(_get_current_dispatch_mode_stack()):
        tracer = getattr(mode, "tracer", None)
        if tracer is not None:
            return tracer.graph  # type: ignore[no-any-return]
    return None


def _last(graph: fx.Graph) -> fx.Node:
    node: fx.Node = next(iter(reversed(graph.nodes)))
    return node


def _mark(graph: fx.Graph, after: fx.Node, key: str, value: object) -> None:
    """Note something on all nodes after one."""
    for node in reversed(graph.nodes):
        if node is after:
            return
        node.meta[key] = value


@contextlib.contextmanager
def mark_backward_pass(objective: Optional[Tensor] = None) -> Iterator[None]:
    """Mark what is recorded in the block as part of the backward pass.

    Args:
        objective: what is followed back; for whoever listens.
    """
    graph = graph_in_recording()
    start = None if graph is None else _last(graph)
    for tell in _LISTENERS:
        tell(objective)
    yield
    for tell in _LISTENERS:
        tell(None)
    if graph is not None and start is not None:
        _mark(graph, start, _BACKWARD, True)


@contextlib.contextmanager
def listen_to_backward(listener: Listener) -> Iterator[None]:
    """Tell of every backward pass in the block."""
    _LISTENERS.append(listener)
    try:
        yield
    finally:
        _LISTENERS.remove(listener)


@contextlib.contextmanager
def mark_layers(module: nn.Module, names: Sequence[str]) -> Iterator[None]:
    """Mark what is recorded in each call of these layers as belonging together.

    Raises:
        ConfigurationError: one of them was never called.
    """
    graph = graph_in_recording()
    starts, calls = [], 0

    def begin(name: str) -> None:
        if graph is not None:
            starts.append(_last(graph))

    def end(name: str, output: object) -> None:
        nonlocal calls
        if graph is not None:
            _mark(graph, starts.pop(), _SEGMENT, calls)
            calls += 1

    with watch_calls(module, names, begin, end):
        yield
