"""Parsers of the command line: what they say of an unknown option, and how shells complete them."""

from __future__ import annotations

import argparse
import difflib
import sys
from typing import Any, Iterator, List, Optional, Tuple

from ipufit.errors import ConfigurationError
from ipufit.utils.console import HelpFormatter


class CommandParser(argparse.ArgumentParser):
    """Parser of one command, which refuses unknown options under its own name and usage.

    Attributes:
        advice: what else to do about an option that is not known; empty for nothing.
    """

    advice = ""

    def parse_known_args(  # type: ignore[override]
        self, args: Any = None, namespace: Any = None
    ) -> Tuple[argparse.Namespace, List[str]]:
        """Parse as argparse does, and refuse what the parser above would complain of."""
        options, strays = super().parse_known_args(args, namespace)
        if strays:
            self.error(f"unrecognized arguments: {' '.join(strays)}. {self._instead(strays)}")
        return options, []

    def _instead(self, strays: List[str]) -> str:
        near = [self._nearest(word) for word in strays]
        hints = [f"Did you mean {name}?" for name in near if name is not None]
        if self.advice and any(word.startswith("-") for word in strays):
            hints.append(self.advice)
        return " ".join([*hints, f"{self.prog} --help lists all."])

    def _nearest(self, word: str) -> Optional[str]:
        options = [name for action in self._actions for name in action.option_strings]
        near = difflib.get_close_matches(word.partition("=")[0], options, n=1, cutoff=0.8)
        return near[0] if near and word.startswith("--") else None


def add_command(
    commands: argparse._SubParsersAction[CommandParser],
    name: str,
    what: str,
    about: str,
    examples: str,
    usage: Optional[str] = None,
) -> CommandParser:
    """Add a command to the others.

    Args:
        commands: the others.
        name: of the command.
        what: it does, in the list of all.
        about: its description, in lines of its own.
        examples: below its options, in lines of their own.
        usage: in place of the one that argparse makes.
    """
    return commands.add_parser(
        name,
        help=what,
        description=about,
        epilog=examples,
        formatter_class=HelpFormatter,
        usage=usage,
        allow_abbrev=False,
    )


SHELLS = ("bash", "zsh", "tcsh")
_FILES, _FOLDERS = ("script",), ("folder", "folders")


def add_completion(parser: argparse.ArgumentParser) -> None:
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
        values: object,
        option_string: object = None,
    ) -> None:
        try:
            script = _script(parser, str(values))
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
    kinds = {**dict.fromkeys(_FILES, shtab.FILE), **dict.fromkeys(_FOLDERS, shtab.DIRECTORY)}
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
