"""Command line of the conformance cases, without importing them."""

from __future__ import annotations

import argparse

__all__ = ["ABOUT", "ENGINES", "EXAMPLES", "add_arguments"]

ABOUT = """\
Run the cases that fix what PopTorch's words mean, each against a loop written by hand, and print a
table. Exit status: 0 all that is judged passed, 1 a case failed, 2 the command line asks for what
is not there.
"""
EXAMPLES = """\
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
