"""Changes of a configuration as one string: ``"device_iterations=4,layers_per_ipu=[2 2]"``."""

from __future__ import annotations

import json
import re
from typing import Any, Dict, List, Tuple

from ipufit.ipu_config.parameters import PARAMETERS, nearest, shown

__all__ = ["parse_changes"]

_TRUE = ("true", "1", "y", "yes")
_FALSE = ("false", "0", "n", "no")
_NONE = ("none", "null")
# A comma that is not inside of brackets.
_BETWEEN = re.compile(r",(?![^\[]*\])")


def parse_changes(text: str, faults: List[str]) -> Dict[str, Any]:
    """The values by name; what can't be read is noted.

    Args:
        text: ``name=value`` separated by commas. Lists are ``[a b c]`` or ``[a,b,c]``.
        faults: sentences are added here.
    """
    if not isinstance(text, str):
        faults.append(
            f"update_from_string needs a string such as 'seed=1,device_iterations=4', got "
            f"{shown(text)}. Use update(...) for a dict."
        )
        return {}
    changes: Dict[str, Any] = {}
    for part in _BETWEEN.split(text) if text.strip() else []:
        name, equals, value = (piece.strip() for piece in part.partition("="))
        if not equals:
            faults.append(
                f"every change must be name=value, got {part!r}. Separate changes by commas, and "
                "the entries of a list by spaces: layers_per_ipu=[2 2]."
            )
        elif name in changes:
            faults.append(f"every change must be said once, got {name!r} again. Leave one out.")
        elif name not in PARAMETERS:
            faults.append(f"IPUConfig has no parameter {name!r}. {nearest(name)}")
        else:
            changes[name], fault = _read(name, value)
            faults += [] if fault is None else [fault]
    return changes


def _read(name: str, text: str) -> Tuple[Any, Any]:
    """A value from its text, and a fault or None; whether it fits is looked at later."""
    parameter = PARAMETERS[name]
    words = text.lower()
    if parameter.optional and words in _NONE:
        return None, None
    if isinstance(parameter.default, bool):
        if words in _TRUE + _FALSE:
            return words in _TRUE, None
        accepted = ", ".join(_TRUE + _FALSE)
        return parameter.default, (
            f"IPUConfig.{name} must be one of {accepted} in a string, got {text!r}. Try true."
        )
    if isinstance(parameter.default, str):
        return text, None
    if text.startswith("[") and text.endswith("]"):
        text = "[" + ",".join(text[1:-1].replace(",", " ").split()) + "]"
    try:
        return json.loads(text), None
    except ValueError:
        return text, None
