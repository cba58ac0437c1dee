"""The numbers of a run for programs."""

from __future__ import annotations

from typing import Any, Dict, Optional

from ipufit.report.files import plain
from ipufit.report.run import Run
from ipufit.utils.phase_timer import PHASES

__all__ = ["outline_of"]

# Beside the training: recording the program, and the report itself.
_APART = ("capture", "report")


def outline_of(run: Run) -> Dict[str, Any]:
    """The most important numbers of a run, in what JSON has.

    ``final`` are the last values of the history, ``seconds`` and ``phases`` those of the whole run,
    and ``samples_per_second`` is that of the executions, without the time of recording.

    Args:
        run: also one that is not over.
    """
    facts, rows = run.facts, run.rows
    history = facts.get("history", {"epoch": [], "history": {}})
    told = {
        "folder": run.folder,
        **{name: facts[name] for name in ("title", "status", "error", "begun")},
        "epochs": len(history["epoch"]),
        "executions": int(sum(rows["executions"])),
        "updates": int(sum(rows["updates"])),
        "samples": int(sum(rows["samples"])),
        "samples_per_second": _rate(run),
        "seconds": facts.get("seconds", 0.0),
        "phases": facts.get("phases", {}),
        "final": {name: pairs[-1][1] for name, pairs in history["history"].items() if pairs},
        "warnings": [
            {name: each[name] for name in ("kind", "text", "cure", "place", "count")}
            for each in facts.get("warnings", [])
        ],
    }
    found: Dict[str, Any] = plain(told)
    return found


def _rate(run: Run) -> Optional[float]:
    rows = run.rows
    seconds = sum(sum(rows[name]) for name in PHASES if name not in _APART)
    return sum(rows["samples"]) / seconds if seconds > 0 else None
