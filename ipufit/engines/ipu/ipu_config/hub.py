"""Configurations on the Hugging Face Hub, through huggingface_hub, which is an extra."""

from __future__ import annotations

import contextlib
import importlib
import os
from typing import Any, Dict, Iterator, Optional, Union

from ipufit.engines.ipu.ipu_config.parameters import shown
from ipufit.errors import ConfigurationError

__all__ = ["Token", "download_file", "upload_file"]

Path = Union[str, "os.PathLike[str]"]
# One of its own, True for that of the login, False for none.
Token = Union[bool, str, None]


def download_file(name: str, file: str, arguments: Dict[str, Any]) -> str:
    """Download a file of a repository and return its path.

    Args:
        name: of the repository.
        file: its name there.
        arguments: what huggingface_hub is told beside that.

    Raises:
        ConfigurationError: it can't be had.
    """
    hub = _library(
        f"there is no file or folder {name!r} here, and to look for it on the Hugging Face Hub "
        "huggingface_hub is needed",
        "pass a path",
    )
    with _told(
        f"the Hugging Face Hub must have a file {file} in {name!r}, but it could not be had",
        "Check the name, or pass a path.",
    ):
        return str(hub.hf_hub_download(name, file, **arguments))


def upload_file(
    text: str,
    name: str,
    file: str,
    commit_message: Optional[str],
    private: Optional[bool],
    token: Token,
    revision: Optional[str],
) -> str:
    """Upload a file to a repository, which is made if need be; return the URL of the commit.

    Args:
        text: of the file.
        name: of the repository.
        file: its name there.
        commit_message, private, token, revision: as for ``IPUConfig.push_to_hub``.

    Raises:
        ConfigurationError: there is no such name, no library, or the Hub refuses.
    """
    if not isinstance(name, str) or not name:
        raise ConfigurationError(
            f"repo_id must be the name of a repository on the Hugging Face Hub, got {shown(name)}. "
            "Write for example 'someone/some-ipu'."
        )
    hub = _library("push_to_hub needs huggingface_hub", "write a folder with save_pretrained")
    with _told(
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
            path_in_repo=file,
            repo_id=full,
            token=token,
            revision=revision,
            commit_message=commit_message or f"Upload {file}",
        )
        return str(getattr(commit, "commit_url", commit))


def _library(lacking: str, otherwise: str) -> Any:
    try:
        return importlib.import_module("huggingface_hub")
    except ImportError as error:
        raise ConfigurationError(
            f"{lacking}, which is not installed. Install it with pip install ipufit[hub], or "
            f"{otherwise}."
        ) from error


@contextlib.contextmanager
def _told(what: str, cure: str) -> Iterator[None]:
    """Faults of the library in the block, of whatever kind, as one of ipufit's."""
    try:
        yield
    except Exception as error:
        first = str(error).partition("\n")[0].rstrip(".")
        raise ConfigurationError(f"{what}: {type(error).__name__}: {first}. {cure}") from error
