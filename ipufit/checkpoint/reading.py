"""Read a checkpoint: everything is checked before anything of it is used."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import os
from typing import Any, Dict, Iterable, Iterator, Mapping

from torch import Tensor

from ipufit.checkpoint.files import Files
from ipufit.checkpoint.json_io import parse
from ipufit.checkpoint.manifest import (
    MANIFEST,
    MOST_BYTES,
    STATE,
    SUFFIX,
    ManifestEntry,
    read_manifest,
)
from ipufit.errors import CheckpointError
from ipufit.utils.codec import UnfitError, advice_of, reason_of, shown

__all__ = ["MOST_STATE_BYTES", "Contents", "read_contents"]

MOST_STATE_BYTES = 64 << 20


@dataclasses.dataclass
class Contents:
    """Contents of a checkpoint that was read.

    Attributes:
        document: of its state.json.
        tensors: by name, by group. They are views of the files, which stay on the disk until the
            tensors are gone.
    """

    document: Dict[str, Any]
    tensors: Dict[str, Dict[str, Tensor]]


def read_contents(files: Files, path: str) -> Contents:
    """Read the checkpoint in this folder.

    Raises:
        CheckpointError: a file of it is missing, damaged, or not what ipufit writes.
    """
    with _told(path, MANIFEST):
        files.check_folder(path)
        entries = read_manifest(files.read_bytes(os.path.join(path, MANIFEST), MOST_BYTES))
        _check_listed(files.names(path), entries)
    for name, entry in entries.items():
        with _told(path, name):
            size = files.size_of(os.path.join(path, name))
            if size != entry.size:
                raise UnfitError(f"it has {size} bytes, and {MANIFEST} says {entry.size}")
    with _told(path, STATE):
        if entries[STATE].size > MOST_STATE_BYTES:
            raise UnfitError(f"it has more than {MOST_STATE_BYTES} bytes")
        data = files.read_bytes(os.path.join(path, STATE), entries[STATE].size)
        _check_hash(hashlib.sha256(data).hexdigest(), entries[STATE])
    groups = [name for name in entries if name != STATE]
    for name in groups:
        with _told(path, name):
            _check_hash(
                files.sha256_of(os.path.join(path, name), entries[name].size), entries[name]
            )
    with _told(path, STATE):
        document = parse(data)
        if not isinstance(document, dict):
            raise UnfitError("it is no JSON object")
    tensors = {}
    for name in groups:
        with _told(path, name):
            tensors[name[: -len(SUFFIX)]] = files.read_tensors(os.path.join(path, name))
    return Contents(document, tensors)


@contextlib.contextmanager
def _told(path: str, name: str) -> Iterator[None]:
    """Name the file in errors that are raised inside."""
    try:
        yield
    except (OSError, UnfitError) as error:
        reason = "it is missing" if isinstance(error, FileNotFoundError) else reason_of(error)
        usual = "Read another checkpoint, or restore this one from a copy."
        raise CheckpointError(
            f"{name!r} of the checkpoint {path!r} must be as ipufit wrote it, but {reason}. "
            f"{advice_of(error) or usual}"
        ) from error


def _check_listed(names: Iterable[str], entries: Mapping[str, ManifestEntry]) -> None:
    """A file of state that is not listed was not checked; a note or a hidden file does no harm."""
    for name in sorted(names):
        is_state = name.endswith((SUFFIX, ".json")) and not name.startswith(".")
        if is_state and name != MANIFEST and name not in entries:
            raise UnfitError(f"it does not list {shown(name)}, which is in the folder")


def _check_hash(sha256: str, entry: ManifestEntry) -> None:
    if sha256 != entry.sha256:
        raise UnfitError(f"its content has changed since {MANIFEST} was written")
