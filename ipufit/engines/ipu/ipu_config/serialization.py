"""A configuration to and from dicts, JSON, files and the Hugging Face Hub."""

from __future__ import annotations

import json
import os
from typing import Any, Dict, List, Mapping, Optional, Type, TypeVar, Union

from ipufit.engines.ipu.ipu_config import files, hub
from ipufit.engines.ipu.ipu_config.hub import Token
from ipufit.engines.ipu.ipu_config.parameters import PARAMETERS, shown
from ipufit.engines.ipu.ipu_config.reading import check_changes, raise_faults
from ipufit.errors import ConfigurationError

__all__ = ["SerializationMixin"]

Path = Union[str, "os.PathLike[str]"]
ConfigT = TypeVar("ConfigT", bound="SerializationMixin")


class SerializationMixin:
    """Reads and writes an IPUConfig as dicts, JSON, files and repositories of the Hub."""

    @classmethod
    def _build(
        cls: Type[ConfigT],
        arguments: Mapping[str, Any],
        pod_type: Optional[str],
        changes: Mapping[str, Any],
        where: str = "",
    ) -> ConfigT:
        raise NotImplementedError

    def _said(self) -> Dict[str, Any]:
        raise NotImplementedError

    def check(self) -> None:
        """Make sure that the values fit together."""
        raise NotImplementedError

    @classmethod
    def from_dict(
        cls: Type[ConfigT],
        config_dict: Mapping[str, Any],
        pod_type: Optional[str] = None,
        **changes: Any,
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
        **changes: Any,
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
        hub_arguments: Dict[str, Any] = {
            "revision": revision,
            "cache_dir": cache_dir,
            "local_files_only": local_files_only,
        }
        if token is not None:
            hub_arguments["token"] = token
        path = files.find(source, subfolder, hub_arguments)
        return cls._build(files.read_file(path), pod_type, changes, repr(path))

    @classmethod
    def from_json_file(cls: Type[ConfigT], path: Path, pod_type: Optional[str] = None) -> ConfigT:
        """A configuration from a file of JSON.

        Args:
            path: of the file.
            pod_type: as for :meth:`from_dict`.

        Raises:
            ConfigurationError: it can't be read; with every fault.
        """
        return cls._build(files.read_file(os.fspath(path)), pod_type, {}, repr(os.fspath(path)))

    @classmethod
    def from_json_string(cls: Type[ConfigT], text: str, pod_type: Optional[str] = None) -> ConfigT:
        """A configuration from JSON.

        Args:
            text: a JSON object.
            pod_type: as for :meth:`from_dict`.

        Raises:
            ConfigurationError: it can't be read; with every fault.
        """
        return cls._build(files.parse(text, "the text"), pod_type, {}, "the text")

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
        files.write_file(self.to_json_string(), os.fspath(path))

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
        for_hub: Dict[str, Any] = {
            "commit_message": commit_message,
            "private": private,
            "token": token,
            "revision": revision,
        }
        hub_names = [name for name, v in {"repo_id": repo_id, **for_hub}.items() if v is not None]
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
        self.to_json_file(os.path.join(folder, files.FILE_NAME))
        if not push_to_hub:
            return None
        name = os.path.basename(os.path.abspath(folder)) if repo_id is None else repo_id
        return self.push_to_hub(name, **for_hub)

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
        return hub.upload_file(
            text, repo_id, files.FILE_NAME, commit_message, private, token, revision
        )
