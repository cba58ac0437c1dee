"""Which PopTorch there is: the SDK's, or the stand-in that is asked for by name."""

from __future__ import annotations

import importlib
import importlib.machinery
import importlib.util
import platform
import types
from pathlib import Path
from typing import Any, List, Optional

import torch

from ipufit.errors import ConfigurationError

__all__ = [
    "find_sdk",
    "ignored_options",
    "is_standin",
    "keeps_float64",
    "load_sdk",
    "load_standin",
    "sdk_or_none",
    "why_no_device",
    "why_no_sdk",
]


def find_sdk() -> Optional[importlib.machinery.ModuleSpec]:
    """Where the SDK's PopTorch is; None without one. Nothing is imported."""
    try:
        spec = importlib.util.find_spec("poptorch")
    except (ImportError, ValueError):
        return None
    # The stand-in under the other name has a spec of its own name, or none with a file.
    if spec is None or spec.name != "poptorch" or not _has_core(spec.origin):
        return None
    return spec


def _has_core(origin: Optional[str]) -> bool:
    """Tell whether PopTorch's compiled half lies beside this file, as it does in the SDK alone."""
    return origin is not None and any(
        file.suffix in (".so", ".pyd") for file in Path(origin).parent.glob("poptorch_core*")
    )


def _is_sdk(module: types.ModuleType) -> bool:
    """Tell whether a module that was imported as ``poptorch`` is the SDK's."""
    return module.__name__ == "poptorch" and _has_core(getattr(module, "__file__", None))


def why_no_sdk() -> Optional[str]:
    """Why PopTorch can't be imported here; None if it can, and then it is imported."""
    if find_sdk() is None:
        return "there is no PopTorch, which comes with the Poplar SDK"
    try:
        module = importlib.import_module("poptorch")
    except Exception as error:
        text = str(error).partition("\n")[0].rstrip(".")
        return (
            "its PopTorch can't be imported and is likely made for another torch or Python than "
            f"torch {torch.__version__} and Python {platform.python_version()}: "
            f"{type(error).__name__}: {text}"
        )
    if not _is_sdk(module):
        return "what `import poptorch` finds is the stand-in, not the SDK's PopTorch"
    return None


def why_no_device() -> Optional[str]:
    """Why no IPU can be used, where PopTorch can be imported; None if one can."""
    module: Any = importlib.import_module("poptorch")
    if module.ipuHardwareIsAvailable():
        return None
    return "PopTorch finds no IPU: attach one to this machine, or look at its partition"


def load_sdk() -> Any:
    """The SDK's PopTorch.

    Raises:
        ConfigurationError: there is none, or it can't be imported.
    """
    reason = why_no_sdk()
    if reason is not None:
        raise ConfigurationError(
            f"engine='ipu' needs the Poplar SDK's PopTorch, but {reason}. Enable the SDK in this "
            "shell, or use engine='embedded'; engine='ipu-standin' tries the IPU engine in plain "
            "torch."
        )
    return importlib.import_module("poptorch")


def sdk_or_none() -> Any:
    """The SDK's PopTorch, or None where it can't be imported."""
    return importlib.import_module("poptorch") if why_no_sdk() is None else None


def is_standin(module: Any) -> bool:
    """Tell whether this PopTorch is the stand-in."""
    return bool(module.__name__ == "ipufit.poptorch")


def load_standin() -> Any:
    """The stand-in for PopTorch, which runs in plain torch."""
    # Imported here, as below: programs through the SDK need none of it.
    from ipufit import poptorch

    return poptorch


def keeps_float64(module: object) -> bool:
    """Tell whether this PopTorch computes in float64: the stand-in may, a device never does."""
    if not is_standin(module):
        return False
    from ipufit.poptorch import _precision

    return _precision.keeps_float64()


def ignored_options(module: Any, options: Any) -> List[str]:
    """Names of the setters that were used and change nothing; the SDK's PopTorch ignores none."""
    if options is None or not is_standin(module):
        return []
    from ipufit.poptorch._options.compiler import ignored

    return ignored(options)
