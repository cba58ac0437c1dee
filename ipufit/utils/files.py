"""Files that appear whole, and writes that outlast a power cut."""

from __future__ import annotations

import contextlib
import os
import re
import stat
import threading
from typing import Dict, Iterator, Mapping

from torch import Tensor


def part_of(name: str) -> str:
    """The hidden name under which this thread makes a file or folder, or takes it away."""
    return f".{name}.{os.getpid()}.{threading.get_ident()}.part"


@contextlib.contextmanager
def replace_file(path: str) -> Iterator[str]:
    """Write a file atomically: a reader sees all of it, or the file before.

    Args:
        path: of the file.

    Yields:
        Path of a new file that the block makes, which takes the place of the other one when the
        block ends; if the block raises, it is removed.
    """
    # Beside the target: only within one file system a file is put in place at once.
    folder, name = os.path.split(path)
    part = os.path.join(folder, part_of(name))
    try:
        yield part
        os.replace(part, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.remove(part)
        raise


def write_text(path: str, text: str) -> None:
    """Write a text file atomically: a reader sees all of it, or the file before."""
    with replace_file(path) as part, open(part, "w", encoding="utf-8") as file:
        file.write(text)


def write_tensors(path: str, tensors: Mapping[str, Tensor], metadata: Dict[str, str]) -> None:
    """Write a new file of safetensors, to the disk itself.

    Args:
        path: of the file, which must not exist.
        tensors: by name; dense, contiguous, on the host, no two in the same memory.
        metadata: of the file.

    Raises:
        OSError: the disk refuses.
        ValueError: the installed safetensors does.
    """
    # Imported here: files of texts do without.
    import safetensors.torch

    with open(path, "xb") as file:
        rights = os.fstat(file.fileno()).st_mode
    try:
        safetensors.torch.save_file(dict(tensors), path, metadata=metadata)
    except (KeyError, ValueError, safetensors.SafetensorError) as error:
        number = re.search(r"(?:os error|code:) (\d+)", str(error))
        if number is not None:
            raise OSError(int(number[1]), os.strerror(int(number[1])), path) from error
        dtypes = ", ".join(sorted({str(tensor.dtype) for tensor in tensors.values()}))
        text = f"the installed safetensors can't store these tensors ({dtypes}): {error}"
        raise ValueError(text) from error
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
