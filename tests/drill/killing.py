"""The drill: processes that train, and one that kills them."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import importlib
import os
import random
import signal
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any, Optional

import torch
from torch.utils.data import DataLoader, TensorDataset

import ipufit
from ipufit.callbacks import EarlyStopping, LambdaCallback, ReduceLROnPlateau
from ipufit.checkpoint.store import Store
from tests.nets import CNN, data

__all__ = ["Drill", "Found"]

_RESULT, _BEGUN, _IMPORTED = "result", "begun", "imported"


@dataclasses.dataclass
class Found:
    """What a drill has seen.

    Attributes:
        kills: of processes.
        runs: that came to their end.
        same: of these, those that ended like a run that was never killed.
        saving: kills while a checkpoint was being written.
        unbegun: kills before there was any.
    """

    kills: int = 0
    runs: int = 0
    same: int = 0
    saving: int = 0
    unbegun: int = 0


def train(folder: Path, checkpoint: Any) -> str:
    """A run with all that has a memory; a digest of its end."""
    torch.manual_seed(0)
    x, y = data(23)
    model = ipufit.Model(CNN().double(), engine="embedded")
    model.compile("adam", "cross_entropy", metrics=["accuracy"], ema=ipufit.EMA())
    history = model.fit(
        DataLoader(TensorDataset(x, y), batch_size=2, shuffle=True),
        epochs=4,
        seed=3,
        verbose=0,
        device_iterations=2,
        validation_data=(x[:9], y[:9]),
        callbacks=[
            LambdaCallback(on_train_begin=lambda logs: (folder / _BEGUN).touch()),
            ReduceLROnPlateau("val_loss", patience=1, min_delta=0.5),
            EarlyStopping("val_loss", patience=3, restore_best_weights=True),
        ],
        checkpoint=checkpoint,
    )
    digest = hashlib.sha256()
    for values in model.optimizer.state.values():
        for value in values.values():
            digest.update(torch.as_tensor(value).numpy().tobytes())
    for value in model.module.state_dict().values():
        digest.update(value.numpy().tobytes())
    digest.update(repr((history.history, history.epoch, history.updates)).encode())
    return digest.hexdigest()


class Drill:
    """Kills processes at moments that a seed decides.

    Args:
        seed: of the moments.
    """

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        # Threads do not survive a fork, so that none may have been started: torch with CUDA has
        # some from its first backward pass on. So nothing is trained here.
        torch.set_num_threads(1)
        with tempfile.TemporaryDirectory() as folder:
            assert os.waitpid(_started(Path(folder), None), 0)[1] == 0
            self._expected = (Path(folder) / _RESULT).read_text()
            # All others find everything imported.
            for name in (Path(folder) / _IMPORTED).read_text().split():
                with contextlib.suppress(ImportError):
                    importlib.import_module(name)
            checkpoint = ipufit.Checkpoint(Path(folder) / "run", every_updates=2, resume="auto")
            start = time.perf_counter()
            process = _started(Path(folder), checkpoint)
            assert os.waitpid(process, 0)[1] == 0
            self._seconds = time.perf_counter() - start
            assert (Path(folder) / _RESULT).read_text() == self._expected

    def run(self, kills: int) -> Found:
        """Until so many processes were killed, and the last run has come to its end."""
        found = Found()
        while found.kills < kills:
            with tempfile.TemporaryDirectory() as folder:
                self._one_run(Path(folder), kills, found)
        return found

    def _one_run(self, folder: Path, kills: int, found: Found) -> None:
        checkpoint = ipufit.Checkpoint(folder / "run", every_updates=2, resume="auto")
        while True:
            process = _started(folder, checkpoint)
            ended = None
            if found.kills < kills:
                ended = _wait_for(folder / _BEGUN, process)
                if ended is None:
                    time.sleep(self._random.uniform(0, 0.5 * self._seconds))
                    os.kill(process, signal.SIGKILL)
            status = os.waitpid(process, 0)[1] if ended is None else ended
            if not os.WIFSIGNALED(status):
                assert os.WEXITSTATUS(status) == 0, status
                found.runs += 1
                found.same += (folder / _RESULT).read_text() == self._expected
                return
            found.kills += 1
            entries = os.listdir(folder / "run") if (folder / "run").exists() else []
            found.saving += any(name.endswith(".part") for name in entries)
            newest, faults = Store(folder / "run").newest()
            assert not faults, faults
            found.unbegun += newest is None


def _wait_for(path: Path, process: int) -> Optional[int]:
    """Wait for a file of a process; its status where it has ended, which a busy machine hides."""
    while not path.exists():
        ended, status = os.waitpid(process, os.WNOHANG)
        if ended:
            assert path.exists(), "training ended before it had begun"
            return status
        time.sleep(0.001)
    return None


def _started(folder: Path, checkpoint: Any) -> int:
    """A process that trains, and leaves its digest in the folder."""
    with contextlib.suppress(FileNotFoundError):
        (folder / _BEGUN).unlink()
    process = os.fork()
    if process:
        return process
    code = 1
    try:
        digest = train(folder, checkpoint)
        names = [name for name in sys.modules if name.partition(".")[0] in ("ipufit", "torch")]
        (folder / _IMPORTED).write_text(" ".join(names))
        part = folder / f"{_RESULT}.part"
        part.write_text(digest)
        os.replace(part, folder / _RESULT)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)
