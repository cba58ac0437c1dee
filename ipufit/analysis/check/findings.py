"""All findings of a check, each place once."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any, Dict, Iterator, Optional, Tuple

from ipufit.analysis.check.finding import Finding
from ipufit.tracing.capture import Frame

__all__ = ["Findings"]


class Findings:
    """Collects them.

    Args:
        caller: the line that stands for what has none of its own.
    """

    def __init__(self, caller: Optional[Frame]) -> None:
        self._caller = caller
        self._found: Dict[Tuple[Any, ...], Finding] = {}
        self._note = ""

    def add(self, *findings: Finding) -> None:
        """Those that are new; what has no line of its own gets that of the call."""
        for finding in findings:
            what = finding.module if finding.file else finding.module or finding.text
            key = (finding.kind, finding.file, finding.line, what)
            if key in self._found:
                continue
            noted = dataclasses.replace(finding, text=f"{finding.text}{self._note}")
            if noted.file is None and self._caller is not None:
                file, line, function = self._caller
                noted = dataclasses.replace(noted, file=file, line=line, function=function)
            self._found[key] = noted

    @contextlib.contextmanager
    def noted(self, note: str) -> Iterator[None]:
        """What is found first in this block has a note."""
        self._note = note
        try:
            yield
        finally:
            self._note = ""

    def sorted(self) -> Tuple[Finding, ...]:
        """Errors first, by file and line."""

        def order(finding: Finding) -> Tuple[Any, ...]:
            return (finding.severity, finding.file or "", finding.line or 0, finding.kind)

        return tuple(sorted(self._found.values(), key=order))
