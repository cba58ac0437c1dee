"""PopTorch's public API on the embedded engine: no SDK, no IPU, the same meaning."""

from ipufit.poptorch._accessor import AsynchronousDataAccessor
from ipufit.poptorch._dataloader import DataLoader
from ipufit.poptorch.enums import DataLoaderMode, SharingStrategy
from ipufit.poptorch.poptorch_core import Error, RecoverableError, UnrecoverableError

__all__ = [
    "AsynchronousDataAccessor",
    "DataLoader",
    "DataLoaderMode",
    "Error",
    "RecoverableError",
    "SharingStrategy",
    "UnrecoverableError",
]
