"""First sections of the page: the outcome of a run, its warnings and advice."""

from __future__ import annotations

import dataclasses
import math
from typing import Dict, List, Optional, Sequence, Tuple

from ipufit.callbacks.history import best_place, direction_of
from ipufit.report.page import texts
from ipufit.report.page.sections import Section
from ipufit.report.run import Facts, NamedRuns, Run, samples_per_second, total


def headline(run: Run) -> Dict[str, str]:
    """Return the key figures of a run, by name; when it began is a text in ISO 8601."""
    facts = run.facts
    done, whole = total(run, "updates"), facts.get("total_updates")
    first = texts.real(facts.get("first_update", 0))
    updates = texts.count(done)
    if isinstance(whole, int) and whole > done:
        updates += f" of {whole:,}"
    if first > 0:
        updates += f", the first after {texts.count(first)}"
    figures = {
        "Status": str(facts["status"]),
        "Begun": str(facts["begun"]),
        "Took": texts.seconds(facts.get("seconds")),
        "Epochs": texts.count(len(facts["epochs"])),
        "Updates": updates,
        "Executions": texts.count(total(run, "executions")),
        "Samples": texts.count(total(run, "samples")),
        "Samples per second": texts.speed(samples_per_second(run)),
    }
    skipped = total(run, "skipped")
    if skipped:
        figures["Updates that were skipped"] = texts.count(skipped)
    if "totals" in facts:
        totals = facts["totals"]
        figures["Parameters"] = texts.count(totals["parameters"])
        if totals["trainable"] != totals["parameters"]:
            figures["Parameters"] += f", {texts.count(totals['trainable'])} of them trained"
    return figures


@dataclasses.dataclass(frozen=True)
class Final:
    """Value of the epochs of a run.

    Attributes:
        name: as the history has it.
        last: value of the last epoch.
        best: the best value; None if none is finite, or the better direction is not known.
        epoch: the first epoch that has the best value, counted from 1.
        direction: "min", "max", or "" if it is not known.
    """

    name: str
    last: float
    best: Optional[float]
    epoch: Optional[int]
    direction: str


def final_values(run: Run) -> List[Final]:
    """List the values of epochs, each with its best."""
    history = run.history
    directions = run.facts.get("params", {}).get("directions")
    values = []
    for name, pairs in history["history"].items():
        numbers = [texts.real(value) for _, value in pairs]
        if not numbers:
            continue
        direction = direction_of(name, directions)
        place = best_place(numbers, direction) if direction else None
        best, epoch = None, None
        if place is not None and not math.isnan(numbers[place]):
            best, epoch = numbers[place], history["epoch"][pairs[place][0]] + 1
        values.append(Final(name, numbers[-1], best, epoch, direction or ""))
    return values


def summary(run: Run) -> Section:
    """Make the section that sums the run up."""
    return Section(
        "summary",
        "Summary",
        {
            "facts": run.facts,
            "headline": headline(run).items(),
            "has_rate": samples_per_second(run) is not None,
            "values": final_values(run),
        },
    )


Notices = Sequence[Tuple[str, str, Sequence[Facts]]]


def warnings_section(runs: NamedRuns) -> Optional[Section]:
    """Make the section of warnings; None where there are none."""
    by_run = [(name, notices(run.facts)) for name, run in runs]
    shown = [(name, groups) for name, groups in by_run if groups]
    return Section("warnings", "Warnings and advice", {"notices": shown}) if shown else None


def notices(facts: Facts) -> Notices:
    """Group advice, and then warnings of Python: title, CSS class and entries of each group."""
    groups = []
    for title, kind in (("Advice", "advice"), ("Warnings", "warning")):
        entries = [
            {**each, "where": _where(each)}
            for each in facts.get("warnings", ())
            if (each["kind"] == "advice") == (kind == "advice")
        ]
        if entries:
            groups.append((title, kind, entries))
    return groups


def _where(entry: Facts) -> List[str]:
    where = [str(part) for part in (entry.get("category"), entry.get("place")) if part]
    if entry.get("count", 1) > 1:
        where.append(f"{entry['count']:,} times")
    return where
