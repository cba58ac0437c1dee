"""``ipufit report`` and ``ipufit watch``: pages and numbers of what runs have written down."""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import sys
from typing import List, Optional

from ipufit.cli.parsing import CommandParser, add_command
from ipufit.errors import ConfigurationError

_ABOUT = """\
Build the page of a training run again from the files of ipufit.Report(FOLDER), also while the run
goes on or after it was killed. Several folders make one page that compares the runs. The path of
the page is printed. Exit status: 0 if the page was written, 2 if a folder is not a report or a file
can't be written.
"""
_EXAMPLES = """\
examples:
  ipufit report runs/1                     write runs/1/report.html and runs/1/trace.json
  ipufit report runs/1 runs/2 --open       write comparison.html, and show it in the browser
  ipufit report runs/* --json              print final values, seconds and warnings as JSON
"""
_COMPARISON = "comparison.html"

_WATCH = """\
Serve the page of a run that trains in another process with the callback ipufit.Report(FOLDER). The
folder need not exist yet. The page updates itself in the browser. The server only reads files, and
only this machine can reach it, at 127.0.0.1. Ctrl-C stops it.

Exit status: 0 after Ctrl-C, 2 if the port is not available.
"""
_WATCH_EXAMPLES = """\
examples:
  ipufit watch runs/1                      use port 6010, or a free one if that is taken
  ipufit watch runs/1 --port 8000 --open   use port 8000, and open the browser
  ssh -L 6010:127.0.0.1:6010 machine       watch a remote run: start watch there, open the URL here
"""


def add(commands: argparse._SubParsersAction[CommandParser]) -> None:
    """Add both commands to the others."""
    what = "build the page of a run, or one that compares several runs"
    command = add_command(commands, "report", what, _ABOUT, _EXAMPLES)
    command.add_argument("folders", nargs="+", metavar="folder", help="written by ipufit.Report")
    command.add_argument(
        "--output",
        metavar="FILE",
        help="path of the page; default: report.html in the folder of the run, or "
        f"{_COMPARISON} in the current directory for several runs",
    )
    command.add_argument("--force", action="store_true", help="overwrite FILE if it exists")
    command.add_argument("--open", action="store_true", help="show the page in the browser")
    command.add_argument(
        "--json",
        action="store_true",
        help="print final values, seconds by phase, samples per second and warnings as JSON, and "
        "write no page",
    )
    command.set_defaults(do=_do)

    what = "show the page of a run while it trains"
    command = add_command(commands, "watch", what, _WATCH, _WATCH_EXAMPLES)
    command.add_argument("folder", help="written by ipufit.Report")
    command.add_argument("--port", type=int, metavar="N", help="port of the page; 0 is a free one")
    command.add_argument("--open", action="store_true", help="show the page in the browser")
    command.set_defaults(do=_watch)


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
            f"--json writes no page, but --{page_options[0]} is about one. Leave one of them out."
        )


def _own_page(folder: str) -> str:
    from ipufit.report.run import PAGE

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
            f"{path!r} exists already. Pass --force to overwrite it, or --output and another file."
        )
    return path


def _tell(folders: List[str]) -> int:
    from ipufit.report import run

    summary = {"runs": [run.summarize_run(run.Run.read(folder)) for folder in folders]}
    sys.stdout.write(json.dumps(summary, indent=2, allow_nan=False) + "\n")
    return 0


def _watch(options: argparse.Namespace) -> int:
    # Imported here: another command does without.
    from ipufit.report.live_server import Server, Watched

    if os.path.exists(options.folder) and not os.path.isdir(options.folder):
        raise ConfigurationError(
            f"watch shows the folder of a report, but {options.folder!r} is a file. Pass the "
            "folder of ipufit.Report."
        )
    with Server(Watched(options.folder), options.port) as server:
        sys.stdout.write(f"{server.url} shows {options.folder}; press Ctrl-C to stop.\n")
        sys.stdout.flush()
        if options.open:
            import webbrowser

            webbrowser.open(server.url)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            sys.stdout.write("\n")
    return 0
