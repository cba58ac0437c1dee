"""Run cases on an implementation."""

from __future__ import annotations

import contextlib
import dataclasses
import fnmatch
import logging
import math
import traceback
import warnings
from typing import Iterator, List, Optional

import torch

from ipufit.conformance import cases as _cases
from ipufit.conformance.implementations import Implementation
from ipufit.conformance.kit import CASES, Case, Kit, SkippedError
from ipufit.conformance.scenario import Observed, Scenario, expected

__all__ = ["Row", "chosen", "run"]

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
            if case.scenario is not None:
                observed = implementation.observe(case.scenario)
                compare(kit, case.scenario, observed, expected(case.scenario))
            elif case.body is not None:
                case.body(kit)
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
