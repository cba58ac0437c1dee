"""Cache of compiled programs in a folder, shared by processes."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
from typing import Any, Dict, Iterator, Mapping, Optional

import torch

from ipufit.poptorch._codec import Encoder
from ipufit.poptorch._errors import Error, error
from ipufit.poptorch._files import FORMAT_VERSION, read_file, write_file
from ipufit.poptorch._graph_files import writes_graphs

__all__ = ["ExecutableCache"]

_logger = logging.getLogger("poptorch::python")


class ExecutableCache:
    """A folder of compiled programs.

    Args:
        folder: of ``Options.enableExecutableCaching`` or POPTORCH_CACHE_DIR; made if missing.
    Raises:
        Error: it can't be written to.
    """

    def __init__(self, folder: str) -> None:
        try:
            os.makedirs(folder, exist_ok=True)
        except OSError as reason:
            raise error(
                f"the folder of the executable cache, {folder}, can't be made: "
                f"{reason.strerror}. Choose another one in enableExecutableCaching()."
            ) from reason
        if not os.access(folder, os.W_OK):
            raise error(
                f"Cache folder {folder} is not writable. Choose another one in "
                "enableExecutableCaching()."
            )
        self._folder = folder

    def key(self, values: Mapping[str, Any]) -> str:
        """Return a hash of what a compilation depends on: the recorded program and its settings.

        Args:
            values: as for ``write_file``; tensors count with their values.
        """
        encoder = Encoder()
        writes_graphs(encoder)
        content = {name: encoder.encode(value) for name, value in values.items()}
        header = [FORMAT_VERSION, torch.__version__, content]
        digest = hashlib.sha256(json.dumps(header, sort_keys=True).encode())
        for name, tensor in encoder.tensors.items():
            digest.update(f"{name}{tensor.dtype}{list(tensor.shape)}".encode())
            digest.update(tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()

    def find(self, key: str) -> Optional[Dict[str, Any]]:
        """Return the values under a key, or None; a damaged file counts as none, with a warning."""
        path = self._path(key)
        if not os.path.exists(path):
            return None
        try:
            values = read_file(path)
        except Error as reason:
            _logger.warning("The model is compiled again: %s", reason.message)
            return None
        _logger.debug("Executable found in the cache: %s", path)
        return values

    def keep(self, key: str, values: Mapping[str, Any]) -> None:
        """Store a compiled program under a key."""
        write_file(self._path(key), values)

    def _path(self, key: str) -> str:
        return os.path.join(self._folder, f"{key}.poptorch")

    @contextlib.contextmanager
    def turn(self, key: str) -> Iterator[None]:
        """Lock a key, so that one process compiles and the next ones find its program.

        On systems without file locks each process compiles for itself.
        """
        try:
            import fcntl
        except ImportError:
            yield
            return
        with open(os.path.join(self._folder, f"{key}.lock"), "a") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            _logger.debug("Executable cache file locked by process %d", os.getpid())
            try:
                yield
            finally:
                fcntl.flock(file, fcntl.LOCK_UN)
                _logger.debug("Process %d released the cache lock", os.getpid())
