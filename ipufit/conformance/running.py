"""Run cases on implementations: tables, and with ``--kit`` programs and how fast models train.

With that option all of it is one file to send back from a machine that has IPUs.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import dataclasses
import fnmatch
import itertools
import json
import logging
import math
import pathlib
import platform
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from typing import Any, Callable, Dict, Iterable, Iterator, List, NoReturn, Optional, TextIO

import torch
from torch import Tensor, nn

import ipufit
from ipufit._version import __version__
from ipufit.callbacks import LambdaCallback
from ipufit.conformance import cases as _cases
from ipufit.conformance.implementations import IMPLEMENTATIONS, Implementation, MissingError
from ipufit.conformance.kit import CASES, Case, Kit, SkippedError
from ipufit.conformance.scenario import Observed, Scenario, expected
from ipufit.engines.choice import list_engines
from ipufit.training.model import Model
from ipufit.utils.interrupts import replaced_handler

assert _cases is not None  # its modules have filled CASES

_ROOT = pathlib.Path(ipufit.__file__).resolve().parents[1]
_EPOCHS = 4


@dataclasses.dataclass(frozen=True)
class _Row:
    """Result of a case.

    Attributes:
        name: name of the case.
        outcome: "pass", "fail", "open", "skip" where the machine lacks something, or "error" where
            it ended with an exception.
        error: largest error of a number, relative to the largest magnitude expected; None where no
            number was compared.
        tolerance: largest error that passes.
        details: claims that failed, or observations.
        question: question of an open case.
    """

    name: str
    outcome: str
    error: Optional[float]
    tolerance: float
    details: str
    question: str


def chosen(patterns: List[str], implementation: Implementation) -> List[Case]:
    """Return the cases that an implementation can run and whose name matches a pattern."""

    def fits(case: Case) -> bool:
        if case.scenario is None:
            able = implementation.poptorch is not None
        else:
            able = implementation.can(case.scenario)
        return able and any(fnmatch.fnmatchcase(case.name, pattern) for pattern in patterns)

    return [case for case in CASES if fits(case)]


def run_case(implementation: Implementation, case: Case) -> _Row:
    """Run one case."""
    dtype = torch.float32 if case.narrow else implementation.dtype
    kit = Kit(implementation.poptorch, dtype, implementation.tolerance)
    computing = contextlib.nullcontext() if case.narrow else implementation.computing()
    failed = ""
    torch.manual_seed(0)
    try:
        with _quiet(), computing:
            try:
                if case.scenario is not None:
                    observed = implementation.observe(case.scenario)
                    _compare(kit, case.scenario, observed, expected(case.scenario))
                elif case.body is not None:
                    case.body(kit)
            finally:
                kit.destroy_models()
    except SkippedError as reason:
        return _Row(case.name, "skip", None, kit.tolerance, str(reason), case.question)
    except Exception as fault:
        where = traceback.extract_tb(fault.__traceback__)[-1]
        failed = f"{type(fault).__name__}: {fault} ({where.name}, line {where.lineno})"
    details = "; ".join(filter(None, [failed, *kit.faults, *kit.notes]))
    outcome = "error" if failed else "fail" if kit.faults else "pass"
    if case.question:
        outcome, details = "open", details or "as we read it"
    error = None if not kit.compared else kit.error
    return _Row(case.name, outcome, error, kit.tolerance, details, case.question)


def _compare(kit: Kit, scenario: Scenario, observed: Observed, wanted: Observed) -> None:
    """Compare the results of a scenario with those expected."""
    for index, (actual, other) in enumerate(zip(observed.calls, wanted.calls)):
        for name in sorted(set(actual) & set(scenario.compared)):
            kit.close(f"{name} of call {index}", actual[name], other[name])
    if not scenario.training:
        return
    kit.equal("names of weights", sorted(observed.weights), sorted(wanted.weights))
    for name, value in wanted.weights.items():
        kit.close(name, observed.weights[name], value)
    for name in (name for name, value in wanted.buffers[0].items() if value.is_floating_point()):
        if len(observed.buffers) == len(wanted.buffers):
            for replica, (actual, other) in enumerate(zip(observed.buffers, wanted.buffers)):
                kit.close(f"{name} of replica {replica}", actual[name], other[name])
        else:  # the host gets one replica's, and nobody says whose
            distances = [_distance(observed.buffers[0][name], b[name]) for b in wanted.buffers]
            best = distances.index(min(distances))
            kit.close(f"{name} of a replica", observed.buffers[0][name], wanted.buffers[best][name])


def _distance(a: torch.Tensor, b: torch.Tensor) -> float:
    distance = float((a.double() - b.double()).abs().max())
    return math.inf if math.isnan(distance) else distance


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Suppress warnings, which would break up the table."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


_NAME = 84


def _environment() -> Dict[str, str]:
    """Return versions and system, which all implementations on this machine share."""
    return {
        "ipufit": __version__,
        "torch": str(torch.__version__),
        "Python": platform.python_version(),
        "system": platform.platform(),
    }


class _ResultTable:
    """Prints and stores the rows of one implementation as they come.

    Args:
        implementation: whose they are.
        out: where to print.
    """

    def __init__(self, implementation: Implementation, out: TextIO) -> None:
        self._out = out
        self._head = {"engine": implementation.name, **_environment(), **implementation.versions()}
        dtype = str(implementation.dtype).rpartition(".")[2]
        self._head["tolerance"] = f"{implementation.tolerance:g} ({dtype})"
        self._rows: List[_Row] = []

    def print(self, rows: Iterable[_Row]) -> None:
        """Print the head, every row, failures, and open questions."""
        for name, value in self._head.items():
            self._line(f"{name:<10} {value}")
        self._line("")
        self._line(f"{'case':<{_NAME}} result  error")
        for row in rows:
            self._rows.append(row)
            error = "" if row.error is None else f"{row.error:.1e}"
            self._line(f"{row.name:<{_NAME}} {row.outcome:<7} {error}".rstrip())
            if row.outcome in ("fail", "error", "skip"):
                self._line(f"    {_one_line(row.details)}")
        self._open_questions()
        self._line("")
        self._line(self.summary())
        self._line("")

    def _open_questions(self) -> None:
        answers: Dict[str, List[_Row]] = {}
        for row in self._rows:
            if row.question:
                answers.setdefault(row.question, []).append(row)
        if answers:
            self._line("")
            self._line("Open questions: what was seen here is reported, not judged.")
        for question, rows in answers.items():
            self._line(f"  {question}")
            for row in rows:
                self._line(f"    {row.name}: {_one_line(row.details)}")

    def summary(self) -> str:
        """Return the number of cases by outcome."""
        counts = collections.Counter(row.outcome for row in self._rows)
        outcomes = ("pass", "fail", "error", "open", "skip")
        named = [f"{counts[name]} {name}" for name in outcomes if counts[name] or name != "skip"]
        return f"{len(self._rows)} cases: {', '.join(named)}"

    @property
    def passed(self) -> bool:
        """True if no judged case failed."""
        return not any(row.outcome in ("fail", "error") for row in self._rows)

    def as_dict(self) -> Dict[str, Any]:
        """Return the table in a form that JSON can hold."""
        rows = []
        for row in self._rows:
            finite = row.error is None or math.isfinite(row.error)
            names = ("said" if name == "details" else name for name in vars(row))
            error = row.error if finite else "inf"
            rows.append({**dict(zip(names, vars(row).values())), "error": error})
        return {"environment": self._head, "rows": rows, "passed": self.passed}

    def _line(self, text: str) -> None:
        self._out.write(text + "\n")
        self._out.flush()


def _write_json(value: object, file: TextIO) -> None:
    """Write a value as one JSON document."""
    json.dump(value, file, indent=1, allow_nan=False)
    file.write("\n")


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _convolutions() -> nn.Module:
    return nn.Sequential(
        nn.Unflatten(1, (1, 28, 28)),
        *(nn.Conv2d(1, 32, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(32, 64, 3), nn.ReLU()),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10)),
    )


_MODULES = {
    "perceptron": lambda: nn.Sequential(nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 10)),
    "convolutions": _convolutions,
}


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
        self.tables: List[_ResultTable] = []
        self.speeds: List[Dict[str, object]] = []
        self.programs: List[Dict[str, object]] = []
        self.complete = False

    def run_cases(self, implementations: List[Implementation], patterns: List[str]) -> None:
        """Run the cases whose names fit on all implementations."""
        for implementation in implementations:
            self.tables.append(_ResultTable(implementation, self._out))
            cases = chosen(patterns, implementation)
            self.tables[-1].print(run_case(implementation, case) for case in cases)

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
            "environment": _environment(),
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
        # By SystemExit, so that files are written.
        end = replaced_handler(signal.SIGTERM, signal.SIG_DFL, lambda n, _: sys.exit(128 + n))
        stack.enter_context(end)
        try:
            evidence.run_cases(implementations, patterns)
            if "--kit" in files:
                evidence.train_models()
                evidence.run_programs()
            evidence.complete = True
        finally:  # what has been seen before an interrupt is not lost
            if "--json" in files:
                _write_json(evidence.as_list(), files["--json"])
            if "--kit" in files:
                _write_json(evidence.as_dict(), files["--kit"])
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
