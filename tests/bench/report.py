"""The tables of docs/benchmarks.md."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import os
import platform
import statistics
from pathlib import Path
from typing import Dict, List, Mapping, Optional, Sequence, Tuple

__all__ = ["Result", "machine", "points_table", "ratios", "summary", "table", "times", "write"]

_BEGIN, _END = "<!-- measured -->", "<!-- how -->"

# What a reader who has never seen ipufit trains with, in their words.
_BEST_KNOWN = {
    "eager loop, indexed, fused Adam": "PyTorch loop with fused Adam",
    "eager loop, DataLoader": "PyTorch loop with DataLoader",
    "torch.compile loop, fused Adam": "torch.compile with fused Adam",
    "Lightning": "Lightning",
    "skorch": "skorch",
    "Keras, torch": "Keras on torch",
    "Keras, JAX, steps_per_execution=32": "Keras on JAX",
    "Trainer of transformers": "Trainer of transformers",
    "Accelerate": "Accelerate",
}

_VERSIONS = ("torch", "lightning", "keras", "jax", "skorch", "numpy", "transformers")


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


def times(results: Sequence[Result]) -> Dict[str, Dict[str, float]]:
    """For each workload, how many times as long as the first peer the best known take."""
    first = {result.workload: result for result in reversed(results)}
    found: Dict[str, Dict[str, float]] = {name: {} for name in reversed(first)}
    for result in results:
        if result.peer in _BEST_KNOWN:
            of = ratios(result, first[result.workload])
            found[result.workload][_BEST_KNOWN[result.peer]] = statistics.median(of)
    return found


def summary(of: Mapping[str, Mapping[str, float]]) -> str:
    """Say in a sentence what :func:`times` says in numbers."""
    spans = {
        name: [peers[name] for peers in of.values() if name in peers]
        for name in _BEST_KNOWN.values()
    }
    told = []
    for name, own in spans.items():
        ends = dict.fromkeys(f"{end:.1f}" for end in (min(own), max(own))) if own else ()
        told += [f"{name} {' to '.join(ends)}"] if own else []
    return f"Time of an update on {', '.join(of)}, ipufit's being 1: {', '.join(told)}."


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
    """Replace what a page has between its marks."""
    head, _, rest = page.read_text(encoding="utf-8").partition(_BEGIN)
    tail = rest.partition(_END)[2]
    page.write_text("\n\n".join([head + _BEGIN, *parts, _END + tail]), encoding="utf-8")
