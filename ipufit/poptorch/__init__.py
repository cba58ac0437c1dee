"""PopTorch's public API on the embedded engine: no SDK, no IPU, the same meaning."""

from ipufit.poptorch import optim
from ipufit.poptorch._hooks import registerPostCompileHook, registerPreCompileHook
from ipufit.poptorch._parsers import (
    ATTR_PREFIX,
    ICustomArgParser,
    accessAttributes,
    flattenTensorStructure,
    getIpuTensorId,
    reconstructTensorStructure,
    registerCustomArgParser,
    registerGeometricCustomArgParsers,
)
from ipufit.poptorch.poptorch_core import Error, RecoverableError, UnrecoverableError

__all__ = [
    "ATTR_PREFIX",
    "Error",
    "ICustomArgParser",
    "RecoverableError",
    "UnrecoverableError",
    "accessAttributes",
    "flattenTensorStructure",
    "getIpuTensorId",
    "optim",
    "reconstructTensorStructure",
    "registerCustomArgParser",
    "registerGeometricCustomArgParsers",
    "registerPostCompileHook",
    "registerPreCompileHook",
]
