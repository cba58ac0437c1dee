"""``python -m tests.soak``: train long, make many models, and see whether anything grows."""

from __future__ import annotations

import argparse
import sys

from tests.soak.leaking import many_executions, many_models


def main() -> None:
    """Run both parts; 1 is the exit code if something grows."""
    parser = argparse.ArgumentParser(prog="nox -s soak --")
    parser.add_argument("--executions", type=int, default=20_000)
    parser.add_argument("--models", type=int, default=200)
    asked = parser.parse_args()
    found = [many_executions(asked.executions), many_models(asked.models)]
    for part in found:
        print(part)
    sys.exit(any(part.leaks for part in found))


if __name__ == "__main__":
    main()
