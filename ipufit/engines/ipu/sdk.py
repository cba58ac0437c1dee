"""PopTorch as it is here: the SDK's or the stand-in, who has its device, and its errors as ours."""

from __future__ import annotations

import contextlib
import importlib.machinery
import importlib.util
import platform
import types
import weakref
from pathlib import Path
from typing import Any, Callable, Iterable, Iterator, List, Optional, Protocol

import torch
from torch import Tensor

from ipufit.errors import (
    ConfigurationError,
    DeviceError,
    IpufitError,
    RecoverableDeviceError,
    UnrecoverableDeviceError,
    brief_error,
)
from ipufit.utils.poptorch_sdk import DOOR, STANDIN, installed
from ipufit.utils.random_streams import LOCK


def find_sdk() -> Optional[importlib.machinery.ModuleSpec]:
    """Where the SDK's PopTorch is; None without one. Nothing is imported."""
    try:
        spec = importlib.util.find_spec("poptorch")
    except (ImportError, ValueError):
        return None
    if spec is not None and spec.origin == DOOR:
        spec = installed("poptorch")
    # The stand-in under the other name has a spec of its own name, or none with a file.
    if spec is None or spec.name != "poptorch" or not _has_core(spec.origin):
        return None
    return spec


def _has_core(origin: Optional[str]) -> bool:
    """Tell whether PopTorch's compiled half lies beside this file, as it does in the SDK alone."""
    return origin is not None and any(
        file.suffix in (".so", ".pyd") for file in Path(origin).parent.glob("poptorch_core*")
    )


def why_no_sdk() -> Optional[str]:
    """Why PopTorch can't be imported here; None if it can, and then it is imported."""
    if find_sdk() is None:
        return "there is no PopTorch, which comes with the Poplar SDK"
    try:
        module = importlib.import_module("poptorch")
    except Exception as error:
        return (
            "its PopTorch can't be imported and is probably for another torch or Python than torch "
            f"{torch.__version__} and Python {platform.python_version()}: {brief_error(error)}"
        )
    if module.__name__ != "poptorch" or not _has_core(getattr(module, "__file__", None)):
        return "`import poptorch` finds the stand-in, not the SDK's PopTorch"
    return None


def why_no_device() -> Optional[str]:
    """Why no IPU can be used, where PopTorch can be imported; None if one can."""
    module = importlib.import_module("poptorch")
    if module.ipuHardwareIsAvailable():
        return None
    return "PopTorch finds no IPU: attach one to this machine, or look at its partition"


def load_sdk() -> types.ModuleType:
    """The SDK's PopTorch.

    Raises:
        ConfigurationError: there is none, or it can't be imported.
    """
    reason = why_no_sdk()
    if reason is not None:
        raise ConfigurationError(
            f"engine='ipu' needs the Poplar SDK's PopTorch, but {reason}. Enable the SDK in this "
            "shell, or use engine='embedded'; engine='ipu-standin' tries the IPU engine in plain "
            "torch."
        )
    return importlib.import_module("poptorch")


def sdk_or_none() -> Optional[types.ModuleType]:
    """The SDK's PopTorch, or None where it can't be imported."""
    return importlib.import_module("poptorch") if why_no_sdk() is None else None


def is_standin(module: types.ModuleType) -> bool:
    """Tell whether this PopTorch is the stand-in."""
    return bool(module.__name__ == STANDIN)


def load_standin() -> types.ModuleType:
    """The stand-in for PopTorch, which runs in plain torch."""
    # Imported here, as below: programs through the SDK need none of it.
    from ipufit import poptorch

    return poptorch


def keeps_float64(module: types.ModuleType) -> bool:
    """Tell whether this PopTorch computes in float64: the stand-in may, a device never does."""
    if not is_standin(module):
        return False
    from ipufit.poptorch import _precision

    return _precision.keeps_float64()


def ignored_options(module: types.ModuleType, options: Any) -> List[str]:
    """Names of the setters that were used and change nothing; the SDK's PopTorch ignores none."""
    if options is None or not is_standin(module):
        return []
    from ipufit.poptorch._options.compiler import ignored

    return ignored(options)


class Executor(Protocol):
    """Type of a program that PopTorch has wrapped, with PopTorch's names."""

    rng_state: List[int]
    isAttachedToDevice: Callable[[], bool]  # noqa: N815
    attachToDevice: Callable[[], object]  # noqa: N815
    detachFromDevice: Callable[[], object]  # noqa: N815
    copyWeightsToHostIfNeeded: Callable[[], bool]  # noqa: N815
    copyWeightsToDevice: Callable[[], object]  # noqa: N815
    setOptimizer: Callable[[object], object]  # noqa: N815
    compile: Callable[..., object]
    destroy: Callable[[], object]

    def __call__(self, *arguments: Tensor) -> Iterable[Tensor]:
        """Run the program once."""


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """Threads take turns: another one could take the device in the middle of this."""
    with LOCK:
        yield


class DeviceOwner:
    """The executor that is attached, or the last one that was.

    Two programs attached at once would need twice the IPUs. Detaching brings weights and optimizer
    state back to the host, attaching takes them over from there.
    """

    def __init__(self) -> None:
        self._present: Optional[weakref.ReferenceType[Executor]] = None

    def _let_go(self) -> None:
        present = self._present() if self._present is not None else None
        if present is not None and present.isAttachedToDevice():
            present.detachFromDevice()
        self._present = None

    def has(self, executor: object) -> bool:
        """Tell whether this executor has the device."""
        return self._present is not None and self._present() is executor

    def compile(self, executor: Executor, arguments: List[Tensor]) -> None:
        """Compile an executor, which takes the device by itself."""
        self._let_go()
        self._present = weakref.ref(executor)
        executor.compile(*arguments)

    def take(self, executor: Executor) -> bool:
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
def translate_errors(sdk: types.ModuleType, doing: str) -> Iterator[None]:
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
            f"{doing} failed on the device: {_first(error)}. Have the system checked before you "
            "use it again."
        ) from error
    except (sdk.Error, AssertionError) as error:
        cause = _ipufit_cause(error)
        if cause is not None:
            raise cause from error
        raise DeviceError(
            f"{doing} failed, because PopTorch says: {_first(error)}. Change what it names, or use "
            "engine='embedded'."
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
