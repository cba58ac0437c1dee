"""One file of a checkpoint, replaced by any bytes: a checkpoint, or an error of ours."""

from __future__ import annotations

import hashlib
import json
import tempfile
from pathlib import Path
from typing import Dict, List

import torch
from torch import nn

import ipufit
from ipufit.checkpoint.store import Store
from ipufit.checkpoint.training_state import RestoredState
from ipufit.errors import CheckpointError

__all__ = ["FILES", "Reader"]

FILES = ("manifest.json", "state.json", "state.safetensors", "weights.safetensors")


class Reader:
    """Reads a checkpoint of which one file is what somebody wants it to be.

    Args:
        file: which.
    """

    def __init__(self, file: str) -> None:
        self._opened = tempfile.TemporaryDirectory()
        self._file = file
        self._folder = Path(self._opened.name) / "run"
        self._train()
        self._name = Store(self._folder).names()[-1]
        self._place = self._folder / self._name
        self.whole = (self._place / file).read_bytes()

    def _train(self) -> None:
        x, y = torch.randn(8, 2), torch.randint(2, (8,))
        model = ipufit.Model(nn.Linear(2, 2), engine="embedded")
        model.compile("adam", "cross_entropy", metrics=["accuracy"])
        checkpoint = ipufit.Checkpoint(self._folder, every_updates=1)
        model.fit(x, y, batch_size=4, seed=0, verbose=0, checkpoint=checkpoint)

    def read(self, content: bytes) -> bool:
        """Whether a checkpoint with this content can be read; the manifest says that it is right.

        Any error but ours is let through.
        """
        (self._place / self._file).write_bytes(content)
        if self._file != "manifest.json":
            self._adjust(content)
        try:
            RestoredState.of(Store(self._folder), self._name)
        except CheckpointError:
            return False
        return True

    def _adjust(self, content: bytes) -> None:
        path = self._place / "manifest.json"
        manifest = json.loads(path.read_text())
        entry = {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}
        manifest["files"][self._file] = entry
        path.write_text(json.dumps(manifest))

    def close(self) -> None:
        """Remove everything."""
        self._opened.cleanup()


def seeds(file: str) -> List[bytes]:
    """What to begin with: a whole file, and some that are nearly one."""
    reader = Reader(file)
    reader.close()
    more: Dict[str, List[bytes]] = {
        "state.json": [b'{"kind": "training", "content": {"$tensor": "a"}}', b"[[[[[[[["],
        "state.safetensors": [b"\x08\x00\x00\x00\x00\x00\x00\x00{}      "],
    }
    return [reader.whole, *more.get(file, [b"{}"])]
