"""What stands while a model's forward is being recorded, and who may look at it."""

from __future__ import annotations

import contextlib
from typing import Iterator, List, Optional

from torch import Tensor

from ipufit.poptorch._blocks import Blocks

__all__ = ["Trace", "traced", "tracing", "untraced"]


class Trace:
    """One recording of a model's forward.

    Attributes:
        training: whether it is a training model.
        blocks: where the model says that its operators go.
        losses: number of losses marked so far.
        kept: what has to live as long as the recorded graph.
    """

    def __init__(self, training: bool) -> None:
        self.training = training
        self.blocks = Blocks()
        self.losses = 0
        self.kept: List[object] = []

    def mark_loss(self, loss: Tensor, reduced: bool = False) -> Tensor:
        """Say that this tensor is a loss; its value stays.

        Args:
            loss: any shape.
            reduced: whether it is an identity loss that was reduced to one number.
        """
        self.losses += 1
        return loss


_stack: List[Trace] = []


def tracing() -> Optional[Trace]:
    """The recording that is under way; None outside of one."""
    return _stack[-1] if _stack else None


@contextlib.contextmanager
def untraced() -> Iterator[None]:
    """As if no recording were under way, for code of the user that runs beside it."""
    held, _stack[:] = list(_stack), []
    try:
        yield
    finally:
        _stack[:] = held


@contextlib.contextmanager
def traced(trace: Trace) -> Iterator[Trace]:
    """Make this the recording that is under way."""
    _stack.append(trace)
    try:
        yield trace
    finally:
        _stack.pop()
