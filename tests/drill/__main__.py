"""``python -m tests.drill``: kill what can go on, and interrupt what reads with workers."""

from __future__ import annotations

import argparse
import itertools
import random
import sys
import time
from typing import Iterator, Tuple

import torch

from tests.drill.interrupting import CASES, interrupt
from tests.drill.killing import Drill

# Of the beginning of a run, in seconds, which is interrupted at any of its milliseconds.
_BEGINNING = 2.0


def main() -> None:
    """Kill and interrupt so often; 1 is the exit code unless every run ends as it should."""
    parser = argparse.ArgumentParser(prog="nox -s drill --")
    parser.add_argument("--kills", type=int, help="200, or none where interrupts are named")
    parser.add_argument("--interrupts", type=int, help="200, or none where kills are named")
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    bound = "seconds that an interrupt may take"
    parser.add_argument("--bound", type=float, default=3.0, help=bound)
    options = parser.parse_args()
    if options.kills is None and options.interrupts is None:
        options.kills = options.interrupts = 200
    # Before any thread is started, which would not survive a fork.
    torch.set_num_threads(1)
    faults = 0
    if options.interrupts:
        faults += _interrupt_all(options.interrupts, options.seed, options.bound)
    if options.kills:
        faults += _kill_all(options.kills, options.seed)
    sys.exit(faults > 0)


def _interrupt_all(count: int, seed: int, bound: float) -> int:
    """Print what went wrong; the number of runs in which something did."""
    longest, faulty = 0.0, 0
    for number, (case, after) in enumerate(_moments(count, random.Random(seed))):
        seconds, faults = interrupt(case, after, only_parent=number % 4 == 3)
        longest = max(longest, seconds)
        if seconds > bound:
            faults.append(f"it took {seconds:.1f} s")
        if faults:
            faulty += 1
            print(f"{case}, {1000 * after:.0f} ms:", *faults, sep="\n  ", flush=True)
    print(
        f"{count} interrupts within the first {_BEGINNING:g} s of {len(CASES)} kinds of runs with "
        f"workers: {count - faulty} ended by KeyboardInterrupt and left nothing behind; the "
        f"slowest took {longest:.1f} s."
    )
    return faulty


def _moments(count: int, source: random.Random) -> Iterator[Tuple[str, float]]:
    """Cases and moments, spread evenly; every other case is the first."""
    first, *others = CASES
    other = itertools.cycle(others)
    moments = [(number + source.random()) * _BEGINNING / count for number in range(count)]
    for number, moment in enumerate(source.sample(moments, count)):
        yield first if number % 2 == 0 else next(other), moment


def _kill_all(kills: int, seed: int) -> int:
    """Print how it went; the number of runs that did not end with the bytes of a whole one."""
    start = time.perf_counter()
    found = Drill(seed).run(kills)
    seconds = time.perf_counter() - start
    print(
        f"{found.kills} kills in {found.runs} runs and {seconds:.0f} s: {found.saving} while a "
        f"checkpoint was written, {found.unbegun} before the first one; {found.same} of "
        f"{found.runs} runs ended with the bytes of a run that was never killed."
    )
    return found.runs - found.same


if __name__ == "__main__":
    main()
