"""The form in which objects that group arguments are shown."""

from __future__ import annotations

import dataclasses
import reprlib
from typing import Any

__all__ = ["SettingsRepr"]


class SettingsRepr:
    """Base of frozen dataclasses that shows the arguments which are not at their defaults."""

    def __repr__(self) -> str:
        settings: Any = self
        shown = []
        for field in dataclasses.fields(settings):
            value = getattr(self, field.name)
            if type(value) is not type(field.default) or value != field.default:
                text = repr(value) if isinstance(value, str) else reprlib.repr(value)
                shown.append(f"{field.name}={text}")
        return f"{type(self).__name__}({', '.join(shown)})"
