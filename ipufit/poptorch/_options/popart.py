"""Options that PopTorch passes to its compiler unchanged."""

from __future__ import annotations

import copy
from typing import Any, Dict, Optional

from ipufit.poptorch._options.group import _FROZEN, need_type

__all__ = ["_PopartOptions"]


class _PopartOptions:
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

    def checkIsFrozen(self, option: Optional[str] = None) -> None:
        """Refuse a change of frozen options.

        Raises:
            AttributeError: they are frozen.
        """
        if option != "_is_frozen" and self._is_frozen:
            raise AttributeError(_FROZEN)

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
