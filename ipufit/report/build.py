"""The files that are made of what a run has written down."""

from __future__ import annotations

import os

from ipufit.report.chrome import trace_of
from ipufit.report.files import PAGE, TRACE, write_text
from ipufit.report.page import page_of
from ipufit.report.run import Run

__all__ = ["make"]


def make(folder: str) -> None:
    """Make everything that is for people to look at, from the facts in the folder.

    Raises:
        ConfigurationError: there is no report, or plotly is not installed.
        OSError: a file can't be written.
    """
    run = Run.read(folder)
    write_text(os.path.join(folder, TRACE), trace_of(run))
    write_text(os.path.join(folder, PAGE), page_of([run]))
