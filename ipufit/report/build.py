"""Files and summaries that are made of what a run has written down."""

from __future__ import annotations

import os
from typing import Dict, Optional

from ipufit.report.chrome import render_trace
from ipufit.report.files import PAGE, TRACE, plain
from ipufit.report.page import render_page
from ipufit.report.run import Run
from ipufit.utils.files import write_text
from ipufit.utils.phase_timer import PHASES

__all__ = ["summarize_run", "write_page"]


def write_page(folder: str) -> None:
    """Write the page and the trace of a run, from the facts and rows in its folder.

    Raises:
        ConfigurationError: there is no report, or plotly is not installed.
        OSError: a file can't be written.
    """
    run = Run.read(folder)
    write_text(os.path.join(folder, TRACE), render_trace(run))
    write_text(os.path.join(folder, PAGE), render_page([run]))


# Beside the training: recording the program, and the report itself.
_APART = ("capture", "report")


def summarize_run(run: Run) -> Dict[str, object]:
    """Return the most important numbers of a run, in types that JSON has.

    ``final`` are the last values of the history, ``seconds`` and ``phases`` those of the whole run,
    and ``samples_per_second`` is that of the executions, without the time of recording.

    Args:
        run: also one that is not over.
    """
    facts, rows = run.facts, run.rows
    history = facts.get("history", {"epoch": [], "history": {}})
    summary = {
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
    plain_summary: Dict[str, object] = plain(summary)
    return plain_summary


def _rate(run: Run) -> Optional[float]:
    rows = run.rows
    seconds = sum(sum(rows[name]) for name in PHASES if name not in _APART)
    return sum(rows["samples"]) / seconds if seconds > 0 else None
