"""Setters that JSON and files of options may call, by name."""

from __future__ import annotations

import json
from typing import Any, Callable, Dict, List, Tuple

from ipufit.poptorch import enums
from ipufit.poptorch._options.group import OptionGroup, nearest
from ipufit.poptorch._options.popart import _PopartOptions
from ipufit.poptorch._options.stages import Phase, Stage
from ipufit.poptorch._options.strategies import _IExecutionStrategy

__all__ = ["ENUMS", "apply_json", "member"]

ENUMS: Dict[str, Any] = {name: getattr(enums, name) for name in enums.__all__}

_GROUPS = ("Distributed", "Jit", "Precision", "TensorLocations", "Training", "_Popart")
_HOLDERS = (OptionGroup, _PopartOptions, _IExecutionStrategy, Stage, Phase)


def _setters(target: object) -> List[str]:
    """Return the public methods of options, of a group, or of one of their arguments."""
    names = [name for name in dir(type(target)) if not name.startswith("_")]
    return [name for name in names if callable(getattr(type(target), name))]


def member(target: object, name: str) -> Any:
    """Return a group of options, or a setter.

    Raises:
        AttributeError: there is none of this name.
    """
    groups = [group for group in _GROUPS if hasattr(type(target), group)]
    names = [*groups, *_setters(target)] if isinstance(target, _HOLDERS) else []
    if name not in names:
        raise AttributeError(f"There is no option {name}. {nearest(name, names)}")
    return getattr(target, name)


def _enum_member(value: object) -> Any:
    """Return the enum's member that a text such as ``"Enum.Member"`` names, or the value itself."""
    if not isinstance(value, str) or value.count(".") != 1:
        return value
    kind, name = value.split(".")
    return getattr(ENUMS.get(kind), "__members__", {}).get(name, value)


def apply_json(options: OptionGroup, text: str, source: str) -> None:
    """Call the setters that a JSON object names, unless one of them does not exist.

    Raises:
        ValueError: not a JSON object.
        AttributeError: a name that is not a setter.
    """
    try:
        values = json.loads(text)
    except ValueError as error:
        raise ValueError(f"{source} expected JSON, got {text!r}: {error}.") from error
    if not isinstance(values, dict):
        raise ValueError(
            f'{source} expected a JSON object, such as {{"deviceIterations": 2}}, got {text!r}.'
        )
    calls: List[Tuple[Callable[..., Any], List[Any]]] = []
    for name, value in values.items():
        target: Any = options
        for part in name.split("."):
            target = member(target, part)
        if isinstance(target, _HOLDERS):
            raise AttributeError(
                f"{source}: {name} is a group of options. Name one of its setters, such as "
                f'"{name}.{_setters(target)[0]}".'
            )
        calls.append((target, value if isinstance(value, list) else [_enum_member(value)]))
    for setter, arguments in calls:
        setter(*arguments)
