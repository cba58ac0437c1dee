"""Weights to evaluate with: moving averages, as Keras keeps them, or those of the optimizer."""

from __future__ import annotations

from typing import Any, Dict, List, Mapping, Optional, Sequence

import torch
from torch import Tensor

from ipufit.core.train_config import EMA
from ipufit.engines.external_changes import changed_shape
from ipufit.tracing.flat_storage import FlatBlock, FlatStorage

# In which weights that went to eval mode and back may differ by rounding, in units of the dtype's.
_ROUNDING = 64


class MovingAverages:
    """One average per flat tensor of weights.

    ``average = momentum * average + (1 - momentum) * weight`` after every update; the first update
    sets it to the weights. Half-precision weights are averaged in float32.

    Args:
        rule: momentum, and when the weights become the averages.
        blocks: the layout.
        flats: the weights.
        known: averages of an earlier program, by parameter.

    Attributes:
        tensors: the averages.
        fresh: True before the first update.
    """

    def __init__(
        self,
        rule: EMA,
        blocks: Sequence[FlatBlock],
        flats: Sequence[Tensor],
        known: Mapping[Tensor, Tensor],
    ) -> None:
        self._rule = rule
        self._blocks = list(blocks)
        self._weights: List[Tensor] = []
        self.tensors = [
            flat.to(torch.promote_types(flat.dtype, torch.float32), copy=True) for flat in flats
        ]
        slots = [(slot, t) for block, t in zip(blocks, self.tensors) for slot in block.slots]
        # A parameter that was frozen so far, or is new, starts at its weight.
        self.fresh = not any(slot.parameter in known for slot, _ in slots)
        for slot, tensor in slots:
            if slot.parameter in known:
                slot.view(tensor).copy_(known[slot.parameter])

    @property
    def swapped(self) -> bool:
        """True while weights and averages have changed places."""
        return bool(self._weights)

    def after_update(self, flats: Sequence[Tensor], updates: int, skipped: bool) -> None:
        """Follow the weights, and become them if it is time.

        Args:
            flats: the weights, after an update.
            updates: how many there have been, this one included.
            skipped: whether it was left out: nothing to follow then.
        """
        if not skipped:
            self._follow(flats)
        every = self._rule.overwrite_frequency
        if every is not None and updates % every == 0:
            self._overwrite(flats)

    def _follow(self, flats: Sequence[Tensor]) -> None:
        for tensor, flat in zip(self.tensors, flats):
            weight = flat.to(tensor.dtype)
            if self.fresh:
                tensor.copy_(weight)
            else:
                tensor.lerp_(weight, 1 - self._rule.momentum)
        self.fresh = False

    def _overwrite(self, flats: Sequence[Tensor]) -> None:
        for tensor, flat in zip(self.tensors, flats):
            flat.copy_(tensor)

    def swap(self, flats: Sequence[Tensor]) -> None:
        """The averages as weights; called again, the weights as they were."""
        if self._weights:
            for kept, flat in zip(self._weights, flats):
                flat.copy_(kept)
            self._weights = []
        else:
            self._weights = [flat.clone() for flat in flats]
            self._overwrite(flats)

    def adopt(self, flats: Sequence[Tensor]) -> None:
        """The averages as weights, for good; before the first update, nothing."""
        self._weights = []
        if not self.fresh:
            self._overwrite(flats)

    def by_parameter(self) -> Dict[Tensor, Tensor]:
        """Copies by parameter; none before the first update."""
        if self.fresh:
            return {}
        return {
            slot.parameter: slot.view(tensor).clone()
            for block, tensor in zip(self._blocks, self.tensors)
            for slot in block.slots
        }

    def snapshot(self) -> List[Tensor]:
        """Copies of the averages."""
        return [] if self.fresh else [tensor.clone() for tensor in self.tensors]

    def restore(self, snapshot: Sequence[Tensor]) -> None:
        """Go back to copies of the averages."""
        self.fresh = not snapshot
        for tensor, value in zip(self.tensors, snapshot):
            tensor.copy_(value)


class OptimizerMode:
    """Train and eval mode of an optimizer that has both, as schedule-free ones do.

    Each changes the weights. Where nobody else has done so in between, training goes on with the
    very weights that it had, so that to look at a model changes no bit of its training.

    Args:
        optimizer: torch's.

    Attributes:
        evaluates: whether the module has the weights for evaluation.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer: Any = optimizer
        self.evaluates = False
        # None before anybody has called either.
        self._is_training: Optional[bool] = None
        # The weights of training, while those for evaluation are in their place.
        self._weights: List[Tensor] = []

    def train(self, storage: FlatStorage) -> None:
        """Put the weights of training into their place."""
        if self._is_training:
            return
        self._switch(storage, True)
        for flat, weights in zip(storage.flats, self._weights):
            largest = torch.maximum(flat.abs().max(), weights.abs().max())
            rounding = _ROUNDING * torch.finfo(flat.dtype).eps * largest
            flat.copy_(torch.where((flat - weights).abs() <= rounding, weights, flat))
        self._weights = []

    def eval(self, storage: FlatStorage) -> None:
        """Put the weights for evaluation into their place."""
        if self._is_training is not False:
            self._weights = [flat.clone() for flat in storage.flats] if self._is_training else []
            self._switch(storage, False)

    def _switch(self, storage: FlatStorage, is_training: bool) -> None:
        self._is_training, self.evaluates = is_training, not is_training
        with torch.no_grad():
            (self._optimizer.train if is_training else self._optimizer.eval)()
        storage.follow(changed_shape)
