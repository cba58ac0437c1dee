"""An update of weights of which each process has a part (ZeRO 3, and FSDP's "full shard")."""

from __future__ import annotations

from typing import List, Sequence, Tuple

import torch
from torch import Tensor, nn

from ipufit.core.train_config import Clip
from ipufit.engines.embedded.flat_optimizer import RuleOptimizer
from ipufit.engines.embedded.fsdp.weights import pieces_of
from ipufit.engines.embedded.zero.optimizer import ShardedOptimizer
from ipufit.processes import Processes
from ipufit.tracing.flat_storage import FlatBlock, FlatStorage

__all__ = ["FSDPOptimizer", "clipped_parts"]


class FSDPOptimizer(ShardedOptimizer):
    """Applies the rules to this process's part of every piece, and leaves it there."""

    takes_parts = True

    def layout(self, named: Sequence[Tuple[str, nn.Parameter]]) -> List[FlatBlock]:
        """Neighbours that are updated alike are a piece together."""
        parameters = dict(named)
        return [
            block
            for piece in pieces_of(named)
            for block in super(FSDPOptimizer, self).layout(
                [(name, parameters[name]) for name, _ in piece]
            )
        ]

    def _flats_of(self, storage: FlatStorage) -> List[Tensor]:
        return storage.flats

    def apply(self, gradients: Sequence[Tensor]) -> None:
        """One weight update of the own parts."""
        if self._bound:
            segments: List[List[slice]] = [[] for _ in gradients]
            for index, slot, (begin, end) in self._slots():
                first = self.cuts[index][self._processes.process_id]
                own = slice(slot.start + begin - first, slot.start + end - first)
                segments[index].append(own if end > begin else slice(0))
            gradients = clipped_parts(self._processes, gradients, segments, self._bound)
        RuleOptimizer.apply(self, gradients)


def clipped_parts(
    processes: Processes,
    gradients: Sequence[Tensor],
    segments: Sequence[Sequence[slice]],
    clip: Clip,
) -> List[Tensor]:
    """Parts of gradients, bounded by the norm of the whole ones.

    Args:
        processes: all of them, which call this at the same time.
        gradients: flat, one for each block.
        segments: of each, where the parameters are of which it has a part; empty for none.
        clip: a bound on a norm.
    """
    squares = [
        torch.stack([_square(gradient[own]) for own in each])
        for gradient, each in zip(gradients, segments)
    ]
    together = torch.cat(squares)
    if clip.global_norm is not None:
        together = together.sum().expand(1).clone()
    processes.add([together])
    largest = clip.norm if clip.global_norm is None else clip.global_norm
    assert largest is not None
    factors = (largest / (together.sqrt() + 1e-6)).clamp(max=1.0)
    if clip.global_norm is not None:
        return [gradient * factors[0].to(gradient.dtype) for gradient in gradients]
    result, rest = [], iter(factors.unbind())
    for gradient, each in zip(gradients, segments):
        bounded = gradient.clone()
        for segment, factor in zip(each, rest):
            bounded[segment] *= factor.to(gradient.dtype)
        result.append(bounded)
    return result


def _square(gradient: Tensor) -> Tensor:
    # The square of a half-precision number overflows at 256; of a float32 norm, none that matters.
    norm: Tensor = torch.linalg.vector_norm(gradient, dtype=torch.float64)
    return norm * norm
