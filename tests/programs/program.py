"""The form in which published programs are listed, and the table that users see of them."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from typing import Callable, Mapping, Optional, Sequence, Tuple


@dataclass(frozen=True)
class Source:
    """A repository at one commit.

    Attributes:
        title: of its part of the table.
        repository: what ``git`` fetches it from.
        commit: its 40 digits.
    """

    title: str
    repository: str
    commit: str


def graphcore_examples(title: str) -> Source:
    """Return Graphcore's examples, of which several lists have a part each."""
    commit = "3cc8f81f13728dd8c17d0d3c8d2fc1549b159485"
    return Source(title, "https://github.com/graphcore/examples", commit)


@dataclass(frozen=True)
class Environment:
    """A virtual environment that programs run in; torch and ipufit are in it.

    Attributes:
        requirements: for pip.
        python: its version.
    """

    requirements: Tuple[str, ...] = ()
    python: str = "3.11"


# What comes of a program.
TRAINS = "trains"  # so many updates with finite results, or more; a file of tests may, too
RUNS = "runs"  # to its end; it trains nothing
PASSES = "passes"  # all tests that it does not skip, but for those that the reason names
FAILS = "fails"  # for a reason that is ours
OUT_OF_REACH = "out of reach"  # for a reason that is not: hardware, a download, a package


@dataclass(frozen=True)
class Program:
    """A program or a file of tests, how it is started, and what comes of it.

    Attributes:
        path: in the repository; of a notebook, its code is run as a script.
        result: one of the five above.
        reason: for a result that is not the whole of it.
        arguments: behind it on the command line; ``{work}`` is an empty folder.
        before: command lines that run before it in the same way, and write what it reads.
        adaptation: what was made up or made smaller, for the table.
        prepare: writes what it reads, into the folder of the repository that it is given, and
            the empty one.
        graphs: made-up data sets of PyTorch Geometric, by their names in graphs.py, in the empty
            folder.
        folder: in the repository, that it runs in; by default the file's own.
        variables: of the environment; ``{work}`` and ``{source}`` are the two folders.
        environment: the name of the environment that it runs in.
        updates: after so many executions of a model for training it is ended.
        calls: after so many of any model, too.
        failures: tests of it that fail or can't be collected, for the reason given.
        seconds: that it may take.
    """

    path: str
    result: str
    reason: str = ""
    arguments: str = ""
    before: Tuple[str, ...] = ()
    adaptation: str = ""
    prepare: Optional[Callable[[Path, Path], None]] = None
    graphs: Tuple[str, ...] = ()
    folder: Optional[str] = None
    variables: Mapping[str, str] = field(default_factory=dict)
    environment: str = "default"
    updates: int = 3
    calls: float = inf
    failures: int = 0
    seconds: int = 600

    def __post_init__(self) -> None:
        assert self.result in (TRAINS, RUNS, PASSES, FAILS, OUT_OF_REACH), self.result
        assert self.reason or (self.result in (TRAINS, RUNS, PASSES) and not self.failures)


def table(programs: Sequence[Program]) -> str:
    """The rows of the programs of one source, in Markdown."""
    lines = ["| program | adaptation | result |", "| --- | --- | --- |"]
    for program in programs:
        words = [f"`{program.arguments}`"] if program.arguments else []
        words += [program.adaptation] if program.adaptation else []
        result = program.result + (f": {program.reason}" if program.reason else "")
        lines.append(f"| `{program.path}` | {'; '.join(words) or 'none'} | {result} |")
    return "\n".join(lines)
