"""Rows held in memory, or mapped into it: one pass over them, batch by batch."""

from __future__ import annotations

import dataclasses
from typing import Any, Callable, Iterator, Optional, Sequence

import torch
from torch import Tensor

from ipufit import tree

__all__ = ["Rows"]


@dataclasses.dataclass(frozen=True)
class Rows:
    """Batches of rows. Every batch is a copy, so that it never changes once it is read.

    A copy of a whole execution at once takes longer than copies of its batches: memory of that
    size comes from the system anew each time.

    Attributes:
        leaves: tells the tensors and arrays with the samples along the first dimension.
        structure: of a batch.
        samples: rows of the pass.
        batch_size: rows of a batch; the last one may have fewer.
        order: draws the indices of the rows, as the pass begins; None is their own order.
    """

    leaves: Callable[[], Sequence[Any]]
    structure: tree.Structure
    samples: int
    batch_size: int
    order: Callable[[], Optional[Tensor]]

    def __iter__(self) -> Iterator[Any]:
        order = self.order()
        for begin in range(0, self.samples, self.batch_size):
            end = min(begin + self.batch_size, self.samples)
            rows = slice(begin, end) if order is None else order[begin:end]
            yield tree.unflatten([_copy(leaf, rows) for leaf in self.leaves()], self.structure)


def _copy(leaf: Any, rows: Any) -> Tensor:
    """Only these rows are read: of a memory-mapped array nothing else enters memory."""
    if isinstance(leaf, Tensor):
        if isinstance(rows, slice):
            return leaf[rows].detach().clone()
        return leaf.detach().index_select(0, rows.to(leaf.device))
    picked = leaf[rows] if isinstance(rows, slice) else leaf[rows.numpy()]
    # A base-class array in memory of its own: no memory map, and writable, as torch wants it.
    return torch.from_numpy(picked.__array__().copy())
