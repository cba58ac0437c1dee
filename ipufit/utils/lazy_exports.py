"""Names of a package that are imported when they are asked for, so that it loads quickly."""

from __future__ import annotations

import ast
import importlib
import pkgutil
import sys
from typing import Callable, List, Mapping, Optional, Tuple


def lazy_exports(
    package: str, moved: Optional[Mapping[str, str]] = None
) -> Tuple[Callable[[str], object], Callable[[], List[str]], List[str]]:
    """``__getattr__`` and ``__dir__`` of a package (PEP 562), and its ``__all__``.

    The names and their modules are those that its ``__init__.pyi`` imports, which type checkers
    read in place of the package: one line a name, ``from a.b import name as name``.

    Args:
        package: its name.
        moved: by a name of an earlier version, where it is now; using one is an error that says so.
    """
    module = sys.modules[package]
    stub = pkgutil.get_data(package, "__init__.pyi")
    assert stub is not None
    homes = {
        alias.name: node.module
        for node in ast.parse(stub).body
        if isinstance(node, ast.ImportFrom) and node.module is not None
        for alias in node.names
    }
    public = sorted(name for name in homes if not name.startswith("_"))

    def of_package(name: str) -> object:
        if moved is not None and name in moved:
            raise AttributeError(f"{package}.{name} is {moved[name]} now. Write that instead.")
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        if homes[name] == package:
            return importlib.import_module(f"{package}.{name}")
        value = getattr(importlib.import_module(homes[name]), name)
        setattr(module, name, value)
        return value

    def shown() -> List[str]:
        # Public names and Python's own; modules and helpers of the package are no suggestions.
        return sorted({*public, *(name for name in vars(module) if name[:2] == "__")})

    return of_package, shown, public
