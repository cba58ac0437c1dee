"""Run cases on an implementation."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import fnmatch
import json
import logging
import math
import platform
import traceback
import warnings
from typing import Any, Dict, Iterable, Iterator, List, Optional, TextIO

import torch

from ipufit._version import __version__
from ipufit.conformance import cases as _cases
from ipufit.conformance.implementations import Implementation
from ipufit.conformance.kit import CASES, Case, Kit, SkippedError
from ipufit.conformance.scenario import Observed, Scenario, expected

__all__ = ["ResultTable", "Row", "chosen", "environment", "run", "write_json"]

assert _cases is not None  # its modules have filled CASES


@dataclasses.dataclass(frozen=True)
class Row:
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


def run(implementation: Implementation, patterns: Optional[List[str]] = None) -> Iterator[Row]:
    """Run cases, one at a time.

    Args:
        patterns: of names, with ``*``; None means all cases.
    """
    for case in chosen(patterns or ["*"], implementation):
        yield run_case(implementation, case)


def run_case(implementation: Implementation, case: Case) -> Row:
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
                    compare(kit, case.scenario, observed, expected(case.scenario))
                elif case.body is not None:
                    case.body(kit)
            finally:
                kit.destroy_models()
    except SkippedError as reason:
        return Row(case.name, "skip", None, kit.tolerance, str(reason), case.question)
    except Exception as fault:
        where = traceback.extract_tb(fault.__traceback__)[-1]
        failed = f"{type(fault).__name__}: {fault} ({where.name}, line {where.lineno})"
    details = "; ".join(filter(None, [failed, *kit.faults, *kit.notes]))
    outcome = "error" if failed else "fail" if kit.faults else "pass"
    if case.question:
        outcome, details = "open", details or "as we read it"
    error = None if not kit.compared else kit.error
    return Row(case.name, outcome, error, kit.tolerance, details, case.question)


def compare(kit: Kit, scenario: Scenario, observed: Observed, wanted: Observed) -> None:
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


def environment() -> Dict[str, str]:
    """Return versions and system, which all implementations on this machine share."""
    return {
        "ipufit": __version__,
        "torch": str(torch.__version__),
        "Python": platform.python_version(),
        "system": platform.platform(),
    }


class ResultTable:
    """Prints and stores the rows of one implementation as they come.

    Args:
        implementation: whose they are.
        out: where to print.
    """

    def __init__(self, implementation: Implementation, out: TextIO) -> None:
        self._out = out
        self._head = {"engine": implementation.name, **environment(), **implementation.versions()}
        dtype = str(implementation.dtype).rpartition(".")[2]
        self._head["tolerance"] = f"{implementation.tolerance:g} ({dtype})"
        self._rows: List[Row] = []

    def print(self, rows: Iterable[Row]) -> None:
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
        answers: Dict[str, List[Row]] = {}
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


def write_json(value: object, file: TextIO) -> None:
    """Write a value as one JSON document."""
    json.dump(value, file, indent=1, allow_nan=False)
    file.write("\n")


def _one_line(text: str) -> str:
    return " ".join(text.split())
