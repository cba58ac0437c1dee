"""Which of Lightning's two packages there is."""

from __future__ import annotations

import importlib
import sys
from typing import Any

from ipufit.errors import ConfigurationError

__all__ = ["part"]


def _package() -> str:
    """The one that is in use already; else the newer name first."""
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
    """A module of Lightning, such as "strategies"; "" for the package itself."""
    package = _package()
    return importlib.import_module(f"{package}.{name}" if name else package)
