"""The tables of docs/benchmarks.md."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import os
import platform
import statistics
from pathlib import Path
from typing import List, Optional, Sequence, Tuple

__all__ = ["Result", "machine", "points_table", "ratios", "table", "write"]

_MARK = "<!-- measured -->"

_VERSIONS = ("torch", "lightning", "keras", "jax", "skorch", "numpy")


@dataclasses.dataclass(frozen=True)
class Result:
    """One peer on one workload.

    Attributes:
        workload, peer: names.
        seconds: of an update, the median over the epochs of each round.
        peak: resident memory of the process at most, in bytes; None if the process has had other
            work too.
    """

    workload: str
    peer: str
    seconds: List[float]
    peak: Optional[float]

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
            f"({min(of):.2f} to {max(of):.2f}) | {_mebibytes(result.peak)} |"
        )
    return "\n".join(lines)


def _mebibytes(peak: Optional[float]) -> str:
    return "" if peak is None else f"{peak / 2**20:.0f}"


def points_table(
    setting: str, unit: str, points: Sequence[int], lines: Sequence[Tuple[str, Sequence[float]]]
) -> str:
    """A curve: a row for each point, a column for each line, in microseconds."""
    names = [f"{name}, {unit}" for name, _ in lines]
    rows = [
        f"| {' | '.join([setting, *names])} |",
        f"| {' | '.join(['---:'] * (1 + len(lines)))} |",
    ]
    for place, point in enumerate(points):
        micros = [of[place] * 1e6 for _, of in lines]
        values = [f"{value:.0f}" if value >= 100 else f"{value:.1f}" for value in micros]
        rows.append(f"| {' | '.join([str(point), *values])} |")
    return "\n".join(rows)


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


def write(page: Path, parts: Sequence[str]) -> None:
    """Replace what a page has below its mark."""
    head = page.read_text(encoding="utf-8").split(_MARK)[0]
    page.write_text("\n\n".join([head + _MARK, *parts]) + "\n", encoding="utf-8")
