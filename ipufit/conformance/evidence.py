"""What ``ipufit conformance --kit`` measures beside the cases: programs, and how fast models train.

With the table of the cases it is one file to send back from a machine that has IPUs.
"""

from __future__ import annotations

import json
import pathlib
import subprocess
import sys
import tempfile
import time
from typing import Any, Dict, Iterator, List, TextIO

import torch
from torch import nn

import ipufit
from ipufit.callbacks.callback import Callback
from ipufit.conformance.running import ResultTable, environment
from ipufit.engines.choice import list_engines
from ipufit.training.model import Model

__all__ = ["timings", "write_kit"]

_ROOT = pathlib.Path(ipufit.__file__).resolve().parents[1]
_EPOCHS = 4


class _Clock(Callback):
    """Notes when each epoch ends."""

    def __init__(self) -> None:
        self.times = [time.perf_counter()]

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Note the time."""
        self.times.append(time.perf_counter())


def _perceptron() -> nn.Module:
    return nn.Sequential(nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 10))


def _convolutions() -> nn.Module:
    return nn.Sequential(
        nn.Unflatten(1, (1, 28, 28)),
        *(nn.Conv2d(1, 32, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(32, 64, 3), nn.ReLU()),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10)),
    )


_MODULES = {"perceptron": _perceptron, "convolutions": _convolutions}


def timings(samples: int = 3200) -> Iterator[Dict[str, Any]]:
    """Train small models on every engine that can run here.

    Args:
        samples: of an epoch, in batches of 32.
    Yields:
        Of each: ``module``, ``engine``, ``device_iterations``, ``first_epoch_seconds``, which has
        recording and compiling in it, and ``samples_per_second`` of the median of the others.
    """
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(samples, 784, generator=generator)
    y = torch.randint(10, (samples,), generator=generator)
    for engine in (status.name for status in list_engines() if status.available):
        for name, make in _MODULES.items():
            for iterations in (1, 20):
                model, clock = Model(make(), engine=engine), _Clock()
                model.compile("sgd", "cross_entropy")
                model.fit(
                    x,
                    y,
                    batch_size=32,
                    epochs=_EPOCHS,
                    device_iterations=iterations,
                    callbacks=[clock],
                    verbose=0,
                )
                model.close()
                first, *others = (after - t for t, after in zip(clock.times, clock.times[1:]))
                yield {
                    "module": name,
                    "engine": engine,
                    "device_iterations": iterations,
                    "first_epoch_seconds": round(first, 3),
                    "samples_per_second": round(samples / sorted(others)[len(others) // 2]),
                }


def _programs(out: TextIO) -> List[Dict[str, Any]]:
    """Run published programs with what is installed here, as a checkout of ipufit lists them."""
    if not (_ROOT / "tests" / "programs").exists():
        out.write("Published programs: not run. They are listed in a checkout of ipufit.\n")
        return []
    with tempfile.TemporaryDirectory() as folder:
        file = pathlib.Path(folder, "programs.json")
        command = [sys.executable, "-m", "tests.programs", "--here", f"--json={file}", "tutorials"]
        subprocess.run(command, cwd=str(_ROOT), stdout=out)
        results: List[Dict[str, Any]] = json.loads(file.read_text("utf-8")) if file.exists() else []
    return results


def write_kit(tables: List[ResultTable], file: TextIO, out: TextIO) -> None:
    """Run programs and models, and write all results as one JSON object.

    Args:
        tables: of the cases.
        file: to write.
        out: to print what is measured.
    """
    speeds = []
    for row in timings():
        speeds.append(row)
        out.write(f"{' '.join(f'{name}={value}' for name, value in row.items())}\n")
    kit = {
        "format": 1,
        "environment": environment(),
        "engines": [str(status) for status in list_engines()],
        "cases": [table.as_dict() for table in tables],
        "speeds": speeds,
        "programs": _programs(out),
    }
    json.dump(kit, file, indent=1, allow_nan=False)
    file.write("\n")
