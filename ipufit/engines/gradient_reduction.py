"""From the gradients of micro-batches to that of an update."""

from __future__ import annotations

import math
from typing import Dict, List, Optional, Sequence, Tuple, Union

import torch
from torch import Tensor

from ipufit.core.batch import ProcessShard, loss_counts
from ipufit.engines.program import ProgramSpec
from ipufit.processes import Processes
from ipufit.processes.group import reduce_scatter


def are_finite(gradients: Sequence[Tensor]) -> Tensor:
    """Tell, in a tensor of shape (), whether all numbers are finite."""
    return torch.stack([gradient.isfinite().all() for gradient in gradients]).all()


class GradientReduction:
    """How the micro-batches of an update share in its gradient.

    Args:
        spec: says what a loss is a mean over, and whether means are averaged or added up.
    """

    def __init__(self, spec: ProgramSpec) -> None:
        assert spec.loss is not None
        self._micro_batch_size = spec.plan.micro_batch_size
        self._is_sum = spec.config.gradient_reduction == "sum"
        self._loss_is_sum = spec.loss.reduction == "sum"
        self._equally = spec.loss.normalize == "micro_batches"
        self._dtype = spec.config.accumulation_dtype
        self._known: Dict[object, Tuple[List[float], float]] = {}

    def start(self, sizes: Sequence[int], share: Optional[ProcessShard] = None) -> GradientSum:
        """A sum over micro-batches of these sizes, or over a process's share of an update."""
        key = tuple(sizes) if share is None else share
        if key not in self._known:
            factors, whole = self.shares(sizes if share is None else share.sizes)
            own = factors if share is None else [factors[i] for i in share.indices]
            self._known[key] = own, whole
        return GradientSum(*self._known[key], self._dtype)

    def coefficients(self, sizes: Sequence[int]) -> List[float]:
        """Return what the gradient of each micro-batch is multiplied with, in all."""
        factors, share = self.shares(sizes)
        return [factor * share for factor in factors]

    def early(self, sizes: Sequence[int]) -> float:
        """Return a factor that gradients may be multiplied with before they are added up.

        The share of their sum if that is a power of two, which changes no bit of a normal number;
        else 1.
        """
        factors, share = self.shares(sizes)
        return share if set(factors) == {1.0} and math.frexp(share)[0] == 0.5 else 1.0

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
        self._early = 1.0
        self._counted: Optional[Tensor] = None
        self._lost: Optional[Tensor] = None

    def next_factor(self) -> float:
        """The factor of the next micro-batch, if its loss stands for its samples."""
        return next(self._factors)

    def add(self, gradients: Sequence[Tensor], count: Optional[Tensor]) -> None:
        """The gradients of the next micro-batch, which may be changed in place.

        Args:
            gradients: one flat tensor per block.
            count: what the loss is a mean over, shape (); None where it is the samples.
        """
        factor = next(self._factors)
        if count is not None:
            self.note(count)
        is_first = not self._total
        for block, gradient in enumerate(gradients):
            joined = self.joined(block, gradient, factor, count)
            if is_first:
                self._total.append(joined)

    def joined(
        self, block: int, gradient: Tensor, factor: float, count: Optional[Tensor]
    ) -> Tensor:
        """The sum of a block with the gradient of one more micro-batch, which may be changed.

        Args:
            block: its number.
            gradient: flat.
            factor: of the micro-batch.
            count: what the loss is a mean over, shape (); None where it is the samples.
        """
        if self._dtype is not None:
            gradient = gradient.to(self._dtype)
        if count is not None:
            gradient, factor = gradient.mul_(count), 1.0
        if block >= len(self._total):
            return gradient.mul_(factor) if factor != 1 else gradient
        return self._total[block].add_(gradient, alpha=factor)

    def note(self, count: Tensor) -> None:
        """Add what one more loss is a mean over."""
        self._counted = count if self._counted is None else self._counted + count

    def add_summed(
        self, gradients: Sequence[Tensor], count: Optional[Tensor], factor: float = 1.0
    ) -> None:
        """The sum of the gradients of full micro-batches, each times its count.

        Args:
            gradients: one flat tensor per block, which may be changed in place.
            count: the sum of the counts; None where losses stand for samples.
            factor: what they are multiplied with already; the same for all of an update.
        """
        self.next_factor()
        self.collect(gradients, count)
        self._early = factor

    def collect(self, gradients: Sequence[Tensor], count: Optional[Tensor]) -> None:
        """Gradients that are weighted as they count already.

        Args:
            gradients: one flat tensor per block, which may be changed in place.
            count: what they are weighted with; None where losses stand for samples.
        """
        if count is not None:
            self.note(count)
        if not self._total:
            self._total = list(gradients)
            return
        for total, gradient in zip(self._total, gradients):
            total.add_(gradient)

    def like(self, flats: Sequence[Tensor]) -> List[Tensor]:
        """The sum by block; zeros like these where nothing was added."""
        if not self._total:
            kinds = [self._dtype or each.dtype for each in flats]
            self._total = [torch.zeros_like(e, dtype=kind) for e, kind in zip(flats, kinds)]
        return self._total

    def replace(self, totals: Sequence[Tensor]) -> None:
        """Take the sum over all processes."""
        self._total = list(totals)

    def add_facts(
        self, processes: Processes, like: Tensor, is_counted: bool, is_lost: bool
    ) -> None:
        """Add what all processes say of their losses, beside the gradients.

        Args:
            processes: all of them.
            like: on the device of the sum.
            is_counted: whether losses are means over what they count.
            is_lost: whether the sum is of no use, which all are to see by :meth:`is_suspect`.
        """
        few = self._facts(like, is_lost)
        processes.add([few])
        self._keep_facts(few, is_counted)

    def _facts(self, like: Tensor, is_lost: bool) -> Tensor:
        few = like.new_zeros(2, dtype=torch.float64)
        few[0] = float(is_lost)
        if self._counted is not None:
            few[1] = self._counted
        return few

    def _keep_facts(self, few: Tensor, is_counted: bool) -> None:
        self._lost = few[0]
        self._counted = few[1] if is_counted else None

    def add_others(
        self,
        processes: Processes,
        like: Sequence[Tensor],
        is_counted: bool,
        is_lost: bool,
        cuts: Optional[Sequence[Sequence[int]]] = None,
    ) -> None:
        """Add what the other processes have summed, so that all have the same sum.

        Args:
            processes: all of them.
            like: tensors like the sum, for a process without a micro-batch in this update.
            is_counted: whether losses are means over what they count.
            is_lost: whether the sum is of no use, which all are to see by :meth:`is_suspect`.
            cuts: of each tensor, where each process needs a part of the sum alone; only that is
                left here. None: all need it whole.
        """
        total = self.like(like)
        if cuts is not None:
            self.add_facts(processes, total[0], is_counted, is_lost)
            self._total = reduce_scatter(processes, total, cuts)
            return
        few = [self._facts(total[0], is_lost)] if is_counted else []
        if is_lost:
            # One more message would take as long as the gradient of a small model.
            total[0][:1] = math.nan
        processes.add([*few, *total])
        self._lost = None
        if few:
            self._keep_facts(few[0], is_counted)

    def is_suspect(self) -> bool:
        """Ask the device whether a process may have said that its part is of no use."""
        if self._lost is not None:
            return bool(self._lost.item())
        return not math.isfinite(self._total[0][0].item())

    def reduced(self, loss_scale: Union[float, Tensor]) -> List[Tensor]:
        """The gradient of the update, of a loss that was not scaled."""
        share = self._share / self._early / loss_scale
        if self._counted is not None:
            whole = self._counted
            # Where nothing counted the gradients are zero, and stay so.
            shares = torch.where(whole > 0, whole.reciprocal(), torch.zeros_like(whole))
            self._total = [total.mul_(shares) for total in self._total]
            share = 1 / loss_scale
        if not isinstance(share, Tensor) and share == 1:
            return self._total
        return [total.mul_(share) for total in self._total]
