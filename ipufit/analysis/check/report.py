"""What ``Model.check`` returns."""

from __future__ import annotations

import dataclasses
import linecache
from typing import Any, Dict, Iterator, Tuple

from ipufit.analysis.check.finding import Finding

__all__ = ["CheckReport"]


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
        """Plain values, for JSON: model, loss, and the findings as dicts."""
        found = [finding.as_dict() for finding in self.findings]
        return {"model": self.model, "loss": self.loss, "findings": found}


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
