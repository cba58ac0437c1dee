"""Files of configurations: JSON that is bounded, read as text and never run."""

from __future__ import annotations

import json
import os
import re
import tempfile
from typing import Any, Dict, List, Tuple, Union

from ipufit.engines.ipu.ipu_config.hub import download_file
from ipufit.errors import ConfigurationError

__all__ = ["FILE_NAME", "find", "parse", "read_file", "write_file"]

Path = Union[str, "os.PathLike[str]"]

FILE_NAME = "ipu_config.json"
# Real ones have about a kilobyte.
_LARGEST = 1 << 20
# A name on the Hub: its owner and the repository, or the repository alone.
_ON_HUB = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


def find(source: Path, subfolder: str, options: Dict[str, Any]) -> str:
    """Find the file of a configuration.

    Args:
        source: a file, a folder with an ``ipu_config.json``, or a repository on the Hub.
        subfolder: in which the file is, "" for none.
        options: what else huggingface_hub is told.

    Raises:
        ConfigurationError: there is none, or the Hub can't be asked.
    """
    path = os.fspath(source)
    if not isinstance(path, str):
        raise ConfigurationError(
            f"a configuration is found by a path or a name on the Hub as a string, got {path!r}. "
            "Decode it first."
        )
    if os.path.isfile(path):
        return path
    if os.path.isdir(path):
        path = os.path.join(path, subfolder) if subfolder else path
        file = os.path.join(path, FILE_NAME)
        if os.path.isfile(file):
            return file
        raise ConfigurationError(
            f"a folder of a configuration must hold a file {FILE_NAME}, but {path!r} has none. "
            "Check the path, or pass the file itself."
        )
    is_path = not isinstance(source, str) or path.endswith(".json") or os.path.exists(path)
    if is_path or not _ON_HUB.fullmatch(path):
        raise ConfigurationError(
            f"a configuration must be a file, a folder with a file {FILE_NAME}, or the name of a "
            f"repository on the Hugging Face Hub, but there is nothing at {path!r}. Check the path."
        )
    return download_file(
        path, FILE_NAME, {"subfolder": subfolder, **options} if subfolder else options
    )


def read_file(path: str) -> Dict[str, Any]:
    """Read the JSON object in a file.

    Raises:
        ConfigurationError: it can't be read, is too large, or is something else.
    """
    try:
        with open(path, "rb") as file:
            data = file.read(_LARGEST + 1)
        return parse(data, repr(path))
    except OSError as error:
        raise ConfigurationError(
            f"a configuration is read from a file, but {error}. Check the path."
        ) from error


def parse(data: Union[str, bytes], where: str) -> Dict[str, Any]:
    """Parse the JSON object in a text.

    Args:
        data: JSON in UTF-8.
        where: it came from, for the message.

    Raises:
        ConfigurationError: it is too large, or something else.
    """
    if len(data) > _LARGEST:
        raise ConfigurationError(
            f"a configuration has at most {_LARGEST} bytes, but {where} has more. Check that it is "
            f"an {FILE_NAME}."
        )
    doubled: List[str] = []
    try:
        text = data if isinstance(data, str) else data.decode("utf-8")
        values = json.loads(
            text,
            object_pairs_hook=lambda pairs: _object(pairs, doubled),
            parse_constant=_refuse_constant,
        )
    except (ValueError, RecursionError) as error:
        raise ConfigurationError(
            f"a configuration is a JSON object, but {where} is none ({type(error).__name__}: "
            f"{error}). Check that it is an {FILE_NAME}."
        ) from error
    if not isinstance(values, dict):
        raise ConfigurationError(
            f"a configuration is a JSON object, but {where} holds a {type(values).__name__}. Check "
            f"that it is an {FILE_NAME}."
        )
    if doubled:
        names = ", ".join(map(repr, dict.fromkeys(doubled)))
        raise ConfigurationError(
            f"a configuration says everything once, but {where} has {names} several times. Leave "
            "one of each."
        )
    return values


def _object(pairs: List[Tuple[str, Any]], doubled: List[str]) -> Dict[str, Any]:
    values: Dict[str, Any] = {}
    for name, value in pairs:
        if name in values:
            doubled.append(name)
        values[name] = value
    return values


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is no number in JSON")


def write_file(text: str, path: str) -> None:
    """Write a text; the file appears under its name only when it is complete.

    Raises:
        ConfigurationError: it can't be written.
    """
    folder, name = os.path.split(path)
    part = ""
    try:
        handle, part = tempfile.mkstemp(prefix=f".{name}.", suffix=".part", dir=folder or ".")
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        # What mkstemp makes is for its owner alone.
        mask = os.umask(0)
        os.umask(mask)
        os.chmod(part, 0o666 & ~mask)
        os.replace(part, path)
    except OSError as error:
        if part and os.path.exists(part):
            os.unlink(part)
        raise ConfigurationError(
            f"a configuration is written to a file in a folder that exists, but {error}. Choose "
            "another path."
        ) from error
