"""Tables of the cases, and beside them programs and how fast models train: ``--kit``.

All of it is one file to send back from a machine that has IPUs.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import pathlib
import subprocess
import sys
import tempfile
import time
from typing import Callable, Dict, Iterator, List, NoReturn, Optional, TextIO

import torch
from torch import Tensor, nn

import ipufit
from ipufit.callbacks import LambdaCallback
from ipufit.conformance.implementations import IMPLEMENTATIONS, Implementation, MissingError
from ipufit.conformance.running import ResultTable, chosen, environment, run, write_json
from ipufit.engines.choice import list_engines
from ipufit.training.model import Model

__all__ = ["collect", "timings"]

_ROOT = pathlib.Path(ipufit.__file__).resolve().parents[1]
_EPOCHS = 4


def _perceptron() -> nn.Module:
    return nn.Sequential(nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 10))


def _convolutions() -> nn.Module:
    return nn.Sequential(
        nn.Unflatten(1, (1, 28, 28)),
        *(nn.Conv2d(1, 32, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(32, 64, 3), nn.ReLU()),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10)),
    )


_MODULES = {"perceptron": _perceptron, "convolutions": _convolutions}


def timings(samples: int = 3200) -> Iterator[Dict[str, object]]:
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
    engines = [status.name for status in list_engines() if status.available]
    for engine, name, iterations in itertools.product(engines, _MODULES, (1, 20)):
        model = Model(_MODULES[name](), engine=engine)
        first, *others = _epoch_seconds(model, x, y, iterations)
        yield {
            "module": name,
            "engine": engine,
            "device_iterations": iterations,
            "first_epoch_seconds": round(first, 3),
            "samples_per_second": round(samples / sorted(others)[len(others) // 2]),
        }


def _epoch_seconds(model: Model, x: Tensor, y: Tensor, iterations: int) -> List[float]:
    """Train a model, and return how long each epoch took."""
    times = [time.perf_counter()]
    clock = LambdaCallback(on_epoch_end=lambda epoch, logs: times.append(time.perf_counter()))
    model.compile("sgd", "cross_entropy")
    model.fit(x, y, 32, _EPOCHS, device_iterations=iterations, callbacks=[clock], verbose=0)
    model.close()
    return [after - before for before, after in zip(times, times[1:])]


def _programs(out: TextIO) -> List[Dict[str, object]]:
    """Run published programs with what is installed here, as a checkout of ipufit lists them."""
    if not (_ROOT / "tests" / "programs").exists():
        out.write("Published programs: not run. They are listed in a checkout of ipufit.\n")
        return []
    with tempfile.TemporaryDirectory() as folder:
        file = pathlib.Path(folder, "programs.json")
        command = [sys.executable, "-m", "tests.programs", "--here", f"--json={file}", "tutorials"]
        subprocess.run(command, cwd=str(_ROOT), stdout=out)
        text = file.read_text("utf-8") if file.exists() else "[]"
    results: List[Dict[str, object]] = json.loads(text)
    return results


def _write_kit(tables: List[ResultTable], file: TextIO, out: TextIO) -> None:
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
    write_json(kit, file)


def collect(options: argparse.Namespace, refuse: Callable[[str], NoReturn]) -> int:
    """Run what a command line asks for.

    Args:
        options: of the command line.
        refuse: ends the program with a text, where they ask for what is not there.
    Returns:
        The exit status: 0 if all that is judged passed, 1 if not.
    """
    patterns = options.only or ["*"]
    with contextlib.ExitStack() as stack:
        files = {}
        for option, path in (("--json", options.json), ("--kit", options.kit)):
            try:
                if path is not None:
                    files[option] = stack.enter_context(open(path, "w", encoding="utf-8"))
            except OSError as fault:
                refuse(f"{option} {path} can't be written: {fault.strerror}")
        implementations = _implementations(options.engine, refuse)
        if not any(chosen(patterns, each) for each in implementations):
            refuse(f"--only {' '.join(patterns)} fits no case. Try 'training/*'.")
        tables: List[ResultTable] = []
        try:
            for implementation in implementations:
                tables.append(ResultTable(implementation, sys.stdout))
                tables[-1].print(run(implementation, patterns))
        finally:  # what has been seen before an interrupt is not lost
            if "--json" in files:
                write_json([table.as_dict() for table in tables], files["--json"])
        if "--kit" in files:
            _write_kit(tables, files["--kit"], sys.stdout)
    return 0 if all(table.passed for table in tables) else 1


def _implementations(
    engine: Optional[str], refuse: Callable[[str], NoReturn]
) -> List[Implementation]:
    """Return the requested implementation, or all there are, printing why others are missing."""
    if engine is not None:
        try:
            return [IMPLEMENTATIONS[engine]()]
        except MissingError as reason:
            refuse(str(reason))
    implementations: List[Implementation] = []
    for make in IMPLEMENTATIONS.values():
        try:
            implementations.append(make())
        except MissingError as reason:
            sys.stdout.write(f"{make.name}: not examined. {reason}\n\n")
    return implementations
