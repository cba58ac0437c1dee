"""``ipufit conformance``: the cases that fix what PopTorch's words mean."""

from __future__ import annotations

from typing import Any, List

__all__ = ["NAME", "add", "run"]

NAME = "conformance"


def add(commands: Any) -> None:
    """Add the command to the others; what stands behind it is read by :func:`run`."""
    commands.add_parser(NAME, help="hold the engines against PopTorch's semantics", add_help=False)


def run(arguments: List[str]) -> int:
    """As ``python -m ipufit.conformance`` does.

    Args:
        arguments: what stands behind the command.

    Returns:
        The exit status.
    """
    # Imported here: another command does without.
    from ipufit.conformance.__main__ import main

    return main(arguments, prog="ipufit conformance")
