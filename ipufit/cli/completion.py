"""``ipufit --print-completion``: what a shell needs to complete the command line."""

from __future__ import annotations

import argparse
import sys
from typing import Any, Dict, Iterator

from ipufit.errors import ConfigurationError

__all__ = ["SHELLS", "add"]

SHELLS = ("bash", "zsh", "tcsh")
_FILES, _FOLDERS = ("script",), ("folder", "folders")


def add(parser: argparse.ArgumentParser) -> None:
    """Add the option to the parser of the whole command."""
    parser.add_argument(
        "--print-completion",
        action=_Print,
        choices=SHELLS,
        help="print a script that makes this shell complete commands, options and files; needs "
        "`pip install ipufit[completion]`",
    )


class _Print(argparse.Action):
    """Prints the script and ends, as ``--version`` does."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: object = None,
    ) -> None:
        try:
            script = _script(parser, values)
        except ConfigurationError as error:
            sys.stderr.write(f"{parser.prog}: {error}\n")
            raise SystemExit(2) from None
        sys.stdout.write(script + "\n")
        raise SystemExit(0)


def _script(parser: argparse.ArgumentParser, shell: str) -> str:
    """Return the script that the shell reads.

    Raises:
        ConfigurationError: the library that writes it is not installed.
    """
    try:
        # Imported here: another command does without.
        import shtab
    except ImportError as error:
        raise ConfigurationError(
            "--print-completion needs shtab, which is not installed. Run: "
            "pip install ipufit[completion]"
        ) from error
    kinds: Dict[str, Any] = dict.fromkeys(_FILES, shtab.FILE)
    kinds.update(dict.fromkeys(_FOLDERS, shtab.DIRECTORY))
    for action in _actions(parser):
        if action.dest in kinds and not action.option_strings:
            action.complete = kinds[action.dest]  # type: ignore[attr-defined]
    script: str = shtab.complete(parser, shell=shell)
    return script


def _actions(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    """Yield the actions of a parser and of its commands."""
    for action in parser._actions:
        yield action
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                yield from _actions(command)
