"""The part of a dataset that one of several processes reads."""

from __future__ import annotations

from typing import Any, Iterator, List, Optional, Tuple

import torch
from torch import Tensor
from torch.utils.data import Sampler

from ipufit.poptorch._errors import error

__all__ = ["ProcessShare", "ShuffledShare", "share_bounds"]


def share_bounds(
    samples: int, processes: int, process: int, step: int, drop_last: bool
) -> Tuple[int, int]:
    """Return the start and the size of the block of one process.

    Args:
        step: samples of a combined batch. With ``drop_last`` every process gets the same number of
            whole ones; otherwise samples are dealt out evenly, one more to each of the first
            processes while they last.
    """
    if drop_last:
        size = samples // (step * processes) * step
        return process * size, size
    size, rest = divmod(samples, processes)
    return process * size + min(process, rest), size + (process < rest)


class _Position(int):
    """A position in the whole dataset, where a plain number is one in the share."""


class ProcessShare:
    """A contiguous block of a dataset, in the order of the dataset or of one shuffling of it.

    The shuffling is of the whole dataset and the same in all processes, so that their blocks never
    meet. What ``drop_last`` leaves out lies behind the blocks in even epochs, and in front of them
    in odd ones, of which the first is one. Plain indices are those of the share.

    Args:
        seed: of the first epoch's shuffling; those of later epochs continue its random numbers.
        shuffle: whether there is one.
    Raises:
        Error: the samples make less than one combined batch for each process.
    """

    def __init__(
        self,
        dataset: Any,
        processes: int,
        process: int,
        step: int,
        drop_last: bool,
        shuffle: bool = False,
        seed: Optional[int] = None,
    ) -> None:
        self._dataset = dataset
        self._begin, self._size = share_bounds(len(dataset), processes, process, step, drop_last)
        if drop_last and not self._size:
            raise error(
                f"With drop_last=True {processes} processes need at least {processes} combined "
                f"batches of {step} samples ({processes * step}), and the dataset has "
                f"{len(dataset)}. Use smaller combined batches, or fewer processes."
            )
        # As PopTorch counts them: by one process's samples, not by those of all.
        self._shift = len(dataset) % self._size if shuffle and drop_last else 0
        self._seed = seed if shuffle else None
        self._drawn = 0
        # The state, as generators can't be sent to other processes by all versions of torch.
        self._state: Optional[Tensor] = None
        self._order: Optional[Tensor] = None
        self._offset = self._begin

    def set_epoch(self, epoch: int) -> None:
        """Use the order of an epoch; the first one is 1."""
        self._offset = self._begin + (self._shift if epoch % 2 else 0)
        if self._seed is None:
            return
        if epoch < self._drawn:
            self._drawn, self._state = 0, None
        generator = torch.Generator()
        generator.manual_seed(self._seed)
        if self._state is not None:
            generator.set_state(self._state)
        for _ in range(self._drawn, epoch):
            self._order = torch.randperm(len(self._dataset), generator=generator)
        self._drawn, self._state = max(self._drawn, epoch), generator.get_state()

    def positions(self) -> List[int]:
        """Return the positions in the dataset of the share's samples, in the order of the epoch."""
        span = slice(self._offset, self._offset + self._size)
        if self._order is None:
            return list(range(span.start, span.stop))
        positions: List[int] = self._order[span].tolist()
        return positions

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> Any:
        return self._dataset[self._position(index)]

    def __getitems__(self, indices: List[int]) -> List[Any]:
        """Return several samples at once, where the dataset can."""
        positions = [self._position(index) for index in indices]
        if callable(getattr(self._dataset, "__getitems__", None)):
            samples: List[Any] = self._dataset.__getitems__(positions)
            return samples
        return [self._dataset[position] for position in positions]

    def _position(self, index: int) -> int:
        if isinstance(index, _Position):
            return int(index)
        if not -self._size <= index < self._size:
            raise IndexError(
                f"index {index} is not in the share of this process, which has {self._size} "
                "samples of the dataset."
            )
        place = self._offset + index % self._size
        return place if self._order is None else int(self._order[place])


class ShuffledShare(Sampler):  # type: ignore[type-arg]  # generic in new versions of torch alone
    """Sampler of the positions in the dataset of a share's samples.

    They go to the loader's workers as they are: a worker has a copy of the share, which knows
    nothing of later epochs.
    """

    def __init__(self, share: ProcessShare) -> None:
        self._share = share

    def __len__(self) -> int:
        return len(self._share)

    def __iter__(self) -> Iterator[int]:
        return map(_Position, self._share.positions())
