"""The outputs of a module by name or by position: one tensor of several, and what is there."""

from __future__ import annotations

import dataclasses
from typing import Any, List, Mapping, Tuple, Type, Union

from ipufit.errors import ConfigurationError

__all__ = ["Key", "children", "label", "listed", "pick"]

# A mapping's key, a field's name, or a position.
Key = Union[str, int]


def label(key: Key) -> str:
    """The output's name in logs: the key itself, ``output_0`` of a position."""
    return key if isinstance(key, str) else f"output_{key}"


def children(value: Any) -> Tuple[Any, ...]:
    """Keys of a mapping, fields of a named tuple or dataclass, else positions; () of a leaf."""
    if isinstance(value, Mapping):
        return tuple(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return tuple(field.name for field in dataclasses.fields(value))
    if isinstance(value, (tuple, list)):
        return tuple(getattr(value, "_fields", range(len(value))))
    return ()


def listed(value: Any) -> str:
    """What came, for a sentence: the type, and the keys or the length if it has any."""
    keys = children(value)
    if isinstance(value, (tuple, list)) and not hasattr(value, "_fields"):
        return f"{type(value).__name__} of {len(value)}"
    if not keys and not isinstance(value, Mapping):
        return type(value).__name__
    return f"{type(value).__name__} with {[str(key) for key in keys]}"


def pick(value: Any, key: Key, role: str, kind: Type[ConfigurationError]) -> Any:
    """One output of several.

    Args:
        value: a mapping, named tuple or dataclass for a name; a tuple or list for a position.
        key: which one.
        role: what the value is, for the message: "the module's outputs", "the target".
        kind: of the error.

    Raises:
        ConfigurationError: of that kind; nothing is there under this name or position.
    """
    if isinstance(key, int):
        if isinstance(value, (tuple, list)):
            if key < len(value):
                return value[key]
            raise kind(
                f"{role} must have an element {key}, got {listed(value)}. Give as many as there "
                "are outputs, in the order in which the module returns them."
            )
        raise kind(
            f"{role} must be a tuple or list to be taken by position, got {listed(value)}. "
            f"{_by_name(value, key)}"
        )
    if isinstance(value, Mapping) and key in value:
        return value[key]
    keys = children(value)
    if not isinstance(value, Mapping) and key in keys:
        return getattr(value, key)
    if any(isinstance(name, str) for name in keys) or isinstance(value, Mapping):
        raise kind(
            f"{role} must hold {key!r}, got {listed(value)}. Use one of the names that are there, "
            "or add it."
        )
    raise kind(
        f"{role} must be a mapping, named tuple or dataclass to be taken by name ({key!r}), got "
        f"{listed(value)}. Give a dict, or losses and metrics as a list by position."
    )


def _by_name(value: Any, key: int) -> str:
    names: List[str] = [str(name) for name in children(value)]
    if names:
        return f"Give losses and metrics as a dict by name: {{{names[0]!r}: ...}}."
    return f"Give a tuple with the one for each output; this is about output {key}."
