"""What a step does with metric objects, as a key among the outputs of its program.

The arguments of their calls are outputs of the program, and the key says whose they are, so that a
recording that is used again says it again.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Dict, List, Mapping, Optional, Tuple

from torch import Tensor

from ipufit.core.logged_values import LogRule
from ipufit.utils import tree

__all__ = ["Call", "Calls", "OfBatch", "Place", "find_calls"]


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a tensor stands among the tensors of all calls.

    Attributes:
        index: there.
    """

    index: int


@dataclasses.dataclass(frozen=True)
class Call:
    """One call of a metric.

    Attributes:
        path: the metric's, from the LightningModule.
        structure: of positional and named arguments.
        leaves: of them, a place instead of each tensor.
    """

    path: str
    structure: tree.Structure
    leaves: Tuple[Any, ...]

    def arguments(self, tensors: Tuple[Tensor, ...]) -> Tuple[Any, Dict[str, Any]]:
        """Positional and named arguments around these tensors."""
        leaves = [tensors[each.index] if isinstance(each, Place) else each for each in self.leaves]
        args, kwargs = tree.unflatten(leaves, self.structure)
        return args, kwargs


@dataclasses.dataclass(frozen=True)
class OfBatch:
    """A value that a call returns, logged like any number of a step.

    Attributes:
        name: under which.
        rule: how the values of micro-batches become one.
        call: index of the call.
        key: of a collection's result; None of a metric's.
    """

    name: str
    rule: LogRule
    call: int
    key: Optional[str]


class Calls(str):
    """The key, among the outputs, of the tensors that the calls of a step got.

    As a text it says all that it knows, so that two are equal where they mean the same.

    Attributes:
        calls: in order.
        values: of micro-batches, to be logged.
        epochs: metrics whose value over the epoch is logged, by name.
        resets: metrics that are logged, and forget everything at the end of an epoch.
    """

    calls: Tuple[Call, ...]
    values: Tuple[OfBatch, ...]
    epochs: Mapping[str, str]
    resets: Tuple[str, ...]

    @staticmethod
    def of(
        calls: List[Call], values: List[OfBatch], epochs: Dict[str, str], resets: List[str]
    ) -> Calls:
        """The key that says this."""
        key = Calls(f"metrics: {calls}, {values}, {epochs}, {resets}")
        key.calls, key.values = tuple(calls), tuple(values)
        key.epochs, key.resets = dict(epochs), tuple(resets)
        return key


def find_calls(outputs: Any) -> Optional[Calls]:
    """The key among the outputs of a program; None if there is none."""
    if not isinstance(outputs, Mapping):
        return None
    return next((key for key in outputs if isinstance(key, Calls)), None)
