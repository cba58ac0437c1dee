"""Weights in files of ``torch.save``, read without running what a stranger may have put there."""

from __future__ import annotations

import os
import zipfile
from typing import Any, Dict

import torch
from torch import Tensor
from torch.torch_version import TorchVersion

from ipufit.errors import ConfigurationError

__all__ = ["TORCH_SUFFIXES", "read_torch"]

TORCH_SUFFIXES = (".pt", ".pth", ".bin")

# Before it, a file could run code in spite of weights_only (CVE-2025-32434).
_SAFE = "2.6"


def read_torch(path: str) -> Dict[str, Tensor]:
    """The tensors of a state dict, by name.

    Raises:
        ConfigurationError: this torch reads no such file safely, or it is something else.
    """
    if TorchVersion(torch.__version__) < TorchVersion(_SAFE):
        raise ConfigurationError(
            f"a file of torch.save can be read safely from torch 2.6 on, got {path!r} and torch "
            f"{torch.__version__}. Convert it with a newer torch: "
            "safetensors.torch.save_file(torch.load(path, weights_only=True), 'w.safetensors')."
        )
    try:
        _refuse_bombs(path)
        state: Any = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise ConfigurationError(
            f"load_weights reads what torch.save(module.state_dict(), path) writes, but {path!r} "
            f"can't be read as that: {type(error).__name__}: {_first_line(error)}. Save the "
            "state_dict again, or use safetensors."
        ) from error
    if not isinstance(state, dict) or not all(isinstance(name, str) for name in state):
        raise _other(path, f"a {type(state).__name__}")
    wrong = [name for name, value in state.items() if not isinstance(value, Tensor)]
    if wrong:
        raise _other(path, f"{type(state[wrong[0]]).__name__} under {wrong[0]!r}")
    return dict(state)


def _refuse_bombs(path: str) -> None:
    """Torch stores its tensors as they are; what is packed may be of any size.

    Raises:
        ValueError: something in it is packed, or said to be larger than the file.
        OSError, zipfile.BadZipFile: it is no file of torch's present format.
    """
    with zipfile.ZipFile(path) as archive:
        members = archive.infolist()
    if any(member.compress_type != zipfile.ZIP_STORED for member in members):
        raise ValueError("it is compressed, as torch.save never does")
    if sum(member.file_size for member in members) > os.path.getsize(path):
        raise ValueError("it says that it holds more than it does")


def _other(path: str, came: str) -> ConfigurationError:
    return ConfigurationError(
        f"load_weights reads a dict of tensors by name, but {path!r} holds {came}. Save "
        "module.state_dict() alone."
    )


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [""])[0].rstrip(".")
