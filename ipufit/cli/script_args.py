"""The command line of what runs a script: ``ipufit run``, ``check``, ``plan`` and ``bench``."""

from __future__ import annotations

import argparse
import math
from typing import List, Tuple

from ipufit.cli.parsing import CommandParser, add_command
from ipufit.utils.poptorch_sdk import CHOICES

_RUN = """\
Run an existing PopTorch script, or a module as `python -m` does. Exit status, traceback, sys.argv
and sys.path are the same as with Python. `import poptorch` imports the PopTorch of the Poplar SDK
if that is installed and works, and otherwise ipufit's stand-in in plain torch; a line on stderr
says which. Without the SDK, `import popart` and `import popdist` bring the enums and functions that
scripts for a single process use.

Exit status: that of the script; 2 if the command line is wrong or the script can't be read.
"""
_RUN_EXAMPLES = """\
examples:
  ipufit run train.py --lr 0.1           pass an option to the script
  ipufit run -m pytest tests             run tests that import poptorch
  ipufit run --poptorch standin pt.py    use no IPU, even if the SDK is installed
"""

_CHECK = """\
Run a script as `ipufit run` does, up to its first call of Model.fit. Instead of training, check the
model, the loss and the first micro-batch for code that would behave differently in a recorded
program. Each finding has file, line and what to write instead. The script ends there, so that its
later lines can't overwrite files with an untrained model. With --all it continues: each call of fit
is checked, and returns an empty History.

Exit status: 0 if there are no findings, 1 if there are, 2 if the command line is wrong, the script
can't be read or fails, or it never calls fit.
"""
_CHECK_EXAMPLES = """\
examples:
  ipufit check train.py --epochs 3       pass an option to the script
  ipufit check --all train.py            check every fit of the script, not only the first
  ipufit check --json -m package.train   print the findings as JSON
"""

_PLAN = """\
Run a script as `ipufit check` does, up to its first call of Model.fit, and estimate what that fit
would need on IPUs: micro-batches, updates and executions, then memory, work and time of every
stage. Nothing is trained, no IPU is needed, and the rest of the script does not run.

Exit status: 0 if every stage fits its IPU, 1 if one does not, 2 if the command line is wrong, the
script can't be read or fails, or it never calls fit.
"""
_PLAN_EXAMPLES = """\
examples:
  ipufit plan train.py --batch 8               pass an option to the script
  ipufit plan --ipus-per-replica 4 train.py    find the best division into four stages
  ipufit plan --json -m package.train          print all numbers as JSON
"""

_BENCH = """\
Run a script as `ipufit check` does, up to its first call of Model.fit, and time that training in
several ways, in turns: the module itself (off), the recorded program (graph), and the recorded
program with kernels chosen on this machine (kernels). All must give the losses of the module
itself. Weights, optimizer and data do not change, and the rest of the script does not run.

Exit status: 0 if all ways give the same losses, 1 if one does not, 2 if the command line is wrong,
the script can't be read or fails, or it never calls fit.
"""
_BENCH_EXAMPLES = """\
examples:
  ipufit bench train.py                  ten seconds, plus the time for recording
  ipufit bench --seconds 60 train.py     for a machine that is busy with other work
  ipufit bench --inductor train.py       also compiled with TorchInductor, which can take minutes
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
        help="make the stand-in report IPUs to scripts that look for them; nothing else changes",
    )

    what, options = "check the model of a script before training", f"[--json] [--all] {which}"
    check = _add(commands, "check", what, _CHECK, _CHECK_EXAMPLES, options)
    _take_json(check, "the findings")
    check.add_argument(
        "--all", action="store_true", help="continue after the first fit, and check every one"
    )

    what = "estimate what a script's model needs on IPUs"
    options = f"[--ipus N] [--ipus-per-replica N] [--json] {which}"
    plan = _add(commands, "plan", what, _PLAN, _PLAN_EXAMPLES, options)
    plan.add_argument(
        "--ipus", type=_count, metavar="N", help="total number of IPUs; replaces that of fit"
    )
    plan.add_argument(
        "--ipus-per-replica",
        type=_count,
        metavar="N",
        help="divide the model into N stages, as evenly as possible; replaces the division that "
        "compile was given",
    )
    _take_json(plan, "the plan")

    what, options = "time the training of a script", f"[--seconds S] [--inductor] [--json] {which}"
    bench = _add(commands, "bench", what, _BENCH, _BENCH_EXAMPLES, options)
    bench.add_argument(
        "--seconds",
        type=_duration,
        default=10.0,
        metavar="S",
        help="seconds for all measurements (default: 10), not counting the recording; each way is "
        "timed at least three times",
    )
    bench.add_argument(
        "--inductor",
        action="store_true",
        help="also time the program compiled with TorchInductor; needs a C++ compiler",
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
    command.advice = "Put arguments of the script after it."
    command.add_argument(
        "--poptorch",
        choices=CHOICES,
        default="auto",
        help="which PopTorch the script imports: auto (the default) is the SDK's if it works, and "
        "else ipufit's stand-in; sdk is the SDK's or an error; standin is ipufit's",
    )
    command.add_argument(
        "-m", dest="module", help=f"the module to {name}; arguments after it are passed to it"
    )
    command.add_argument(
        "script", nargs="?", help=f"the file to {name}; arguments after it are passed to it"
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
