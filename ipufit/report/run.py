"""A run as its report has it, with sums and stretches of its executions."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Dict, List, Mapping, Optional, Sequence, Tuple

from ipufit.report.files import Facts, plain, read_facts, read_rows
from ipufit.report.rows import SUMS, largest
from ipufit.utils.phase_timer import PHASES


@dataclasses.dataclass(frozen=True)
class Run:
    """Facts and executions of one run.

    Attributes:
        folder: of its report.
        facts: ``run.json``; see :mod:`ipufit.report.files`.
        rows: its executions, by column.
    """

    folder: str
    facts: Dict[str, Any]
    rows: Dict[str, List[float]]

    @property
    def history(self) -> Facts:
        """The values of its epochs and updates; there are none before the first epoch is over."""
        nothing: Facts = {"epoch": [], "history": {}, "updates": {}}
        return {**nothing, **self.facts.get("history", {})}

    @staticmethod
    def read(folder: str) -> Run:
        """Read a run from its folder, also while it is being written.

        Raises:
            ConfigurationError: there is no report.
        """
        return Run(folder, read_facts(folder), read_rows(folder))


# Runs of one page, with their names; the name of a single run is empty, and not shown.
NamedRuns = Sequence[Tuple[str, Run]]

# No part of the work on samples.
_APART = ("capture", "validation", "report")


def total(run: Run, name: str) -> float:
    """Sum a column over all executions."""
    return math.fsum(run.rows[name])


def samples_per_second(run: Run) -> Optional[float]:
    """Return the rate of training: without capture, validation and the report itself."""
    spent = math.fsum(total(run, phase) for phase in PHASES if phase not in _APART)
    return total(run, "samples") / spent if spent > 0 else None


def ends(rows: Mapping[str, Sequence[float]]) -> List[float]:
    """Return when every execution was over, in seconds since the run began."""
    return [sum(row) for row in zip(rows["begin"], *(rows[phase] for phase in PHASES))]


def binned(rows: Mapping[str, Sequence[float]], most: int) -> List[Dict[str, float]]:
    """Sum executions over at most so many stretches.

    Args:
        rows: executions, by column.
        most: stretches.

    Returns:
        For each stretch the sums of numbers and seconds, ``begin`` and ``first_update`` of the
        first execution, ``update`` and ``end`` after the last, seconds ``working`` on samples, and
        the largest ``memory``.
    """
    length = len(rows["begin"])
    size = max(1, math.ceil(length / most))
    over = ends(rows)
    stretches = []
    for start in range(0, length, size):
        stop = min(start + size, length)
        one: Dict[str, float] = {name: math.fsum(rows[name][start:stop]) for name in SUMS}
        one["begin"], one["first_update"] = rows["begin"][start], rows["first_update"][start]
        one["working"] = math.fsum(one[phase] for phase in PHASES if phase not in _APART)
        last = stop - 1
        one["end"] = over[last]
        one["update"] = rows["first_update"][last] + rows["updates"][last]
        one["memory"] = largest(rows["memory"][start:stop])
        stretches.append(one)
    return stretches


def summarize_run(run: Run) -> Dict[str, object]:
    """Return the most important numbers of a run, in types that JSON has.

    ``final`` are the last values of the history, ``seconds`` and ``phases`` those of the whole run,
    and ``samples_per_second`` is that of the executions, without the time of recording.

    Args:
        run: also one that is not over.
    """
    facts, rows = run.facts, run.rows
    summary = {
        "folder": run.folder,
        **{name: facts[name] for name in ("title", "status", "error", "begun")},
        "epochs": len(run.history["epoch"]),
        "executions": int(sum(rows["executions"])),
        "updates": int(sum(rows["updates"])),
        "samples": int(sum(rows["samples"])),
        "samples_per_second": samples_per_second(run),
        "seconds": facts.get("seconds", 0.0),
        "phases": facts.get("phases", {}),
        "final": {name: pairs[-1][1] for name, pairs in run.history["history"].items() if pairs},
        "warnings": [
            {name: each[name] for name in ("kind", "text", "cure", "place", "count")}
            for each in facts.get("warnings", [])
        ],
    }
    plain_summary: Dict[str, object] = plain(summary)
    return plain_summary
