"""Rows held in memory, or mapped into it: one pass over them, batch by batch."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Callable, Iterator, List, Optional, Sequence, Union

import torch
from torch import Tensor

from ipufit.data.prefetch import reads_ahead
from ipufit.utils import tree

__all__ = ["ReadAhead", "RowBlock", "Rows", "batch_count", "is_in_memory"]

# Elements of what torch copies without other threads; its limit is no part of its interface.
_PIECE = 2**15 - 1


@dataclasses.dataclass
class ReadAhead:
    """How far a pass may read ahead.

    Attributes:
        batches: so many will be asked for before anything is done with the first of them.
    """

    batches: int = 1


@dataclasses.dataclass(frozen=True)
class RowBlock:
    """Batches of rows that were copied together.

    Attributes:
        leaves: the tensors, rows along the first dimension.
        structure: how they make a batch.
        batch_size: rows of a batch; the last one may have fewer.
    """

    leaves: Sequence[Tensor]
    structure: tree.Structure
    batch_size: int

    def __len__(self) -> int:
        return -(-self.leaves[0].shape[0] // self.batch_size)

    @property
    def are_full(self) -> bool:
        """True if no batch is smaller."""
        return not self.leaves[0].shape[0] % self.batch_size

    def columns(self) -> List[Sequence[Tensor]]:
        """Each tensor in parts, one for each batch."""
        return [torch.split(leaf, self.batch_size) for leaf in self.leaves]

    def batches(self) -> List[Any]:
        """Yield batches as the user's loader has them."""
        return [tree.unflatten(leaves, self.structure) for leaves in zip(*self.columns())]

    def apart(self) -> List[RowBlock]:
        """Each batch by itself."""
        return [dataclasses.replace(self, leaves=leaves) for leaves in zip(*self.columns())]


def batch_count(raw: Any) -> int:
    """How many batches it is that a pass over the data yields at once."""
    return len(raw) if isinstance(raw, RowBlock) else 1


@dataclasses.dataclass(frozen=True)
class Rows:
    """Batches of rows. Every batch is a copy, so that it never changes once it is read.

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
        for picked in self.picked(ReadAhead()):
            yield from picked.batches()

    def picked(self, horizon: ReadAhead, most: Optional[int] = None) -> Iterator[RowBlock]:
        """The batches of a pass, ``most`` of them at most, as many at once as are wanted."""
        order = self.order()
        samples = self.samples if most is None else min(self.samples, most * self.batch_size)
        begin = 0
        while begin < samples:
            leaves = self.leaves()
            end = min(begin + horizon.batches * self.batch_size, samples)
            rows = slice(begin, end) if order is None else order[begin:end]
            picked = [_copy(leaf, rows) for leaf in leaves]
            yield RowBlock(picked, self.structure, self.batch_size)
            # Nothing is kept of batches that are done with.
            del leaves, picked
            begin = end


def is_in_memory(leaf: Any) -> bool:
    """True if rows of it can be copied without a disk or another device."""
    if isinstance(leaf, Tensor):
        return leaf.device.type == "cpu"
    while leaf is not None:
        if any(kind.__name__ == "memmap" for kind in type(leaf).__mro__):
            return False
        leaf = getattr(leaf, "base", None)
    return True


def _copy(leaf: Any, rows: Union[slice, Tensor]) -> Tensor:
    """Only these rows are read: of a memory-mapped array nothing else enters memory."""
    if not isinstance(leaf, Tensor):
        picked = leaf[rows if isinstance(rows, slice) else rows.numpy()]
        # A base-class array in memory of its own: no memory map, and writable, as torch wants it.
        return torch.from_numpy(picked.__array__().copy())
    tensor: Tensor = leaf.detach()
    if reads_ahead() and _is_plain(tensor):
        return _copy_alone(tensor, rows)
    if isinstance(rows, slice):
        return tensor[rows].clone()
    return tensor.index_select(0, rows.to(tensor.device))


def _is_plain(tensor: Tensor) -> bool:
    return type(tensor) is Tensor and tensor.device.type == "cpu" and tensor.is_contiguous()


def _copy_alone(leaf: Tensor, rows: Union[slice, Tensor]) -> Tensor:
    """In pieces that torch copies in this thread alone.

    For a larger one it wakes other threads, and those that it wakes for a second thread get into
    the way of those that train: on two cores an update of a small network took 3 x the time.
    """
    count = rows.stop - rows.start if isinstance(rows, slice) else len(rows)
    copy = leaf.new_empty((count, *leaf.shape[1:]))
    size = math.prod(leaf.shape[1:])
    if size > _PIECE:
        places = range(rows.start, rows.stop) if isinstance(rows, slice) else rows.tolist()
        for place, row in zip(places, copy):
            pieces = torch.split(leaf[place].view(-1), _PIECE)
            for piece, source in zip(torch.split(row.view(-1), _PIECE), pieces):
                piece.copy_(source)
        return copy
    step = _PIECE // max(1, size)
    for begin in range(0, count, step):
        piece = copy[begin : begin + step]
        if isinstance(rows, slice):
            piece.copy_(leaf[rows.start + begin : rows.start + begin + len(piece)])
        else:
            torch.index_select(leaf, 0, rows[begin : begin + step], out=piece)
    return copy
