"""The command ``ipufit``."""

from __future__ import annotations

import argparse
import functools
import sys
from typing import Callable, Dict, List, NoReturn, Optional, Sequence, Tuple

from ipufit import __version__
from ipufit.commands import conformance, doctor, report, watch
from ipufit.errors import IpufitError
from ipufit.finding_poptorch import CHOICES, offer_poptorch
from ipufit.scripts import (
    ScriptError,
    enter,
    enter_module,
    read_script,
    run_module,
    run_script,
)

__all__ = ["main"]

_RUN = """\
Run an existing PopTorch script, or a module as `python -m` does, with Python's own exit status,
traceback, sys.argv and sys.path. Where it says `import poptorch`, it gets the PopTorch of the
Poplar SDK if that is installed and can be imported, and ipufit's stand-in in plain torch otherwise;
a line on stderr says which.
"""

_CHECK = """\
Run a script as `ipufit run` does, up to its first call of Model.fit, and check the model, the loss
and the first micro-batch instead of training: what a recorded program would not do as it is
written, each with file, line and what to write instead. Then the script is ended, so that nothing
that comes after training can overwrite files with a model that was not trained. With --all it goes
on: every fit is a check, and returns an empty History. Exit status: 0 nothing was found, 1 there
are findings, 2 the command line or the script can't be read, or the script fails or fits no model.
"""

_EXAMPLES = """\
examples:
  ipufit check train.py          what of train.py's model a recorded program would not do
  ipufit run train.py --lr 0.1   a PopTorch script, with or without the Poplar SDK
  ipufit watch runs/1            the page of a run of fit(report="runs/1") while it trains

`ipufit COMMAND --help` says more of each.
"""

# These run what is not ours: what stands behind it on the command line is its own.
_OF_SCRIPTS = ("run", "check")


def main(arguments: Optional[Sequence[str]] = None) -> None:
    """Do what the command line asks for.

    Args:
        arguments: without the name of the command; None means those of this process.
    Raises:
        SystemExit: with status 2, where the command line or the script can't be read; with the
            script's own status, where it ends itself; with that of any other command, after it.
        BaseException: whatever the script raises.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    parser, commands = _parsers()
    rest: List[str] = []
    if given and given[0] in _OF_SCRIPTS:
        given, rest = _split(given)
    if given and given[0] == conformance.NAME:
        raise SystemExit(conformance.run(given[1:]))
    options = parser.parse_args(given)
    if options.command is None:
        parser.print_help()
        return
    if options.command not in _OF_SCRIPTS:
        raise SystemExit(_status(options))
    command = commands[options.command]
    if (options.script is None) == (options.module is None):
        command.error("give a script, or -m and a module")
    execute = _found(command, options, rest)
    if options.command == "check":
        _check(options, execute)
        return
    offer_poptorch(options.poptorch, tell=_silent if options.quiet else _tell)
    execute()


def _status(options: argparse.Namespace) -> int:
    """Do what a command does that runs no script; a fault of the user's is one line."""
    try:
        status: int = options.do(options)
    except (IpufitError, OSError) as error:
        sys.stderr.write(f"ipufit {options.command}: {error}\n")
        return 2
    return status


def _check(options: argparse.Namespace, execute: Callable[[], None]) -> None:
    """Run what was found with fit replaced.

    Raises:
        SystemExit: always; with the status of the check.
    """
    offer_poptorch(options.poptorch, tell=_silent)
    # Imported here: another command does without.
    from ipufit.diagnose.check_command import check_script

    raise SystemExit(check_script(execute, options.json, options.all))


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
        _refuse(command, str(fault))
    enter(script, rest)
    return functools.partial(run_script, script)


def _parsers() -> Tuple[argparse.ArgumentParser, Dict[str, argparse.ArgumentParser]]:
    """The parser of the whole command, and those of the commands that run scripts, by name."""
    parser = argparse.ArgumentParser(
        prog="ipufit",
        description="Keras' compile and fit for PyTorch, on IPUs and elsewhere.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"ipufit {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="command")
    run = commands.add_parser(
        "run",
        help="run a PopTorch script",
        description=_RUN,
        usage="%(prog)s [-h] [--poptorch {auto,sdk,standin}] [--quiet] "
        "{script,-m module} [arguments ...]",
        allow_abbrev=False,
    )
    _take_script(run, "run")
    run.add_argument("--quiet", action="store_true", help="don't say which PopTorch was imported")
    check = commands.add_parser(
        "check",
        help="check what a script would train",
        description=_CHECK,
        usage="%(prog)s [-h] [--json] [--all] [--poptorch {auto,sdk,standin}] "
        "{script,-m module} [arguments ...]",
        allow_abbrev=False,
    )
    _take_script(check, "check")
    check.add_argument(
        "--json",
        action="store_true",
        help="print the findings as JSON; what the script prints goes to stderr",
    )
    check.add_argument(
        "--all", action="store_true", help="go on after the first fit, and check every one"
    )
    report.add(commands)
    watch.add(commands)
    doctor.add(commands)
    conformance.add(commands)
    return parser, {"run": run, "check": check}


def _take_script(command: argparse.ArgumentParser, verb: str) -> None:
    """Arguments that say what to run."""
    command.add_argument(
        "--poptorch",
        choices=CHOICES,
        default="auto",
        help="which PopTorch the script imports: the SDK's if it works (auto, the default), "
        "the SDK's or an error (sdk), ipufit's (standin)",
    )
    command.add_argument(
        "-m", dest="module", help=f"the module to {verb}; what follows it is its own"
    )
    command.add_argument(
        "script", nargs="?", help=f"the file to {verb}; what follows it is its own"
    )


def _split(given: List[str]) -> Tuple[List[str], List[str]]:
    """Cut a command line behind the script or module: what follows is its own, `--` included."""
    for place, word in enumerate(given[1:], 1):
        joined = word.startswith("-m") and word != "-m"
        if joined or (not word.startswith("-") and given[place - 1] != "--poptorch"):
            return given[: place + 1], given[place + 1 :]
    return given, []


def _refuse(parser: argparse.ArgumentParser, text: str) -> NoReturn:
    """End with the status of a command line that can't be followed."""
    sys.stderr.write(f"{parser.prog}: {text}\n")
    raise SystemExit(2)


def _tell(line: str) -> None:
    sys.stderr.write(f"ipufit run: {line}\n")
    sys.stderr.flush()


def _silent(line: str) -> None:
    pass
