"""Arguments of torch's functions by name, however they were passed."""

from __future__ import annotations

from typing import Any, Dict, Mapping, Sequence

__all__ = ["named"]


def named(names: Sequence[str], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Dict[str, Any]:
    """Those that were given; positional ones beyond the names are left out."""
    return {**dict(zip(names, args)), **kwargs}
