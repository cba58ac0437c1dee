"""Checks that a stored optimizer state is one, and fits this optimizer."""

from __future__ import annotations

from typing import Any, List, Mapping, Optional, Sequence

import torch
from torch import Tensor

__all__ = ["check_optimizer", "optimizer_differences"]

_NUMBERS = (bool, int, float)


def check_optimizer(state: Any) -> None:
    """Make sure that it has the form of ``torch.optim.Optimizer.state_dict()``.

    torch itself takes over what it does not understand, and fails in a later update.

    Raises:
        ValueError, TypeError, KeyError: it has not.
    """
    for key, values in state["state"].items():
        if type(key) is not int:
            raise ValueError(f"it has optimizer state of {key!r}")
        for name, value in values.items():
            _check_value(name, value)
    for group in state["param_groups"]:
        if not all(type(each) is int for each in group["params"]):
            raise ValueError("a group of parameters holds no indices")
        for name, value in group.items():
            if name != "params":
                _check_value(name, value)


def _check_value(name: object, value: object) -> None:
    if type(name) is not str:
        raise ValueError(f"the optimizer has a value without a name, {name!r}")
    parts = value if isinstance(value, (list, tuple)) else [value]
    if not all(part is None or isinstance(part, (Tensor, str, *_NUMBERS)) for part in parts):
        raise ValueError(f"{name} of the optimizer is a {type(value).__name__}")


def optimizer_differences(
    optimizer: Optional[torch.optim.Optimizer], state: Mapping[str, Any], left_out: Sequence[str]
) -> List[str]:
    """Return how the optimizer differs from a checkpoint's, a line for each difference.

    Args:
        optimizer: of now.
        state: in the checkpoint.
        left_out: names of settings that come anew.
    """
    assert optimizer is not None
    groups, stored = optimizer.param_groups, state["param_groups"]
    sizes, own_sizes = ([len(group["params"]) for group in each] for each in (stored, groups))
    if sizes != own_sizes:
        return [f"parameters of the optimizer's groups: {sizes} in the checkpoint, {own_sizes} now"]
    faults = []
    for number, (group, other) in enumerate(zip(groups, stored)):
        wrong = sorted(
            name
            for name in {*group, *other} - {"params", *left_out}
            if name not in group or name not in other or not _alike(group[name], other[name])
        )
        faults += [f"setting {name!r} of the optimizer's group {number}" for name in wrong]
    shapes = [parameter.shape for group in groups for parameter in group["params"]]
    places = [key for group in stored for key in group["params"]]
    by_place = dict(zip(places, shapes))
    for key, values in state["state"].items():
        for name, value in values.items():
            is_number = value is None or isinstance(value, _NUMBERS)
            is_tensor = isinstance(value, Tensor) and value.shape in (by_place.get(key), ())
            if key not in by_place or not (is_number or is_tensor):
                faults.append(f"{name!r} of the optimizer's parameter {key}")
    return faults


def _alike(one: object, other: object) -> bool:
    """Return True if two settings are of one kind; a rate may have become a tensor."""
    numbers = (*_NUMBERS, Tensor)
    if isinstance(one, numbers) and isinstance(other, numbers):
        return True
    return one is None or other is None or isinstance(other, type(one))
