"""Pictures with channels last, where torch's convolutions and poolings are faster on a CPU.

Every convolution and pooling takes its pictures in that layout, and what comes between them keeps
it; values and shapes stay what they are, strides inside of the graph don't.
"""

from __future__ import annotations

from typing import Dict, Sequence, Tuple

import torch
from torch import Tensor, fx

from ipufit.engines.embedded.passes.data_flow import Flow, value_of

__all__ = ["as_recorded", "channels_last", "to_channels_last"]

_aten = torch.ops.aten

# Operators, with the arguments that are pictures.
_PICTURES: Dict[object, Tuple[int, ...]] = {
    _aten.convolution.default: (0, 1),
    _aten.convolution_backward.default: (0, 1, 2),
    _aten.max_pool2d_with_indices.default: (0,),
    _aten.max_pool2d_with_indices_backward.default: (0, 1, 7),
    _aten.avg_pool2d.default: (0,),
    _aten.avg_pool2d_backward.default: (0, 1),
}

_VIEWS = (_aten.view.default, _aten._unsafe_view.default)

# With no more elements in all the time is that of the calls.
_SMALLEST = 2**17

# What goes by strides, and so by the layout.
_BY_STRIDES = {"as_strided", "as_strided_", "set_", "resize_", "_reshape_alias"}


def to_channels_last(graph: fx.Graph) -> int:
    """Rewrite a graph; how many operators work on pictures, 0 if it stays as it was."""
    nodes = [node for node in graph.nodes if _is_of_pictures(node)]
    flow = Flow(graph)
    if _elements(nodes) <= _SMALLEST or not all(_allows(node, flow) for node in graph.nodes):
        return 0
    last: Dict[fx.Node, fx.Node] = {}
    for node in nodes:
        for place in _PICTURES[node.target]:
            source = node.args[place]
            assert isinstance(source, fx.Node)
            if source not in last or flow.is_written(source):
                with graph.inserting_before(node):
                    last[source] = graph.call_function(channels_last, (source,))
                last[source].meta["val"] = value_of(source)
            node.update_arg(place, last[source])
    for node in graph.nodes:
        if node.target in _VIEWS:
            node.target = _aten.reshape.default
    _restore_outputs(graph)
    return len(nodes)


def _elements(nodes: Sequence[fx.Node]) -> int:
    values = [value_of(node.args[0]) for node in nodes]
    return sum(value.numel() for value in values if value is not None)


def channels_last(pictures: Tensor) -> Tensor:
    """Return a node with these values, channels last; of one channel, marked as such.

    Args:
        pictures: shape (samples, channels, height, width).
    """
    channels, height, width = pictures.shape[1:]
    if channels == 1 and pictures.is_contiguous():
        strides = (height * width, 1, width, 1)
        return pictures.as_strided(pictures.shape, strides, pictures.storage_offset())
    return pictures.contiguous(memory_format=torch.channels_last)


def as_recorded(value: Tensor, strides: Sequence[int]) -> Tensor:
    """Return a node with these values in the strides that were recorded."""
    if value.stride() == tuple(strides):
        return value
    return torch.empty_strided(value.shape, strides, dtype=value.dtype).copy_(value)


def _is_of_pictures(node: fx.Node) -> bool:
    if node.target not in _PICTURES:
        return False
    for place in _PICTURES[node.target]:
        value = value_of(node.args[place])
        if value is None or value.dim() != 4 or value.device.type != "cpu":
            return False
        if value.dtype not in (torch.float32, torch.int64):
            return False
    if node.target is _aten.convolution.default:
        return node.args[6] is False
    return node.target is not _aten.convolution_backward.default or node.args[7] is False


def _allows(node: fx.Node, flow: Flow) -> bool:
    """Tell whether the node computes the same whatever the strides of its inputs."""
    if node.op != "call_function":
        return True
    if node.target in _VIEWS and not flow.is_given(node) and flow.is_written_after(node):
        return False
    value = value_of(node)
    # Random numbers come in the order of memory.
    is_random = torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
    if is_random and (value is None or value.dim() > 2):
        return False
    return str(node.target).split(".")[1:2] not in [[name] for name in _BY_STRIDES]


def _restore_outputs(graph: fx.Graph) -> None:
    (end,) = (node for node in graph.nodes if node.op == "output")
    with graph.inserting_before(end):
        for node in end.all_input_nodes:
            value = value_of(node)
            if value is not None and value.dim() > 2:
                new = graph.call_function(as_recorded, (node, tuple(value.stride())))
                new.meta["val"] = value
                end.replace_input_with(node, new)
