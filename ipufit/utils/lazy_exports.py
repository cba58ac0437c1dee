"""Names of a package that are imported when they are asked for, so that it loads quickly."""

from __future__ import annotations

import importlib
import sys
from typing import Callable, List, Mapping, Optional, Sequence, Tuple

__all__ = ["lazy_exports"]


def lazy_exports(
    package: str, names: Mapping[str, Sequence[str]], moved: Optional[Mapping[str, str]] = None
) -> Tuple[Callable[[str], object], Callable[[], List[str]]]:
    """``__getattr__`` and ``__dir__`` of a package (PEP 562).

    Type checkers must not see them, or any name would be right for them: they belong in the other
    branch of ``if TYPE_CHECKING:``, which imports the names.

    Args:
        package: its name.
        names: by module, what is imported from there.
        moved: by a name of an earlier version, where it is now; using one is an error that says so.
    """
    module = sys.modules[package]
    homes = {name: home for home in names for name in names[home]}

    def of_package(name: str) -> object:
        if moved is not None and name in moved:
            raise AttributeError(f"{package}.{name} is {moved[name]} now. Write that instead.")
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(homes[name]), name)
        setattr(module, name, value)
        return value

    # Public names and Python's own; modules and helpers of the package are no suggestions.
    return of_package, lambda: sorted(
        {*module.__all__, *(n for n in vars(module) if n[:2] == "__")}
    )
