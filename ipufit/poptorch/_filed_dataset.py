"""A dataset on its way to another process through a file."""

from __future__ import annotations

import os
import pickle
import tempfile
from multiprocessing import reduction
from typing import Any, Dict

__all__ = ["FiledDataset"]


class FiledDataset:
    """A dataset in a file that has no name: only this process and the one it starts can open it.

    Its tensors are in it as bytes, where multiprocessing would move them to shared memory, of which
    there may be too little.
    """

    def __init__(self, dataset: Any) -> None:
        self._file = tempfile.TemporaryFile()  # noqa: SIM115  # open until it has been read
        pickle.dump(dataset, self._file, protocol=4)
        self._file.flush()

    def close(self) -> None:
        """Let go of the file, which the other process holds."""
        self._file.close()

    def __getstate__(self) -> Dict[str, Any]:
        return {"_handle": reduction.DupFd(self._file.fileno())}

    def __setstate__(self, state: Dict[str, Any]) -> None:
        self._handle = state["_handle"]

    def open(self) -> Any:
        """The dataset, in the other process."""
        with os.fdopen(self._handle.detach(), "rb") as file:
            file.seek(0)
            return pickle.load(file)
