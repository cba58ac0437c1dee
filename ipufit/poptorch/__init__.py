"""PopTorch's public API on the embedded engine: no SDK, no IPU, the same meaning."""

from ipufit.poptorch import enums, ops, optim, options, profiling, testing
from ipufit.poptorch._accessor import AsynchronousDataAccessor
from ipufit.poptorch._dataloader import DataLoader
from ipufit.poptorch._executor import VERSION as __version__
from ipufit.poptorch._executor import inferenceModel, load, trainingModel
from ipufit.poptorch._impl import createPoptorchError, isRunningOnIpu, poptorchAtExit
from ipufit.poptorch._logging import logger, setLogLevel
from ipufit.poptorch._operators.custom import register_custom_op as register_custom_op
from ipufit.poptorch._operators.scopes import module_repr, print
from ipufit.poptorch._options.group import RENAMED as _RENAMED
from ipufit.poptorch._parsers import (
    ICustomArgParser,
    accessAttributes,
    getIpuTensorId,
    registerCustomArgParser,
    registerGeometricCustomArgParsers,
)
from ipufit.poptorch._placement import ipuHardwareIsAvailable, ipuHardwareVersion
from ipufit.poptorch._poplar_executor import (
    PoplarExecutor,
    _OverwriteContextManager,
    registerPostCompileHook,
    registerPreCompileHook,
)
from ipufit.poptorch.enums import *
from ipufit.poptorch.ops import *
from ipufit.poptorch.options import (
    Attribute,
    BlockId,
    ConfigFileError,
    Options,
    ParallelPhasedExecution,
    Phase,
    PipelinedExecution,
    SerialPhasedExecution,
    ShardedExecution,
    Stage,
    TensorLocationSettings,
)
from ipufit.poptorch.poptorch_core import (
    Error,
    RecoverableError,
    UnrecoverableError,
    importPoptorchMetadataFromFile,
)
from ipufit.utils.poptorch_sdk import install as install

# The enums and the operators are listed where they are, for here too.
__all__ = [
    "AsynchronousDataAccessor",
    "Attribute",
    "BlockId",
    "ConfigFileError",
    "DataLoader",
    "Error",
    "ICustomArgParser",
    "Options",
    "ParallelPhasedExecution",
    "Phase",
    "PipelinedExecution",
    "PoplarExecutor",
    "RecoverableError",
    "SerialPhasedExecution",
    "ShardedExecution",
    "Stage",
    "TensorLocationSettings",
    "UnrecoverableError",
    "_OverwriteContextManager",
    "__version__",
    "accessAttributes",
    "createPoptorchError",
    "getIpuTensorId",
    "importPoptorchMetadataFromFile",
    "inferenceModel",
    "ipuHardwareIsAvailable",
    "ipuHardwareVersion",
    "isRunningOnIpu",
    "load",
    "logger",
    "module_repr",
    "ops",
    "optim",
    "options",
    "poptorchAtExit",
    "print",
    "profiling",
    "registerCustomArgParser",
    "registerGeometricCustomArgParsers",
    "registerPostCompileHook",
    "registerPreCompileHook",
    "setLogLevel",
    "testing",
    "trainingModel",
]
__all__ += enums.__all__
__all__ += ops.__all__


def __getattr__(name: str) -> object:
    """Tell of a name that an earlier PopTorch had.

    Raises:
        AttributeError: of that name, or of any other one.
    """
    hint = f". It is called {_RENAMED[name]} in PopTorch 3.4." if name in _RENAMED else ""
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}{hint}")
