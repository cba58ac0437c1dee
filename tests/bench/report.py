"""The tables of docs/benchmarks.md, and the plot beside it."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import os
import platform
import statistics
from pathlib import Path
from typing import List, Optional

__all__ = ["Result", "write"]

_VERSIONS = ("torch", "lightning", "keras", "jax", "skorch", "numpy")


@dataclasses.dataclass(frozen=True)
class Result:
    """One peer on one workload.

    Attributes:
        workload, peer: names.
        seconds: of an update, the median over the epochs of each round.
        peak: resident memory of the process at most, in bytes.
    """

    workload: str
    peer: str
    seconds: List[float]
    peak: float

    @property
    def median(self) -> float:
        """Seconds of an update, over the rounds."""
        return statistics.median(self.seconds)


def ratios(result: Result, first: Result) -> List[float]:
    """Round by round, how many times as long as the first peer it takes."""
    return [own / other for own, other in zip(result.seconds, first.seconds)]


def table(results: List[Result]) -> str:
    """The peers of one workload, the fastest first."""
    first = results[0]
    lines = [
        "| peer | µs an update | times ipufit's: median (least to most of the rounds) "
        "| peak memory, MiB |",
        "| --- | ---: | ---: | ---: |",
    ]
    for result in sorted(results, key=lambda result: result.median):
        of = ratios(result, first)
        lines.append(
            f"| {result.peer} | {result.median * 1e6:.0f} | {statistics.median(of):.2f} "
            f"({min(of):.2f} to {max(of):.2f}) | {result.peak / 2**20:.0f} |"
        )
    return "\n".join(lines)


def machine() -> str:
    """What it ran on."""
    versions = []
    for name in _VERSIONS:
        try:
            versions.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    model = platform.processor() or platform.machine()
    cores = len(os.sched_getaffinity(0))
    return f"{cores} cores ({model}), Python {platform.python_version()}, {', '.join(versions)}"


def write(results: List[Result], rounds: int, seconds: float, folder: Optional[Path]) -> None:
    """Print the tables; with a folder, write the page and the plot into it."""
    names = list(dict.fromkeys(result.workload for result in results))
    tables = {name: table([r for r in results if r.workload == name]) for name in names}
    text = "\n\n".join(f"## {name}\n\n{body}" for name, body in tables.items())
    print(f"{machine()}; {rounds} rounds in {seconds / 60:.1f} minutes\n\n{text}")
    if folder is None:
        return
    page = folder / "benchmarks.md"
    head = page.read_text(encoding="utf-8").split("<!-- measured -->")[0]
    note = f"Measured on {machine()}; {rounds} rounds in {seconds / 60:.0f} minutes."
    page.write_text(f"{head}<!-- measured -->\n\n{note}\n\n{text}\n", encoding="utf-8")
