"""``python -m ipufit.conformance``: run the cases, print a table that can be sent on."""

from __future__ import annotations

import argparse
import sys
from typing import Optional, Sequence

from ipufit.utils.console import HelpFormatter

_ABOUT = """\
Run the test cases that define PopTorch's semantics, each against a hand-written loop, and print a
table. Exit status: 0 if no case failed, 1 if one did, 2 if the command line names an engine or a
case that does not exist here.
"""
_EXAMPLES = """\
examples:
  {prog}                                         run every case on every engine
  {prog} --engine standin --only 'training/*'    run some cases on the stand-in for PopTorch
  {prog} --json table.json                       also write the table to a file
  {prog} --kit kit.json                          also run programs and a benchmark; takes an hour
"""
# The names of ``ipufit.conformance.implementations``, whose import takes a while.
ENGINES = ("embedded", "poptorch", "standin")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments to a parser."""
    parser.add_argument(
        "--engine",
        choices=ENGINES,
        help="the engine to test; default: every one on this machine, one after another",
    )
    parser.add_argument("--json", metavar="FILE", help="also write the table to a file")
    parser.add_argument(
        "--kit",
        metavar="FILE",
        help="also run published programs and a small benchmark, and write all results to a file "
        "to send back",
    )
    parser.add_argument(
        "--only",
        metavar="PATTERN",
        action="append",
        help="run only cases whose name matches, such as 'training/*'; can be repeated",
    )


def main(
    arguments: Optional[Sequence[str]] = None, prog: str = "python -m ipufit.conformance"
) -> int:
    """Run the command.

    Args:
        arguments: of the command line; None means those of this process.
        prog: how it was called, for its texts.
    Returns:
        The exit status: 0 if all that is judged passed, 1 if not.
    Raises:
        SystemExit: with status 2, where the command line asks for what is not there.
    """
    parser = argparse.ArgumentParser(
        prog=prog,
        description=_ABOUT,
        epilog=_EXAMPLES.format(prog=prog),
        formatter_class=HelpFormatter,
    )
    add_arguments(parser)
    options = parser.parse_args(arguments)
    # Imported here: the cases take a while, and a shell that completes the command does without.
    from ipufit.conformance.running import collect

    return collect(options, parser.error)


if __name__ == "__main__":
    sys.exit(main())
