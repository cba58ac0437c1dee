"""The table, for people and for programs."""

from __future__ import annotations

import collections
import json
import math
import platform
from typing import Any, Dict, Iterable, List, TextIO

import torch

from ipufit._version import __version__
from ipufit.conformance.implementations import Implementation
from ipufit.conformance.running import Row

__all__ = ["Table", "environment", "write_json"]

_NAME = 84


def environment() -> Dict[str, str]:
    """What every implementation on this machine shares."""
    return {
        "ipufit": __version__,
        "torch": str(torch.__version__),
        "Python": platform.python_version(),
        "system": platform.platform(),
    }


class Table:
    """Prints the rows of one implementation as they come, and keeps them.

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
        """Print the head, every row, what failed, and what is open."""
        for name, value in self._head.items():
            self._line(f"{name:<10} {value}")
        self._line("")
        self._line(f"{'case':<{_NAME}} result  error")
        for row in rows:
            self._rows.append(row)
            error = "" if row.error is None else f"{row.error:.1e}"
            self._line(f"{row.name:<{_NAME}} {row.outcome:<7} {error}".rstrip())
            if row.outcome in ("fail", "error", "skip"):
                self._line(f"    {_one_line(row.said)}")
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
                self._line(f"    {row.name}: {_one_line(row.said)}")

    def summary(self) -> str:
        """How many cases there were of each outcome."""
        counts = collections.Counter(row.outcome for row in self._rows)
        outcomes = ("pass", "fail", "error", "open", "skip")
        named = [f"{counts[name]} {name}" for name in outcomes if counts[name] or name != "skip"]
        return f"{len(self._rows)} cases: {', '.join(named)}"

    @property
    def passed(self) -> bool:
        """Whether nothing failed of what is judged."""
        return not any(row.outcome in ("fail", "error") for row in self._rows)

    def as_dict(self) -> Dict[str, Any]:
        """What JSON can hold."""
        rows = []
        for row in self._rows:
            finite = row.error is None or math.isfinite(row.error)
            rows.append({**vars(row), "error": row.error if finite else "inf"})
        return {"environment": self._head, "rows": rows, "passed": self.passed}

    def _line(self, text: str) -> None:
        self._out.write(text + "\n")
        self._out.flush()


def write_json(tables: Iterable[Table], file: TextIO) -> None:
    """All tables as one JSON document."""
    json.dump([table.as_dict() for table in tables], file, indent=1, allow_nan=False)
    file.write("\n")


def _one_line(text: str) -> str:
    return " ".join(text.split())
