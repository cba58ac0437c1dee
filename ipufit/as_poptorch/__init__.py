"""``import poptorch``, and what a program imports beside it, also where there is no Poplar SDK.

``ipufit.utils.poptorch_sdk`` puts this folder on ``sys.path``, before all that is installed: each
module in it has the name of one of the SDK's, and gives way to that one where it can be imported.
"""

from __future__ import annotations

import contextlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types
from typing import Optional, Sequence

from ipufit.utils.poptorch_sdk import POPTORCH, STANDIN

__all__ = ["become_poptorch"]


class _Loader(importlib.abc.Loader):
    """Loads a module of the stand-in for a name that begins with ``poptorch``."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._own: Optional[importlib.machinery.ModuleSpec] = None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        """Import the real module, and keep its own spec, which the import system replaces."""
        module = importlib.import_module(self._name)
        self._own = module.__spec__
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        """Restore the module's spec; its code ran under its real name."""
        module.__spec__ = self._own

    def load_module(self, fullname: Optional[str] = None) -> types.ModuleType:
        """Return the module, for programs that call the loader of a spec themselves."""
        return importlib.import_module(self._name)


class _Finder(importlib.abc.MetaPathFinder):
    """Finds ``poptorch.x`` as ``ipufit.poptorch.x``: one module under two names."""

    def find_spec(
        self,
        fullname: str,
        path: Optional[Sequence[str]],
        target: Optional[types.ModuleType] = None,
    ) -> Optional[importlib.machinery.ModuleSpec]:
        """Return the spec of a submodule that the stand-in has; None for any other name."""
        if not fullname.startswith(f"{POPTORCH}."):
            return None
        name = STANDIN + fullname[len(POPTORCH) :]
        if importlib.util.find_spec(name) is None:
            return None
        return importlib.machinery.ModuleSpec(fullname, _Loader(name))


def become_poptorch(standin: types.ModuleType, operators: types.ModuleType) -> None:
    """Make the stand-in ``poptorch``, and its operators ``torch.ops.poptorch``."""
    # Imported here: another name does without.
    import torch

    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
    # No library of torch's: PopTorch's own could not be imported into this process any more.
    setattr(torch.ops, POPTORCH, operators)
    sys.modules[POPTORCH] = standin
    # As PopTorch does: programs pass batches of torch_geometric without another import.
    if importlib.util.find_spec("poptorch_geometric") is not None:
        with contextlib.suppress(standin.Error):
            standin.registerGeometricCustomArgParsers()
