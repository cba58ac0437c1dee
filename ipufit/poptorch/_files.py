"""One file for a compiled model: a zip of JSON and safetensors. Nothing in it is ever executed."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import threading
import zipfile
from typing import Any, Dict, Mapping, Union

import safetensors
import safetensors.torch
import torch

from ipufit.poptorch._codec import Decoder, Encoder, InvalidContent
from ipufit.poptorch._errors import error
from ipufit.poptorch._graph_files import reads_graphs, writes_graphs

__all__ = ["FORMAT_VERSION", "Path", "file_to_write", "invalid", "read_file", "write_file"]

_logger = logging.getLogger("poptorch::python")

Path = Union[str, "os.PathLike[str]"]

FORMAT_VERSION = 1
_FORMAT = "ipufit.poptorch"
_NAME_IN_FOLDER = "model.poptorch"
_METADATA, _TENSORS = "metadata.json", "tensors.safetensors"


def file_to_write(filename: Path) -> str:
    """The path of the file; its folder is made, and a folder gets ``model.poptorch`` inside.

    Raises:
        AssertionError: what should be its folder is a file.
    """
    path = os.fspath(filename)
    folder = os.path.dirname(path)
    if folder and not os.path.isdir(folder):
        if os.path.exists(folder):
            raise AssertionError(
                f"Destination folder {folder} is not a directory. Choose another path for the file."
            )
        os.makedirs(folder, exist_ok=True)
    if os.path.isdir(path):
        inside = os.path.join(path, _NAME_IN_FOLDER)
        _logger.warning("save(): %s is a directory, saving model to %s", path, inside)
        return inside
    return path


def write_file(path: Path, values: Mapping[str, object]) -> None:
    """Write named values; the file appears under its name only when it is complete.

    Args:
        path: as ``file_to_write`` returns it.
        values: tensors, parameters, recorded programs, numbers, texts, None, dtypes, devices,
            poptorch's enums, and lists, tuples, named tuples and dicts of these. A tensor of device
            "meta" stands for its dtype and shape. One object in two places stays one.
    Raises:
        Error: a value of another type.
    """
    encoder = Encoder()
    writes_graphs(encoder)
    content = {name: encoder.encode(value) for name, value in values.items()}
    metadata = {
        "format": _FORMAT,
        "format_version": FORMAT_VERSION,
        "torch": torch.__version__,
        "values": content,
    }
    text = json.dumps(metadata, allow_nan=False)
    target = os.fspath(path)
    # Beside the target: only within one file system a file is put in place at once.
    folder, name = os.path.split(target)
    part = os.path.join(folder, f".{name}.{os.getpid()}.{threading.get_ident()}.part")
    try:
        with zipfile.ZipFile(part, "x", zipfile.ZIP_STORED) as file:
            file.writestr(_METADATA, text)
            file.writestr(_TENSORS, safetensors.torch.save(encoder.tensors))
        os.replace(part, target)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.remove(part)
        raise


def read_file(path: Path) -> Dict[str, Any]:
    """The values of a file.

    No class named in it is imported, and no code of it runs; operators are looked up in torch.

    Raises:
        Error: it is not there, was not written by ``write_file``, or was written by a version that
            says more than this one can read.
    """
    name = os.fspath(path)
    try:
        with open(name, "rb") as raw, zipfile.ZipFile(raw) as file:
            metadata, tensors = _parts(file, os.fstat(raw.fileno()).st_size)
        return _values(metadata, tensors)
    except InvalidContent as reason:
        raise invalid(name, str(reason)) from reason
    except OSError as reason:
        raise invalid(name, f"it can't be read ({reason.strerror or reason})") from reason
    except RecursionError as reason:
        raise invalid(name, "its values are nested too deeply") from reason
    except (zipfile.BadZipFile, EOFError, NotImplementedError, RuntimeError) as reason:
        raise invalid(name, f"it is damaged, or of another kind ({reason})") from reason


def invalid(name: str, reason: str) -> Exception:
    """The error for a file that can't be used, and why."""
    return error(
        f"Invalid file {name}: {reason}. Write it anew with compileAndExport() or save() of this "
        "version; files of PopTorch itself can't be read here."
    )


def _parts(file: zipfile.ZipFile, size: int) -> Any:
    entries = file.infolist()
    if sorted(entry.filename for entry in entries) != [_METADATA, _TENSORS]:
        raise InvalidContent(f"it must hold {_METADATA} and {_TENSORS}, and nothing else")
    for entry in entries:
        # Stored as they are: a small file can't become a large one.
        if entry.compress_type != zipfile.ZIP_STORED or entry.file_size > size:
            raise InvalidContent(f"its {entry.filename} is compressed")
    try:
        metadata = json.loads(file.read(_METADATA).decode())
    except ValueError as reason:
        raise InvalidContent(f"its {_METADATA} is no JSON: {reason}") from reason
    if not isinstance(metadata, dict) or metadata.get("format") != _FORMAT:
        raise InvalidContent(f"its {_METADATA} is not that of a compiled model")
    if metadata.get("format_version") != FORMAT_VERSION:
        raise InvalidContent(
            f"it has format version {metadata.get('format_version')!r}, and this ipufit reads "
            f"{FORMAT_VERSION}; it was written with torch {metadata.get('torch')}"
        )
    try:
        tensors = safetensors.torch.load(file.read(_TENSORS))
    except (safetensors.SafetensorError, KeyError, ValueError) as reason:
        raise InvalidContent(f"its {_TENSORS} can't be read: {reason}") from reason
    return metadata, tensors


def _values(metadata: Dict[str, Any], tensors: Dict[str, torch.Tensor]) -> Dict[str, Any]:
    values = metadata.get("values")
    if not isinstance(values, dict):
        raise InvalidContent("it has no values")
    decoder = Decoder(tensors)
    reads_graphs(decoder)
    return {name: decoder.decode(value) for name, value in values.items()}
