"""Results of a micro-batch besides gradients: the module's outputs, the loss, logged values."""

from __future__ import annotations

import dataclasses
from typing import Any, List, Mapping, Sequence, Tuple

import torch
from torch import Tensor

from ipufit.core.logged_values import Entries, LogRule
from ipufit.losses import LossTerm
from ipufit.utils import tree
from ipufit.utils.names import check_log_name

__all__ = ["OutputShape", "ReportedScalars"]

_PLAIN = (bool, int, float, complex, str, bytes)


class OutputShape:
    """How the tensors that a step returns become the module's outputs again.

    Leaves that are not tensors (None, numbers, strings) are what they were when the step was
    recorded.
    """

    def __init__(self, outputs: Any) -> None:
        leaves, self._structure = tree.flatten(outputs)
        self._leaves = [None if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        self._places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        self.tensors: List[Tensor] = [leaves[i] for i in self._places]

    def equals(self, other: OutputShape) -> bool:
        """Tell whether both put tensors into the same places among the same other leaves."""
        return (
            self._structure == other._structure
            and self._places == other._places
            and all(
                type(one) is type(two) and (one is two or (isinstance(one, _PLAIN) and one == two))
                for one, two in zip(self._leaves, other._leaves)
            )
        )

    def forget(self) -> None:
        """Let go of the tensors of the recording."""
        self.tensors = [torch.empty(t.shape, dtype=t.dtype, device="meta") for t in self.tensors]

    def rebuild(self, tensors: Sequence[Tensor]) -> Any:
        """The module's outputs around these tensors."""
        leaves = list(self._leaves)
        for place, tensor in zip(self._places, tensors):
            leaves[place] = tensor
        return tree.unflatten(leaves, self._structure)


@dataclasses.dataclass(frozen=True)
class ReportedScalars:
    """The numbers that a micro-batch reports, in one tensor: the loss, its count, what it logged.

    Attributes:
        counted: whether the loss comes with a count.
        rules: of the logged values, by name, in the order of the tensor.
    """

    counted: bool = False
    rules: Mapping[str, LogRule] = dataclasses.field(default_factory=dict)

    @property
    def is_loss_alone(self) -> bool:
        """True where there is no number but the loss."""
        return not (self.counted or self.rules)

    @staticmethod
    def of(term: LossTerm, entries: Entries) -> Tuple[ReportedScalars, Tensor]:
        """Gather the numbers into a tensor: shape (), or (size,) in float64 for several."""
        loss = term.value.detach()
        values = [loss] if term.count is None else [loss, term.count.detach()]
        rules = {name: entry.rule for name, entry in entries.items()}
        values += [entry.joined(loss.device) for entry in entries.values()]
        for name, part in term.parts.items():
            rules[check_log_name(name, rules)] = LogRule(counted=True)
            values.append(part.detach())
        reported = ReportedScalars(term.count is not None, rules)
        if reported.is_loss_alone:
            return reported, loss
        return reported, torch.stack([v.reshape(()).to(torch.float64) for v in values])
