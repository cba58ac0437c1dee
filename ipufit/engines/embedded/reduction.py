"""From the gradients of micro-batches to that of an update."""

from __future__ import annotations

from typing import Dict, List, Optional, Sequence, Tuple, Union

import torch
from torch import Tensor

from ipufit.program import ProgramSpec, loss_counts

__all__ = ["GradientSum", "Reduction"]


class Reduction:
    """How the micro-batches of an update share in its gradient.

    Args:
        spec: says what a loss is a mean over, and whether means are averaged or added up.
    """

    def __init__(self, spec: ProgramSpec) -> None:
        assert spec.loss is not None
        self._micro_batch_size = spec.plan.micro_batch_size
        self._is_sum = spec.recipe.gradient_reduction == "sum"
        self._loss_is_sum = spec.loss.reduction == "sum"
        self._equally = spec.loss.normalize == "micro_batches"
        self._dtype = spec.recipe.accumulation_dtype
        self._known: Dict[Tuple[int, ...], Tuple[List[float], float]] = {}

    def start(self, sizes: Sequence[int]) -> GradientSum:
        """A sum over micro-batches of these sizes."""
        key = tuple(sizes)
        if key not in self._known:
            self._known[key] = self.shares(sizes)
        return GradientSum(*self._known[key], self._dtype)

    def coefficients(self, sizes: Sequence[int]) -> List[float]:
        """What the gradient of each of these micro-batches is multiplied with, in all."""
        factors, share = self.shares(sizes)
        return [factor * share for factor in factors]

    def shares(self, sizes: Sequence[int]) -> Tuple[List[float], float]:
        """A factor for each of these micro-batches, and one for their sum."""
        if self._equally:
            return [1.0] * len(sizes), 1.0 if self._is_sum else 1 / len(sizes)
        full = self._micro_batch_size
        whole = full if self._is_sum else sum(sizes)
        weights = [count / whole for count in loss_counts(sizes, full, self._loss_is_sum)]
        if len(set(sizes)) == 1:
            return [1.0] * len(sizes), weights[0]
        return weights, 1.0


class GradientSum:
    """Adds up flat gradients, one tensor per block.

    Args:
        factors: of each micro-batch whose loss stands for its samples.
        share: of the sum.
        dtype: of the sum; None for that of the gradients.
    """

    def __init__(
        self, factors: Sequence[float], share: float, dtype: Optional[torch.dtype]
    ) -> None:
        self._factors = iter(factors)
        self._share = share
        self._dtype = dtype
        self._total: List[Tensor] = []
        self._counted: Optional[Tensor] = None

    def add(self, gradients: Sequence[Tensor], count: Optional[Tensor]) -> None:
        """The gradients of the next micro-batch, which may be changed in place.

        Args:
            gradients: one flat tensor per block.
            count: what the loss is a mean over, shape (); None where it is the samples.
        """
        factor = next(self._factors)
        if self._dtype is not None:
            gradients = [gradient.to(self._dtype) for gradient in gradients]
        if count is not None:
            self._counted = count if self._counted is None else self._counted + count
            gradients, factor = [gradient.mul_(count) for gradient in gradients], 1.0
        if not self._total:
            self._total = [g.mul_(factor) if factor != 1 else g for g in gradients]
            return
        for total, gradient in zip(self._total, gradients):
            total.add_(gradient, alpha=factor)

    def add_summed(self, gradients: Sequence[Tensor], count: Optional[Tensor]) -> None:
        """The sum of the gradients of full micro-batches, each times its count.

        Args:
            gradients: one flat tensor per block, which may be changed in place.
            count: the sum of the counts; None where losses stand for samples.
        """
        next(self._factors)
        if count is not None:
            self._counted = count if self._counted is None else self._counted + count
        if not self._total:
            self._total = list(gradients)
            return
        for total, gradient in zip(self._total, gradients):
            total.add_(gradient)

    def reduced(self, loss_scale: Union[float, Tensor]) -> List[Tensor]:
        """The gradient of the update, of a loss that was not scaled."""
        share = self._share / loss_scale
        if self._counted is not None:
            whole = self._counted
            # Where nothing counted the gradients are zero, and stay so.
            shares = torch.where(whole > 0, whole.reciprocal(), torch.zeros_like(whole))
            self._total = [total.mul_(shares) for total in self._total]
            share = 1 / loss_scale
        if not isinstance(share, Tensor) and share == 1:
            return self._total
        return [total.mul_(share) for total in self._total]
