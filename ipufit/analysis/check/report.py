"""Findings of a check, collected and reported."""

from __future__ import annotations

import contextlib
import dataclasses
import linecache
from typing import Any, Dict, Iterator, Optional, Tuple

from ipufit.tracing.capture import Frame

__all__ = ["KINDS", "SEVERITIES", "CheckReport", "Finding", "Findings"]

# An error stops fit, or makes it train something else than what is written; a warning is lost work,
# or what is rarely meant.
SEVERITIES = ("error", "warning")

KINDS = (
    "attribute",
    "branch",
    "capture",
    "constant",
    "container",
    "folded",
    "generator",
    "global",
    "mode",
    "not_optimized",
    "number",
    "numpy",
    "outside",
    "output",
    "program",
    "random",
    "rebound",
    "shape",
    "text",
    "unused",
    "value",
)


@dataclasses.dataclass(frozen=True)
class Finding:
    """A fault that :meth:`ipufit.Model.check` reports at one place.

    Attributes:
        kind: what it is, such as "branch"; one of those in the guide.
        severity: "error": ``fit`` refuses the module, or trains something else than what is
            written; or "warning": lost work, or what is rarely meant.
        file, line, function: of the user's source; None where no line of it is to blame.
        text: what is wrong.
        cure: what to write instead.
        module: name of the module or parameter that it is about, or None.
    """

    kind: str
    severity: str
    file: Optional[str]
    line: Optional[int]
    function: Optional[str]
    text: str
    cure: str
    module: Optional[str] = None

    def __str__(self) -> str:
        where = f"{self.file}:{self.line} in {self.function}: " if self.file else ""
        return f"{where}{self.severity} [{self.kind}] {self.text}. {self.cure}"

    def as_dict(self) -> Dict[str, Any]:
        """Return the attributes by name, for JSON."""
        return dataclasses.asdict(self)


@dataclasses.dataclass(frozen=True)
class CheckReport:
    """The findings of a check, errors first; true if there are any.

    Attributes:
        model: name of the class of the module.
        findings: in the order of files and lines, errors before warnings.
        loss: whether the loss and the target were part of it.
    """

    model: str
    findings: Tuple[Finding, ...]
    loss: bool = True

    def __len__(self) -> int:
        return len(self.findings)

    def __iter__(self) -> Iterator[Finding]:
        return iter(self.findings)

    def __str__(self) -> str:
        part = "" if self.loss else " (without a loss)"
        if not self.findings:
            return f"{self.model}: nothing found{part}."
        errors = sum(finding.severity == "error" for finding in self.findings)
        count = f"{_count(errors, 'error')}, {_count(len(self) - errors, 'warning')}"
        return "\n".join([f"{self.model}: {count}{part}.", *map(_shown, self.findings)])

    def as_dict(self) -> Dict[str, Any]:
        """Return plain values, for JSON: model, loss, and the findings as dicts."""
        findings = [finding.as_dict() for finding in self.findings]
        return {"model": self.model, "loss": self.loss, "findings": findings}


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _shown(finding: Finding) -> str:
    where = f"{finding.file}:{finding.line} in {finding.function}" if finding.file else "(no line)"
    source = linecache.getline(finding.file or "", finding.line or 0).strip()
    lines = [
        f"{where}: {finding.severity} [{finding.kind}]",
        *([f"    {source}"] if source else []),
    ]
    return "\n".join([*lines, f"  {finding.text}.", f"  {finding.cure}"])


class Findings:
    """Collects findings: of each kind, one for a line of the user's.

    Args:
        caller: the line that stands for what has none of its own.
    """

    def __init__(self, caller: Optional[Frame]) -> None:
        self._caller = caller
        self._by_place: Dict[Tuple[Any, ...], Finding] = {}
        self._note = ""

    def add(self, *findings: Finding) -> None:
        """Add findings that are new; one without a line gets the line of the caller."""
        for finding in findings:
            what = finding.module if finding.file else finding.module or finding.text
            key = (finding.kind, finding.file, finding.line, what)
            if key in self._by_place:
                continue
            with_note = dataclasses.replace(finding, text=f"{finding.text}{self._note}")
            if with_note.file is None and self._caller is not None:
                file, line, function = self._caller
                with_note = dataclasses.replace(with_note, file=file, line=line, function=function)
            self._by_place[key] = with_note

    @contextlib.contextmanager
    def with_note(self, note: str) -> Iterator[None]:
        """Append a note to findings that are new in this block."""
        self._note = note
        try:
            yield
        finally:
            self._note = ""

    def sorted(self) -> Tuple[Finding, ...]:
        """Return the findings, errors first, by file and line."""

        def order(finding: Finding) -> Tuple[Any, ...]:
            return (finding.severity, finding.file or "", finding.line or 0, finding.kind)

        return tuple(sorted(self._by_place.values(), key=order))
