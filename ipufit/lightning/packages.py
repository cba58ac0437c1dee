"""Import of Lightning from whichever of its two packages is installed."""

from __future__ import annotations

import importlib
import sys
from typing import Any

from ipufit.errors import ConfigurationError

__all__ = ["part"]


def _package() -> str:
    """Return the name of the package that is in use already, else of the newer one."""
    names = ("lightning.pytorch", "pytorch_lightning")
    for name in names:
        if sys.modules.get(name) is not None:
            return name
    for name in names:
        try:
            importlib.import_module(name)
        except ImportError:
            continue
        return name
    raise ConfigurationError(
        "ipufit.lightning needs Lightning 2.1 or newer, which is not installed. Run pip install "
        "ipufit[lightning]."
    )


def part(name: str) -> Any:
    """Import a module of Lightning, such as "strategies"; "" is the package itself."""
    package = _package()
    return importlib.import_module(f"{package}.{name}" if name else package)
