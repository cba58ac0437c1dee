"""Batches of a given number of rows, made of batches of any."""

from __future__ import annotations

from typing import Iterable, Iterator, List, Tuple

from torch import Tensor

__all__ = ["rebatched"]


def rebatched(batches: Iterable[List[Tensor]], rows: int) -> Iterator[Tuple[int, List[Tensor]]]:
    """Cut batches where a batch of ``rows`` rows is full.

    Yields:
        the row of the new batch at which a piece belongs, and the piece. Every row comes once, in
        order; a piece that ends at ``rows`` completes its batch.
    """
    filled = 0
    for tensors in batches:
        begin, end = 0, _rows_of(tensors)
        while begin < end:
            size = min(end - begin, rows - filled)
            yield filled, [tensor.narrow(0, begin, size) for tensor in tensors]
            begin += size
            filled = (filled + size) % rows


def _rows_of(tensors: List[Tensor]) -> int:
    rows = [tensor.shape[0] if tensor.dim() else None for tensor in tensors]
    first = rows[0] if rows else None
    if first is None or any(other != first for other in rows):
        shapes = [tuple(tensor.shape) for tensor in tensors]
        raise AssertionError(
            "rebatched_size joins batches along dimension 0, which must be of one size in all "
            f"tensors of a batch; their shapes are {shapes}. Give every tensor a batch dimension, "
            "or leave rebatched_size out."
        )
    return first
