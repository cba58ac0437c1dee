"""Which PopTorch is tracing, for layers that tell it where and how they are computed."""

from __future__ import annotations

import contextlib
import contextvars
from typing import Any, Iterator, Optional

__all__ = ["sdk_in_use", "traced_by"]

_SDK: contextvars.ContextVar[Optional[Any]] = contextvars.ContextVar("sdk", default=None)


def sdk_in_use() -> Optional[Any]:
    """PopTorch, or the stand-in, while a program for IPUs is traced; None elsewhere."""
    return _SDK.get()


@contextlib.contextmanager
def traced_by(sdk: Any) -> Iterator[None]:
    """The block is traced by this PopTorch."""
    before = _SDK.set(sdk)
    try:
        yield
    finally:
        _SDK.reset(before)
