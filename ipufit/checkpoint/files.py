"""Disk operations of a store, each a method, so that a test can make it fail."""

from __future__ import annotations

import hashlib
import os
import shutil
import stat
from typing import BinaryIO, Dict, List, Mapping

import safetensors
import safetensors.torch
from torch import Tensor

from ipufit.utils import files
from ipufit.utils.codec import UnfitError, apart, reason_of
from ipufit.utils.fault_injection import check_disk

__all__ = ["Files"]

_CHUNK = 1 << 20
# Not through a link that was put in the place of a file, and without waiting for a pipe's writer.
_READING = (
    os.O_RDONLY
    | getattr(os, "O_NOFOLLOW", 0)
    | getattr(os, "O_NONBLOCK", 0)
    | getattr(os, "O_BINARY", 0)
)


class Files:
    """The operations on files and folders that checkpoints are made of.

    Each raises OSError where the disk refuses, and UnfitError where a file is not what it must be,
    or tensors are of a kind that no file takes.
    """

    def make_folder(self, path: str) -> None:
        """Make a folder that is new."""
        os.mkdir(path)

    def write(self, path: str, data: bytes) -> None:
        """Write a new file, to the disk itself."""
        check_disk(path)
        with open(path, "xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())

    def write_tensors(self, path: str, tensors: Mapping[str, Tensor]) -> None:
        """Write tensors to a new file, to the disk itself."""
        try:
            files.write_tensors(path, apart(tensors), {"format": "pt"})
        except safetensors.SafetensorError as error:
            raise UnfitError(f"safetensors says {reason_of(error)}") from error
        except (KeyError, ValueError) as error:
            dtypes = ", ".join(sorted({str(tensor.dtype) for tensor in tensors.values()}))
            raise UnfitError(
                f"the installed safetensors can't store all of these: {dtypes}",
                "Convert tensors to another dtype.",
            ) from error

    def rename(self, old: str, new: str) -> None:
        """Give a folder another name, at once; ``new`` must not exist."""
        os.rename(old, new)

    def sync_folder(self, path: str) -> None:
        """Make the names in a folder outlast a power cut, where folders can be synchronised."""
        files.sync_folder(path)

    def remove_tree(self, path: str) -> None:
        """Remove a folder with all that is in it; of a link only the link."""
        if os.path.islink(path):
            os.unlink(path)
        else:
            shutil.rmtree(path)

    def names(self, path: str) -> List[str]:
        """Return the names in a folder."""
        return os.listdir(path)

    def check_folder(self, path: str) -> None:
        """Raise UnfitError if this is no folder, but a link to one for example."""
        if not stat.S_ISDIR(os.lstat(path).st_mode):
            raise UnfitError("the checkpoint is no folder, or a link to one")

    def size_of(self, path: str) -> int:
        """Return the size of a regular file in bytes."""
        return _size(os.lstat(path))

    def read_bytes(self, path: str, most: int) -> bytes:
        """A regular file of at most so many bytes."""
        with _opened(path) as file:
            data = file.read(most + 1)
        if len(data) > most:
            raise UnfitError(f"it has more than {most} bytes")
        return data

    def sha256_of(self, path: str, size: int) -> str:
        """Hash of a regular file of so many bytes, of which only a small part is in memory."""
        digest, left = hashlib.sha256(), size
        with _opened(path) as file:
            while left:
                chunk = file.read(min(left, _CHUNK))
                if not chunk:
                    raise UnfitError("it became shorter while it was read")
                digest.update(chunk)
                left -= len(chunk)
        return digest.hexdigest()

    def read_tensors(self, path: str) -> Dict[str, Tensor]:
        """The tensors of a file, which is mapped: their values are read when they are used."""
        try:
            return safetensors.torch.load_file(path)
        except Exception as error:
            # Whatever a stranger's file makes safetensors and torch say.
            raise UnfitError(f"safetensors says {reason_of(error)}") from error


def _opened(path: str) -> BinaryIO:
    _size(os.lstat(path))
    handle = os.open(path, _READING)
    try:
        _size(os.fstat(handle))
        return os.fdopen(handle, "rb")
    except BaseException:
        os.close(handle)
        raise


def _size(status: os.stat_result) -> int:
    if not stat.S_ISREG(status.st_mode):
        raise UnfitError("it is no regular file, but a link for example")
    return status.st_size
