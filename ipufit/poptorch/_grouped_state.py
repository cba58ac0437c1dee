"""Optimizer state of a parameter with several copies, one for each group of replicas."""

from __future__ import annotations

from typing import Dict, Mapping, Sequence

import torch
from torch import Tensor

from ipufit.poptorch._optimizer_base import DeviceState

__all__ = ["merge_parts", "split_parts"]

# For each such parameter, the names of its copies.
Copies = Mapping[str, Sequence[str]]


def _renamed(name: str, copies: Copies) -> Dict[str, Sequence[str]]:
    """Map the merged name of a state tensor to its parts' names, if this is the first part."""
    for parameter, parts in copies.items():
        if name.endswith(f"___{parts[0]}"):
            prefix = name[: -len(parts[0])]
            return {prefix + parameter: [prefix + part for part in parts]}
    return {}


def merge_parts(state: DeviceState, copies: Copies) -> DeviceState:
    """Stack the state of a parameter's copies along a new first dimension, as the parameter has it.

    Hyper-parameters are equal for all copies, so that one of them is returned.
    """
    tensors = _merge(state["ipu_state"] or {}, copies, True)
    return {"ipu_state": tensors, "ipu_param": _merge(state["ipu_param"] or {}, copies, False)}


def _merge(values: Mapping[str, Tensor], copies: Copies, every: bool) -> Dict[str, Tensor]:
    result: Dict[str, Tensor] = dict(values)
    for name in values:
        for whole, names in _renamed(name, copies).items():
            parts = [result.pop(each) for each in names]
            result[whole] = torch.stack(parts) if every else parts[0]
    return result


def split_parts(state: DeviceState, copies: Copies) -> DeviceState:
    """Split the result of :func:`merge_parts` into the state of each copy."""
    return {
        "ipu_state": _split_values(state.get("ipu_state") or {}, copies, True),
        "ipu_param": _split_values(state.get("ipu_param") or {}, copies, False),
    }


def _split_values(values: Mapping[str, Tensor], copies: Copies, every: bool) -> Dict[str, Tensor]:
    result: Dict[str, Tensor] = {}
    for name, value in values.items():
        for whole, parts in copies.items():
            if name.endswith(f"___{whole}"):
                prefix = name[: -len(whole)]
                for place, part in enumerate(parts):
                    result[prefix + part] = value[place] if every else value
                break
        else:
            result[name] = value
    return result
