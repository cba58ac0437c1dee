"""The module in which PopTorch has its executor, for programs that look there.

PopTorch Geometric has this file executed anew, which must not make a second set of classes: they
are defined elsewhere.
"""

from ipufit.poptorch._compiled import (
    _OverwriteContextManager,
    registerPostCompileHook,
    registerPreCompileHook,
)
from ipufit.poptorch._executor import PoplarExecutor

__all__ = [
    "PoplarExecutor",
    "_OverwriteContextManager",
    "registerPostCompileHook",
    "registerPreCompileHook",
]
