"""How near a workload's updates are to what the machine can multiply at most."""

from __future__ import annotations

import dataclasses
import time
from typing import Any, Callable, Dict, List, Sequence, Tuple

import torch

from tests.bench.workloads import Workload

__all__ = ["Limit", "best_rate", "limit_table", "operations"]

# Rows and columns of the products whose rate is taken, and how often each is made.
_SIZES, _TIMES = (512, 1024, 2048), 7


@dataclasses.dataclass(frozen=True)
class Limit:
    """What an update needs at least.

    Attributes:
        workload: its name.
        operations: floating-point operations of products, convolutions and recurrent layers.
        seconds: of an update by ipufit.
        rate: operations per second at most.
    """

    workload: str
    operations: float
    seconds: float
    rate: float

    @property
    def share(self) -> float:
        """Of the time, what the operations need at this rate."""
        return self.operations / self.rate / self.seconds


def operations(work: Workload) -> float:
    """Count the floating-point operations of an update, the mean over the batches of an epoch."""
    # Torch 2.0 has none.
    from torch.utils.flop_counter import FlopCounterMode

    module, batches = work.module(), work.batches()
    counter = FlopCounterMode(display=False, custom_mapping=_RECURRENT)
    with counter:
        for x, y in batches:
            work.loss_function(module(x), y).backward()
    return counter.get_total_flops() / len(batches)


def _of_layer(x: Sequence[int], w: Sequence[int], recurrent: Sequence[int]) -> float:
    """A recurrent layer in one direction: products with its inputs and with its last state."""
    steps = x[0] * x[1]
    return 2.0 * steps * (w[0] * w[1] + recurrent[0] * recurrent[1])


def _forward(x: Any, w: Any, recurrent: Any, *_: Any, **__: Any) -> float:
    return _of_layer(x, w, recurrent)


def _backward(x: Any, w: Any, recurrent: Any, *_: Any, **__: Any) -> float:
    return 2 * _of_layer(x, w, recurrent)


_RECURRENT: Dict[Any, Callable[..., float]] = {
    torch.ops.aten.mkldnn_rnn_layer: _forward,
    torch.ops.aten.mkldnn_rnn_layer_backward: _backward,
}


def best_rate() -> float:
    """Measure floating-point operations per second of square products, by BLAS or oneDNN."""
    found: List[float] = []
    for size in _SIZES:
        a, b = torch.randn(size, size), torch.randn(size, size)
        for product in _products():
            found += [2.0 * size**3 / _seconds(product, a, b) for _ in range(_TIMES)]
    return max(found)


def _products() -> Tuple[Callable[..., Any], ...]:
    from ipufit.engines.embedded.passes.cpu_kernels import _linear

    linear = _linear()
    if linear is None:
        return (torch.mm,)
    return torch.mm, lambda a, b: linear(a, b, None, "none", [], "")


def _seconds(product: Callable[..., Any], a: torch.Tensor, b: torch.Tensor) -> float:
    with torch.no_grad():
        start = time.perf_counter()
        product(a, b)
        return time.perf_counter() - start


def limit_table(limits: Sequence[Limit]) -> str:
    """A row for each workload."""
    lines = [
        "| model | operations of an update, GFLOP | at the best rate, µs | ipufit, µs | share |",
        "| --- | ---: | ---: | ---: | ---: |",
    ]
    for limit in limits:
        least = limit.operations / limit.rate
        lines.append(
            f"| {limit.workload} | {limit.operations / 1e9:.2f} | {least * 1e6:.0f} | "
            f"{limit.seconds * 1e6:.0f} | {limit.share:.2f} |"
        )
    return "\n".join(lines)
