"""What must stay small: each cost with its bound, and whether the bound holds."""

from __future__ import annotations

import dataclasses
import os
import statistics
import subprocess
import sys
from typing import List, Sequence

from tests.bench.peers import BY_HAND, OWN
from tests.bench.running import Running
from tests.bench.workloads import WORKLOADS

__all__ = [
    "Cost",
    "cost_table",
    "curve_costs",
    "import_cost",
    "memory_costs",
    "share_costs",
    "start_cost",
]

_IMPORT = """
import time, torch
start = time.perf_counter()
import ipufit
print(time.perf_counter() - start)
"""
_START = """
import time
from tests.bench.fitted import compiled
from tests.bench.workloads import WORKLOADS
from ipufit.callbacks import LambdaCallback
work = WORKLOADS["mlp"]
x, y = work.tensors()
model = compiled(work.module())
ends = []
end = LambdaCallback(on_train_batch_end=lambda batch, logs: ends.append(time.perf_counter()))
start = time.perf_counter()
model.fit(x, y, batch_size=work.batch, verbose=0, seed=0, callbacks=[end])
print(ends[0] - start)
"""


@dataclasses.dataclass(frozen=True)
class Cost:
    """One cost.

    Attributes:
        name: what it is.
        values: as measured, several times.
        unit: " s", "%" or " x".
        bound: what the median is to be at most.
    """

    name: str
    values: Sequence[float]
    unit: str
    bound: float

    @property
    def median(self) -> float:
        """The value that is held against the bound."""
        return statistics.median(self.values)

    @property
    def holds(self) -> bool:
        """Whether the bound does; of what could not be measured it does not."""
        return self.median <= self.bound


def cost_table(costs: Sequence[Cost]) -> str:
    """One line each."""
    lines = [
        "| cost | median (least to most) | bound | holds |",
        "| --- | ---: | ---: | --- |",
    ]
    for cost in costs:
        value, least, most, bound = (
            _shown(number, cost.unit)
            for number in (cost.median, min(cost.values), max(cost.values), cost.bound)
        )
        verdict = "yes" if cost.holds else "**no**"
        lines.append(f"| {cost.name} | {value} ({least} to {most}) | {bound} | {verdict} |")
    return "\n".join(lines)


def _shown(value: float, unit: str) -> str:
    return f"{100 * value:.1f} %" if unit == "%" else f"{value:.2f}{unit}"


def _fresh(code: str) -> float:
    """What a new process prints; bytecode is kept, as an installation has it."""
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return float(done.stdout)


def import_cost(count: int) -> Cost:
    """``import ipufit`` where torch is imported already."""
    _fresh(_IMPORT)
    values = [_fresh(_IMPORT) for _ in range(count)]
    return Cost("`import ipufit` after `import torch`", values, " s", 0.15)


def start_cost(count: int) -> Cost:
    """From the call of ``fit`` to the end of the first update, in a new process."""
    _fresh(_START)
    values = [_fresh(_START) for _ in range(count)]
    return Cost("from the call of `fit` to the first update of the mlp", values, " s", 1.0)


def memory_costs(count: int) -> List[Cost]:
    """Of each workload, the peak of a process that trains it beside that of the loop by hand."""
    return [
        Cost(
            f"peak memory of the {name}, times the eager loop's",
            [_peak(OWN, name) / _peak(BY_HAND, name) for _ in range(count)],
            " x",
            1.1,
        )
        for name in WORKLOADS
    ]


def _peak(peer: str, workload: str) -> float:
    """Bytes of a new process that trains three epochs, and nothing else."""
    with Running("tests.bench.worker", peer) as running:
        return float(running.ask(do="rounds", workload=workload, epochs=3, updates=0)["peak"])


def share_costs(
    waiting: List[float],
    feeding: List[float],
    telling: List[float],
    padding: List[float],
    rows: List[float],
    workers: List[float],
) -> List[Cost]:
    """The shares of :mod:`tests.bench.shares`."""
    return [
        Cost("waiting for data, of the time of `fit`", waiting, "%", 0.05),
        Cost(
            "`fit` on tensors beside `fit` on executions that are there already", feeding, "%", 0.05
        ),
        Cost("accuracy and the bar beside neither", telling, "%", 0.03),
        Cost("a `DataLoader` over a `TensorDataset` beside its tensors", rows, "%", 0.1),
        Cost(
            "a `DataLoader` over samples, two workers, beside tensors, in this process",
            workers,
            "%",
            0.1,
        ),
        Cost("texts in buckets beside all padded to the longest", padding, " x", 1 / 1.8),
    ]


def curve_costs(executions: List[List[float]], replicas: List[List[float]]) -> List[Cost]:
    """Of the curves, round by round: replicas against one, and where longer executions cost.

    Args:
        executions: the curve over ``device_iterations``, a list of points for each round.
        replicas: that over replicas, of which the last point is 8.
    """
    points = [statistics.median(values) for values in zip(*executions)]
    rise = max(later / min(points[:place]) for place, later in enumerate(points) if place)
    several = [values[-1] / values[0] for values in replicas]
    return [
        Cost("8 replicas beside 1 for the same samples", several, " x", 1.3),
        Cost(
            "an update beside one of any smaller `device_iterations`, at most", [rise], " x", 1.05
        ),
    ]
