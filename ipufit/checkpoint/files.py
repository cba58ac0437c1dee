"""The files of a checkpoint: JSON, tensors and the manifest that lists them, written and read."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import math
import os
import re
import shutil
import stat
from typing import IO, Any, Dict, Iterator, List, Mapping, NamedTuple, NoReturn, Tuple, TypeVar

import safetensors.torch
import torch
from torch import Tensor

from ipufit.errors import CheckpointError
from ipufit.utils import codec, files
from ipufit.utils.fault_injection import check_disk
from ipufit.utils.state import as_pairs

T = TypeVar("T")
# A JSON object whose members are checked where they are used.
Document = Dict[str, Any]

# A level of an encoded value takes up to three: {"$dict": [[key, value]]}.
_LEVELS = 3 * codec.MAX_DEPTH + 50
_LENGTH = 30  # of a number: a float has up to 24; more digits take quadratic time to read
_TOKENS = re.compile(rb'\\.|["\[\]{}]', re.DOTALL)


def _dump(document: object, most: int) -> bytes:
    """Return a document as the text of a JSON file.

    Raises:
        UnfitError: it is not plain JSON, or could not be read back.
    """
    try:
        data = json.dumps(document, allow_nan=False, separators=(",", ":")).encode("ascii")
    except (TypeError, ValueError, RecursionError) as error:
        raise codec.UnfitError(f"it is not JSON: {codec.reason_of(error)}") from error
    if len(data) > most:
        raise codec.UnfitError(f"it has {len(data)} bytes, more than {most}")
    # json writes a tuple as a list, and a key 1 as "1".
    if _parse(data) != document:
        raise codec.UnfitError("it is not plain JSON: reading it back gives something else")
    return data


def _parse(data: bytes) -> object:
    """The document in a file of bounded size.

    Raises:
        UnfitError: it is no JSON, nested deeper than an encoded value, names a key twice, or has a
            number that is not finite or too long.
    """
    _check_depth(data)
    try:
        return json.loads(
            data.decode("utf-8"),
            object_pairs_hook=_unique,
            parse_constant=_no_constant,
            parse_float=_finite,
            parse_int=lambda text: int(_bounded(text)),
        )
    except ValueError as error:
        raise codec.UnfitError(f"it is not JSON: {codec.reason_of(error)}") from error


def _check_depth(data: bytes) -> None:
    """The parser recurses, on a stack whose size is not known."""
    depth, in_text = 0, False
    for match in _TOKENS.finditer(data):
        token = match.group()
        if token == b'"':
            in_text = not in_text
        elif not in_text and token in b"[{":
            depth += 1
            if depth > _LEVELS:
                raise codec.UnfitError(f"it is nested deeper than {_LEVELS} levels")
        elif not in_text and token in b"]}":
            depth -= 1


def _unique(pairs: List[Tuple[str, T]]) -> Dict[str, T]:
    members: Dict[str, T] = {}
    for name, value in pairs:
        if name in members:
            raise ValueError(f"the key {codec.shown(name)} appears twice")
        members[name] = value
    return members


def _no_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is not a number")


def _finite(text: str) -> float:
    value = float(_bounded(text))
    if not math.isfinite(value):
        raise ValueError(f"the number {codec.shown(text)} is too large")
    return value


def _bounded(text: str) -> str:
    if len(text) > _LENGTH:
        raise ValueError(f"the number {codec.shown(text)} has more than {_LENGTH} characters")
    return text


MANIFEST = "manifest.json"
_STATE = "state.json"
_SUFFIX = ".safetensors"
_MOST_BYTES = 1 << 20
_MOST_FILES = 64
_FORMAT = "ipufit.Checkpoint"
# Another minor number: older files have less. Another major number: they can't be read.
VERSION = (1, 2)
_GROUP = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9_.-]{0,99}")
_SHA256 = re.compile(r"[0-9a-f]{64}")


class _ManifestEntry(NamedTuple):
    """Size and digest that a file must have.

    Attributes:
        size: in bytes.
        sha256: of its content, in hexadecimal digits.
    """

    size: int
    sha256: str


def _write_manifest(entries: Mapping[str, _ManifestEntry]) -> bytes:
    """Return the text of a manifest with the size and digest of each file."""
    files = {name: {"size": entry.size, "sha256": entry.sha256} for name, entry in entries.items()}
    if len(files) > _MOST_FILES:
        raise codec.UnfitError(
            f"it has {len(files)} files, more than {_MOST_FILES}", "Make fewer groups of tensors."
        )
    return _dump({"format": _FORMAT, "version": list(VERSION), "files": files}, _MOST_BYTES)


def _read_manifest(data: bytes) -> Dict[str, _ManifestEntry]:
    """The files that it lists, by plain names.

    Raises:
        UnfitError: it is none, of a version that is not read, or lists what can be no file of it.
    """
    content = _parse(data)
    if not isinstance(content, dict) or content.get("format") != _FORMAT:
        raise codec.UnfitError("it is not the manifest of a checkpoint")
    _check_version(content.get("version"))
    files = content.get("files")
    if set(content) != {"format", "version", "files"} or not isinstance(files, dict):
        raise codec.UnfitError("its parts are not format, version and files")
    if _STATE not in files or len(files) > _MOST_FILES:
        raise codec.UnfitError(
            f"it lists {len(files)} files, but must list {_STATE} and at most {_MOST_FILES}"
        )
    return {_check_name(name): _entry(name, parts) for name, parts in files.items()}


def _check_version(version: object) -> None:
    is_pair = isinstance(version, list) and [type(part) for part in version] == [int, int]
    if not isinstance(version, list) or not is_pair or version[0] < VERSION[0] or version[1] < 0:
        raise codec.UnfitError("its version does not exist")
    if tuple(version) > VERSION:
        came, supported = (".".join(map(str, pair)) for pair in (version, VERSION))
        raise codec.UnfitError(
            f"it was written by a newer ipufit, in version {came} of the format; this ipufit "
            f"reads versions up to {supported}",
            "Update ipufit, or read a checkpoint that this version wrote.",
        )


def _check_name(name: str) -> str:
    is_group = name.endswith(_SUFFIX) and _GROUP.fullmatch(name[: -len(_SUFFIX)])
    if name != _STATE and not is_group:
        raise codec.UnfitError(
            f"it lists the file {codec.shown(name)}, which can't belong to a checkpoint"
        )
    return name


def _entry(name: str, parts: object) -> _ManifestEntry:
    if isinstance(parts, dict) and set(parts) == {"size", "sha256"}:
        size, sha256 = parts["size"], parts["sha256"]
        is_hash = isinstance(sha256, str) and _SHA256.fullmatch(sha256)
        if type(size) is int and size >= 0 and is_hash:
            return _ManifestEntry(size, sha256)
    raise codec.UnfitError(f"it does not give a size and a hash for {codec.shown(name)}")


_CHUNK = 1 << 20
_PAIRS = "~complex"  # ends the name of a complex tensor, of which a file holds the real numbers
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
            pairs = {
                f"{name}{_PAIRS}" if tensor.is_complex() else name: as_pairs(tensor)
                for name, tensor in tensors.items()
            }
            files.write_tensors(path, codec.apart(pairs), {"format": "pt"})
        except ValueError as error:
            raise codec.UnfitError(str(error), "Convert tensors to another dtype.") from error

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
            raise codec.UnfitError("the checkpoint is not a folder, or is a link to one")

    def size_of(self, path: str) -> int:
        """Return the size of a regular file in bytes."""
        return _size(os.lstat(path))

    def read_bytes(self, path: str, most: int) -> bytes:
        """A regular file of at most so many bytes."""
        with _opened(path) as file:
            data = file.read(most + 1)
        if len(data) > most:
            raise codec.UnfitError(f"it has more than {most} bytes")
        return data

    def sha256_of(self, path: str, size: int) -> str:
        """Hash of a regular file of so many bytes, of which only a small part is in memory."""
        digest, left = hashlib.sha256(), size
        with _opened(path) as file:
            while left:
                chunk = file.read(min(left, _CHUNK))
                if not chunk:
                    raise codec.UnfitError("it shrank while it was read")
                digest.update(chunk)
                left -= len(chunk)
        return digest.hexdigest()

    def read_tensors(self, path: str) -> Dict[str, Tensor]:
        """The tensors of a file, which is mapped: their values are read when they are used."""
        try:
            tensors = safetensors.torch.load_file(path)
            # Copied: complex numbers want another alignment than a file gives them.
            return {
                name.replace(_PAIRS, ""): torch.view_as_complex(each.clone())
                if _PAIRS in name
                else each
                for name, each in tensors.items()
            }
        except Exception as error:
            # Whatever a stranger's file makes safetensors and torch say.
            raise codec.UnfitError(f"safetensors says {codec.reason_of(error)}") from error


def _opened(path: str) -> IO[bytes]:
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
        raise codec.UnfitError("it is not a regular file; it may be a link")
    return status.st_size


_MOST_STATE_BYTES = 64 << 20


@dataclasses.dataclass
class Contents:
    """Contents of a checkpoint that was read.

    Attributes:
        document: of its state.json.
        tensors: by name, by group. They are views of the files, which stay on the disk until the
            tensors are gone.
    """

    document: Document
    tensors: Dict[str, Dict[str, Tensor]]


def write_contents(
    disk: Files, path: str, document: Document, tensors: Mapping[str, Mapping[str, Tensor]]
) -> None:
    """Write a checkpoint into this folder, which is empty; the manifest last.

    Args:
        disk: writes.
        path: of the folder.
        document: plain JSON.
        tensors: by name, by group.

    Raises:
        UnfitError, OSError: it can't be written.
    """
    for group, members in tensors.items():
        _check_tensors(group, members)
    try:
        data = _dump(document, _MOST_STATE_BYTES)
    except codec.UnfitError as error:
        raise codec.UnfitError(
            f"its document is refused: {error.reason}", "Make it with ipufit.checkpoint.encode."
        ) from error
    disk.write(os.path.join(path, _STATE), data)
    entries = {_STATE: _ManifestEntry(len(data), hashlib.sha256(data).hexdigest())}
    for group, members in tensors.items():
        file = os.path.join(path, group + _SUFFIX)
        disk.write_tensors(file, members)
        size = disk.size_of(file)
        entries[group + _SUFFIX] = _ManifestEntry(size, disk.sha256_of(file, size))
    disk.write(os.path.join(path, MANIFEST), _write_manifest(entries))
    disk.sync_folder(path)


def _check_tensors(group: str, members: Mapping[str, Tensor]) -> None:
    if not _GROUP.fullmatch(group):
        raise codec.UnfitError(
            f"a group of its tensors is called {codec.shown(group)}",
            "Name groups with letters, digits, '_', '.' and '-'.",
        )
    for name, tensor in members.items():
        fault = codec.why_not_stored(tensor)
        if fault is not None:
            raise codec.UnfitError(
                f"{codec.shown(name)} of {group!r} is {fault}",
                "Convert it to a dense tensor with values.",
            )


def read_contents(disk: Files, path: str) -> Contents:
    """Read the checkpoint in this folder.

    Raises:
        CheckpointError: a file of it is missing, damaged, or not what ipufit writes.
    """
    with _named(path, MANIFEST):
        disk.check_folder(path)
        entries = _read_manifest(disk.read_bytes(os.path.join(path, MANIFEST), _MOST_BYTES))
        _check_listed(disk.names(path), entries)
    for name, entry in entries.items():
        with _named(path, name):
            size = disk.size_of(os.path.join(path, name))
            if size != entry.size:
                raise codec.UnfitError(f"it has {size} bytes, but {MANIFEST} says {entry.size}")
    with _named(path, _STATE):
        if entries[_STATE].size > _MOST_STATE_BYTES:
            raise codec.UnfitError(f"it has more than {_MOST_STATE_BYTES} bytes")
        data = disk.read_bytes(os.path.join(path, _STATE), entries[_STATE].size)
        _check_hash(hashlib.sha256(data).hexdigest(), entries[_STATE])
    groups = [name for name in entries if name != _STATE]
    for name in groups:
        with _named(path, name):
            sha256 = disk.sha256_of(os.path.join(path, name), entries[name].size)
            _check_hash(sha256, entries[name])
    with _named(path, _STATE):
        document = _parse(data)
        if not isinstance(document, dict):
            raise codec.UnfitError("it is not a JSON object")
    tensors = {}
    for name in groups:
        with _named(path, name):
            tensors[name[: -len(_SUFFIX)]] = disk.read_tensors(os.path.join(path, name))
    return Contents(document, tensors)


@contextlib.contextmanager
def _named(path: str, name: str) -> Iterator[None]:
    """Name the file in errors that are raised inside."""
    try:
        yield
    except (OSError, codec.UnfitError) as error:
        reason = "it is missing" if isinstance(error, FileNotFoundError) else codec.reason_of(error)
        usual = "Use another checkpoint, or restore this one from a copy."
        raise CheckpointError(
            f"{name!r} of the checkpoint {path!r} must be as ipufit wrote it, but {reason}. "
            f"{codec.advice_of(error) or usual}"
        ) from error


def _check_listed(names: List[str], entries: Mapping[str, _ManifestEntry]) -> None:
    """A file of state that is not listed was not checked; a note or a hidden file does no harm."""
    for name in sorted(names):
        is_state = name.endswith((_SUFFIX, ".json")) and not name.startswith(".")
        if is_state and name != MANIFEST and name not in entries:
            raise codec.UnfitError(f"it does not list {codec.shown(name)}, which is in the folder")


def _check_hash(sha256: str, entry: _ManifestEntry) -> None:
    if sha256 != entry.sha256:
        raise codec.UnfitError(f"its content has changed since {MANIFEST} was written")
