"""``python -m tests.models [WORD ...]``: train published models, as they are listed.

Words choose models by list and name. Nothing of them is kept in the project.
"""

import argparse
import importlib
import sys
import time
import traceback
from collections import Counter
from pathlib import Path

from tests.models.model import ITSELF, RECORDED, compare

PAGE = Path(__file__).resolve().parents[2] / "docs" / "models.md"
# What stands behind it on the page is written here.
TABLES = "<!-- python -m tests.models --write -->"
GROUPS = ("vision", "language", "graphs", "diffusion")


def load_groups():
    """Import the lists, in the order of the page."""
    return [importlib.import_module(f"tests.models.{name}") for name in GROUPS]


def page(groups):
    """The text of docs/models.md, with its tables anew."""
    head = PAGE.read_text("utf-8").partition(f"{TABLES}\n")[0]
    ways = Counter(entry.way for group in groups for entry in group.MODELS)
    parts = [
        f"{head}{TABLES}",
        f"{sum(ways.values())} models: {ways[RECORDED]} are recorded as one program, "
        f"{ways[ITSELF]} run themselves.",
    ]
    for group in groups:
        rows = [
            f"| {entry.name} | {entry.way}{f': {entry.why}' if entry.why else ''} | "
            f"{str(entry.dtype).replace('torch.', '')}, {entry.within:g} |"
            for entry in group.MODELS
        ]
        table = ["| model | way | weights equal the loop's within |", "| --- | --- | --- |", *rows]
        parts += [f"## {group.TITLE}", "\n".join(table)]
    return "\n\n".join(parts) + "\n"


def main():
    """Do what the command line says; the exit status is 1 where a model does otherwise."""
    parser = argparse.ArgumentParser(prog="python -m tests.models", description=__doc__)
    parser.add_argument("words", nargs="*", metavar="WORD", help="part of list/name")
    parser.add_argument("--write", action="store_true", help="write the tables of docs/models.md")
    options = parser.parse_args()
    groups = load_groups()
    if options.write:
        PAGE.write_text(page(groups), encoding="utf-8")
        return 0
    counts = Counter()
    for name, group in zip(GROUPS, groups):
        for entry in group.MODELS:
            title = f"{name}/{entry.name}"
            if options.words and not any(word in title for word in options.words):
                continue
            begun = time.monotonic()
            try:
                way, why, difference = compare(entry)
                good = way == entry.way and difference <= entry.within
                text = f"{way}, {difference:.1e} {why}"
            except Exception as error:
                good = False
                where = traceback.extract_tb(error.__traceback__)[-1]
                text = f"{type(error).__name__}: {error} at {where.filename}:{where.lineno}"
            counts[good] += 1
            mark = "as listed" if good else "NOT AS LISTED"
            print(f"{title}: {mark}: {text} ({time.monotonic() - begun:.0f} s)", flush=True)
    print(f"{counts[True]} passed, {counts[False]} failed")
    return 1 if counts[False] else 0


if __name__ == "__main__":
    sys.exit(main())
