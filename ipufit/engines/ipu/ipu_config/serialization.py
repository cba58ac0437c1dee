"""A configuration to and from dicts, bounded JSON files and the Hugging Face Hub.

Files are read as text and never run; the Hub is reached through huggingface_hub, an extra.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import re
from types import ModuleType
from typing import Dict, Iterator, List, NoReturn, Optional, Tuple, Union

from ipufit.errors import ConfigurationError, brief_error, unfit

Path = Union[str, "os.PathLike[str]"]
# One of its own, True for that of the login, False for none.
Token = Union[bool, str, None]


FILE_NAME = "ipu_config.json"
# Real ones have about a kilobyte.
_LARGEST = 1 << 20
# A name on the Hub: its owner and the repository, or the repository alone.
_ON_HUB = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


def _download(name: str, arguments: Dict[str, object]) -> str:
    """Download the file of a repository and return its path.

    Args:
        name: of the repository.
        arguments: what huggingface_hub is told beside that.

    Raises:
        ConfigurationError: it can't be had.
    """
    hub = _library(
        f"there is no file or folder {name!r} here, and to look for it on the Hugging Face Hub "
        "huggingface_hub is needed",
        "pass a path",
    )
    with _translate_hub_errors(
        f"the Hugging Face Hub must have a file {FILE_NAME} in {name!r}, but it could not be "
        "downloaded",
        "Check the name, or pass a path.",
    ):
        return str(hub.hf_hub_download(name, FILE_NAME, **arguments))


def upload(
    text: str,
    name: str,
    commit_message: Optional[str],
    private: Optional[bool],
    token: Token,
    revision: Optional[str],
) -> str:
    """Upload the file to a repository, which is made if need be; return the URL of the commit.

    Args:
        text: of the file.
        name: of the repository.
        commit_message, private, token, revision: as for ``IPUConfig.push_to_hub``.

    Raises:
        ConfigurationError: there is no such name, no library, or the Hub refuses.
    """
    if not isinstance(name, str) or not name:
        needed = "the name of a repository on the Hugging Face Hub"
        raise unfit("repo_id", needed, name, "Write for example 'someone/some-ipu'.")
    hub = _library("push_to_hub needs huggingface_hub", "write a folder with save_pretrained")
    with _translate_hub_errors(
        f"a configuration is written to {name!r} on the Hugging Face Hub, but that failed",
        "Check the name and the token; huggingface_hub.login() keeps one.",
    ):
        # Its default for a repository that is made is for it to say.
        wish = {} if private is None else {"private": private}
        repository = hub.create_repo(name, token=token, exist_ok=True, **wish)
        # It adds the owner where the name has none.
        full = getattr(repository, "repo_id", name)
        if revision is not None and not revision.startswith("refs/"):
            hub.create_branch(full, branch=revision, token=token, exist_ok=True)
        commit = hub.upload_file(
            path_or_fileobj=text.encode("utf-8"),
            path_in_repo=FILE_NAME,
            repo_id=full,
            token=token,
            revision=revision,
            commit_message=commit_message or f"Upload {FILE_NAME}",
        )
        return str(getattr(commit, "commit_url", commit))


def _library(lacking: str, otherwise: str) -> ModuleType:
    try:
        return importlib.import_module("huggingface_hub")
    except ImportError as error:
        raise ConfigurationError(
            f"{lacking}, which is not installed. Install it with pip install ipufit[hub], or "
            f"{otherwise}."
        ) from error


@contextlib.contextmanager
def _translate_hub_errors(what: str, cure: str) -> Iterator[None]:
    """Faults of the library in the block, of whatever kind, as one of ipufit's."""
    try:
        yield
    except Exception as error:
        raise ConfigurationError(f"{what}: {brief_error(error)}. {cure}") from error


def find_file(source: Path, subfolder: str, options: Dict[str, object]) -> str:
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
            f"a configuration is named by a path or a name on the Hub, as a string, got {path!r}. "
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
            f"repository on the Hugging Face Hub, but nothing exists at {path!r}. Check the path."
        )
    return _download(path, {"subfolder": subfolder, **options} if subfolder else options)


def read_file(path: str) -> Dict[str, object]:
    """Read the JSON object in a file.

    Raises:
        ConfigurationError: it can't be read, is too large, or is something else.
    """
    try:
        with open(path, "rb") as file:
            data = file.read(_LARGEST + 1)
        return parse_json(data, repr(path))
    except OSError as error:
        raise ConfigurationError(
            f"a configuration is read from a file, but {error}. Check the path."
        ) from error


def parse_json(data: Union[str, bytes], where: str) -> Dict[str, object]:
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
            f"a configuration is a JSON object, but {where} is not ({type(error).__name__}: "
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
            f"each key of a configuration appears once, but {where} has {names} several times. "
            "Keep one of each."
        )
    return values


def _object(pairs: List[Tuple[str, object]], doubled: List[str]) -> Dict[str, object]:
    values: Dict[str, object] = {}
    for name, value in pairs:
        if name in values:
            doubled.append(name)
        values[name] = value
    return values


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a number in JSON")
