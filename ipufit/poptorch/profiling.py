"""Named spans of time, as torch's profiler shows them.

PopTorch hands them to its own profiler, which comes with the SDK; here ``torch.profiler`` does.
"""

from __future__ import annotations

import contextlib
from typing import Any, Callable, ContextManager, TypeVar

import torch

from ipufit.poptorch._logging import logger
from ipufit.poptorch._tracing import tracing

__all__ = ["Channel", "logger"]

T = TypeVar("T")


class Channel:
    """A source of spans, whose names begin with its own.

    Args:
        name: of the channel.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def tracepoint(self, name: str) -> ContextManager[object]:
        """A context that is one span, called ``<channel>.<name>``."""
        if tracing() is not None:
            # A span is an operator, which must not get into the program.
            return contextlib.nullcontext()
        return torch.profiler.record_function(f"{self._name}.{name}")

    def instrument(self, obj: T, *methods: str) -> T:
        """Make every call of these methods of one object a span of their name.

        Raises:
            AttributeError: the object has no such method.
        """
        for name in methods:
            setattr(obj, name, _Measured(self, name, getattr(obj, name)))
        return obj


class _Measured:
    """A method whose calls are spans; an object of a class, so that it can be sent to a process."""

    def __init__(self, channel: Channel, name: str, method: Callable[..., Any]) -> None:
        self._channel = channel
        self._name = name
        self._method = method

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with self._channel.tracepoint(self._name):
            return self._method(*args, **kwargs)
