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
from typing import (
    Any,
    Dict,
    Iterator,
    List,
    Mapping,
    NoReturn,
    Optional,
    Tuple,
    Type,
    TypeVar,
    Union,
)

from ipufit.engines.ipu.ipu_config.parameters import PARAMETERS, shown
from ipufit.engines.ipu.ipu_config.reading import check_changes, raise_faults
from ipufit.errors import ConfigurationError
from ipufit.utils.files import write_text

__all__ = [
    "FILE_NAME",
    "SerializationMixin",
    "Token",
    "download_file",
    "find_file",
    "parse_json",
    "read_file",
    "upload_file",
    "write_file",
]

Path = Union[str, "os.PathLike[str]"]
# One of its own, True for that of the login, False for none.
Token = Union[bool, str, None]


def download_file(name: str, file: str, arguments: Dict[str, object]) -> str:
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
    with _translate_hub_errors(
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
            path_in_repo=file,
            repo_id=full,
            token=token,
            revision=revision,
            commit_message=commit_message or f"Upload {file}",
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
        first = str(error).partition("\n")[0].rstrip(".")
        raise ConfigurationError(f"{what}: {type(error).__name__}: {first}. {cure}") from error


FILE_NAME = "ipu_config.json"
# Real ones have about a kilobyte.
_LARGEST = 1 << 20
# A name on the Hub: its owner and the repository, or the repository alone.
_ON_HUB = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


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


def _object(pairs: List[Tuple[str, object]], doubled: List[str]) -> Dict[str, object]:
    values: Dict[str, object] = {}
    for name, value in pairs:
        if name in values:
            doubled.append(name)
        values[name] = value
    return values


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number in JSON")


def write_file(text: str, path: str) -> None:
    """Write a text; the file appears under its name only when it is complete.

    Raises:
        ConfigurationError: it can't be written.
    """
    try:
        write_text(path, text)
    except OSError as error:
        raise ConfigurationError(
            f"a configuration is written to a file in a folder that exists, but {error}. Choose "
            "another path."
        ) from error


ConfigT = TypeVar("ConfigT", bound="SerializationMixin")


class SerializationMixin:
    """Reads and writes an IPUConfig as dicts, JSON, files and repositories of the Hub."""

    @classmethod
    def _build(
        cls: Type[ConfigT],
        arguments: Mapping[str, object],
        pod_type: Optional[str],
        changes: Mapping[str, object],
        where: str = "",
    ) -> ConfigT:
        raise NotImplementedError

    def _said(self) -> Dict[str, object]:
        raise NotImplementedError

    def check(self) -> None:
        """Make sure that the values fit together."""
        raise NotImplementedError

    @classmethod
    def from_dict(
        cls: Type[ConfigT],
        config_dict: Mapping[str, object],
        pod_type: Optional[str] = None,
        **changes: object,
    ) -> ConfigT:
        """A configuration from values by name, as a file has them.

        Args:
            config_dict: values; also those of earlier releases, and values by pod type.
            pod_type: "pod4", "pod8", "pod16", "pod32", "pod64", "pod128" or "pod256", to choose
                among values by pod type. None takes those named "default" and keeps the others for
                :meth:`for_pod_type`.
            changes: parameters that are set afterwards. What follows from others is not derived
                anew.

        Raises:
            ConfigurationError: with every fault.
        """
        if not isinstance(config_dict, Mapping):
            raise ConfigurationError(
                f"from_dict needs values by name, got {shown(config_dict)}. Pass a dict, or use "
                "from_pretrained for a path."
            )
        return cls._build(config_dict, pod_type, changes)

    @classmethod
    def from_pretrained(
        cls: Type[ConfigT],
        source: Path,
        pod_type: Optional[str] = None,
        *,
        revision: Optional[str] = None,
        cache_dir: Optional[Path] = None,
        local_files_only: bool = False,
        token: Token = None,
        subfolder: str = "",
        **changes: object,
    ) -> ConfigT:
        """A configuration from a file, a folder or the Hugging Face Hub.

        Args:
            source: a file; a folder with an ``ipu_config.json``; or the name of a repository on the
                Hub, for which huggingface_hub is needed (``pip install ipufit[hub]``).
            pod_type: as for :meth:`from_dict`.
            revision: branch, tag or commit on the Hub.
            cache_dir: where huggingface_hub keeps what it downloads.
            local_files_only: take from there alone.
            token: for the Hub; True is that of the login, and so is None where it is needed.
            subfolder: of the folder or the repository, in which the file is.
            changes: as for :meth:`from_dict`.

        Raises:
            ConfigurationError: nothing is found, or it can't be read; with every fault.
        """
        unknown: List[str] = []
        check_changes({n: None for n in changes if n not in PARAMETERS}, unknown)
        # Before anything is downloaded for nothing.
        raise_faults(unknown if not os.path.exists(source) else [])
        hub_arguments: Dict[str, object] = {
            "revision": revision,
            "cache_dir": cache_dir,
            "local_files_only": local_files_only,
        }
        if token is not None:
            hub_arguments["token"] = token
        path = find_file(source, subfolder, hub_arguments)
        return cls._build(read_file(path), pod_type, changes, repr(path))

    @classmethod
    def from_json_file(cls: Type[ConfigT], path: Path, pod_type: Optional[str] = None) -> ConfigT:
        """A configuration from a file of JSON.

        Args:
            path: of the file.
            pod_type: as for :meth:`from_dict`.

        Raises:
            ConfigurationError: it can't be read; with every fault.
        """
        return cls._build(read_file(os.fspath(path)), pod_type, {}, repr(os.fspath(path)))

    @classmethod
    def from_json_string(cls: Type[ConfigT], text: str, pod_type: Optional[str] = None) -> ConfigT:
        """A configuration from JSON.

        Args:
            text: a JSON object.
            pod_type: as for :meth:`from_dict`.

        Raises:
            ConfigurationError: it can't be read; with every fault.
        """
        return cls._build(parse_json(text, "the text"), pod_type, {}, "the text")

    def to_dict(self) -> Dict[str, Any]:
        """All parameters by name, ready for JSON.

        With values by pod type, those that were given: what follows from them is left out.
        """
        copied = json.loads(self.to_json_string())
        assert isinstance(copied, dict)
        return copied

    def to_json_string(self) -> str:
        """Write the values as JSON, sorted by name.

        Raises:
            ConfigurationError: ``parallelize_kwargs`` hold what JSON has not.
        """
        try:
            return json.dumps(self._said(), indent=2, sort_keys=True, allow_nan=False) + "\n"
        except (TypeError, ValueError) as error:
            raise ConfigurationError(
                "IPUConfig.parallelize_kwargs must hold only what JSON has, but "
                f"{str(error).rstrip('.')}. Take that entry out to save the configuration."
            ) from error

    def to_json_file(self, path: Path) -> None:
        """Write it to a file, which appears under its name only when it is complete.

        Args:
            path: of the file; its folder exists.

        Raises:
            ConfigurationError: it can't be written, or the values don't fit together.
        """
        self.check()
        write_file(self.to_json_string(), os.fspath(path))

    def save_pretrained(
        self,
        folder: Path,
        push_to_hub: bool = False,
        repo_id: Optional[str] = None,
        *,
        commit_message: Optional[str] = None,
        private: Optional[bool] = None,
        token: Token = None,
        revision: Optional[str] = None,
    ) -> Optional[str]:
        """Write ``ipu_config.json`` into a folder, which is made if need be.

        ``IPUConfig.from_pretrained(folder)`` reads it, and so does optimum-graphcore, if no value
        is by pod type.

        Args:
            folder: of the file.
            push_to_hub: write it to the Hugging Face Hub too.
            repo_id: of the repository there; None is the name of the folder.
            commit_message: as for :meth:`push_to_hub`.
            private: as for :meth:`push_to_hub`.
            token: as for :meth:`push_to_hub`.
            revision: as for :meth:`push_to_hub`.

        Returns:
            The URL of the commit; None where nothing was written to the Hub.

        Raises:
            ConfigurationError: it can't be written, or the values don't fit together.
        """
        for_hub = {
            "repo_id": repo_id,
            "commit_message": commit_message,
            "private": private,
            "token": token,
            "revision": revision,
        }
        hub_names = [name for name, value in for_hub.items() if value is not None]
        if hub_names and not push_to_hub:
            raise ConfigurationError(
                f"{', '.join(hub_names)} of save_pretrained "
                f"{'are' if len(hub_names) > 1 else 'is'} for the Hugging Face Hub, but "
                "push_to_hub is False. Pass push_to_hub=True, or leave out what is for it."
            )
        try:
            os.makedirs(folder, exist_ok=True)
        except OSError as error:
            raise ConfigurationError(
                f"save_pretrained needs a folder, but {error}. Choose another one, or write a file "
                "with to_json_file."
            ) from error
        self.to_json_file(os.path.join(folder, FILE_NAME))
        if not push_to_hub:
            return None
        name = os.path.basename(os.path.abspath(folder)) if repo_id is None else repo_id
        return self.push_to_hub(
            name,
            commit_message=commit_message,
            private=private,
            token=token,
            revision=revision,
        )

    def push_to_hub(
        self,
        repo_id: str,
        *,
        commit_message: Optional[str] = None,
        private: Optional[bool] = None,
        token: Token = None,
        revision: Optional[str] = None,
    ) -> str:
        """Write ``ipu_config.json`` to a repository on the Hugging Face Hub.

        The repository is made if need be, and so is the branch. It needs huggingface_hub
        (``pip install ipufit[hub]``).

        Args:
            repo_id: of the repository, such as "someone/some-ipu"; without an owner it is yours.
            commit_message: of the commit; None for one that names the file.
            private: whether a repository that is made is private; None is the Hub's default.
            token: for the Hub; None is that of the login.
            revision: branch to write to; None is the main one.

        Returns:
            The URL of the commit.

        Raises:
            ConfigurationError: the values don't fit together, there is no huggingface_hub, or the
                Hub refuses.
        """
        self.check()
        text = self.to_json_string()
        return upload_file(text, repo_id, FILE_NAME, commit_message, private, token, revision)
