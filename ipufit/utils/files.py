"""Writes that outlast a power cut: files of tensors, and the names in a folder."""

from __future__ import annotations

import os
import stat
from typing import Dict, Mapping

import safetensors.torch
from torch import Tensor

__all__ = ["sync_folder", "write_tensors"]


def write_tensors(path: str, tensors: Mapping[str, Tensor], metadata: Dict[str, str]) -> None:
    """Write a new file of safetensors, to the disk itself.

    Args:
        path: of the file, which must not exist.
        tensors: by name; dense, contiguous, on the host, no two in the same memory.
        metadata: of the file.

    Raises:
        OSError: the disk refuses.
        KeyError, ValueError, safetensors.SafetensorError: the installed safetensors does.
    """
    with open(path, "xb") as file:
        rights = os.fstat(file.fileno()).st_mode
    safetensors.torch.save_file(dict(tensors), path, metadata=metadata)
    with open(path, "rb+") as file:
        os.fsync(file.fileno())
    # Some versions of safetensors make a file that only its owner can read.
    os.chmod(path, stat.S_IMODE(rights))


def sync_folder(path: str) -> None:
    """Make the names in a folder outlast a power cut, where folders can be synchronised."""
    if hasattr(os, "O_DIRECTORY"):
        handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
