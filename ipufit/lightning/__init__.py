"""The accelerator "ipu" and IPUStrategy of Lightning 2, for those who keep their Trainer.

Importing this imports Lightning, and registers both names with it.
"""

from __future__ import annotations

from typing import NoReturn

from ipufit.lightning.strategy import IPUAccelerator, IPUStrategy, Trainer

__all__ = ["IPUAccelerator", "IPUStrategy", "Trainer"]


def __getattr__(name: str) -> NoReturn:
    """Raise an error that says how a name of older versions of Lightning is called today.

    Raises:
        ImportError: of that name; no AttributeError, of which ``from ... import`` tells nothing.
        AttributeError: of any other one.
    """
    if name == "IPUPlugin":
        raise ImportError(
            "IPUPlugin is the name of IPUStrategy before Lightning 1.6, and does not exist here. "
            "Use ipufit.lightning.IPUStrategy, as strategy= of the Trainer.",
            name=__name__,
        )
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
