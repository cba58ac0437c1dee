"""A traced micro-batch and how it runs: what every program of the embedded engine is made of."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Callable, Iterator, List, Optional, Sequence, Tuple

import torch
from torch import Tensor, fx

from ipufit.core.batch import MicroBatch
from ipufit.engines.embedded.passes.select_kernels import Lowered
from ipufit.tracing.grad_step import GradStep
from ipufit.utils.random_streams import isolated

__all__ = ["Seeding", "TracedStep", "Update", "computing"]


@contextlib.contextmanager
def computing(device: torch.device, is_random: bool) -> Iterator[None]:
    """Compute without gradients of torch's own, and with random numbers of the program's own.

    Args:
        device: whose generators are put back.
        is_random: whether any are drawn. Torch's generator has one user at a time: without need
            the data pipeline is not kept from it.
    """
    with torch.no_grad(), isolated(device) if is_random else contextlib.nullcontext():
        yield


@dataclasses.dataclass(frozen=True, eq=False)
class TracedStep:
    """One micro-batch, ready to run.

    Attributes:
        run: takes weights, other state, batch leaves and a loss scale if there is one; returns the
            reported numbers, outputs and flat gradients.
        lowered: how it does so.
        micro: what was recorded.
        random: whether it may draw random numbers.
        kept_alive: objects whose identity the recording depends on.
        graph: what ``run`` runs; None where it runs the module itself.
    """

    run: Callable[..., List[Tensor]]
    lowered: Lowered
    micro: GradStep
    random: bool
    kept_alive: Tuple[object, ...]
    graph: Optional[fx.GraphModule]


# The micro-batches of an update, each with the traced step that runs it.
Update = Sequence[Tuple[MicroBatch, TracedStep]]

# Starts the random numbers of a micro-batch, given its update, its place in it, and what sets them
# apart from others of the update.
Seeding = Callable[[TracedStep, int, int, str], None]
