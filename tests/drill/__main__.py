"""``python -m tests.drill``: kill training at random moments, resume, compare with a whole run."""

from __future__ import annotations

import argparse
import sys
import time

from tests.drill.killing import Drill


def main() -> None:
    """Kill so often; 1 is the exit code unless every run ends with the bytes of a whole one."""
    parser = argparse.ArgumentParser(prog="nox -s drill --")
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    asked = parser.parse_args()
    start = time.perf_counter()
    found = Drill(asked.seed).run(asked.kills)
    seconds = time.perf_counter() - start
    print(
        f"{found.kills} kills in {found.runs} runs and {seconds:.0f} s: {found.saving} while a "
        f"checkpoint was written, {found.unbegun} before the first one; {found.same} of "
        f"{found.runs} runs ended with the bytes of a run that was never killed."
    )
    sys.exit(found.same != found.runs)


if __name__ == "__main__":
    main()
