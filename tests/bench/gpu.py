"""``python -m tests.bench.gpu``: ipufit on a GPU beside loops by hand; prints the page's tables.

One of the loops replays an update that was captured as a CUDA graph by hand, which is as fast as
PyTorch gets with the kernels that it has. Loops have all samples on the GPU; ``fit`` gets them from
the host's memory, as its users have them.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any, Callable, Dict, List

import torch
from torch import nn

from tests.bench.__main__ import check
from tests.bench.fitted import compiled, first_losses, seconds_of_epochs
from tests.bench.peers import BY_HAND, OWN
from tests.bench.report import Result, table
from tests.bench.workloads import LEARNING_RATE, LOSSES, WORKLOADS, Workload

CAPTURED = "loop of a CUDA graph captured by hand"
ROUNDS, EPOCHS = 3, 8


class Loop:
    """A loop by hand over tensors on the GPU.

    Args:
        work: what is trained.
        captures: whether an update is captured once and replayed.
    """

    def __init__(self, work: Workload, captures: bool) -> None:
        self._net = work.module().cuda()
        self._batches = list(zip(*(part.cuda().split(work.batch) for part in work.tensors())))
        parameters = self._net.parameters()
        self._optimizer = torch.optim.Adam(
            parameters, LEARNING_RATE, fused=True, capturable=captures
        )
        self._inputs = [part.clone() for part in self._batches[0]]
        self._make: Callable[..., torch.Tensor] = self._update
        if captures:
            self._capture()

    def _update(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        self._optimizer.zero_grad()
        loss = nn.functional.cross_entropy(self._net(x), y)
        loss.backward()
        self._optimizer.step()
        return loss.detach()

    def _capture(self) -> None:
        before = [p.detach().clone() for p in self._net.parameters()]
        aside = torch.cuda.Stream()
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            for _ in range(3):
                self._update(*self._inputs)
        torch.cuda.current_stream().wait_stream(aside)
        with torch.no_grad():
            for parameter, value in zip(self._net.parameters(), before):
                parameter.copy_(value)
        for state in self._optimizer.state.values():
            for value in state.values():
                value.zero_()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            loss = self._update(*self._inputs)

        def replay(*batch: torch.Tensor) -> torch.Tensor:
            for place, value in zip(self._inputs, batch):
                place.copy_(value)
            graph.replay()
            return loss.clone()

        self._make = replay

    def losses(self, count: int) -> List[float]:
        """Of the next updates."""
        return [self._make(*batch).item() for batch in self._batches[:count]]

    def rounds(self, epochs: int) -> List[float]:
        """Seconds of so many epochs."""
        found = []
        for _ in range(epochs):
            start = time.perf_counter()
            losses = [self._make(*batch) for batch in self._batches]
            torch.stack(losses).mean().item()
            found.append(time.perf_counter() - start)
        return found


def fits(work: Workload, device_iterations: int, **options: Any) -> Any:
    """Seconds of epochs of ``fit``, and the losses of its first updates."""
    x, y = work.tensors()
    own = compiled(work.module().cuda(), **options)
    losses = first_losses(own, work.batches(LOSSES))
    model = compiled(work.module().cuda(), **options)
    how = {"batch_size": work.batch, "device_iterations": device_iterations}
    return seconds_of_epochs(model, x, y, **how), losses


def measured(work: Workload) -> List[Result]:
    """All peers in turn, round after round; the first two epochs of each are left out."""
    peers: Dict[str, Any] = {
        OWN: fits(work, 32),
        "ipufit, device_iterations=8": fits(work, 8),
        "ipufit, device_iterations=1": fits(work, 1),
        'ipufit, jit="graph"': fits(work, 32, jit="graph"),
        "ipufit, run_eagerly=True": fits(work, 32, run_eagerly=True),
    }
    for name, captures in ((BY_HAND, False), (CAPTURED, True)):
        losses = Loop(work, captures).losses(LOSSES)
        peers[name] = Loop(work, captures).rounds, losses
    times: Dict[str, List[float]] = {name: [] for name in peers}
    for name, (_, losses) in peers.items():
        check(work.name, name, losses, OWN, peers[OWN][1])
    for _ in range(ROUNDS):
        for name, (rounds, _) in peers.items():
            times[name].append(statistics.median(rounds(EPOCHS)[2:]) / work.updates)
    return [Result(work.name, name, own, None) for name, own in times.items()]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.gpu")
    parser.add_argument("--workload", action="append", choices=sorted(WORKLOADS))
    asked = parser.parse_args()
    print(f"Measured on one {torch.cuda.get_device_name()}, torch {torch.__version__}.")
    for name in asked.workload or list(WORKLOADS):
        print(f"\n### {name}\n\n{table(measured(WORKLOADS[name]))}", flush=True)


if __name__ == "__main__":
    main()
