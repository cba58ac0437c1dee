"""The command ``ipufit``."""

from __future__ import annotations

import argparse
import functools
import math
import os
import sys
from typing import Any, Callable, Dict, Iterable, List, NoReturn, Optional, Sequence, Tuple

from ipufit import __version__
from ipufit.commands import completion, conformance, doctor, report, watch
from ipufit.commands.parsing import CommandParser
from ipufit.errors import IpufitError, UnknownNameError
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
a line on stderr says which. Exit status: the script's own; 2 the command line or the script can't
be read.
"""
_RUN_EXAMPLES = """\
examples:
  ipufit run train.py --lr 0.1           the script's own option stands behind it
  ipufit run -m pytest tests             tests that import poptorch
  ipufit run --poptorch standin pt.py    without an IPU, also where the SDK is
"""

_CHECK = """\
Run a script as `ipufit run` does, up to its first call of Model.fit, and check the model, the loss
and the first micro-batch instead of training: what a recorded program would not do as it is
written, each with file, line and what to write instead. Then the script is ended, so that nothing
that comes after training can overwrite files with a model that was not trained. With --all it goes
on: every fit is a check, and returns an empty History.
Exit status: 0 nothing was found, 1 there are findings, 2 the command line or the script can't be
read, or the script fails or fits no model.
"""
_CHECK_EXAMPLES = """\
examples:
  ipufit check train.py --epochs 3       what it would train with this option of its own
  ipufit check --all train.py            every fit of the script, not only the first
  ipufit check --json -m package.train   the findings, for a program
"""

_PLAN = """\
Run a script as `ipufit check` does, up to its first call of Model.fit, and print what that would
take on IPUs: micro-batches, updates and executions, then memory, work and time of every stage, by
estimate. Nothing is trained, no IPU is needed, and the rest of the script is not run.
Exit status: 0 every stage fits its IPU, 1 one does not, 2 the command line or the script can't be
read, or the script fails or fits no model.
"""
_PLAN_EXAMPLES = """\
examples:
  ipufit plan train.py --batch 8               what the script asks for, its own option included
  ipufit plan --ipus-per-replica 4 train.py    the best division of the model into four stages
  ipufit plan --json -m package.train          all numbers, for a program
"""

_BENCH = """\
Run a script as `ipufit check` does, up to its first call of Model.fit, and time the program that
it would train, one way and another: the module itself (off), the recorded program (graph), and
that with kernels chosen on this machine (kernels), in turns. Each way must give the losses of the
first. Weights, optimizer and data are left as they were, and the rest of the script is not run.
Exit status: 0 all ways give the same losses, 1 one does not, 2 the command line or the script
can't be read, or the script fails or fits no model.
"""
_BENCH_EXAMPLES = """\
examples:
  ipufit bench train.py                  ten seconds, and the time that recording takes
  ipufit bench --seconds 60 train.py     on a machine with other work
  ipufit bench --inductor train.py       compiled into a library too, which takes a minute
"""

_EXAMPLES = """\
examples:
  ipufit check train.py          what of train.py's model a recorded program would not do
  ipufit plan train.py           what it takes on IPUs, by estimate
  ipufit bench train.py          how fast it trains here, one way and another
  ipufit run train.py --lr 0.1   a PopTorch script, with or without the Poplar SDK
  ipufit watch runs/1            the page of a run of fit(report="runs/1") while it trains

