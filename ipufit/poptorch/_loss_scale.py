"""Automatic loss scaling: a factor that follows how large gradients of half precision are."""

from __future__ import annotations

from typing import Iterable, Optional

import torch
from torch import Tensor

__all__ = ["FINAL", "NAME", "AutomaticLossScale"]

NAME = "lossScaleUpdateFactor"

# The factor by the optimizer's loss scaling.
FINAL = "finalLossScale"

_LARGEST = 65504.0


class AutomaticLossScale:
    """Doubled with every update, halved where too many elements come near float16's largest.

    No update is left out: the factor is kept so that gradients don't leave float16's range.

    Args:
        bin_edge: from which part of float16's largest number an element counts as large
            (``automaticLossScalingSettings.binEdgeLocation``).
        threshold: the part of all elements that may be large (``thresholdUpperCountProportion``).
        period: updates from one change to the next (``updatePeriod``).

    Attributes:
        factor: by which the optimizer's loss scaling is multiplied in the coming update.
    """

    def __init__(self, bin_edge: float = 0.125, threshold: float = 1e-7, period: int = 1) -> None:
        self.factor = 1.0
        self._edge = bin_edge * _LARGEST
        self._threshold = threshold
        self._period = period
        self._updates = 0
        self._large: Optional[Tensor] = None
        self._elements = 0

    @property
    def observed(self) -> bool:
        """Whether gradients were seen since the last update."""
        return self._large is not None

    def observe(self, gradients: Iterable[Tensor]) -> None:
        """See gradients of a micro-batch, multiplied by the loss scaling; does not synchronise.

        Args:
            gradients: of float16 where the program computes in it; others are not looked at where
                there are any of float16.
        """
        tensors = list(gradients)
        halves = [tensor for tensor in tensors if tensor.dtype == torch.float16]
        for tensor in halves or tensors:
            # Not `>`: what is no number is not small either.
            large = (~(tensor.detach().abs() <= self._edge)).sum()
            self._large = (
                large if self._large is None else self._large + large.to(self._large.device)
            )
            self._elements += tensor.numel()

    def update(self) -> None:
        """Change the factor, after the update that it was used in."""
        self._updates += 1
        if self._updates % self._period == 0:
            large = 0.0 if self._large is None else float(self._large)
            crowded = large > self._threshold * self._elements
            self.factor *= 0.5 if crowded else 2.0
        self._large, self._elements = None, 0
