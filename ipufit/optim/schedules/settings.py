"""The settings of an optimizer's parameter groups: reading, writing, keeping."""

from __future__ import annotations

import numbers
import re
from typing import Any, Callable, Dict, List, Optional, Tuple

import torch
from torch import Tensor

from ipufit.errors import ConfigurationError
from ipufit.optim.several import settings_of

# Hyper-parameters of a parameter group, by name.
Settings = Dict[str, Any]
# Name of a setting, and the place in it where it is a tuple: beta1 is ("betas", 0).
Target = Tuple[str, Optional[int]]

# What torch's schedulers note down in a group for themselves.
NOTES = ("initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum")


def read(optimizer: torch.optim.Optimizer) -> List[Settings]:
    """The settings of every group, all but "params"; tensors of one element as numbers."""
    return list(map(settings_of, optimizer.param_groups))


def number(value: object) -> Optional[float]:
    """The value as a float if it is one number, else None; a boolean is none."""
    if isinstance(value, Tensor) and value.numel() == 1:
        value = value.item()
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        return None
    return float(value)


def numbers_of(settings: Settings) -> Settings:
    """The hyper-parameters of a group that are numbers, by the names under which users know them.

    Returns:
        A dict with "beta1", "beta2", ... in place of "betas". A learning rate of any type is in it.
    """
    hyper_parameters: Settings = {}
    for name, value in settings.items():
        if name == "betas" and isinstance(value, (tuple, list)):
            hyper_parameters.update({f"beta{i + 1}": beta for i, beta in enumerate(value)})
        elif name == "lr" or (number(value) is not None and name not in NOTES):
            hyper_parameters[name] = value
    return hyper_parameters


def target(name: object, settings: Settings, kind: str, group: int) -> Target:
    """Find the setting of an optimizer that a name means.

    Args:
        name: "lr" or "learning_rate", "beta1", or any hyper-parameter that is a number.
        settings: of one group.
        kind: the optimizer's class, for messages.
        group: index of that group, for messages.

    Raises:
        ConfigurationError: the group has no such number; with those that it has.
    """
    hyper_parameters = numbers_of(settings)
    name = "lr" if name == "learning_rate" else name
    if name in hyper_parameters:
        beta = re.fullmatch(r"beta(\d+)", name)
        return ("betas", int(beta[1]) - 1) if beta and name not in settings else (name, None)
    came = f"{name!r} for parameter group {group}"
    if name in settings and name not in NOTES:
        came += f", which is {settings[name]!r}, not a single number"
    raise ConfigurationError(
        f"lr_scheduler can only schedule hyper-parameters of {kind} that are numbers, got {came}. "
        f"It has {', '.join(hyper_parameters)}."
    )


def write(group: Settings, where: Target, value: float) -> None:
    """Set a number; a tensor stays the same object, because programs may hold on to it."""
    name, place = where
    if place is not None:
        values = list(group[name])
        if isinstance(values[place], Tensor):
            values[place].fill_(value)
            return
        values[place] = value
        group[name] = type(group[name])(values)
    elif isinstance(group[name], Tensor):
        group[name].fill_(value)
    else:
        group[name] = value


def keep(optimizer: torch.optim.Optimizer) -> Callable[[], None]:
    """Remember the settings of every group.

    Returns:
        What puts them back exactly, as often as it is called; tensors keep their identity.
    """
    saved_groups = [
        {
            name: (value, value.detach().clone() if isinstance(value, Tensor) else None)
            for name, value in group.items()
            if name != "params"
        }
        for group in optimizer.param_groups
    ]

    def restore() -> None:
        for group, values in zip(optimizer.param_groups, saved_groups):
            for name in [name for name in group if name != "params" and name not in values]:
                del group[name]
            for name, (value, copy) in values.items():
                if copy is not None:
                    value.detach().copy_(copy)
                group[name] = value

    return restore
