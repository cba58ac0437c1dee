"""Base class of groups of options: fixed names, values of fixed types, and freezing."""

from __future__ import annotations

import copy
import difflib
from typing import Any, Dict, Iterable, Optional, TypeVar

from ipufit.poptorch._logging import logger

__all__ = [
    "OptionGroup",
    "_PopartOptions",
    "nearest",
    "need_type",
]

Self = TypeVar("Self", bound="OptionGroup")

_FROZEN = (
    "Can't modify frozen Options: they belong to a model or a DataLoader. "
    "Set options before handing them over, or change a copy: options.clone()."
)


# By the name in earlier versions of PopTorch: an option, and its enum, as they are called now.
RENAMED = {"anchorMode": "outputMode", "AnchorMode": "OutputMode"}


def nearest(name: str, names: Iterable[str]) -> str:
    """Return a sentence that suggests the nearest name, or lists all of them."""
    names = sorted(names)
    if RENAMED.get(name) in names:
        return f"It is called {RENAMED[name]} in PopTorch 3.4."
    close = difflib.get_close_matches(name, names, n=1)
    if close:
        return f"Did you mean {close[0]}?"
    return f"Valid names are {', '.join(names)}." if names else "There are none."


def need_type(option: str, value: object, *kinds: type) -> None:
    """Refuse a value of another type.

    A bool is not taken for a number: the device's compiler would refuse it later.

    Raises:
        AssertionError: it is of another type.
    """
    matches = isinstance(value, kinds) and not (isinstance(value, bool) and bool not in kinds)
    if not matches:
        expected = " or ".join(kind.__name__ for kind in kinds)
        raise AssertionError(
            f"Unexpected type {type(value).__name__} for option {option}. "
            f"Expected {expected}, got {value!r}."
        )


class Freezable:
    """Options that an executor freezes, because it is compiled for their values."""

    _is_frozen = False

    def checkIsFrozen(self, option: Optional[str] = None) -> None:
        """Refuse a change of frozen options.

        Raises:
            AttributeError: they are frozen.
        """
        if option != "_is_frozen" and self._is_frozen:
            raise AttributeError(_FROZEN)


