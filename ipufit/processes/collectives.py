"""Flat tensors of which each process has a part: the part's sum, the whole, and all of it in one.

Parts are told apart by cuts: process p has the elements from ``cuts[p]`` up to ``cuts[p + 1]``.
Sums go round by all-to-all, which both gloo and NCCL have on every torch, for parts of any length;
gloo's own reduce-scatter is missing on old ones.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Iterator, List, Optional, Sequence, Tuple

import torch
from torch import Tensor, distributed

from ipufit.processes.group import Processes, as_bytes

if TYPE_CHECKING:
    from ipufit.processes.connection import PendingWork

# Bytes of all processes that are under way at a time; a copy of them is made.
_WINDOW = 25 * 2**20


def part_of(processes: Processes, flat: Tensor, cuts: Sequence[int]) -> Tensor:
    """A view of this process's part of a whole tensor."""
    return flat[cuts[processes.process_id] : cuts[processes.process_id + 1]]


def reduce_scatter(
    processes: Processes, flats: Sequence[Tensor], cuts: Sequence[Sequence[int]]
) -> List[Tensor]:
    """Sum flat tensors over all processes, and return this process's part of each sum.

    Each process sends a value once, and not twice as for a sum that all get. Half precision is
    summed in float32, and rounded once.

    Args:
        flats: whole and contiguous in each process; they are changed.
        cuts: of each.
    Returns:
        Views of them. What is beside the part means nothing any more.
    """
    parts = []
    with torch.no_grad():
        for flat, bounds in zip(flats, cuts):
            for pieces in _windows(flat, bounds):
                edges = [*itertools.accumulate(map(len, pieces), initial=0)]
                pending = PendingReduceScatter(processes, torch.cat(pieces), edges)
                pending.end()
                pieces[processes.process_id].copy_(pending.result)
            parts.append(part_of(processes, flat, bounds))
    return parts


def _windows(flat: Tensor, cuts: Sequence[int]) -> Iterator[List[Tensor]]:
    """A piece of each part, window after window; pieces of short parts are empty at last."""
    parts = [flat[begin:end] for begin, end in zip(cuts, cuts[1:])]
    width = max(1, _WINDOW // (flat.element_size() * len(parts)))
    for begin in range(0, max(map(len, parts)), width):
        yield [part[begin : begin + width] for part in parts]


def all_gather_parts(
    processes: Processes, flats: Sequence[Tensor], cuts: Sequence[Sequence[int]]
) -> None:
    """Make flat tensors whole in all processes, in place, from the part that each one has.

    Args:
        flats: contiguous.
        cuts: of each.
    """
    works = processes.pending_work()
    with torch.no_grad():
        for flat, bounds in zip(flats, cuts):
            start_all_gather(works, flat, bounds)
    works.wait()


def start_all_gather(works: PendingWork, flat: Tensor, cuts: Sequence[int]) -> None:
    """Start to make a flat tensor whole from the part that each process has.

    Args:
        works: of the processes; the tensor is whole when they are done.
        flat: contiguous.
        cuts: of it.
    """
    for process, (begin, end) in enumerate(zip(cuts, cuts[1:])):
        if end > begin:
            part = as_bytes(flat[begin:end])
            works.start(distributed.broadcast, part, process, like=part)


def gather_parts(
    processes: Processes, part: Tensor, lengths: Sequence[int], everywhere: bool
) -> Optional[Tensor]:
    """Gather the parts that processes have into a whole tensor.

    Args:
        part: of this process, flat and contiguous.
        lengths: of the parts, by process.
        everywhere: whether all get it; else process 0 alone.
    Returns:
        A new tensor on the device of the part, or None where nobody wants it.
    """
    assert lengths[processes.process_id] == len(part)
    cuts = [*itertools.accumulate(lengths, initial=0)]
    if everywhere:
        whole = part.new_empty(cuts[-1])
        part_of(processes, whole, cuts).copy_(part)
        all_gather_parts(processes, [whole], [cuts])
        return whole
    wants = processes.is_rank_zero
    whole = part.new_empty(cuts[-1] if wants else 0)
    one = part.element_size()
    here = [one * length if wants else 0 for length in lengths]
    there = [one * len(part), *[0] * (len(lengths) - 1)]
    with torch.no_grad(), processes.collectives() as start:
        texts: Tuple[Tensor, Tensor] = as_bytes(whole), as_bytes(part)
        start(distributed.all_to_all_single, *texts, here, there, like=part)
    return whole if wants else None


class PendingReduceScatter:
    """Sum of a flat tensor over all processes, under way, of which each gets its part.

    Args:
        processes: all of them.
        whole: contiguous; it stays as it is until the sum has ended.
        cuts: of it.

    Attributes:
        result: this process's part, when the sum has ended.
    """

    def __init__(self, processes: Processes, whole: Tensor, cuts: Sequence[int]) -> None:
        count = len(cuts) - 1
        self.result = torch.empty_like(part_of(processes, whole, cuts))
        self._received = whole.new_empty(count * len(self.result))
        # What is sent stays until it has arrived.
        self._sent = whole
        self._works = processes.pending_work()
        one = whole.element_size()
        here = [one * len(self.result)] * count
        there = [one * (end - begin) for begin, end in zip(cuts, cuts[1:])]
        texts = as_bytes(self._received), as_bytes(whole)
        self._works.start(distributed.all_to_all_single, *texts, here, there, like=whole)

    def end(self) -> None:
        """Wait until the sums have arrived."""
        self._works.wait()
        rows = self._received.view(-1, len(self.result)) if len(self.result) else None
        if rows is not None:
            wide = torch.float32 if rows.dtype in (torch.float16, torch.bfloat16) else rows.dtype
            self.result.copy_(rows.sum(0, dtype=wide))
