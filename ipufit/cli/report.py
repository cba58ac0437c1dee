"""``ipufit report``: pages and numbers of what runs have written down."""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import sys
from typing import List, Optional

from ipufit.cli.parsing import CommandParser, add_command
from ipufit.errors import ConfigurationError

__all__ = ["add"]

_ABOUT = """\
Make the page of a run anew from what ipufit.Report(FOLDER) has written down, also of a run that
still goes on or was killed; or, of several folders, one page that compares them. The path of the
page is printed. Exit status: 0 it was made, 2 a folder is no report, or a file can't be written.
"""
_EXAMPLES = """\
examples:
  ipufit report runs/1                     runs/1/report.html and runs/1/trace.json
  ipufit report runs/1 runs/2 --open       comparison.html, shown in the browser
  ipufit report runs/* --json              final values, seconds and warnings, for programs
"""
_COMPARISON = "comparison.html"


def add(commands: argparse._SubParsersAction[CommandParser]) -> None:
    """Add the command to the others."""
    what = "make the page of a run, or one that compares several"
    command = add_command(commands, "report", what, _ABOUT, _EXAMPLES)
    command.add_argument("folders", nargs="+", metavar="folder", help="of ipufit.Report(FOLDER)")
    command.add_argument(
        "--output",
        metavar="FILE",
        help="where the page goes; otherwise report.html in the folder of the run, and "
        f"{_COMPARISON} in the present folder for several",
    )
    command.add_argument("--force", action="store_true", help="replace a FILE that is there")
    command.add_argument("--open", action="store_true", help="show the page in the browser")
    command.add_argument(
        "--json",
        action="store_true",
        help="print final values, seconds by phase, samples per second and warnings as JSON, and "
        "make no page",
    )
    command.set_defaults(do=_do)


def _do(options: argparse.Namespace) -> int:
    if options.json:
        _refuse_page(options)
        return _tell(options.folders)
    path = _free(options)
    if path is None:
        # Imported here: another command does without.
        from ipufit.report.page import write_page

        (folder,) = options.folders
        write_page(folder)
        path = _own_page(folder)
    else:
        from ipufit.report.page import render_page
        from ipufit.report.run import Run
        from ipufit.utils.files import write_text

        write_text(path, render_page([Run.read(folder) for folder in options.folders]))
    sys.stdout.write(f"{path}\n")
    if options.open:
        import webbrowser

        webbrowser.open(pathlib.Path(path).resolve().as_uri())
    return 0


def _refuse_page(options: argparse.Namespace) -> None:
    """There is no page with ``--json``."""
    page_options = [name for name in ("output", "force", "open") if getattr(options, name)]
    if page_options:
        raise ConfigurationError(
            f"--json makes no page, but --{page_options[0]} is about one. Leave one of them out."
        )


def _own_page(folder: str) -> str:
    from ipufit.report.files import PAGE

    return os.path.join(folder, PAGE)


def _free(options: argparse.Namespace) -> Optional[str]:
    """The file for the page; None for that of the one run itself, which may always be made anew.

    Raises:
        ConfigurationError: it is there, and might be something else.
    """
    path: Optional[str] = options.output
    if len(options.folders) == 1:
        own_page = _own_page(options.folders[0])
        if path is None or os.path.abspath(path) == os.path.abspath(own_page):
            return None
    elif path is None:
        path = _COMPARISON
    if os.path.isdir(path):
        raise ConfigurationError(
            f"the page must be a file, but {path!r} is a folder. Pass --output {path}/page.html."
        )
    if os.path.lexists(path) and not options.force:
        raise ConfigurationError(
            f"{path!r} is there already. Pass --force to replace it, or --output and another file."
        )
    return path


def _tell(folders: List[str]) -> int:
    from ipufit.report.run import Run, summarize_run

    summary = {"runs": [summarize_run(Run.read(folder)) for folder in folders]}
    sys.stdout.write(json.dumps(summary, indent=2, allow_nan=False) + "\n")
    return 0
