"""``python -m ipufit.conformance``: run the cases, print a table that can be sent on."""

from __future__ import annotations

import argparse
import sys
from typing import Optional, Sequence

__all__ = ["ENGINES", "add_arguments", "main"]

_ABOUT = """\
Run the cases that fix what PopTorch's words mean, each against a loop written by hand, and print a
table. Exit status: 0 all that is judged passed, 1 a case failed, 2 the command line asks for what
is not there.
"""
_EXAMPLES = """\
examples:
  {prog}                                         every case, on whatever is here
  {prog} --engine standin --only 'training/*'    some, on PopTorch's API in plain torch
  {prog} --json table.json                       a file to be sent on
  {prog} --kit kit.json                          that, with programs and speeds, in an hour
"""
# The names of ``ipufit.conformance.implementations``, whose import takes a while.
ENGINES = ("embedded", "poptorch", "standin")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments to a parser."""
    parser.add_argument(
        "--engine",
        choices=ENGINES,
        help="what is examined; without it, one after the other, whatever is on this machine",
    )
    parser.add_argument("--json", metavar="FILE", help="write the table to a file, too")
    parser.add_argument(
        "--kit",
        metavar="FILE",
        help="run published programs and a small benchmark, too, and write all of it to a file "
        "that can be sent back",
    )
    parser.add_argument(
        "--only",
        metavar="PATTERN",
        action="append",
        help="run the cases whose name fits, such as 'training/*'; may be given again",
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
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_arguments(parser)
    options = parser.parse_args(arguments)
    # Imported here: the cases take a while, and a shell that completes the command does without.
    from ipufit.conformance.evidence import collect

    return collect(options, parser.error)


if __name__ == "__main__":
    sys.exit(main())
