"""The command ``ipufit``."""

from __future__ import annotations

import argparse
import functools
import os
import sys
from typing import Callable, Dict, Iterable, List, Optional, Sequence, Tuple

from ipufit._version import __version__
from ipufit.cli import doctor, report, script_args
from ipufit.cli.parsing import CommandParser, add_completion
from ipufit.cli.run import ScriptError, enter, enter_module, read_script, run_module, run_script
from ipufit.conformance import __main__ as conformance
from ipufit.errors import IpufitError, UnknownNameError
from ipufit.utils.console import HelpFormatter
from ipufit.utils.poptorch_sdk import install

_CONFORMANCE = "conformance"
_EXAMPLES = """\
examples:
  ipufit check train.py          find code that behaves differently once it is recorded
  ipufit plan train.py           estimate memory and time on IPUs
  ipufit bench train.py          compare training speeds on this machine
  ipufit run train.py --lr 0.1   run a PopTorch script, with or without the Poplar SDK
  ipufit watch runs/1            show the report of a training run while it goes on

`ipufit COMMAND --help` describes one command.

In bash, `eval "$(ipufit --print-completion bash)"` turns on completion with TAB.
"""


def main(arguments: Optional[Sequence[str]] = None) -> None:
    """Do what the command line asks for.

    Args:
        arguments: without the name of the command; None means those of this process.
    Raises:
        SystemExit: with status 2, where the command line or the script can't be read; with the
            script's own status, where it ends itself; with that of any other command, after it.
        BaseException: whatever the script raises.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    parser, commands = _parsers()
    if words and not words[0].startswith("-") and words[0] not in commands:
        parser.error(_unknown(words[0], commands))
    rest: List[str] = []
    if words and words[0] in script_args.NAMES:
        words, rest = script_args.split(words)
    if words and words[0] == _CONFORMANCE:
        # It reads its arguments itself.
        raise SystemExit(conformance.main(words[1:], prog=f"ipufit {_CONFORMANCE}"))
    options = parser.parse_args(words)
    if options.command is None:
        parser.print_help()
        return
    if options.command not in script_args.NAMES:
        raise SystemExit(_status(options))
    command = commands[options.command]
    if (options.script is None) == (options.module is None):
        command.error("pass a script, or -m and a module")
    execute = _found(command, options, rest)
    if options.command != "run":
        raise SystemExit(_examine(options, execute))
    install(options.poptorch, claim_ipus=options.claim_ipus, quiet=options.quiet)
    execute()


def _unknown(word: str, commands: Iterable[str]) -> str:
    """Return the text of an error about an unknown command."""
    is_script = word.endswith(".py") or os.path.exists(word)
    hint = f"To run a script, write: ipufit run {word}. " if is_script else ""
    return str(UnknownNameError("command", word, commands, hint, is_typo=not is_script))


def _status(options: argparse.Namespace) -> int:
    """Do what a command does that runs no script; a fault of the user's is one line."""
    try:
        status: int = options.do(options)
    except (IpufitError, OSError) as error:
        sys.stderr.write(f"ipufit {options.command}: {error}\n")
        return 2
    return status


def _examine(options: argparse.Namespace, execute: Callable[[], None]) -> int:
    """Run what was found with fit replaced; returns the exit status."""
    install(options.poptorch, quiet=True)
    # Imported here: another command does without.
    if options.command == "plan":
        from ipufit.cli.plan import Planning

        return Planning(options).run(execute)
    if options.command == "bench":
        from ipufit.cli.bench import Bench

        return Bench(options).run(execute)
    from ipufit.cli.check import Checking

    return Checking(options).run(execute)


def _found(
    command: argparse.ArgumentParser, options: argparse.Namespace, rest: List[str]
) -> Callable[[], None]:
    """Enter what is to be run, and return what runs it."""
    try:
        if options.module is not None:
            enter_module(options.module, rest)
            return functools.partial(run_module, options.module)
        script = read_script(options.script)
    except ScriptError as fault:
        sys.stderr.write(f"{command.prog}: {fault}\n")
        raise SystemExit(2) from None
    enter(script, rest)
    return functools.partial(run_script, script)


def _parsers() -> Tuple[argparse.ArgumentParser, Dict[str, CommandParser]]:
    """The parser of the whole command, and those of its commands, by name."""
    parser = argparse.ArgumentParser(
        prog="ipufit",
        description="Keras' compile and fit for PyTorch, on CPUs, GPUs and IPUs.",
        epilog=_EXAMPLES,
        formatter_class=HelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"ipufit {__version__}")
    add_completion(parser)
    commands = parser.add_subparsers(dest="command", metavar="command", parser_class=CommandParser)
    script_args.add(commands)
    report.add(commands)
    doctor.add(commands)
    # For shells that complete it, and for --help.
    conformance.add_arguments(
        commands.add_parser(_CONFORMANCE, help="test the engines against PopTorch's semantics")
    )
    return parser, commands.choices
