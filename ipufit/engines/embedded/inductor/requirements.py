"""Requirements of compiling: a torch that can, and a C++ compiler."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
from typing import Optional

import torch

from ipufit.errors import ConfigurationError


def loader() -> Optional[type]:
    """Return the class that runs a compiled library; None where this torch has none."""
    container: Optional[type] = getattr(
        getattr(torch._C, "_aoti", None), "AOTIModelContainerRunnerCpu", None
    )
    return container


def _compiler() -> str:
    """The name by which TorchInductor calls the C++ compiler."""
    return os.environ.get("CXX") or ("clang++" if sys.platform == "darwin" else "g++")


def missing() -> Optional[str]:
    """Say what is not there and what to do about it, in two sentences; None where all is."""
    if os.name != "posix":
        return "a POSIX system, which this is not. Leave jit out, or pass jit='graph'."
    if loader() is None or importlib.util.find_spec("torch._inductor") is None:
        return (
            f"a torch that compiles programs into libraries, which torch {torch.__version__} "
            "can't. Install torch 2.6 or newer, or pass jit='graph'."
        )
    if shutil.which(_compiler()) is None:
        return (
            f"a C++ compiler, and {_compiler()!r} was not found. Install one (apt install g++, or "
            "xcode-select --install on a Mac), set CXX to one, or pass jit='graph'."
        )
    return None


def refuse_missing() -> None:
    """Make sure that programs can be compiled here.

    Raises:
        ConfigurationError: they can't.
    """
    lacking = missing()
    if lacking is not None:
        raise ConfigurationError(f"jit='inductor' needs {lacking}")
