"""Weights under the names of ``state_dict``, so that nobody needs ipufit to read them."""

from __future__ import annotations

from typing import Any, Dict, List, Mapping, Tuple

from torch import Tensor, nn

from ipufit.engines.program import TrainState

__all__ = ["merge", "split"]

Named = Dict[str, Tensor]


def split(module: nn.Module, state: TrainState) -> Tuple[Named, Named]:
    """Parameters and buffers of replica 0: those of the module's ``state_dict``, and all others.

    A tensor with several names is under each of them in the first.
    """
    tensors = {**state.weights, **state.buffers[0]}
    first = _first_names(module)
    named: Named = {}
    for name, value in module.state_dict().items():
        tensor = tensors.get(first.get(name, name))
        if tensor is None and isinstance(value, Tensor):
            tensor = value.detach()  # extra state
        if tensor is not None:
            named[name] = tensor
    exported = {first.get(name, name) for name in named}
    return named, {name: value for name, value in tensors.items() if name not in exported}


def merge(module: nn.Module, named: Mapping[str, Tensor], others: Mapping[str, Tensor]) -> Named:
    """Parameters and buffers by the names that programs know them by."""
    first = _first_names(module)
    return {**{first.get(name, name): value for name, value in named.items()}, **others}


def _first_names(module: nn.Module) -> Dict[str, str]:
    """For every name of a tensor, the first one."""
    name_by_id: Dict[int, str] = {}
    first_names: Dict[str, str] = {}
    named: List[Tuple[str, Any]] = [
        *module.named_parameters(remove_duplicate=False),
        *module.named_buffers(remove_duplicate=False),
    ]
    for name, tensor in named:
        first_names[name] = name_by_id.setdefault(id(tensor), name)
    return first_names
