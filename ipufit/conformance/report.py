"""The table of results, as text and as JSON."""

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

__all__ = ["ResultTable", "environment", "write_json"]

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


def write_json(tables: Iterable[ResultTable], file: TextIO) -> None:
    """Write all tables as one JSON document."""
    json.dump([table.as_dict() for table in tables], file, indent=1, allow_nan=False)
    file.write("\n")


def _one_line(text: str) -> str:
    return " ".join(text.split())
