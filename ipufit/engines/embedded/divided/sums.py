"""Gradients of which this process has a part, added up over an update's micro-batches."""

from __future__ import annotations

from typing import Optional, Sequence

import torch
from torch import Tensor

from ipufit.engines.embedded.reduction import GradientSum
from ipufit.processes import Processes

__all__ = ["DividedSum"]


class DividedSum(GradientSum):
    """Adds up parts that are sums over all processes already, each weighted as it counts."""

    def next_factor(self) -> float:
        """Of the gradient of the next micro-batch, before it goes to the others."""
        return next(self._factors)

    def add(self, gradients: Sequence[Tensor], count: Optional[Tensor]) -> None:
        """The parts of the next micro-batch's gradients.

        Args:
            gradients: one flat tensor per block.
            count: what this process's own loss is a mean over; None where it is the samples.
        """
        if count is not None:
            self._counted = count if self._counted is None else self._counted + count
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
        few = torch.zeros(2, dtype=torch.float64, device=like[0].device)
        few[0] = float(is_lost)
        if self._counted is not None:
            few[1] = self._counted
        processes.add([few])
        self._lost = few[0]
        self._counted = few[1] if is_counted else None