`ipufit COMMAND --help` says more of each.
In bash, `eval "$(ipufit --print-completion bash)"` makes TAB complete all of it.
"""

# These run what is not ours: what stands behind it on the command line is its own.
_OF_SCRIPTS = ("run", "check", "plan", "bench")
# Their options that a value follows, which is not the script.
_VALUED = ("--poptorch", "--ipus", "--ipus-per-replica", "--seconds")


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
    if given and not given[0].startswith("-") and given[0] not in commands:
        parser.error(_unknown(given[0], commands))
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
    if options.command != "run":
        raise SystemExit(_examine(options, execute))
    offer_poptorch(options.poptorch, tell=_silent if options.quiet else _tell)
    execute()


def _unknown(word: str, commands: Iterable[str]) -> str:
    """What is wrong with the name of a command."""
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
    offer_poptorch(options.poptorch, tell=_silent)
    # Imported here: another command does without.
    if options.command == "plan":
        from ipufit.commands.plan import plan_script

        return plan_script(execute, options.json, options.ipus, options.ipus_per_replica)
    if options.command == "bench":
        from ipufit.commands.bench import bench_script

        return bench_script(execute, options.json, options.seconds, options.inductor)
    from ipufit.diagnose.check_command import check_script

    return check_script(execute, options.json, options.all)


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


def _parsers() -> Tuple[argparse.ArgumentParser, Dict[str, CommandParser]]:
    """The parser of the whole command, and those of its commands, by name."""
    parser = argparse.ArgumentParser(
        prog="ipufit",
        description="Keras' compile and fit for PyTorch, on IPUs and elsewhere.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"ipufit {__version__}")
    completion.add(parser)
    commands = parser.add_subparsers(dest="command", metavar="command", parser_class=CommandParser)
    run = commands.add_parser(
        "run",
        help="run a PopTorch script",
        description=_RUN,
        epilog=_RUN_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
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
        epilog=_CHECK_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="%(prog)s [-h] [--json] [--all] [--poptorch {auto,sdk,standin}] "
        "{script,-m module} [arguments ...]",
        allow_abbrev=False,
    )
    _take_script(check, "check")
    _take_json(check, "the findings")
    check.add_argument(
        "--all", action="store_true", help="go on after the first fit, and check every one"
    )
    _add_plan(commands)
    _add_bench(commands)
    report.add(commands)
    watch.add(commands)
    doctor.add(commands)
    conformance.add(commands)
    for name in _OF_SCRIPTS:
        commands.choices[name].advice = "Arguments of the script stand behind it."
    return parser, commands.choices


def _add_plan(commands: Any) -> None:
    plan = commands.add_parser(
        "plan",
        help="say what a script's model takes on IPUs",
        description=_PLAN,
        epilog=_PLAN_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="%(prog)s [-h] [--ipus N] [--ipus-per-replica N] [--json] "
        "[--poptorch {auto,sdk,standin}] {script,-m module} [arguments ...]",
        allow_abbrev=False,
    )
    _take_script(plan, "plan")
    plan.add_argument(
        "--ipus", type=_count, metavar="N", help="in all, instead of those that fit is called with"
    )
    plan.add_argument(
        "--ipus-per-replica",
        type=_count,
        metavar="N",
        help="divide the model into so many stages, as evenly as can be, instead of what compile "
        "asks for",
    )
    _take_json(plan, "the plan")


def _add_bench(commands: Any) -> None:
    bench = commands.add_parser(
        "bench",
        help="time what a script would train",
        description=_BENCH,
        epilog=_BENCH_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="%(prog)s [-h] [--seconds S] [--inductor] [--json] [--poptorch {auto,sdk,standin}] "
        "{script,-m module} [arguments ...]",
        allow_abbrev=False,
    )
    _take_script(bench, "bench")
    bench.add_argument(
        "--seconds",
        type=_duration,
        default=10.0,
        metavar="S",
        help="for all that is timed (10); recording comes on top, and each way is timed three "
        "times at least",
    )
    bench.add_argument(
        "--inductor",
        action="store_true",
        help="time the program compiled with TorchInductor too; needs a C++ compiler",
    )
    _take_json(bench, "the times")


def _count(text: str) -> int:
    """A positive whole number of a command line."""
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1, got {text!r}")
    return int(text)


def _duration(text: str) -> float:
    """A positive number of seconds of a command line."""
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < math.inf:
        raise argparse.ArgumentTypeError(f"must be a number of seconds above 0, got {text!r}")
    return seconds


def _take_json(command: argparse.ArgumentParser, what: str) -> None:
    command.add_argument(
        "--json",
        action="store_true",
        help=f"print {what} as JSON; what the script prints goes to stderr",
    )


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
        if joined or (not word.startswith("-") and given[place - 1] not in _VALUED):
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