class OptionGroup(Freezable):
    """A dictionary of options whose names and types are those of its defaults.

    Values are read as attributes (``options.device_iterations``), by name (``options.exists``,
    ``options("device_iterations")``), or all at once (``toDict``).
    """

    def __init__(self, **default_values: object) -> None:
        self._warnings: Dict[str, str] = {}
        self._warnings_disabled: Any = set()
        self._is_frozen = False
        # From here on no other private attribute can appear.
        self._values: Dict[str, Any] = default_values

    def set(self, **kwargs: object) -> None:
        """Give known options new values.

        Raises:
            AssertionError: an unknown name, or a value of another type than the present one.
            AttributeError: the options are frozen.
        """
        self.checkIsFrozen()
        for option, value in kwargs.items():
            if not self.exists(option):
                raise AssertionError(
                    f"There is no option {option}. {nearest(option, self._values)}"
                )
            need_type(option, value, type(self._values[option]))
            self._values[option] = value

    def createOrSet(self, **kwargs: object) -> None:
        """Set options; a new name is added, and an existing one follows the rules of ``set``."""
        self.checkIsFrozen()
        for option, value in kwargs.items():
            if option in self._values:
                self.set(**{option: value})
            else:
                self._values[option] = value

    def exists(self, option: str) -> bool:
        """Return True if the option has a value."""
        return option in self._values

    def deleteIfExists(self, option: str) -> None:
        """Remove the value of an option."""
        self.checkIsFrozen()
        self._values.pop(option, None)

    def update(self, other: Dict[str, Any]) -> Dict[str, Any]:
        """Add this group's values to a dictionary, which is returned.

        Raises:
            AssertionError: the dictionary has one of these names already.
        """
        for option, warning in self._warnings.items():
            if option not in self._warnings_disabled:
                logger.warning(warning)
        both = sorted(set(self._values).intersection(other))
        if both:
            raise AssertionError(
                f"These options are set in two places: {', '.join(both)}. Keep their own setters, "
                "and leave them out of options._Popart.set."
            )
        other.update(self._values)
        return other

    def toDict(self) -> Dict[str, Any]:
        """Return the values by name."""
        return self.update({})

    def _freeze(self) -> None:
        self._set_frozen(True)

    def _unfreeze(self) -> None:
        self._set_frozen(False)

    def _set_frozen(self, frozen: bool) -> None:
        """Freeze or unfreeze this group and the groups inside it."""
        self._is_frozen = frozen
        for value in self.__dict__.values():
            if isinstance(value, Freezable):
                value._is_frozen = frozen

    def __call__(self, option: str) -> Any:
        return getattr(self, option)

    def __getattr__(self, option: str) -> Any:
        # Only asked for what is not an attribute; `_values` itself is missing while a copy is made.
        values = self.__dict__.get("_values", {})
        if option.startswith("_") or option not in values:
            names = set(values).union(name for name in dir(type(self)) if not name.startswith("_"))
            raise AttributeError(f"There is no option {option}. {nearest(option, names)}")
        return values[option]

    def __setattr__(self, option: str, value: object) -> None:
        self.checkIsFrozen(option)
        if not option.startswith("_"):
            self.set(**{option: value})
            return
        if "_values" in self.__dict__ and option != "__class__" and option not in self.__dict__:
            raise AttributeError(
                f"There is no private attribute {option}. {nearest(option, self.__dict__)}"
            )
        super().__setattr__(option, value)

    def __getstate__(self) -> Dict[str, Any]:
        return self.__dict__

    def __setstate__(self, state: Dict[str, Any]) -> None:
        self.__dict__.update(state)

    def __deepcopy__(self: Self, memory: Dict[int, Any]) -> Self:
        """Return a copy that is not frozen."""
        copied = type(self).__new__(type(self))
        memory[id(self)] = copied
        for name, value in self.__dict__.items():
            copied.__dict__[name] = False if name == "_is_frozen" else copy.deepcopy(value, memory)
        return copied

    def __repr__(self) -> str:
        values = ", ".join(f"{name}={value!r}" for name, value in self._values.items())
        return f"{type(self).__name__}({values})"


class _PopartOptions(Freezable):
    """Session options of the device's compiler, by its own names: ``options._Popart``.

    Any name and any value is taken here; ``compile`` refuses what the compiler does not know.

    Attributes:
        options: the values by name.
    """

    def __init__(self) -> None:
        self._is_frozen = False
        self.options: Dict[str, Any] = {}
        self.set("instrumentWithHardwareCycleCounter", False)
        self.set("rearrangeAnchorsOnHost", False)

    def set(self, key: str, value: object) -> _PopartOptions:
        """Set one option."""
        self.checkIsFrozen()
        need_type("key", key, str)
        self.options[key] = value
        return self

    def setEngineOptions(self, engine_options: Dict[str, str]) -> _PopartOptions:
        """Set options of the device's engine, by its own names."""
        need_type("engineOptions", engine_options, dict)
        return self.set("engineOptions", engine_options)

    def setPatterns(self, patterns: Dict[str, bool], level: int = 2) -> _PopartOptions:
        """Set the rewriting patterns that the compiler uses, on top of those of a level.

        Raises:
            AssertionError: not a dict, or a level that is not an int.
        """
        need_type("level", level, int)
        need_type("patterns", patterns, dict)
        self.set("patterns_level", level)
        return self.set("patterns", patterns)

    def __deepcopy__(self, memory: Dict[int, Any]) -> _PopartOptions:
        """Return a copy that is not frozen."""
        copied = type(self).__new__(type(self))
        memory[id(self)] = copied
        for name, value in self.__dict__.items():
            copied.__dict__[name] = False if name == "_is_frozen" else copy.deepcopy(value, memory)
        return copied

    def __repr__(self) -> str:
        values = ", ".join(f"{name}={value!r}" for name, value in self.options.items())
        return f"{type(self).__name__}({values})"
