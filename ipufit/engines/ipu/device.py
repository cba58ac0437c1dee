"""Who has the device: one program at a time, decided here and nowhere else."""

from __future__ import annotations

import functools
import weakref
from typing import Any, Callable, List, Optional, TypeVar, cast

from ipufit.utils.random_streams import LOCK

__all__ = ["OWNER", "Owner", "alone"]

_Method = TypeVar("_Method", bound=Callable[..., Any])


def alone(method: _Method) -> _Method:
    """Threads take turns: another one could take the device in the middle of this."""

    @functools.wraps(method)
    def locked(*args: Any, **kwargs: Any) -> Any:
        with LOCK:
            return method(*args, **kwargs)

    return cast(_Method, locked)


class Owner:
    """The executor that is attached, or the last one that was.

    Two programs attached at once would need twice the IPUs. Detaching brings weights and optimizer
    state back to the host, attaching takes them over from there.
    """

    def __init__(self) -> None:
        self._present: Optional[weakref.ReferenceType[Any]] = None

    def _let_go(self) -> None:
        present = self._present() if self._present is not None else None
        if present is not None and present.isAttachedToDevice():
            present.detachFromDevice()
        self._present = None

    def has(self, executor: Any) -> bool:
        """Tell whether this executor has the device."""
        return self._present is not None and self._present() is executor

    def compile(self, executor: Any, arguments: List[Any]) -> None:
        """Compile an executor, which takes the device by itself."""
        self._let_go()
        self._present = weakref.ref(executor)
        executor.compile(*arguments)

    def take(self, executor: Any) -> bool:
        """Give the device to a compiled executor; whether another one, or none, had it before."""
        if self.has(executor) and executor.isAttachedToDevice():
            return False
        if not self.has(executor):
            self._let_go()
        self._present = weakref.ref(executor)
        if not executor.isAttachedToDevice():
            executor.attachToDevice()
        return True

    def release(self, executor: Any) -> None:
        """Bring everything back from an executor, if it has the device."""
        if self.has(executor):
            self._let_go()


OWNER = Owner()
