"""``python -m ipufit.conformance``: run the cases, print a table that can be sent on."""

from __future__ import annotations

import argparse
import contextlib
import sys
from typing import List, Optional, Sequence

from ipufit.conformance.command_line import ABOUT, EXAMPLES, add_arguments
from ipufit.conformance.evidence import write_kit
from ipufit.conformance.implementations import IMPLEMENTATIONS, Implementation, MissingError
from ipufit.conformance.running import ResultTable, chosen, run, write_json

__all__ = ["main"]


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
    parser = _parser(prog)
    options = parser.parse_args(arguments)
    patterns = options.only or ["*"]
    with contextlib.ExitStack() as stack:
        files = {}
        for option, path in (("--json", options.json), ("--kit", options.kit)):
            try:
                if path is not None:
                    files[option] = stack.enter_context(open(path, "w", encoding="utf-8"))
            except OSError as fault:
                parser.error(f"{option} {path} can't be written: {fault.strerror}")
        implementations = _implementations(parser, options.engine)
        if not any(chosen(patterns, each) for each in implementations):
            parser.error(f"--only {' '.join(patterns)} fits no case. Try 'training/*'.")
        tables: List[ResultTable] = []
        try:
            for implementation in implementations:
                tables.append(ResultTable(implementation, sys.stdout))
                tables[-1].print(run(implementation, patterns))
        finally:  # what has been seen before an interrupt is not lost
            if "--json" in files:
                write_json(tables, files["--json"])
        if "--kit" in files:
            write_kit(tables, files["--kit"], sys.stdout)
    return 0 if all(table.passed for table in tables) else 1


def _parser(prog: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=prog,
        description=ABOUT,
        epilog=EXAMPLES.format(prog=prog),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_arguments(parser)
    return parser


def _implementations(
    parser: argparse.ArgumentParser, engine: Optional[str]
) -> List[Implementation]:
    """Return the requested implementation, or all there are, printing why others are missing."""
    if engine is not None:
        try:
            return [IMPLEMENTATIONS[engine]()]
        except MissingError as reason:
            parser.error(str(reason))
    implementations: List[Implementation] = []
    for make in IMPLEMENTATIONS.values():
        try:
            implementations.append(make())
        except MissingError as reason:
            sys.stdout.write(f"{make.name}: not examined. {reason}\n\n")
    return implementations


if __name__ == "__main__":
    sys.exit(main())
