"""Optimizer state of a parameter that groups of replicas hold copies of: one tensor for all."""

from __future__ import annotations

from typing import Dict, Mapping, Sequence

import torch
from torch import Tensor

from ipufit.poptorch._optimizer_base import DeviceState

__all__ = ["joined", "split"]

# For each such parameter, the names of its copies.
Copies = Mapping[str, Sequence[str]]


def _renamed(name: str, copies: Copies) -> Dict[str, Sequence[str]]:
    """The state's name for all copies, and its names for each, if this is the first copy's."""
    for parameter, parts in copies.items():
        if name.endswith(f"___{parts[0]}"):
            prefix = name[: -len(parts[0])]
            return {prefix + parameter: [prefix + part for part in parts]}
    return {}


def joined(state: DeviceState, copies: Copies) -> DeviceState:
    """State of copies along a new first dimension, as the parameter itself has it.

    Hyper-parameters are the same for all copies: there is one of them.
    """
    tensors = _joined(state["ipu_state"] or {}, copies, True)
    return {"ipu_state": tensors, "ipu_param": _joined(state["ipu_param"] or {}, copies, False)}


def _joined(values: Mapping[str, Tensor], copies: Copies, every: bool) -> Dict[str, Tensor]:
    result: Dict[str, Tensor] = dict(values)
    for name in values:
        for whole, names in _renamed(name, copies).items():
            own = [result.pop(each) for each in names]
            result[whole] = torch.stack(own) if every else own[0]
    return result


def split(state: DeviceState, copies: Copies) -> DeviceState:
    """What :func:`joined` made of it."""
    return {
        "ipu_state": _split(state.get("ipu_state") or {}, copies, True),
        "ipu_param": _split(state.get("ipu_param") or {}, copies, False),
    }


def _split(values: Mapping[str, Tensor], copies: Copies, every: bool) -> Dict[str, Tensor]:
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
