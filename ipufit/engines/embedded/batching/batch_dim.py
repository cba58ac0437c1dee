"""Where the samples of a batch are in a tensor."""

from __future__ import annotations

import dataclasses
import math
from typing import Sequence, Tuple, Union


class RefusalError(Exception):
    """The micro-batches can't be merged; the text says why, as the end of a sentence."""


@dataclasses.dataclass(frozen=True)
class _Fixed:
    """No sample is in it: the tensor is the same whatever the batch."""


@dataclasses.dataclass(frozen=True)
class _Unread:
    """A result of which nothing is known, so that nothing may read it."""


@dataclasses.dataclass(frozen=True)
class BatchDim:
    """The samples lie along one dimension, and what belongs to one depends on no other.

    Attributes:
        dim: the dimension.
        outer, inner: its index is ``(o * samples + sample) * inner + i`` with ``o < outer``: other
            dimensions may have been joined with that of the samples.
    """

    dim: int
    outer: int = 1
    inner: int = 1

    def size(self, samples: int) -> int:
        """The size of the dimension."""
        return self.outer * samples * self.inner

    def moved(self, dim: int) -> BatchDim:
        """Return these samples along another dimension."""
        return dataclasses.replace(self, dim=dim)


NOT_MAPPED, UNREAD = _Fixed(), _Unread()

# Of one tensor, or of an operator's several results.
State = Union[_Fixed, _Unread, BatchDim, Tuple["State", ...]]


def regroup(along: BatchDim, before: Sequence[int], after: Sequence[int], samples: int) -> BatchDim:
    """Find the batch dimension after a view of another shape.

    Args:
        along: where they are before.
        before, after: the shapes.
        samples: how many there are, at least 2, so that there is one answer.

    Raises:
        RefusalError: a dimension of the view does not hold all of them.
    """
    left = math.prod(before[: along.dim]) * along.outer
    right = along.inner * math.prod(before[along.dim + 1 :])
    for dim, size in enumerate(after):
        outside, inside = math.prod(after[:dim]), math.prod(after[dim + 1 :])
        if not outside or not inside or left % outside or right % inside:
            continue
        candidate = BatchDim(dim, left // outside, right // inside)
        if candidate.size(samples) == size:
            return candidate
    raise RefusalError(f"a view of {tuple(before)} as {tuple(after)} splits or mixes samples")
