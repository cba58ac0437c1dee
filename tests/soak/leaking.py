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

# What memory may grow by: allocators keep some, and tables of Python's double.
_MOST_MIB = 16.0
_UPDATES = 100


@dataclasses.dataclass(frozen=True)
class Has:
    """Of this process: resident memory in MiB, open files, threads."""

    memory: float
    files: int
    threads: int

    @staticmethod
    def now() -> Has:
        """At this moment."""
        gc.collect()
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        memory = pages * os.sysconf("SC_PAGE_SIZE") / 2**20
        return Has(memory, len(os.listdir("/proc/self/fd")), threading.active_count())


@dataclasses.dataclass(frozen=True)
class Grown:
    """What a part of the run has left behind.

    Attributes:
        what: the part.
        first: when a quarter of it was done; until then all that is made once is made.
        last: at its end.
    """

    what: str
    first: Has
    last: Has

    @property
    def leaks(self) -> bool:
        """Whether something has grown."""
        return (
            self.last.memory > self.first.memory + _MOST_MIB
            or self.last.files > self.first.files
            or self.last.threads > self.first.threads
        )

    def __str__(self) -> str:
        first, last = self.first, self.last
        return (
            f"{self.what}: memory {first.memory:.0f} to {last.memory:.0f} MiB, files {first.files} "
            f"to {last.files}, threads {first.threads} to {last.threads}"
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
        model.compile("adam", "cross_entropy", ["accuracy"])
        model.fit(
            x,
            y,
            batch_size=4,
            epochs=max(8, executions // _UPDATES),
            validation_data=(x[:40], y[:40]),
            prefetch=1,
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
    return Grown(what, looks.found[count // 4], looks.found[-1])


def many_models(models: int) -> Grown:
    """Models that are made, trained twice, used and closed."""
    x, y = _data(4)
    first = None
    for number in range(models):
        with ipufit.Model(_net(), engine="embedded") as model:
            model.compile("adam", "cross_entropy", ["accuracy"])
            for _ in range(2):
                model.fit(x, y, batch_size=4, verbose=0)
            model.evaluate(x, y, batch_size=4, verbose=0)
            model.predict(x, batch_size=4, verbose=0)
        if number == models // 4:
            first = Has.now()
    assert first is not None
    return Grown(f"{models} models", first, Has.now())
