"""From the accumulated gradient to the one that the optimizer gets, and the scale of the loss."""

from __future__ import annotations

import dataclasses
import math
from typing import List, Optional, Sequence, Tuple

import torch
from torch import Tensor

from ipufit.core.train_config import Clip, LossScale
from ipufit.errors import NonFiniteLossError
from ipufit.tracing.flat_storage import FlatBlock


@dataclasses.dataclass(frozen=True)
class GradientTransform:
    """Changes the gradient between its reduction and the optimizer.

    Attributes:
        clip: bounds on it.
        dtype: in which it was accumulated; None for that of each parameter.
        group_clips: bounds on that of some parameter groups together, by their indices.
    """

    clip: Clip
    dtype: Optional[torch.dtype]
    group_clips: Sequence[Tuple[range, Clip]] = ()

    @property
    def is_identity(self) -> bool:
        """True where the optimizer gets the gradient as it was accumulated."""
        return self.dtype is None and not self.clip and not self.group_clips

    def examples(self, flats: Sequence[Tensor]) -> List[Tensor]:
        """Tensors like the accumulated gradients of these weights, without values."""
        return [torch.empty_like(flat, dtype=self.dtype or flat.dtype) for flat in flats]

    def __call__(
        self, gradients: Sequence[Tensor], blocks: Sequence[FlatBlock], flats: Sequence[Tensor]
    ) -> List[Tensor]:
        """Bounded while still in the accumulation's dtype, then in that of the weights."""
        bounded = clipped(gradients, blocks, self.clip) if self.clip else list(gradients)
        for groups, clip in self.group_clips:
            places = [place for place, block in enumerate(blocks) if block.group in groups]
            parts = [bounded[place] for place in places]
            if parts:
                parts = clipped(parts, [blocks[place] for place in places], clip)
            for place, part in zip(places, parts):
                bounded[place] = part
        return [gradient.to(flat.dtype) for gradient, flat in zip(bounded, flats)]


def clipped(gradients: Sequence[Tensor], blocks: Sequence[FlatBlock], clip: Clip) -> List[Tensor]:
    """The gradients of all blocks, bounded.

    Norms as in torch.nn.utils.clip_grad_norm_, values as in clip_grad_value_.

    Args:
        gradients: flat, one for each block.
        blocks: which part of a flat tensor belongs to which parameter.
        clip: the bound.
    """
    if clip.value is not None:
        return [gradient.clamp(-clip.value, clip.value) for gradient in gradients]
    if clip.global_norm is not None:
        norms = [_norm(gradient) for gradient in gradients]
        widest = torch.float64 if any(n.dtype == torch.float64 for n in norms) else torch.float32
        together = torch.stack([norm.to(widest) for norm in norms])
        factor = _factor(torch.linalg.vector_norm(together), clip.global_norm)
        return [gradient * factor.to(gradient.dtype) for gradient in gradients]
    if clip.norm is not None:
        result = []
        for gradient, block in zip(gradients, blocks):
            parts = [gradient[slot.start : slot.stop] for slot in block.slots]
            factors = [_factor(_norm(part), clip.norm).to(part.dtype) for part in parts]
            result.append(torch.cat([part * factor for part, factor in zip(parts, factors)]))
        return result
    return list(gradients)


def _norm(gradient: Tensor) -> Tensor:
    # The square of a half-precision number overflows at 256.
    wide = torch.promote_types(gradient.dtype, torch.float32)
    norm: Tensor = torch.linalg.vector_norm(gradient, dtype=wide)
    return norm


def _factor(norm: Tensor, largest: float) -> Tensor:
    factor: Tensor = largest / (norm + 1e-6)
    return factor.clamp(max=1.0)


# Halved from 2**15 so far, the scale has nothing to do with the trouble any more.
_SMALLEST = 2.0**-24
# Doubled beyond this, the scaled loss itself leaves the range of float32.
_LARGEST = 2.0**100


@dataclasses.dataclass(frozen=True)
class ScaleState:
    """The present factor.

    Attributes:
        value: what the loss is multiplied with.
        good: updates since it last changed.
    """

    value: float
    good: int = 0

    def after(self, finite: bool, rule: LossScale) -> ScaleState:
        """The state after an update whose gradient was finite or not."""
        if rule.growth_interval is None:
            return self
        if not finite:
            return ScaleState(self.value / 2)
        if self.good + 1 < rule.growth_interval:
            return ScaleState(self.value, self.good + 1)
        return ScaleState(self.value * 2 if self.value < _LARGEST else self.value)


class Scaler:
    """Decides which updates are skipped.

    Args:
        rule: how the factor changes.
        state: where an earlier program left it; None starts anew.

    Attributes:
        state: the present factor.
    """

    def __init__(self, rule: LossScale, state: Optional[ScaleState]) -> None:
        self._rule = rule
        self.state = state or ScaleState(rule.initial)

    @property
    def value(self) -> float:
        """The present factor."""
        return self.state.value

    def tensor(self, device: torch.device) -> Tensor:
        """The present factor, shape (), float64: exact whatever the loss's dtype."""
        return torch.full((), self.state.value, dtype=torch.float64, device=device)

    def coming(self, updates: int) -> List[ScaleState]:
        """Foresee the scale of so many updates, and the one after, if no gradient is lost."""
        states = [self.state]
        for _ in range(updates):
            states.append(states[-1].after(True, self._rule))
        return states

    def judge(
        self, finite: Tensor, left_out: Optional[bool], seen: List[Tensor], update: int
    ) -> bool:
        """Decide whether an update is skipped; the factor follows.

        Args:
            finite: whether its gradients are.
            left_out: whether it is known to be skipped; None to look at its gradients at once.
            seen: takes whether they are finite, for whoever looks later.
            update: its index.

        Raises:
            NonFiniteLossError: no factor, however small, makes the gradients finite.
        """
        if left_out is None:
            left_out = not bool(finite)
        else:
            seen.append(finite)
        state = self.state.after(not left_out, self._rule)
        if left_out and self._rule.dynamic and state.value < _SMALLEST:
            raise NonFiniteLossError(
                "the gradient must be finite at some loss scale, but it was not down to "
                f"{self.state.value:g} in update {update}. The weights, buffers and optimizer "
                "state are those from before that update. Look for a division by zero or a root at "
                "zero in the backward pass.",
                update,
                math.nan,
            )
        self.state = state
        return left_out
