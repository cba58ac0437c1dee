"""``python -m tests.bench.report_cost``: what ``ipufit.Report`` adds to a fit of the MLP.

Prints a table for docs/report.md. One fit with a report goes with and without it in turns, every
few milliseconds: so near to each other that what else the machine does meets both alike. What is
done once, apart from executions, is told apart: timing the operators after the first epoch, and
making the report at the end.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import tempfile
import time
from typing import Any, Dict, Iterator, List, Tuple
from unittest import mock

import torch

from ipufit.report import Report, recorder
from ipufit.training.trainer import Trainer
from ipufit.utils.phase_timer import NO_CLOCK, Clock
from tests.bench.fitted import compiled
from tests.bench.workloads import WORKLOADS, Workload

# Executions of each turn, by device_iterations: some milliseconds.
POINTS = {1: 16, 32: 1}
# The rows of the first executions, one for each, cost more than those of the rest.
LEFT_OUT = 8
# Epochs of each fit, after those.
EPOCHS = 32


class Turns:
    """Switches the report of a fit off and on again.

    Args:
        block: executions of each turn.

    Attributes:
        seconds: of an execution, turn by turn: without a report, and with it.
    """

    def __init__(self, block: int) -> None:
        self._block = block
        self.seconds: Tuple[List[float], List[float]] = ([], [])

    @contextlib.contextmanager
    def switching(self) -> Iterator[None]:
        """Do so as long as the block lasts."""
        run_epoch, turns = Trainer.run_epoch, self

        def executions(trainer: Trainer, number: int) -> Iterator[None]:
            clock: Any = trainer.clock
            read = mock.patch.object(
                clock, "reading", lambda values: turns._read(trainer, clock, values, number)
            )
            with read:
                yield from run_epoch(trainer, number)

        with mock.patch.object(Trainer, "run_epoch", executions):
            yield

    def _read(
        self, trainer: Trainer, clock: Clock, values: Iterator[Any], epoch: int
    ) -> Iterator[Any]:
        """What ``Clock.reading`` does, and in every second turn what ``NoClock.reading`` does."""
        everybody = trainer.observers
        told: Any = everybody[-1]
        engine, place, begun = told._session.engine, 0, 0.0
        while True:
            is_on, is_first = not place // self._block % 2, not place % self._block
            if is_first:
                now = time.perf_counter()
                # The one after the change of epochs is not like the others.
                if place > self._block and epoch >= LEFT_OUT:
                    self.seconds[not is_on].append((now - begun) / self._block)
                if is_on:
                    told._mark()
                else:
                    told.end_executions()
                trainer.observers = everybody if is_on else everybody[:-1]
                trainer.clock = engine.clock = clock if is_on else NO_CLOCK
                begun = time.perf_counter()
            if is_on:
                clock.turn("data")
            value = next(values, None)
            if value is None:
                trainer.observers = everybody
                trainer.clock = engine.clock = clock
                return
            yield value
            del value
            place += 1


def measured(work: Workload, device_iterations: int, fits: int) -> Tuple[List[float], List[float]]:
    """Seconds of an execution, turn by turn of several fits, without a report and with it."""
    turns = Turns(POINTS[device_iterations])
    with tempfile.TemporaryDirectory() as folder, turns.switching():
        for _ in range(fits):
            fit(work, device_iterations, LEFT_OUT + EPOCHS, Report(folder, overwrite=True))
    return turns.seconds


def fit(work: Workload, device_iterations: int, epochs: int, report: Report) -> None:
    """Train the MLP."""
    how: Dict[str, Any] = {"epochs": epochs, "callbacks": report, "batch_size": work.batch}
    how.update(device_iterations=device_iterations, shuffle=False, verbose=0, seed=0)
    compiled(work.module()).fit(*work.tensors(), **how)


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

    times = timed(recorder.Recorder, "_profiled"), timed(recorder, "write_page")
    with tempfile.TemporaryDirectory() as folder, times[0], times[1]:
        fit(work, 1, 4, Report(folder, overwrite=True))
    return found["_profiled"], found["make"]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.report_cost")
    parser.add_argument("--fits", type=int, default=8)
    fits = parser.parse_args().fits
    torch.set_num_threads(1)
    work = WORKLOADS["mlp"]
    print(
        "| device_iterations | an execution | with a report: times without, by the median turn | "
        "by the quarter that is faster |\n| ---: | ---: | ---: | ---: |"
    )
    for point in POINTS:
        off, on = measured(work, point, fits)
        lower, middle = (
            statistics.quantiles(on, n=4)[place] / statistics.quantiles(off, n=4)[place]
            for place in range(2)
        )
        typical = statistics.median(off)
        print(f"| {point} | {typical * 1e6:.0f} µs | {middle:.3f} | {lower:.3f} |", flush=True)
    operators, page = once(work)
    print(f"\nOnce in a fit: {operators:.2f} s for the operators, {page:.2f} s for the report.")


if __name__ == "__main__":
    main()
