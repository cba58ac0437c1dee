"""State of the recording of a model's forward: its blocks, its losses, and what it keeps alive."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Dict, FrozenSet, Hashable, Iterator, List, Optional, Sequence, Set

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from ipufit.partition.entered_blocks import EnteredBlocks, Entry
from ipufit.poptorch._activations import Activations
from ipufit.poptorch._errors import error
from ipufit.tracing.flat_storage import storage_id

__all__ = ["RecordedBlocks", "Trace", "traced", "tracing", "untraced"]


class RecordedBlocks(EnteredBlocks):
    """The blocks of a recording, and those of them in which something is computed.

    Attributes:
        computing: the entries in which something is computed, in order; None first where that
            happens before any block, on IPU 0.
    """

    def __init__(self) -> None:
        super().__init__()
        self.computing: List[Optional[Entry]] = []
        self._is_counted = False

    def enter(self, user_id: Optional[Hashable], ipu_id: Optional[int]) -> None:
        """Start a block, which lasts until the next one starts, or until it is left."""
        super().enter(user_id, ipu_id)
        self._is_counted = False

    def on_operator(self) -> None:
        """Assign an operator that is about to be recorded to the current block.

        Raises:
            Error: the last block was left, and no other one entered.
        """
        if not self.is_active:
            name = self.entered[-1][0] if self.entered else None
            raise error(
                "No active Block, all the ops must belong to a Block: something is computed "
                f"after the block {name!r} was left. Put it into a poptorch.Block, or begin blocks "
                "with poptorch.Block.start or poptorch.BeginBlock, which don't end."
            )
        if not self._is_counted:
            self.computing.append(self.entered[-1] if self.entered else None)
            self._is_counted = True


@dataclasses.dataclass(frozen=True)
class _Loss:
    """A tensor that was marked as a loss.

    Attributes:
        tensor: the marked tensor.
        reaching: numbers of the losses that it was computed from.
        reduced: whether it is an identity loss that was reduced to one number.
    """

    tensor: Tensor
    reaching: FrozenSet[int]
    reduced: bool


class Trace:
    """One recording of a model's forward.

    Attributes:
        training: whether it is a training model.
        blocks: where the model says that its operators go.
        keep_alive: objects that must live as long as the recorded graph.
        losses: number of tensors that were said to be losses.
        activations: names of what its operators make.
    """

    def __init__(self, training: bool) -> None:
        self.training = training
        self.blocks = RecordedBlocks()
        self.keep_alive: List[object] = []
        self.losses = 0
        self.activations = Activations()
        self._losses: List[_Loss] = []
        self._reaching: Dict[int, Set[int]] = {}
        self._foreign: Set[int] = set()
        # Memory that is freed may be given out again, and would bring its old losses along.
        self._alive: List[Tensor] = []

    def mark_loss(self, loss: Tensor, reduced: bool = False) -> Tensor:
        """Mark a tensor as a loss.

        Args:
            loss: any shape.
            reduced: whether it is an identity loss that was reduced to one number.
        Returns:
            A tensor of the same value, to be used in its place; without training, itself.
        """
        self.losses += 1
        if not self.training:
            return loss
        number = len(self._losses)
        marked = loss.clone()
        self._losses.append(_Loss(marked, frozenset(self._of(loss)), reduced))
        self._reaching[storage_id(marked)] = {number, *self._of(loss)}
        self._alive.append(marked)
        return marked

    def _of(self, tensor: Tensor) -> Set[int]:
        return self._reaching.get(storage_id(tensor), set())

    def computed(self, inputs: Sequence[Tensor], results: Sequence[Tensor]) -> None:
        """Record that an operator made, or changed, tensors out of others."""
        reaching: Set[int] = set()
        for tensor in inputs:
            reaching |= self._of(tensor)
        for tensor in results:
            self._alive.append(tensor)
            if reaching:
                self._reaching.setdefault(storage_id(tensor), set()).update(reaching)

    def made_on_host(self, tensor: Tensor) -> None:
        """Record a tensor that forward made of numbers without naming the device."""
        self._alive.append(tensor)
        self._foreign.add(storage_id(tensor))

    def is_on_host(self, tensor: Tensor) -> bool:
        """Return True if a tensor of the recording belongs to the host."""
        return storage_id(tensor) in self._foreign

    def final_loss(self, results: Sequence[Tensor]) -> Tensor:
        """Return the one loss that no other loss is computed from.

        Args:
            results: what the model returns or changes; a loss that reaches none of it is dead.

        Raises:
            Error: there is none, or there are several.
        """
        live: Set[int] = set()
        for tensor in results:
            live |= self._of(tensor)
        inner: Set[int] = set()
        for number in live:
            inner |= self._losses[number].reaching
        final = sorted(live - inner)
        if not final:
            raise error(
                "Couldn't find a loss in graph! Training needs a loss that is returned, or that "
                "what is returned is computed from: use a loss of torch.nn, or mark your own with "
                "poptorch.identity_loss(value, reduction)."
            )
        if len(final) > 1:
            raise error(
                "Multiple independent losses found in graph. Graph must have one final loss. Wrap "
                f"final graph loss in poptorch.identity_loss. Of the {len(final)} found, add up "
                'what is to be trained on: poptorch.identity_loss(loss1 + loss2, reduction="none").'
            )
        return self._losses[final[0]].tensor

    def is_inner_reduced(self, tensor: Tensor, final: Optional[Tensor]) -> bool:
        """Return True for a reduced identity loss that goes into another loss."""
        return any(
            loss.tensor is tensor and loss.reduced and tensor is not final for loss in self._losses
        )


_stack: List[Trace] = []


def tracing() -> Optional[Trace]:
    """Return the recording that is under way; None outside of one."""
    return _stack[-1] if _stack else None


@contextlib.contextmanager
def untraced() -> Iterator[None]:
    """Suspend the recording that is under way, to compute for real."""
    stack, _stack[:] = list(_stack), []
    try:
        with _disable_current_modes(), torch._C.DisableTorchFunction():
            yield
    finally:
        _stack[:] = stack


@contextlib.contextmanager
def traced(trace: Trace) -> Iterator[Trace]:
    """Make a trace the recording that is under way."""
    _stack.append(trace)
    try:
        yield trace
    finally:
        _stack.pop()
