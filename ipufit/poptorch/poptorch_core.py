"""Exceptions of the device side, and other functions of PopTorch's compiled half."""

from __future__ import annotations

import enum
from typing import Dict, NoReturn, Tuple, Type

from ipufit.poptorch import _logging, _placement, _tracing
from ipufit.poptorch._logging import Error, refusing
from ipufit.poptorch._options import compiler as _compiler

__all__ = ["Error", "RecoverableError", "UnrecoverableError", "importPoptorchMetadataFromFile"]


class RecoverableError(Error):
    """The system failed, and can be used again after an action.

    Attributes:
        recovery_action: ``"IPU_RESET"``, ``"LINK_RESET"``, ``"PARTITION_RESET"`` or
            ``"FULL_RESET"``.
    """

    def __init__(
        self,
        message: str = "",
        type: str = "poplar_recoverable_runtime_error",
        location: str = "",
        recovery_action: str = "",
    ):
        super().__init__(message, type, location)
        self.recovery_action = recovery_action


class UnrecoverableError(Error):
    """The system failed, and has to be looked at before it can be used again."""


class TestErrorType(enum.IntEnum):
    """The kinds of error that ``_throwTestError`` can raise."""

    __test__ = False  # not a class of tests, whatever its name begins with

    Poptorch = 0
    Popart = 1
    PopartInternal = 2
    Poplibs = 3
    PoplarUnrecoverable = 4
    PoplarUnknown = 5
    PoplarRecoverableFullReset = 6
    PoplarLinkError = 7


class TracingMode(enum.IntEnum):
    """The kinds of program that PopTorch records."""

    PopART = 0


# The class, the type that it carries, and a text.
_TEST_ERRORS: Dict[TestErrorType, Tuple[Type[Error], str, str]] = {
    TestErrorType.Poptorch: (Error, "poptorch_cpp_error", "PopTorch failed, on request."),
    TestErrorType.Popart: (Error, "popart_exception", "The compiler failed, on request."),
    TestErrorType.PopartInternal: (
        Error,
        "popart_internal_exception",
        "The compiler contradicted itself, on request.",
    ),
    TestErrorType.Poplibs: (Error, "poplibs_exception", "A library failed, on request."),
    TestErrorType.PoplarUnrecoverable: (
        UnrecoverableError,
        "poplar_unrecoverable_runtime_error",
        "The system failed for good, on request.",
    ),
    TestErrorType.PoplarUnknown: (
        Error,
        "poplar_unknown_runtime_error",
        "The system failed in an unknown way, on request.",
    ),
    TestErrorType.PoplarRecoverableFullReset: (
        RecoverableError,
        "poplar_recoverable_runtime_error",
        "The system needs a reset, on request.",
    ),
    TestErrorType.PoplarLinkError: (
        Error,
        "poplar_link_error",
        "Linking failed, on request. Output: -lfoo not found.",
    ),
}


def _throwTestError(type: TestErrorType) -> NoReturn:
    """Raise an error of a kind that only a device has, to try out what handles it."""
    kind, name, text = _TEST_ERRORS[TestErrorType(type)]
    location = "[0] throwTestError::bottomLevel\n[1] throwTestError::topLevel"
    if kind is RecoverableError:
        raise RecoverableError(text, name, location, "FULL_RESET")
    raise kind(text, name, location)


def _validateOptions(options: Dict[str, object]) -> None:
    """Refuse options that the device's compiler would refuse.

    Args:
        options: those of ``Options.toDict()``.
    Raises:
        Error: an unknown option, or a value of a type that none has.
    """
    _compiler.validate(options)


def isCompilingWithDispatcher() -> bool:
    """Return True while a model is recorded."""
    return _tracing.tracing() is not None


def ipuHardwareVersion(numIpus: int = 1) -> int:
    """The kind of IPU that the system has; 0 for none, unless ``--claim-ipus`` says otherwise."""
    return _placement.ipuHardwareVersion() if _placement.ipuHardwareIsAvailable(numIpus) else 0


def setLogLevel(level: int = 2) -> None:
    """Say which messages are printed, by number."""
    _logging.setLogLevel(level)


def setPopartLogLevel(level: int) -> None:
    """Accept a level for the compiler's own log, which this engine does not have."""


def poptorchAtExit() -> None:
    """Give up what is held outside of Python: nothing, on this engine."""


def importPoptorchMetadataFromFile(filename: str) -> NoReturn:
    """Read the head of a file that the SDK has written, which only the SDK can.

    Raises:
        Error: always.
    """
    raise Error(
        f"The head of {filename} can only be read with the SDK that wrote it. Files of this engine "
        "are opened with poptorch.load(filename)."
    )


class InternalPoplarExecutable:
    """A program of a device, which only the SDK can make."""

    def __init__(self) -> None:
        raise Error(_only_the_sdk("InternalPoplarExecutable"))


class CompilerOptions:
    """Settings of the SDK's tracer, which only the SDK has."""

    def __init__(self) -> None:
        raise Error(_only_the_sdk("CompilerOptions"))


def _only_the_sdk(name: str) -> str:
    return (
        f"poptorch_core.{name} works on programs of a device, which only the SDK makes. Use the "
        "methods of poptorch.PoplarExecutor."
    )


_OF_PROGRAMS = (
    "_getPopartIR",
    "_getTensorNames",
    "appendPoptorchMetadataToFile",
    "attachToDevice",
    "compileWithManualTracing",
    "copyNamedBuffersToDevice_impl",
    "copyWeightsToDevice_impl",
    "copyWeightsToHost_impl",
    "createGraph",
    "cycleCount",
    "destroyDispatcher",
    "detachFromDevice",
    "endDispatch",
    "endOutputsMove",
    "endParametersMove",
    "execute",
    "finalizeGraph",
    "getIpuTensorId",
    "getRandomSeed",
    "getRngState",
    "getTimestamps",
    "isAlreadyRegistered",
    "isAttachedToDevice",
    "isGraphNondeterministic",
    "loadEngineAndConnectStreams",
    "mapParamsToNames",
    "processDispatchAndImportExecutable",
    "readOptimizerState",
    "registerBuffersWithCallback",
    "registerCPUCallBack",
    "saveExecutableToFile",
    "setCustomCodeletsPath",
    "setPerReplica",
    "setRngState",
    "startDispatch",
    "startOutputsMove",
    "startParametersMove",
    "updateOptimizers",
    "writeOptimizerState",
)
for _name in _OF_PROGRAMS:
    globals()[_name] = refusing(_name, _only_the_sdk(_name))
