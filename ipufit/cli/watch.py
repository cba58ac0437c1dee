"""``ipufit watch``: the page of a run while it trains."""

from __future__ import annotations

import argparse
import os
import sys

from ipufit.cli.parsing import CommandParser, add_command
from ipufit.errors import ConfigurationError

__all__ = ["add"]

_ABOUT = """\
Show the page of a run in a browser while it trains in another process, where the callback
ipufit.Report(FOLDER) writes down what it does. The folder may be missing at first. The page brings
itself up to date. Only this machine can reach it, at 127.0.0.1; it only reads. Ctrl-C ends it.
Exit status: 0 it was ended, 2 the port can't be had.
"""
_EXAMPLES = """\
examples:
  ipufit watch runs/1                      at port 6010, or any free one where that is taken
  ipufit watch runs/1 --port 8000 --open   in the browser, at once
  ssh -L 6010:127.0.0.1:6010 machine       from far: then watch there, and open the address here
"""


def add(commands: argparse._SubParsersAction[CommandParser]) -> None:
    """Add the command to the others."""
    what = "show the page of a run while it trains"
    command = add_command(commands, "watch", what, _ABOUT, _EXAMPLES)
    command.add_argument("folder", help="of ipufit.Report(FOLDER)")
    command.add_argument(
        "--port", type=int, metavar="N", help="to listen at; 0 is any that is free"
    )
    command.add_argument("--open", action="store_true", help="show the page in the browser")
    command.set_defaults(do=_do)


def _do(options: argparse.Namespace) -> int:
    # Imported here: another command does without.
    from ipufit.report.live_server import Server, Watched

    if os.path.exists(options.folder) and not os.path.isdir(options.folder):
        raise ConfigurationError(
            f"watch shows the folder of a report, but {options.folder!r} is a file. Pass the "
            "folder that ipufit.Report was given."
        )
    with Server(Watched(options.folder), options.port) as server:
        sys.stdout.write(f"{server.url} shows {options.folder}; Ctrl-C ends it.\n")
        sys.stdout.flush()
        if options.open:
            import webbrowser

            webbrowser.open(server.url)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            sys.stdout.write("\n")
    return 0
