"""Methods that show as spans of their object's profiling channel."""

from __future__ import annotations

import functools
from typing import Any, Callable, TypeVar

__all__ = ["spanned"]

F = TypeVar("F", bound=Callable[..., Any])


def spanned(method: F) -> F:
    """Make every call a span of the method's name on the channel ``self._profiling``."""

    @functools.wraps(method)
    def measured(self: Any, *args: Any, **kwargs: Any) -> Any:
        with self._profiling.tracepoint(method.__name__):
            return method(self, *args, **kwargs)

    return measured  # type: ignore[return-value]
