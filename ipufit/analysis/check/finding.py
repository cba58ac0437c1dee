"""One thing that a check has found, and where."""

from __future__ import annotations

import dataclasses
from typing import Any, Dict, Optional

__all__ = ["KINDS", "SEVERITIES", "Finding"]

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
    """What :meth:`ipufit.Model.check` reports of one place.

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
        """The attributes by name, for JSON."""
        return dataclasses.asdict(self)
