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
from ipufit.utils.interrupts import exit_at_sigterm

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


class Evidence:
    """Results of cases, models and programs, as far as they have come.

    Args:
        out: to print them.

    Attributes:
        tables: of the cases.
        speeds: what ``timings`` has yielded.
        programs: what became of published programs, as ``tests.programs`` writes it.
        complete: whether nothing is missing, because nothing has interrupted the run.
    """

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self.tables: List[ResultTable] = []
        self.speeds: List[Dict[str, object]] = []
        self.programs: List[Dict[str, object]] = []
        self.complete = False

    def run_cases(self, implementations: List[Implementation], patterns: List[str]) -> None:
        """Run the cases whose names fit on all implementations."""
        for implementation in implementations:
            self.tables.append(ResultTable(implementation, self._out))
            self.tables[-1].print(run(implementation, patterns))

    def train_models(self) -> None:
        """Measure how fast models train."""
        for row in timings():
            self.speeds.append(row)
            self._out.write(f"{' '.join(f'{name}={value}' for name, value in row.items())}\n")

    def run_programs(self) -> None:
        """Run the published programs that a checkout lists, with what is installed here."""
        if not (_ROOT / "tests" / "programs").exists():
            self._out.write(
                "Published programs: not run. They are listed in a checkout of ipufit.\n"
            )
            return
        with tempfile.TemporaryDirectory() as folder:
            file = pathlib.Path(folder, "programs.json")
            command = [sys.executable, "-m", "tests.programs"]
            command += ["--here", f"--json={file}", "tutorials"]
            try:
                subprocess.run(command, cwd=str(_ROOT), stdout=self._out)
            finally:
                if file.exists():
                    self.programs = json.loads(file.read_text("utf-8"))

    def as_list(self) -> List[Dict[str, object]]:
        """Return the tables in a form that JSON can hold."""
        return [table.as_dict() for table in self.tables]

    def as_dict(self) -> Dict[str, object]:
        """Return all results in a form that JSON can hold."""
        return {
            "format": 1,
            "complete": self.complete,
            "environment": environment(),
            "engines": [str(status) for status in list_engines()],
            "cases": self.as_list(),
            "speeds": self.speeds,
            "programs": self.programs,
        }


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
        evidence = Evidence(sys.stdout)
        stack.enter_context(exit_at_sigterm())
        try:
            evidence.run_cases(implementations, patterns)
            if "--kit" in files:
                evidence.train_models()
                evidence.run_programs()
            evidence.complete = True
        finally:  # what has been seen before an interrupt is not lost
            if "--json" in files:
                write_json(evidence.as_list(), files["--json"])
            if "--kit" in files:
                write_json(evidence.as_dict(), files["--kit"])
    return 0 if all(table.passed for table in evidence.tables) else 1


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
