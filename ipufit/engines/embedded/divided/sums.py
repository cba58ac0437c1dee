"""Gradients of which this process has a part, added up over an update's micro-batches."""

from __future__ import annotations

from typing import Optional, Sequence

from torch import Tensor

from ipufit.engines.embedded.reduction import GradientSum
from ipufit.processes import Processes

__all__ = ["DividedSum"]


class DividedSum(GradientSum):
    """Adds up parts that are sums over all processes already, each weighted as it counts."""

    def add(self, gradients: Sequence[Tensor], count: Optional[Tensor]) -> None:
        """The parts of the next micro-batch's gradients.

        Args:
            gradients: one flat tensor per block.
            count: what this process's own loss is a mean over; None where it is the samples.
        """
        self.note(count)
        if not self._total:
            self._total = list(gradients)
            return
        for total, gradient in zip(self._total, gradients):
            total.add_(gradient)

    def add_others(
        self,
        processes: Processes,
        like: Sequence[Tensor],
        is_counted: bool,
        is_lost: bool,
        cuts: Optional[Sequence[Sequence[int]]] = None,
    ) -> None:
        """Add what the other processes say of their losses; the gradients were added before."""
        self.add_facts(processes, like[0], is_counted, is_lost)
