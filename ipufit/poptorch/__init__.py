"""PopTorch's public API on the embedded engine: no SDK, no IPU, the same meaning."""

from ipufit.poptorch import optim
from ipufit.poptorch.poptorch_core import Error, RecoverableError, UnrecoverableError

__all__ = ["Error", "RecoverableError", "UnrecoverableError", "optim"]
