"""``python -m tests.bench.report_cost``: what ``fit(report=...)`` adds to a fit of the MLP.

Prints a table for docs/report.md: epochs of a fit with a report beside epochs of one without, in
turns, round after round, in one process and on one core. What is done once, apart from executions,
is told apart: timing the operators after the first epoch, and making the report at the end.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from typing import Any, Dict, List, Tuple
from unittest import mock

import torch

from ipufit.report import Report, recorder
from tests.bench.fitted import Marks, compiled
from tests.bench.workloads import WORKLOADS, Workload

POINTS = (1, 32)
EPOCHS = 4


def epochs_of(work: Workload, model: Any, device_iterations: int, report: Any) -> List[float]:
    """Seconds of each epoch but the first."""
    marks = Marks()
    how: Dict[str, Any] = {"epochs": EPOCHS, "callbacks": [marks], "report": report}
    how.update(batch_size=work.batch, device_iterations=device_iterations)
    model.fit(*work.tensors(), shuffle=False, verbose=0, seed=0, **how)
    return marks.epochs[1:]


def measured(
    work: Workload, device_iterations: int, rounds: int
) -> Tuple[List[float], float, float]:
    """What a report adds.

    Returns:
        By round, an epoch with a report beside one without; the same of the shortest epochs of all,
        which nothing else on the machine has held up; and seconds of an execution.
    """
    models = [compiled(work.module()) for _ in range(2)]
    ratios, seconds = [], []
    every: Tuple[List[float], List[float]] = ([], [])
    with tempfile.TemporaryDirectory() as folder:
        report = Report(folder, overwrite=True)
        for number in range(rounds + 1):
            # Who comes first finds the processor in another state than who comes second.
            order = [0, 1] if number % 2 else [1, 0]
            found = [0.0, 0.0]
            for is_on in order:
                given = report if is_on else None
                epochs = epochs_of(work, models[is_on], device_iterations, given)
                found[is_on] = statistics.median(epochs)
                every[is_on].extend(epochs if number else ())
            if number:
                ratios.append(found[1] / found[0])
                seconds.append(found[0] * device_iterations / work.updates)
    return ratios, min(every[1]) / min(every[0]), statistics.median(seconds)


def once(work: Workload) -> Tuple[float, float]:
    """Seconds of timing the operators, and of making the report."""
    found: Dict[str, float] = {}

    def timed(owner: Any, name: str) -> Any:
        original = getattr(owner, name)

        def run(*given: Any) -> Any:
            start = time.perf_counter()
            try:
                return original(*given)
            finally:
                found[name] = time.perf_counter() - start

        return mock.patch.object(owner, name, run)

    times = timed(recorder.Recorder, "_profiled"), timed(recorder, "make")
    with tempfile.TemporaryDirectory() as folder, times[0], times[1]:
        epochs_of(work, compiled(work.module()), 1, Report(folder, overwrite=True))
    return found["_profiled"], found["make"]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.report_cost")
    parser.add_argument("--rounds", type=int, default=15)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    work = WORKLOADS["mlp"]
    print(
        "| device_iterations | an execution | with a report, times without: the shortest epochs | "
        "median of the rounds (least to most) |\n| ---: | ---: | ---: | ---: |"
    )
    for point in POINTS:
        ratios, shortest, seconds = measured(work, point, rounds)
        ends = f"{min(ratios):.3f} to {max(ratios):.3f}"
        print(
            f"| {point} | {seconds * 1e6:.0f} µs | {shortest:.3f} "
            f"| {statistics.median(ratios):.3f} ({ends}) |",
            flush=True,
        )
    operators, page = once(work)
    print(f"\nOnce in a fit: {operators:.2f} s for the operators, {page:.2f} s for the report.")


if __name__ == "__main__":
    main()
