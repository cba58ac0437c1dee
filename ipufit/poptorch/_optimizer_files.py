"""An optimizer as values of a file, and one of the same class back."""

from __future__ import annotations

from typing import Any, Dict, Mapping, Optional

import torch
from torch import nn

from ipufit.poptorch import optim
from ipufit.poptorch._codec import InvalidContent, class_path
from ipufit.poptorch._errors import error

__all__ = ["optimizer_from_values", "optimizer_to_values"]

# A file can name these and no other.
_CLASSES: Dict[str, Any] = {
    class_path(kind): kind
    for kind in (
        torch.optim.SGD,
        torch.optim.Adam,
        torch.optim.AdamW,
        torch.optim.RMSprop,
        optim.SGD,
        optim.Adam,
        optim.AdamW,
        optim.RMSprop,
        optim.LAMB,
    )
}
# What an optimizer of torch may have besides, and those of the front end have.
_SETTINGS = sorted(
    {
        name
        for kind in (optim.SGD, optim.Adam, optim.AdamW, optim.RMSprop, optim.LAMB)
        for name in kind._child_only
    }
    | {"max_weight_norm"}
)


def optimizer_to_values(optimizer: torch.optim.Optimizer) -> Dict[str, Any]:
    """Class and settings; parameters stand in it themselves, so that they stay the model's own.

    The state on the device is not among them.

    Raises:
        Error: an optimizer of a class of the user's.
    """
    kind = class_path(type(optimizer))
    if kind not in _CLASSES:
        raise error(
            "a file holds optimizers of torch.optim and poptorch.optim, got "
            f"{kind.replace(':', '.')}. Use one of these as it is, or save with "
            "export_model=False."
        )
    marks = getattr(optimizer, "variable_attrs", None)
    return {
        "class": kind,
        "groups": [dict(group) for group in optimizer.param_groups],
        "defaults": dict(optimizer.defaults),
        "settings": {n: vars(optimizer)[n] for n in _SETTINGS if n in vars(optimizer)},
        "variable": None if marks is None else list(marks._variable_attributes),
        "state": [(parameter, dict(state)) for parameter, state in optimizer.state.items()],
    }


def optimizer_from_values(values: Optional[Mapping[str, Any]]) -> Optional[torch.optim.Optimizer]:
    """The optimizer of ``optimizer_to_values``; None for None.

    Raises:
        InvalidContent: no optimizer is written like this.
    """
    if values is None:
        return None
    try:
        kind = _CLASSES.get(values["class"])
        if kind is None:
            raise InvalidContent(f"{values['class']!r} is not an optimizer that it can hold")
        groups = [dict(group) for group in values["groups"]]
        made: torch.optim.Optimizer = kind(groups, lr=groups[0]["lr"])
        made.defaults.update(values["defaults"])
        for name, value in values["settings"].items():
            if name not in _SETTINGS:
                raise InvalidContent(f"{name!r} is not a setting of an optimizer")
            setattr(made, name, value)
        if isinstance(made, optim.Optimizer):
            made.variable_attrs._variable_attributes = [str(n) for n in values["variable"]]
        for parameter, state in values["state"]:
            if not isinstance(parameter, nn.Parameter):
                raise InvalidContent("the state of an optimizer must be that of a parameter")
            made.state[parameter] = dict(state)
        return made
    except InvalidContent:
        raise
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as reason:
        raise InvalidContent(f"it holds no sound optimizer: {reason!r}") from reason
