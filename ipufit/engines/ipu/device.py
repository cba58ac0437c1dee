"""Who has the device, one program at a time; and PopTorch's errors as those of this library."""

from __future__ import annotations

import contextlib
import functools
import weakref
from typing import Any, Callable, Iterator, List, Optional, TypeVar, cast

from ipufit.errors import DeviceError, IpufitError, RecoverableDeviceError, UnrecoverableDeviceError
from ipufit.utils.random_streams import LOCK

__all__ = ["OWNER", "DeviceOwner", "alone", "translate_errors"]

_Method = TypeVar("_Method", bound=Callable[..., Any])


def alone(method: _Method) -> _Method:
    """Threads take turns: another one could take the device in the middle of this."""

    @functools.wraps(method)
    def locked(*args: object, **kwargs: object) -> Any:
        with LOCK:
            return method(*args, **kwargs)

    return cast(_Method, locked)


class DeviceOwner:
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

    def has(self, executor: object) -> bool:
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

    def release(self, executor: object) -> None:
        """Bring everything back from an executor, if it has the device."""
        if self.has(executor):
            self._let_go()


OWNER = DeviceOwner()


@contextlib.contextmanager
def translate_errors(sdk: Any, doing: str) -> Iterator[None]:
    """Raise what PopTorch raises in the block as an error of ours.

    Args:
        sdk: PopTorch.
        doing: what the block does, for the message.

    Raises:
        RecoverableDeviceError: with the action that makes the device usable again.
        UnrecoverableDeviceError: someone has to look at the device.
        DeviceError: anything else that PopTorch refuses.
    """
    try:
        yield
    except IpufitError:
        raise
    except sdk.RecoverableError as error:
        action = str(error.recovery_action)
        raise RecoverableDeviceError(
            f"{doing} failed on the device: {_first(error)}. It can be used again after "
            f"{action}; see the documentation of the Poplar SDK, then fit again.",
            action,
        ) from error
    except sdk.UnrecoverableError as error:
        raise UnrecoverableDeviceError(
            f"{doing} failed on the device: {_first(error)}. Have the system looked at before it "
            "is used again."
        ) from error
    except (sdk.Error, AssertionError) as error:
        cause = _ipufit_cause(error)
        if cause is not None:
            raise cause from error
        raise DeviceError(
            f"{doing} must be possible with PopTorch, but it says: {_first(error)}. Change what it "
            "names, or use engine='embedded'."
        ) from error
    except RuntimeError as error:
        # PopTorch's tracing raises some of torch's errors, and ours as their cause.
        if isinstance(error.__cause__, IpufitError):
            raise error.__cause__ from error
        raise


def _ipufit_cause(error: BaseException) -> Optional[IpufitError]:
    """An error of ours that PopTorch has passed on as one of its own."""
    visited = set()
    cause: Optional[BaseException] = error
    while cause is not None and id(cause) not in visited:
        visited.add(id(cause))
        if isinstance(cause, IpufitError):
            return cause
        cause = cause.__cause__ or cause.__context__
    return None


def _first(error: BaseException) -> str:
    text = str(getattr(error, "message", "") or error)
    return " ".join(text.split()).rstrip(".")
