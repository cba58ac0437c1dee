"""The module in which PopTorch has its executor, for programs that look there.

PopTorch Geometric has this file executed anew, which must not make a second set of classes: they
are defined elsewhere.
"""

from ipufit.poptorch._executor import PoplarExecutor
from ipufit.poptorch._hooks import (
    _OverwriteContextManager,
    registerPostCompileHook,
    registerPreCompileHook,
)

__all__ = [
    "PoplarExecutor",
    "_OverwriteContextManager",
    "registerPostCompileHook",
    "registerPreCompileHook",
]
