"""``python -m tests.bench``: every peer on every workload, in turn; writes docs/benchmarks.md."""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Dict, List

from tests.bench.peers import LOSSES, PEERS
from tests.bench.report import Result, write
from tests.bench.workloads import WORKLOADS

# Losses of the first updates must agree with those of the first peer to this share.
AGREEMENT = 2e-3
_DOCS = Path(__file__).parents[2] / "docs"


class Running:
    """A peer in a process of its own, which waits while others are measured."""

    def __init__(self, workload: str, name: str) -> None:
        command = [sys.executable, "-m", "tests.bench.worker", workload, name]
        self.name = name
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def ask(self, **what: Any) -> Dict[str, Any]:
        """One answer; an error if the process has ended."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(what) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"{self.name} ended with {self._process.wait()}")
        answer: Dict[str, Any] = json.loads(line)
        return answer

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def measured(workload: str, names: List[str], rounds: int, epochs: int) -> List[Result]:
    """All peers in turn, round after round, after a first one that is not counted."""
    peers = [Running(workload, name) for name in names]
    try:
        for peer in peers:
            peer.ask(do="rounds", epochs=1)  # records, compiles, starts
        losses = [peer.ask(do="losses", count=LOSSES)["losses"] for peer in peers]
        for peer, own in zip(peers, losses):
            check(workload, peer.name, own, peers[0].name, losses[0])
        times: List[List[float]] = [[] for _ in peers]
        peaks = [0.0] * len(peers)
        for number in range(rounds):
            for i, peer in enumerate(peers):
                answer = peer.ask(do="rounds", epochs=1 + epochs)
                times[i].append(statistics.median(answer["seconds"][1:]))
                peaks[i] = answer["peak"]
            print(f"{workload}: round {number + 1} of {rounds}", file=sys.stderr)
    finally:
        for peer in peers:
            peer.close()
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


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(prog="nox -s bench --")
    parser.add_argument("--quick", action="store_true", help="few rounds, nothing is written")
    parser.add_argument("--workload", action="append", choices=sorted(WORKLOADS))
    parser.add_argument("--peer", action="append", choices=list(PEERS))
    parser.add_argument("--rounds", type=int, default=0)
    asked = parser.parse_args()
    rounds = asked.rounds or (2 if asked.quick else 7)
    start = time.perf_counter()
    results: List[Result] = []
    for workload in asked.workload or WORKLOADS:
        results += measured(workload, list(asked.peer or PEERS), rounds, 1 if asked.quick else 3)
    seconds = time.perf_counter() - start
    whole = not (asked.quick or asked.workload or asked.peer)
    write(results, rounds, seconds, _DOCS if whole else None)


if __name__ == "__main__":
    main()
