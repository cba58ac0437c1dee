"""A recording of several micro-batches in one, as updates run it."""

from __future__ import annotations

import dataclasses
from typing import Callable, List, Optional, Sequence, Tuple

from torch import Tensor, fx

from ipufit.core.batch import MicroBatch
from ipufit.engines.embedded.batching.steps import BatchedGradStep
from ipufit.engines.embedded.traced_step import TracedStep
from ipufit.tracing.grad_step import ReportedScalars

__all__ = ["BatchedResult", "BatchedStep"]


@dataclasses.dataclass(frozen=True)
class BatchedResult:
    """Results of several micro-batches that ran at once.

    Attributes:
        kinds: what the numbers of each are.
        numbers: a row for each.
        outputs: of the first, the second, and so on; empty where nobody wants them.
        gradients: the sum of theirs, each times its count if it has one; a flat tensor per block.
    """

    kinds: Sequence[ReportedScalars]
    numbers: Tensor
    outputs: List[Tensor]
    gradients: List[Tensor]

    def losses(self) -> List[float]:
        """The loss of each micro-batch, on the host."""
        column = self.numbers if self.numbers.dim() == 1 else self.numbers[:, 0]
        values: List[float] = column.tolist()
        return values

    def outputs_of(self, place: int) -> List[Tensor]:
        """Return the outputs of one micro-batch."""
        size = len(self.outputs) // len(self.kinds)
        return self.outputs[place * size : (place + 1) * size]

    @property
    def count(self) -> Optional[Tensor]:
        """The sum of what the losses are means over; None where that is the samples."""
        return self.numbers[:, 1].sum() if self.kinds[0].counted else None


@dataclasses.dataclass(frozen=True)
class BatchedStep:
    """Ready to run.

    Attributes:
        run: takes weights, other state and what the step makes of the leaves.
        step: what was recorded.
        base: what is recorded for one of its micro-batches.
        count: how many it takes.
        blocks: how many flat gradients it returns.
        reads: names of the buffers that it reads, of which it takes those of one replica.
        factor: what its gradients are multiplied with.
        graph: what ``run`` runs.
    """

    run: Callable[..., List[Tensor]]
    step: BatchedGradStep
    base: TracedStep
    count: int
    blocks: int
    reads: Tuple[str, ...]
    factor: float = 1.0
    graph: Optional[fx.GraphModule] = None

    def takes(self, recorded: Sequence[TracedStep]) -> bool:
        """Tell whether an update of micro-batches traced like this can be made of it."""
        whole = bool(recorded) and not len(recorded) % self.count
        return whole and all(each is self.base for each in recorded)

    def __call__(self, state: Sequence[Tensor], batches: Sequence[MicroBatch]) -> BatchedResult:
        """Run on as many micro-batches as it takes."""
        numbers, *rest = self.run(*state, *self.step.arguments(batches))
        outputs, gradients = rest[: len(rest) - self.blocks], rest[len(rest) - self.blocks :]
        return BatchedResult(self.step.reported, numbers, outputs, gradients)
