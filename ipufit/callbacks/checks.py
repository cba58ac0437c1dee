"""Checks of the arguments of callbacks, and the lines that callbacks print."""

from __future__ import annotations

import math
import operator
import sys
from typing import Any, Callable, Mapping, Optional, Tuple, TypeVar

from ipufit.errors import ConfigurationError

__all__ = ["finite", "one_of", "say", "stored", "whole"]

T = TypeVar("T")


def say(text: str) -> None:
    """Print a line where the progress bar is, without breaking it."""
    # Imported here: nobody needs it who prints nothing.
    from tqdm.auto import tqdm

    tqdm.write(text, file=sys.stderr)


def stored(state: Mapping[str, object], name: str, kind: Callable[[Any], T]) -> Optional[T]:
    """A value of a callback's state in a checkpoint, which may be None.

    Raises:
        KeyError, TypeError, ValueError: it is not of that kind.
    """
    value = state[name]
    return None if value is None else kind(value)


def whole(owner: object, name: str, value: Any, least: int = 0) -> int:
    """The value, an integer of at least ``least``.

    Raises:
        ConfigurationError: it is none.
    """
    if isinstance(value, bool) or not hasattr(value, "__index__") or value < least:
        raise _refusal(owner, name, f"an integer of at least {least}", value)
    return operator.index(value)


def finite(owner: object, name: str, value: object, least: Optional[float] = None) -> float:
    """The value as a finite float of at least ``least``.

    Raises:
        ConfigurationError: it is none.
    """
    number = math.nan
    if not isinstance(value, (bool, str, bytes)) and hasattr(value, "__float__"):
        number = float(value)
    if not math.isfinite(number) or (least is not None and number < least):
        wanted = "a finite number" + ("" if least is None else f" of at least {least}")
        raise _refusal(owner, name, wanted, value)
    return number


def one_of(owner: object, name: str, value: object, choices: Tuple[object, ...]) -> Any:
    """The value, one of the choices.

    Raises:
        ConfigurationError: it is none.
    """
    if not any(type(value) is type(choice) and value == choice for choice in choices):
        raise _refusal(owner, name, " or ".join(map(repr, choices)), value)
    return value


def _refusal(owner: object, name: str, wanted: str, value: object) -> ConfigurationError:
    return ConfigurationError(f"{name} of {type(owner).__name__} must be {wanted}, got {value!r}.")
