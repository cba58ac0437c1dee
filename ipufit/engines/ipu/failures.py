"""PopTorch's errors as ours."""

from __future__ import annotations

import contextlib
from typing import Any, Iterator, Optional

from ipufit.errors import (
    DeviceError,
    IpufitError,
    RecoverableDeviceError,
    UnrecoverableDeviceError,
)

__all__ = ["translate_errors"]


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
        own = _own(error)
        if own is not None:
            raise own from error
        raise DeviceError(
            f"{doing} must be possible with PopTorch, but it says: {_first(error)}. Change what it "
            "names, or use engine='embedded'."
        ) from error
    except RuntimeError as error:
        # PopTorch's tracing raises some of torch's errors, and ours as their cause.
        if isinstance(error.__cause__, IpufitError):
            raise error.__cause__ from error
        raise


def _own(error: BaseException) -> Optional[IpufitError]:
    """An error of ours that PopTorch has passed on as one of its own."""
    seen = set()
    cause: Optional[BaseException] = error
    while cause is not None and id(cause) not in seen:
        seen.add(id(cause))
        if isinstance(cause, IpufitError):
            return cause
        cause = cause.__cause__ or cause.__context__
    return None


def _first(error: BaseException) -> str:
    text = str(getattr(error, "message", "") or error)
    return " ".join(text.split()).rstrip(".")
