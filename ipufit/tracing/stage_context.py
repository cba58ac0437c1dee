"""Following a forward pass through the stages of a partition, where there is one."""

from __future__ import annotations

import contextlib
from typing import Callable, Iterator, Optional

from torch import nn

from ipufit.partition.own_blocks import OwnBlocks
from ipufit.partition.partition import Partition

__all__ = ["follow_stages"]


@contextlib.contextmanager
def follow_stages(
    partition: Optional[Partition],
    module: nn.Module,
    on_begin: Callable[[int], None] = lambda stage: None,
) -> Iterator[OwnBlocks]:
    """Watch a forward pass of the module, and the loss after it, and check the stages.

    Args:
        partition: of the module; None for one IPU.
        module: the user's.
        on_begin: called with the number of every stage that begins, 0 at the start included.

    Yields:
        The blocks that the module begins itself.

    Raises:
        PartitionError: a stage runs after a later one; a module that begins one did not run;
            a stage or IPU has nothing to compute; a parameter is used in two; or the module has
            blocks of its own that contradict the partition.
    """
    blocks = OwnBlocks(partition)
    with blocks.recording():
        if partition is None:
            walk = None
            yield blocks
        else:
            # Imported here: few models are divided.
            from ipufit.tracing.stage_trace import Walk

            walk = Walk(partition, module, blocks, on_begin)
            with walk.watching():
                yield blocks
    blocks.check_entered()
    if walk is not None:
        walk.check_end()
