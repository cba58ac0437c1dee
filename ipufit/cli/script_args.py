"""The command line of what runs a script: ``ipufit run``, ``check``, ``plan`` and ``bench``."""

from __future__ import annotations

import argparse
import math
from typing import List, Tuple

from ipufit.cli.parsing import CommandParser, add_command
from ipufit.utils.poptorch_sdk import CHOICES

__all__ = ["NAMES", "add", "split"]

_RUN = """\
Run an existing PopTorch script, or a module as `python -m` does, with Python's own exit status,
traceback, sys.argv and sys.path. Where it says `import poptorch`, it gets the PopTorch of the
Poplar SDK if that is installed and can be imported, and ipufit's stand-in in plain torch otherwise;
a line on stderr says which. Where there is no SDK, `import popart` and `import popdist` find the
enums and the functions that scripts for one process use.
Exit status: the script's own; 2 the command line or the script can't be read.
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

# These run what is not ours: what stands behind it on the command line is its own.
NAMES = ("run", "check", "plan", "bench")
# Their options that a value follows, which is not the script.
_VALUED = ("--poptorch", "--ipus", "--ipus-per-replica", "--seconds")


def add(commands: argparse._SubParsersAction[CommandParser]) -> None:
    """Add these commands to the others."""
    which = "[--poptorch {auto,sdk,standin}]"
    options = f"{which} [--quiet] [--claim-ipus]"
    run = _add(commands, "run", "run a PopTorch script", _RUN, _RUN_EXAMPLES, options)
    run.add_argument("--quiet", action="store_true", help="don't say which PopTorch was imported")
    run.add_argument(
        "--claim-ipus",
        action="store_true",
        help="let the stand-in tell scripts that ask that there are IPUs; nothing else changes",
    )

    what, options = "check what a script would train", f"[--json] [--all] {which}"
    check = _add(commands, "check", what, _CHECK, _CHECK_EXAMPLES, options)
    _take_json(check, "the findings")
    check.add_argument(
        "--all", action="store_true", help="go on after the first fit, and check every one"
    )

    what = "say what a script's model takes on IPUs"
    options = f"[--ipus N] [--ipus-per-replica N] [--json] {which}"
    plan = _add(commands, "plan", what, _PLAN, _PLAN_EXAMPLES, options)
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

    what, options = "time what a script would train", f"[--seconds S] [--inductor] [--json] {which}"
    bench = _add(commands, "bench", what, _BENCH, _BENCH_EXAMPLES, options)
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


def _add(
    commands: argparse._SubParsersAction[CommandParser],
    name: str,
    what: str,
    about: str,
    examples: str,
    options: str,
) -> CommandParser:
    """Add a command, with the arguments that say what to run."""
    usage = f"%(prog)s [-h] {options} {{script,-m module}} [arguments ...]"
    command = add_command(commands, name, what, about, examples, usage)
    command.advice = "Arguments of the script stand behind it."
    command.add_argument(
        "--poptorch",
        choices=CHOICES,
        default="auto",
        help="which PopTorch the script imports: the SDK's if it works (auto, the default), "
        "the SDK's or an error (sdk), ipufit's (standin)",
    )
    command.add_argument(
        "-m", dest="module", help=f"the module to {name}; what follows it is its own"
    )
    command.add_argument(
        "script", nargs="?", help=f"the file to {name}; what follows it is its own"
    )
    return command


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


def split(words: List[str]) -> Tuple[List[str], List[str]]:
    """Cut a command line behind the script or module: what follows is its own, `--` included."""
    for place, word in enumerate(words[1:], 1):
        is_module = word.startswith("-m") and word != "-m"
        if is_module or (not word.startswith("-") and words[place - 1] not in _VALUED):
            return words[: place + 1], words[place + 1 :]
    return words, []
