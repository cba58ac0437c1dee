"""Blocks that a forward pass enters: who records them, and which classes begin them.

The stand-in for PopTorch reports every block it begins to the recordings that are under way, and
registers its class of blocks when it is imported. Nothing here knows the stand-in.
"""

from __future__ import annotations

import contextlib
from typing import Dict, Hashable, Iterator, List, Optional, Tuple

__all__ = ["BLOCK_CLASSES", "EnteredBlocks", "Entry", "record_blocks", "recordings"]

# A block's name, and the IPU that was asked for.
Entry = Tuple[Hashable, Optional[int]]

# Context managers that report to the recordings; empty until a PopTorch that does is imported.
BLOCK_CLASSES: List[type] = []

_recordings: List[EnteredBlocks] = []


class EnteredBlocks:
    """The blocks of one forward pass, in the order in which they were entered.

    Attributes:
        entered: one entry for each time that a block was entered; a block may come twice.
        is_active: whether the last block is still open, or none was entered.
    """

    def __init__(self) -> None:
        self.entered: List[Entry] = []
        self.is_active = True
        self._next_auto_id = 0
        self._numbered: Dict[int, str] = {}

    def use_auto_id(self) -> None:
        """Restart the numbering of unnamed blocks at 0."""
        self._next_auto_id = 0

    def next_auto_id(self) -> str:
        """Return the name of the next unnamed block."""
        self._next_auto_id += 1
        return str(self._next_auto_id - 1)

    def enter(self, user_id: Optional[Hashable], ipu_id: Optional[int]) -> None:
        """Start a block, which lasts until the next one starts, or until it is left."""
        self.entered.append((user_id or self.next_auto_id(), ipu_id))
        self.is_active = True

    def number_of(self, owner: object) -> str:
        """Return the number of an unnamed block, which stays the same for its owner."""
        if id(owner) not in self._numbered:
            self._numbered[id(owner)] = self.next_auto_id()
        return self._numbered[id(owner)]

    def leave(self) -> None:
        """End the current block, so that the next operator needs a new one."""
        self.is_active = False


@contextlib.contextmanager
def record_blocks(blocks: Optional[EnteredBlocks] = None) -> Iterator[List[Entry]]:
    """Record name and IPU of every block that is entered in the context, compiling or not.

    Args:
        blocks: the recording to add to; a new one by default.
    """
    blocks = EnteredBlocks() if blocks is None else blocks
    _recordings.append(blocks)
    try:
        yield blocks.entered
    finally:
        _recordings.pop()


def recordings() -> List[EnteredBlocks]:
    """Return the recordings that are under way, the outermost first."""
    return list(_recordings)
