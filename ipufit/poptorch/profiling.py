"""Named spans of time, as torch's profiler shows them.

PopTorch hands them to its own profiler, which comes with the SDK; here ``torch.profiler`` does.
"""

from __future__ import annotations

import contextlib
import functools
from typing import Any, Callable, ContextManager, SupportsIndex, Type, TypeVar

import torch

from ipufit.poptorch._logging import logger
from ipufit.poptorch._tracing import tracing
from ipufit.poptorch._wrapping import reduced_as_plain

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
        """Return a context that is one span, called ``<channel>.<name>``."""
        if tracing() is not None:
            # A span is an operator, which must not get into the program.
            return contextlib.nullcontext()
        return torch.profiler.record_function(f"{self._name}.{name}")

    def instrument(self, obj: T, *methods: str) -> T:
        """Measure every call of these methods of one object as a span of their name.

        Methods that Python itself calls, such as ``__getitem__`` of a dataset or ``__iter__`` of a
        data loader, are looked up in the class: the object then gets a subclass of its class. A
        pickle or a copy of it is of the class itself. Nothing happens to an object that takes
        neither, such as a list.

        Raises:
            AttributeError: the object has no such method.
        """
        for name in methods:
            method = getattr(obj, name)
            try:
                if name.startswith("__") and hasattr(type(obj), name):
                    obj.__class__ = _measuring(type(obj), name, self)
                else:
                    setattr(obj, name, _Measured(self, name, method))
            except (AttributeError, TypeError):
                logger.debug("A %s can't be instrumented", type(obj).__name__)
        return obj


class _Measured:
    """A method whose calls are spans; an object of a class, so that it can be sent to a process."""

    def __init__(self, channel: Channel, name: str, method: Callable[..., Any]) -> None:
        # So that a signature is the method's.
        functools.update_wrapper(self, method)
        self._channel = channel
        self._name = name
        self._method = method

    def __call__(self, *args: object, **kwargs: object) -> Any:
        with self._channel.tracepoint(self._name):
            return self._method(*args, **kwargs)


def _measuring(kind: Type[Any], name: str, channel: Channel) -> Type[Any]:
    """Return a subclass that measures this method as spans."""
    method = getattr(kind, name)

    @functools.wraps(method)
    def measured(self: object, *args: object, **kwargs: object) -> object:
        with channel.tracepoint(name):
            return method(self, *args, **kwargs)

    plain = getattr(kind, "_instrumented", kind)

    def reduced(self: object, protocol: SupportsIndex) -> object:
        return reduced_as_plain(self, plain, protocol)

    namespace = {
        name: measured,
        "__reduce_ex__": reduced,
        "__module__": kind.__module__,
        "__qualname__": kind.__qualname__,
        "__doc__": kind.__doc__,
        "_instrumented": plain,
    }
    exact: Any = type(kind)
    measuring: Type[Any] = exact(kind.__name__, (kind,), namespace)
    return measuring
