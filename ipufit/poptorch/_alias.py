"""Alias of this package as ``poptorch``, where PopTorch itself is not installed."""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types
from typing import Optional, Sequence

import torch

from ipufit.poptorch._operators import torch_ops

__all__ = ["install", "uninstall"]

_REAL = "ipufit.poptorch"
_ALIAS = "poptorch"


class _Loader(importlib.abc.Loader):
    """Loads the module of the real package, for a name of the alias."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._original_spec: Optional[importlib.machinery.ModuleSpec] = None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        """Import the real module, and remember its spec, which the import system replaces."""
        module = importlib.import_module(self._name)
        self._original_spec = module.__spec__
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        """Restore the module's spec; its code ran under its real name."""
        module.__spec__ = self._original_spec

    def load_module(self, fullname: Optional[str] = None) -> types.ModuleType:
        """Return the module, for programs that call the loader of a spec themselves."""
        return importlib.import_module(self._name)


class _Finder(importlib.abc.MetaPathFinder):
    """Finds ``poptorch`` and its submodules."""

    def find_spec(
        self,
        fullname: str,
        path: Optional[Sequence[str]],
        target: Optional[types.ModuleType] = None,
    ) -> Optional[importlib.machinery.ModuleSpec]:
        """Return the spec of an alias; None for any other name."""
        if fullname.partition(".")[0] != _ALIAS:
            return None
        name = _REAL + fullname[len(_ALIAS) :]
        if importlib.util.find_spec(name) is None:
            return None
        return importlib.machinery.ModuleSpec(fullname, _Loader(name))


_FINDER = _Finder()


def install() -> None:
    """Make ``import poptorch`` import ``ipufit.poptorch``; safe to call twice.

    PopTorch's operators are then in ``torch.ops.poptorch``, too.
    """
    if _FINDER not in sys.meta_path:
        sys.meta_path.insert(0, _FINDER)
    # No library of torch's: PopTorch's own could not be imported into this process any more.
    setattr(torch.ops, _ALIAS, torch_ops)


def uninstall() -> None:
    """Remove the alias, and the modules that have been imported through it."""
    if _FINDER in sys.meta_path:
        sys.meta_path.remove(_FINDER)
        delattr(torch.ops, _ALIAS)
    for name in [n for n in sys.modules if n.partition(".")[0] == _ALIAS]:
        del sys.modules[name]
