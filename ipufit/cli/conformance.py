"""``ipufit conformance``: the cases that fix what PopTorch's words mean."""

from __future__ import annotations

from typing import Any, List

from ipufit.conformance import command_line

__all__ = ["NAME", "add", "run"]

NAME = "conformance"


def add(commands: Any) -> None:
    """Add the command to the others.

    What stands behind it is read by :func:`run`; shells complete by what is added here.
    """
    command = commands.add_parser(NAME, help="hold the engines against PopTorch's semantics")
    command_line.add_arguments(command)


def run(arguments: List[str]) -> int:
    """Run ``python -m ipufit.conformance``.

    Args:
        arguments: what stands behind the command.

    Returns:
        The exit status.
    """
    # Imported here: another command does without.
    from ipufit.conformance.__main__ import main

    return main(arguments, prog="ipufit conformance")
