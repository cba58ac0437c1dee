"""What a process has at the beginning of a long run, and what at its end."""

from __future__ import annotations

import dataclasses
import gc
import os
import tempfile
import threading
from pathlib import Path
from typing import Any, List

import torch
from torch import nn

import ipufit
from ipufit.callbacks import Callback, CSVLogger, EarlyStopping, JSONLinesLogger, ModelCheckpoint

__all__ = ["Grown", "many_executions", "many_models"]

# Objects that may stay: of an epoch the entries of a history and what is noted here; of a model
# three for the source of each of its graphs, which torch.fx keeps for tracebacks, some fifteen.
_OF_AN_EPOCH, _OF_A_MODEL = 4, 64
_UPDATES = 100
_TENSORS = (torch.Tensor, nn.Parameter)


@dataclasses.dataclass(frozen=True)
class Has:
    """What this process has.

    Attributes:
        memory: resident, in MiB; for information, as allocators keep what was freed.
        objects: that Python's collector of garbage knows.
        tensors: bytes of memory that tensors lie in.
        files: open ones.
        threads: of Python.
    """

    memory: float
    objects: int
    tensors: int
    files: int
    threads: int

    @staticmethod
    def now() -> Has:
        """At this moment."""
        gc.collect()
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        memory = pages * os.sysconf("SC_PAGE_SIZE") / 2**20
        objects = gc.get_objects()
        storages = {
            storage.data_ptr(): storage.nbytes()
            for storage in (o.untyped_storage() for o in objects if type(o) in _TENSORS)
        }
        files = len(os.listdir("/proc/self/fd"))
        size = sum(storages.values())
        return Has(memory, len(objects), size, files, threading.active_count())


@dataclasses.dataclass(frozen=True)
class Grown:
    """What a part of the run has left behind.

    Attributes:
        what: the part.
        allowed: how many objects more there may be.
        first: when a quarter of it was done; until then all that is made once is made.
        last: at its end.
    """

    what: str
    allowed: int
    first: Has
    last: Has

    @property
    def leaks(self) -> bool:
        """Whether something has grown."""
        return (
            self.last.objects > self.first.objects + self.allowed
            or self.last.tensors > self.first.tensors
            or self.last.files > self.first.files
            or self.last.threads > self.first.threads
        )

    def __str__(self) -> str:
        first, last = self.first, self.last
        return (
            f"{self.what}: memory {first.memory:.0f} to {last.memory:.0f} MiB, objects "
            f"{first.objects} to {last.objects}, tensors {first.tensors} to {last.tensors} bytes, "
            f"files {first.files} to {last.files}, threads {first.threads} to {last.threads}"
            f"{', which leaks' if self.leaks else ''}"
        )


def _net() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 32), nn.Dropout(0.1), nn.BatchNorm1d(32), nn.Linear(32, 4))


def _data(updates: int) -> Any:
    generator = torch.Generator().manual_seed(0)
    return (
        torch.randn(updates * 4, 16, generator=generator),
        torch.randint(4, (updates * 4,), generator=generator),
    )


class _Looks(Callback):
    """Looks at the process after every epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.found: List[Has] = []

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.found.append(Has.now())


def many_executions(executions: int) -> Grown:
    """One fit with callbacks that write, validation and checkpoints."""
    x, y = _data(_UPDATES)
    looks = _Looks()
    with tempfile.TemporaryDirectory() as folder:
        model = ipufit.Model(_net(), engine="embedded")
        model.compile("adam", "cross_entropy", metrics=["accuracy"])
        model.fit(
            x,
            y,
            batch_size=4,
            epochs=max(8, executions // _UPDATES),
            validation_data=(x[:40], y[:40]),
            loading=ipufit.Loading(prefetch=1),
            seed=0,
            verbose=0,
            callbacks=[
                looks,
                EarlyStopping("val_loss", patience=10**6, restore_best_weights=True),
                CSVLogger(Path(folder) / "log.csv"),
                JSONLinesLogger(Path(folder) / "log.jsonl", every_updates=20),
                ModelCheckpoint(Path(folder) / "{epoch}.safetensors", keep=2),
            ],
            checkpoint=ipufit.Checkpoint(Path(folder) / "run", every_updates=50),
        )
        model.close()
    count = len(looks.found)
    what = f"{count * _UPDATES} executions"
    allowed = _OF_AN_EPOCH * (count - count // 4)
    return Grown(what, allowed, looks.found[count // 4], looks.found[-1])


def many_models(models: int) -> Grown:
    """Models that are made, trained twice, used and closed."""
    x, y = _data(4)
    first = None
    for number in range(models):
        with ipufit.Model(_net(), engine="embedded") as model:
            model.compile("adam", "cross_entropy", metrics=["accuracy"])
            for _ in range(2):
                model.fit(x, y, batch_size=4, verbose=0)
            model.evaluate(x, y, batch_size=4, verbose=0)
            model.predict(x, batch_size=4, verbose=0)
        if number == models // 4:
            first = Has.now()
    assert first is not None
    allowed = _OF_A_MODEL * (models - models // 4)
    return Grown(f"{models} models", allowed, first, Has.now())
