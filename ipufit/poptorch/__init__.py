"""PopTorch's public API on the embedded engine: no SDK, no IPU, the same meaning."""

from ipufit.poptorch import (
    _poplar_executor,
    enums,
    ops,
    optim,
    options,
    poptorch_core,
    profiling,
    testing,
)
from ipufit.poptorch._accessor import AsynchronousDataAccessor
from ipufit.poptorch._dataloader import DataLoader
from ipufit.poptorch._executor import VERSION as __version__
from ipufit.poptorch._executor import inferenceModel, load, trainingModel
from ipufit.poptorch._impl import createPoptorchError, isRunningOnIpu, poptorchAtExit
from ipufit.poptorch._logging import setLogLevel
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
from ipufit.poptorch._poplar_executor import *
from ipufit.poptorch.enums import *
from ipufit.poptorch.ops import *
from ipufit.poptorch.options import *
from ipufit.poptorch.poptorch_core import *
from ipufit.utils.poptorch_sdk import install as install

# The names of whole modules are listed where they are, for here too.
__all__ = [
    "AsynchronousDataAccessor",
    "DataLoader",
    "ICustomArgParser",
    "__version__",
    "accessAttributes",
    "createPoptorchError",
    "getIpuTensorId",
    "inferenceModel",
    "ipuHardwareIsAvailable",
    "ipuHardwareVersion",
    "isRunningOnIpu",
    "load",
    "module_repr",
    "optim",
    "options",
    "poptorchAtExit",
    "print",
    "profiling",
    "registerCustomArgParser",
    "registerGeometricCustomArgParsers",
    "setLogLevel",
    "testing",
    "trainingModel",
]
__all__ += _poplar_executor.__all__
__all__ += enums.__all__
__all__ += ops.__all__
__all__ += options.__all__
__all__ += poptorch_core.__all__
# Both the operators and the options have the enums.
__all__ = list(dict.fromkeys(__all__))


def __getattr__(name: str) -> object:
    """Tell of a name that an earlier PopTorch had.

    Raises:
        AttributeError: of that name, or of any other one.
    """
    hint = f". It is called {_RENAMED[name]} in PopTorch 3.4." if name in _RENAMED else ""
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}{hint}")
