"""How the time grows with one setting: device iterations, replicas, width, samples."""

from __future__ import annotations

import dataclasses
import functools
import statistics
import time
from typing import Any, Callable, Dict, List, Sequence, Tuple

from torch import nn

from tests.bench.running import serve
from tests.bench.workloads import CLASSES, WORKLOADS

__all__ = ["CURVES", "Curve", "Line", "Rounds", "one_round"]

# The last of so many epochs is timed; one before it pays for what is done once.
_EPOCHS = 2

# Seconds of an update or a sample, each time it is called.
Timer = Callable[[], float]


@dataclasses.dataclass(frozen=True)
class Line:
    """One way to train, over a setting.

    Attributes:
        name: for the legend.
        make: of the setting and the updates of an epoch.
    """

    name: str
    make: Callable[[int, int], Timer]


@dataclasses.dataclass(frozen=True)
class Curve:
    """Lines over one setting.

    Attributes:
        name: of the setting.
        title: what is measured, for people.
        unit: of the values, which are told in microseconds.
        points: the settings.
        lines: the ways to train.
    """

    name: str
    title: str
    unit: str
    points: Tuple[int, ...]
    lines: Tuple[Line, ...]


# The values of a curve, round by round: of each line, one for each point.
Rounds = Dict[str, List[List[float]]]


def _fit(module: nn.Module, samples: int, count: int, **how: Any) -> Timer:
    """Seconds of an epoch over ``count``, whatever it counts."""
    from tests.bench.fitted import compiled, seconds_of_epochs

    rounds = seconds_of_epochs(compiled(module), *_vectors(samples), **how)
    return lambda: rounds(_EPOCHS)[-1] / count


@functools.lru_cache(maxsize=1)
def _all_vectors(samples: int) -> Any:
    return WORKLOADS["mlp"].data(samples)


def _vectors(samples: int) -> Any:
    x, y = _all_vectors(max(_SAMPLES))
    return x[:samples], y[:samples]


def _mlp(width: int = 128) -> nn.Module:
    return nn.Sequential(nn.Linear(784, width), nn.ReLU(), nn.Linear(width, CLASSES))


_BATCH = 32
_SAMPLES = (1024, 4096, 16384, 65536)


def _executions(device_iterations: int, updates: int) -> Timer:
    how = {"batch_size": _BATCH, "device_iterations": device_iterations}
    return _fit(_mlp(), updates * _BATCH, updates, **how)


def _replicas(replicas: int, updates: int) -> Timer:
    how = {"batch_size": _BATCH // replicas, "ipus": replicas, "device_iterations": 32}
    return _fit(_mlp(), updates * _BATCH, updates, **how)


def _width(width: int, updates: int) -> Timer:
    updates = max(1, updates // 4)
    how = {"batch_size": _BATCH, "device_iterations": 32}
    return _fit(_mlp(width), updates * _BATCH, updates, **how)


def _width_by_hand(width: int, updates: int) -> Timer:
    from tests.bench.peers import BY_HAND, PEERS

    work = dataclasses.replace(
        WORKLOADS["mlp"],
        updates=max(1, updates // 4),
        module=lambda: _mlp(width),
    )
    rounds, _ = PEERS[BY_HAND](work)
    return lambda: rounds(_EPOCHS)[-1] / work.updates


def _samples(samples: int, updates: int) -> Timer:
    how = {"batch_size": _BATCH, "device_iterations": 32}
    return _fit(_mlp(), samples, samples, **how)


CURVES: Dict[str, Curve] = {
    curve.name: curve
    for curve in (
        Curve(
            "device_iterations",
            "updates of an execution",
            "µs an update",
            (1, 2, 4, 8, 16, 32, 64, 128, 256),
            (Line("ipufit", _executions),),
        ),
        Curve(
            "replicas",
            "replicas that share the 32 samples of an update",
            "µs an update",
            (1, 2, 4, 8),
            (Line("ipufit", _replicas),),
        ),
        Curve(
            "width",
            "width of the hidden layer",
            "µs an update",
            (64, 128, 256, 512, 1024, 2048),
            (Line("ipufit", _width), Line("eager loop, indexed, fused Adam", _width_by_hand)),
        ),
        Curve(
            "samples",
            "samples of the dataset",
            "µs a sample",
            _SAMPLES,
            (Line("ipufit", _samples),),
        ),
    )
}


def one_round(timers: Sequence[Sequence[Timer]]) -> List[List[float]]:
    """Each point of each line in turn: the lines of a point follow one another."""
    found: List[List[float]] = [[] for _ in timers]
    for point in zip(*timers):
        for values, timer in zip(found, point):
            values.append(timer())
    return found


def made(curve: Curve, updates: int) -> List[List[Timer]]:
    """What times each point of each line."""
    return [[line.make(point, updates) for point in curve.points] for line in curve.lines]


def medians(rounds: Sequence[Sequence[float]]) -> List[float]:
    """Of one line, point by point."""
    return [statistics.median(values) for values in zip(*rounds)]


def main() -> None:
    """``python -m tests.bench.curves``: rounds of one curve or another, as asked."""

    def make() -> Any:
        timers: Dict[str, Any] = {}

        def answer(asked: Dict[str, Any]) -> Dict[str, Any]:
            curve = CURVES[asked["curve"]]
            if curve.name not in timers:
                timers[curve.name] = made(curve, asked["updates"])
            started = time.perf_counter()
            return {
                "values": one_round(timers[curve.name]),
                "seconds": time.perf_counter() - started,
            }

        return answer

    serve(make)


if __name__ == "__main__":
    main()
