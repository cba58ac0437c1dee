"""Sums and stretches of a run's executions."""

from __future__ import annotations

import math
from typing import Any, Dict, List, Mapping, Optional, Sequence

from ipufit.report.run import Run
from ipufit.utils.phase_timer import PHASES

__all__ = [
    "APART",
    "LOOKS",
    "PHASE_NAMES",
    "binned",
    "ends",
    "samples_per_second",
    "total",
    "used_phases",
]

# What a phase is called.
PHASE_NAMES = {
    "data": "waiting for data",
    "to_device": "host to device",
    "compute": "compute",
    "anchors": "anchors to host",
    "metrics": "loss and metrics",
    "callbacks": "callbacks",
    "checkpoint": "checkpoints",
    "capture": "capture",
    "validation": "validation",
    "report": "this report",
    "other": "the rest",
}
# Of each phase the number of its colour and pattern: what a run is for has the plain one.
LOOKS = ("compute", *(phase for phase in PHASES if phase != "compute"))
# No part of the work on samples.
APART = ("capture", "validation", "report")
_SUMS = ("executions", "updates", "samples", "skipped", *PHASES)


def total(run: Run, name: str) -> float:
    """Sum of a column."""
    return math.fsum(run.rows[name])


def samples_per_second(run: Run) -> Optional[float]:
    """While it trained: without recording the program, validation and this report."""
    spent = math.fsum(total(run, phase) for phase in PHASES if phase not in APART)
    return total(run, "samples") / spent if spent > 0 else None


def ends(rows: Mapping[str, Sequence[float]]) -> List[float]:
    """When every execution was over, in seconds since the run began."""
    return [sum(row) for row in zip(rows["begin"], *(rows[phase] for phase in PHASES))]


def binned(rows: Mapping[str, Sequence[float]], most: int) -> List[Dict[str, float]]:
    """At most so many stretches of executions, each with its sums.

    Args:
        rows: executions, by column.
        most: stretches.

    Returns:
        Of each the sums of numbers and seconds, ``begin`` and ``first_update`` of the first
        execution, ``update`` and ``end`` after the last, seconds ``working`` on samples, and the
        largest ``memory``.
    """
    length = len(rows["begin"])
    size = max(1, math.ceil(length / most))
    over = ends(rows)
    found = []
    for start in range(0, length, size):
        stop = min(start + size, length)
        one: Dict[str, float] = {name: math.fsum(rows[name][start:stop]) for name in _SUMS}
        one["begin"], one["first_update"] = rows["begin"][start], rows["first_update"][start]
        one["working"] = math.fsum(one[phase] for phase in PHASES if phase not in APART)
        last = stop - 1
        one["end"] = over[last]
        one["update"] = rows["first_update"][last] + rows["updates"][last]
        known = [value for value in rows["memory"][start:stop] if not math.isnan(value)]
        one["memory"] = max(known, default=math.nan)
        found.append(one)
    return found


def used_phases(seconds: Mapping[str, Any]) -> List[str]:
    """Those that took any time, in their order."""
    return [phase for phase in PHASES if seconds.get(phase)]
