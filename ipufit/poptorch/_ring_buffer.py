"""A ring buffer of slots in shared memory, which one process fills and another reads."""

from __future__ import annotations

from typing import List, Optional, Sequence, Set, Tuple

import torch
from torch import Tensor

from ipufit.poptorch._logging import logger


class _RingBuffer:
    """The slots, and where this side of the ring stands.

    Attributes:
        memory: for each tensor of a batch one of shape (slots, *shape).
        indices_mem: shape (slots,), bool: True where a batch waits to be read, or is being read.
    """

    def __init__(self, memory: List[Tensor], indices_mem: Tensor) -> None:
        self.memory = memory
        self.indices_mem = indices_mem
        self._index = 0

    def _advance(self) -> None:
        self._index = (self._index + 1) % len(self.indices_mem)


class RingBufferWriter(_RingBuffer):
    """The side that fills slots, and makes the memory.

    Args:
        tensors: the first batch, which says of what shapes and dtypes all of them are.
        slots: their number.
        rows: of a batch; None for as many as the first one has.
    """

    def __init__(self, tensors: Sequence[Tensor], slots: int, rows: Optional[int] = None) -> None:
        shapes = [t.shape if rows is None else (rows, *t.shape[1:]) for t in tensors]
        memory = [_shared(slots, *s, dtype=t.dtype) for s, t in zip(shapes, tensors)]
        super().__init__(memory, _shared(slots, dtype=torch.bool))
        self._converted: Set[Tuple[int, torch.dtype]] = set()

    def is_writable(self) -> bool:
        """Return True if the reader has released the current slot."""
        return not bool(self.indices_mem[self._index])

    def write(self, tensors: Sequence[Tensor], start: Optional[int] = None) -> None:
        """Copy tensors into the current slot.

        Args:
            tensors: a batch, or some of its rows.
            start: the row that the first of them becomes; None for a whole batch.
        Raises:
            AssertionError: they don't have the shape of the first batch, or are of a kind that its
                dtype can't hold. Of the same kind they are converted, as the log says once.
        """
        for number, (tensor, memory) in enumerate(zip(tensors, self.memory)):
            slot = memory[self._index]
            if start is not None:
                slot = slot[start : start + len(tensor)]
            # copy_ would repeat a short batch until it fills the slot.
            if tensor.shape != slot.shape:
                raise AssertionError(
                    f"Tensor {number} of a batch has shape {tuple(tensor.shape)}, and that of the "
                    f"first batch has {tuple(slot.shape)}. An AsynchronousDataAccessor needs all "
                    "alike: use drop_last=True, or rebatched_size where only the number of rows "
                    "differs."
                )
            if tensor.dtype != slot.dtype:
                self._check_dtype(number, tensor.dtype, slot.dtype)
            slot.copy_(tensor.detach())

    def _check_dtype(self, number: int, dtype: torch.dtype, first: torch.dtype) -> None:
        if not torch.can_cast(dtype, first):
            raise AssertionError(
                f"Tensor {number} of a batch has dtype {dtype}, and that of the first batch has "
                f"{first}, which can't hold its values. Make all batches of one dtype."
            )
        if (number, dtype) not in self._converted:
            self._converted.add((number, dtype))
            logger.warning(
                "Tensor %d of a batch has dtype %s, and becomes %s as in the first batch.",
                number,
                dtype,
                first,
            )

    def publish(self) -> None:
        """Pass the current slot to the reader, and go on to the next one."""
        self.indices_mem[self._index] = True
        self._advance()

    def clear(self) -> None:
        """Reclaim all slots, read or not."""
        self.indices_mem.fill_(False)
        self._index = 0


class RingBufferReader(_RingBuffer):
    """The side that reads slots, one at a time."""

    def __init__(self, memory: List[Tensor], indices_mem: Tensor) -> None:
        super().__init__(memory, indices_mem)
        self._reading: Optional[int] = None

    def take(self) -> List[Tensor]:
        """Return the batch of the current slot: the shared memory itself, until ``release``."""
        assert self._reading is None
        assert bool(self.indices_mem[self._index])
        self._reading = self._index
        self._advance()
        return [memory[self._reading] for memory in self.memory]

    def release(self) -> bool:
        """Release the slot that is being read, and return True if there was one."""
        if self._reading is None:
            return False
        self.indices_mem[self._reading] = False
        self._reading = None
        return True

    def clear(self) -> None:
        """Restart at the first slot, after the writer has."""
        self._reading = None
        self._index = 0


def _shared(*shape: int, dtype: torch.dtype) -> Tensor:
    memory: Tensor = torch.zeros(shape, dtype=dtype).share_memory_()  # type: ignore[no-untyped-call]
    return memory
