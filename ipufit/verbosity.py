"""How much is printed."""

from __future__ import annotations

import sys
from typing import Union

from ipufit.errors import ConfigurationError

__all__ = ["resolve_verbose"]


def resolve_verbose(verbose: Union[int, str]) -> int:
    """0 silent, 1 a bar, 2 a line per epoch; "auto" is 1 where stderr is a terminal, else 2.

    Raises:
        ConfigurationError: anything else.
    """
    if verbose == "auto":
        return 1 if sys.stderr.isatty() or "ipykernel" in sys.modules else 2
    if isinstance(verbose, bool):
        return int(verbose)
    if verbose in (0, 1, 2) and isinstance(verbose, int):
        return verbose
    raise ConfigurationError(
        f"verbose must be 0 (silent), 1 (bar), 2 (one line an epoch) or 'auto', got {verbose!r}."
    )
