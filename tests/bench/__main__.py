"""``python -m tests.bench``: peers, curves and costs; writes docs/benchmarks.md and its plots."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Collection, Dict, List, Sequence

from tests.bench.costs import (
    Cost,
    cost_table,
    curve_costs,
    import_cost,
    memory_costs,
    share_costs,
    start_cost,
)
from tests.bench.curves import CURVES, Rounds, medians
from tests.bench.first_update import FirstUpdates, first_updates, parts_table
from tests.bench.limits import Limit, best_rate, limit_table, operations
from tests.bench.peers import COMPILED, EARLIER, FIRST_RUN, OWN, PEERS
from tests.bench.real import REAL
from tests.bench.report import Result, machine, points_table, summary, table, times, write
from tests.bench.running import Running
from tests.bench.shares import SHARES
from tests.bench.workloads import WORKLOADS

# Losses of the first updates must agree with those of the first peer to this share.
AGREEMENT = 2e-3
PARTS = ("peers", "real", "curves", "costs")
ALL = {**WORKLOADS, **REAL}
TIMES_PLOT = "benchmarks-times.svg"
PEERS_PLOT, CURVES_PLOT = "benchmarks-peers.svg", "benchmarks-curves.svg"
_DOCS = Path(__file__).parents[2] / "docs"


@dataclasses.dataclass(frozen=True)
class Extent:
    """How long to measure.

    Attributes:
        rounds: of the peers.
        epochs: of a peer in a round, the first of which is left out where there are several.
        updates: of an epoch at most; 0 for those of the workload.
        shared: whether a peer's process has all workloads; it starts once, and its peak says
            nothing.
        curve_rounds: of each curve.
        curve_updates: of its epochs.
        times: how often a cost is measured.
    """

    rounds: int = 6
    epochs: int = 3
    updates: int = 0
    shared: bool = False
    curve_rounds: int = 5
    curve_updates: int = 256
    times: int = 5


QUICK = Extent(2, 1, 64, True, 1, 64, 1)


def measured(workloads: Sequence[str], names: Sequence[str], extent: Extent) -> List[Result]:
    """All peers in turn, round after round, after a first epoch that is not counted.

    Each has a cache of its own, empty but for what an earlier run of ipufit leaves to the first.
    """
    with contextlib.ExitStack() as stack:
        caches = [stack.enter_context(tempfile.TemporaryDirectory()) for _ in names]
        if FIRST_RUN in names and OWN in names:
            with Running("tests.bench.worker", EARLIER, cache=caches[names.index(OWN)]) as earlier:
                for name in workloads:
                    earlier.ask(do="rounds", workload=name, updates=extent.updates, epochs=1)
        peers = [
            stack.enter_context(Running("tests.bench.worker", name, cache=cache))
            for name, cache in zip(names, caches)
        ]
        found = [one for name in workloads for one in _in_turn(name, peers, extent)]
    if not extent.shared:
        return found
    return [dataclasses.replace(result, peak=None) for result in found]


def _in_turn(workload: str, peers: Sequence[Running], extent: Extent) -> List[Result]:
    what = {"workload": workload, "updates": extent.updates}
    peers = [peer for peer in peers if ALL[workload].has(peer.name)]
    for peer in peers:
        peer.ask(do="rounds", epochs=1, **what)  # records, compiles, starts
    count = ALL[workload].compared
    losses = [peer.ask(do="losses", count=count, **what)["losses"] for peer in peers]
    for peer, own in zip(peers, losses):
        check(workload, peer.name, own, peers[0].name, losses[0])
    times: List[List[float]] = [[] for _ in peers]
    peaks = [0.0] * len(peers)
    for number in range(extent.rounds):
        for i, peer in enumerate(peers):
            answer = peer.ask(do="rounds", epochs=extent.epochs, **what)
            later = answer["seconds"][1:] or answer["seconds"]
            times[i].append(statistics.median(later))
            peaks[i] = answer["peak"]
        _say(f"{workload}: round {number + 1} of {extent.rounds}")
    return [Result(workload, peer.name, own, peak) for peer, own, peak in zip(peers, times, peaks)]


def check(workload: str, name: str, own: List[float], other: str, wanted: List[float]) -> None:
    """Refuse to time what trains something else.

    Raises:
        SystemExit: a loss of the first updates differs.
    """
    for update, (value, expected) in enumerate(zip(own, wanted)):
        if not abs(value - expected) <= AGREEMENT * abs(expected):
            raise SystemExit(
                f"{workload}: the loss of {name} in update {update} is {value}, but that of "
                f"{other} is {expected}: they do not train the same."
            )


def scaled(extent: Extent) -> Dict[str, Rounds]:
    """Every curve, its rounds in turn with those of the others."""
    found: Dict[str, Rounds] = {
        name: {line.name: [] for line in curve.lines} for name, curve in CURVES.items()
    }
    with Running("tests.bench.curves") as running:
        for number in range(1 + extent.curve_rounds):
            for name, lines in found.items():
                values = running.ask(curve=name, updates=extent.curve_updates)["values"]
                # The first round pays for what is done once.
                for line, points in zip(lines.values(), values if number else []):
                    line.append(points)
            _say(f"curves: round {number} of {extent.curve_rounds}")
    return found


def costs(extent: Extent, curves: Dict[str, Rounds]) -> List[Cost]:
    """All costs; those of the curves where these were measured."""
    found = [import_cost(extent.times), start_cost(extent.times), *memory_costs(extent.times)]
    with Running("tests.bench.shares") as running:
        shares: Dict[str, List[float]] = {name: [] for name in SHARES}
        for _ in range(extent.times):
            for name, values in shares.items():
                values.append(running.ask(share=name, updates=0)["value"])
    found += share_costs(**shares)
    if curves:
        own = {name: curves[name]["ipufit"] for name in ("device_iterations", "replicas")}
        found += curve_costs(own["device_iterations"], own["replicas"])
    return found


def _say(text: str) -> None:
    print(text, file=sys.stderr)


def limits(results: Sequence[Result]) -> List[Limit]:
    """What the machine could do at most, for each workload that ipufit has trained."""
    rate = best_rate()
    return [
        Limit(result.workload, operations(ALL[result.workload]), result.median, rate)
        for result in results
        if result.peer == OWN
    ]


def tables(
    results: Sequence[Result],
    curves: Dict[str, Rounds],
    found: Sequence[Cost],
    bounds: Sequence[Limit] = (),
    updates: Sequence[FirstUpdates] = (),
) -> List[str]:
    """What was measured, as parts of a page."""
    parts = []
    if results:
        parts.append(f"![Every row of the tables, and its rounds]({PEERS_PLOT})")
    for workload in dict.fromkeys(result.workload for result in results):
        own = [result for result in results if result.workload == workload]
        parts.append(f"## {workload}\n\n{table(own)}")
    if bounds:
        parts.append(f"## Limits\n\n{limit_table(bounds)}")
    if curves:
        parts.append(f"## Curves\n\n![Time over each setting]({CURVES_PLOT})")
    for name, lines in curves.items():
        curve = CURVES[name]
        columns = [(line, medians(rounds)) for line, rounds in lines.items()]
        parts.append(points_table(curve.title, curve.unit, curve.points, columns))
    if found:
        parts.append(f"## Costs\n\n{cost_table(found)}")
    if updates:
        parts.append(f"Seconds of the processor before a first update:\n\n{parts_table(updates)}")
    return parts


def first(results: Sequence[Result]) -> List[str]:
    """What a page begins with: a picture, and a sentence for each kind of model."""
    small, real = of(results, WORKLOADS), of(results, REAL)
    parts = []
    if small:
        parts += [f"![Time of an update, as bars]({TIMES_PLOT})", summary(times(small))]
    if real:
        parts.append(summary(times(real)))
    return parts


def of(results: Sequence[Result], workloads: Collection[str]) -> List[Result]:
    """The results of these workloads."""
    return [result for result in results if result.workload in workloads]


def _names(quick: bool) -> List[str]:
    """The peers; a quick look does not wait for a compiler, and so its runs are all first ones."""
    return [name for name in PEERS if not (quick and name in (COMPILED, FIRST_RUN))]


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(prog="nox -s bench --")
    parser.add_argument(
        "--quick", action="store_true", help="a look, after which nothing is written"
    )
    parser.add_argument("--part", action="append", choices=PARTS)
    parser.add_argument("--workload", action="append", choices=sorted(ALL))
    parser.add_argument("--peer", action="append", choices=list(PEERS))
    parser.add_argument("--rounds", type=int, help="of the peers and of the curves")
    parser.add_argument("--folder", type=Path, default=_DOCS, help="of the page that is written")
    asked = parser.parse_args()
    extent = QUICK if asked.quick else Extent()
    if asked.rounds:
        extent = dataclasses.replace(extent, rounds=asked.rounds, curve_rounds=asked.rounds)
    parts = asked.part or PARTS
    start = time.perf_counter()
    results: List[Result] = []
    of_parts = [*(WORKLOADS if "peers" in parts else ()), *(REAL if "real" in parts else ())]
    workloads, names = asked.workload or of_parts, asked.peer or _names(asked.quick)
    groups = [workloads] if extent.shared else [[name] for name in workloads]
    for group in groups if of_parts else ():
        # A process for each peer that trains any of them.
        own = [name for name in names if any(ALL[each].has(name) for each in group)]
        results += measured(group, own, extent)
    curves = scaled(extent) if "curves" in parts else {}
    found = costs(extent, curves) if "costs" in parts else []
    updates = first_updates(max(1, extent.times // 2)) if "costs" in parts else []
    found += [cost for each in updates for cost in each.costs()]
    minutes = (time.perf_counter() - start) / 60
    note = (
        f"Measured on {machine()}; {extent.rounds} rounds of the peers and "
        f"{extent.curve_rounds} of the curves, in {minutes:.1f} minutes."
    )
    page = [*first(results), note, *tables(results, curves, found, limits(results), updates)]
    print("\n\n".join(page))
    if not (asked.quick or asked.workload or asked.peer or asked.part):
        from tests.bench.plots import plot_curves, plot_ratios, plot_times

        small = of(results, WORKLOADS)
        plot_times(times(small), asked.folder / TIMES_PLOT)
        plot_ratios(small, asked.folder / PEERS_PLOT)
        plot_curves(curves, asked.folder / CURVES_PLOT)
        write(asked.folder / "benchmarks.md", page)


if __name__ == "__main__":
    main()
