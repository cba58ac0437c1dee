"""``python -m tests.house``: the figures beside their bounds; fails where one is above its own.

A bound is a figure that has been reached. It goes down with the figure, and up for a reason that
the commit gives.
"""

import json
import subprocess
import sys
from pathlib import Path

from tests.house.structure import measure

HERE = Path(__file__).resolve().parent
BOUNDS = HERE / "bounds.json"


def main():
    """Print a table; the exit status is 1 where a figure is above its bound."""
    figures, groups = measure(HERE.parents[1] / "ipufit")
    command = [sys.executable, "-m", "tests.house.path"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    figures.update(json.loads(done.stdout.splitlines()[-1]))
    bounds = json.loads(BOUNDS.read_text("utf-8"))
    above = [name for name, bound in bounds.items() if figures[name] > bound]
    print(f"{'figure':24}{'now':>8}{'bound':>8}")
    for name, figure in figures.items():
        print(f"{name:24}{figure:8}{bounds[name]:8}{'  above' if name in above else ''}")
    for group in groups:
        print(f"circle of {len(group)}: {', '.join(group)}")
    if above:
        sys.exit(f"above the bounds of {BOUNDS.name}: {', '.join(above)}")


if __name__ == "__main__":
    main()
