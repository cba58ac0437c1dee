"""The list of a checkpoint's files, which is written last."""

from __future__ import annotations

import re
from typing import Any, Dict, Mapping, NamedTuple, Tuple

from ipufit.checkpoint.json_io import dump, parse
from ipufit.utils.codec import UnfitError, shown

__all__ = [
    "MANIFEST",
    "STATE",
    "SUFFIX",
    "ManifestEntry",
    "check_group",
    "read_manifest",
    "write_manifest",
]

MANIFEST = "manifest.json"
STATE = "state.json"
SUFFIX = ".safetensors"
MOST_BYTES = 1 << 20
_MOST_FILES = 64
_FORMAT = "ipufit.Checkpoint"
# Another minor number: older files have less. Another major number: they can't be read.
VERSION = (1, 2)
_GROUP = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9_.-]{0,99}")
_SHA256 = re.compile(r"[0-9a-f]{64}")


class ManifestEntry(NamedTuple):
    """Size and digest that a file must have.

    Attributes:
        size: in bytes.
        sha256: of its content, in hexadecimal digits.
    """

    size: int
    sha256: str


def check_group(group: str) -> None:
    """Raise UnfitError if no file can be named like this."""
    if not _GROUP.fullmatch(group):
        raise UnfitError(
            f"a group of its tensors is called {shown(group)}",
            "Name groups with letters, digits, '_', '.' and '-'.",
        )


def write_manifest(entries: Mapping[str, ManifestEntry]) -> bytes:
    """Return the text of a manifest with the size and digest of each file."""
    files = {name: {"size": entry.size, "sha256": entry.sha256} for name, entry in entries.items()}
    if len(files) > _MOST_FILES:
        raise UnfitError(
            f"it has {len(files)} files, more than {_MOST_FILES}", "Make fewer groups of tensors."
        )
    return dump({"format": _FORMAT, "version": list(VERSION), "files": files}, MOST_BYTES)


def read_manifest(data: bytes) -> Dict[str, ManifestEntry]:
    """The files that it lists, by plain names.

    Raises:
        UnfitError: it is none, of a version that is not read, or lists what can be no file of it.
    """
    content = parse(data)
    if not isinstance(content, dict) or content.get("format") != _FORMAT:
        raise UnfitError("it is no manifest of a checkpoint")
    _check_version(content.get("version"))
    files = content.get("files")
    if set(content) != {"format", "version", "files"} or not isinstance(files, dict):
        raise UnfitError("its parts are not format, version and files")
    if STATE not in files or len(files) > _MOST_FILES:
        raise UnfitError(
            f"it lists {len(files)} files, but must list {STATE} and at most {_MOST_FILES}"
        )
    return {_checked_name(name): _entry(name, parts) for name, parts in files.items()}


def _check_version(version: Any) -> None:
    is_pair = isinstance(version, list) and [type(part) for part in version] == [int, int]
    if not is_pair or version[0] < VERSION[0] or version[1] < 0:
        raise UnfitError("its version is none that ever was")
    if _pair(version) > VERSION:
        came, supported = (".".join(map(str, pair)) for pair in (version, VERSION))
        raise UnfitError(
            f"it was written by a newer ipufit, in version {came} of the format, and this one "
            f"reads up to {supported}",
            "Update ipufit, or read a checkpoint that this one wrote.",
        )


def _pair(version: Any) -> Tuple[int, int]:
    return version[0], version[1]


def _checked_name(name: str) -> str:
    is_group = name.endswith(SUFFIX) and _GROUP.fullmatch(name[: -len(SUFFIX)])
    if name != STATE and not is_group:
        raise UnfitError(f"it lists the file {shown(name)}, which can be none of a checkpoint")
    return name


def _entry(name: str, parts: object) -> ManifestEntry:
    if isinstance(parts, dict) and set(parts) == {"size", "sha256"}:
        size, sha256 = parts["size"], parts["sha256"]
        is_hash = isinstance(sha256, str) and _SHA256.fullmatch(sha256)
        if type(size) is int and size >= 0 and is_hash:
            return ManifestEntry(size, sha256)
    raise UnfitError(f"it does not give a size and a hash for {shown(name)}")
