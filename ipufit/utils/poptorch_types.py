"""Objects of PopTorch's, of the SDK or of the stand-in, known without importing either."""

from __future__ import annotations

from typing import Container, Optional

__all__ = ["sdk_kind"]


def sdk_kind(thing: object, names: Container[str]) -> Optional[str]:
    """Which of PopTorch's classes something is an instance of; None if it is of none of these.

    Args:
        thing: anything.
        names: of the classes.
    """
    for kind in type(thing).__mro__:
        if kind.__name__ in names and "poptorch" in kind.__module__:
            return kind.__name__
    return None
