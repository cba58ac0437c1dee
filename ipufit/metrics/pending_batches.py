"""Micro-batches as one, and executions that are looked at together."""

from __future__ import annotations

from typing import Any, List, Optional, Sequence, Tuple

import torch
from torch import Tensor

__all__ = ["Seen", "Waiting", "joined"]

# What is known of a micro-batch: prediction, target, size and sample_weight.
Seen = Tuple[Any, Any, int, Any]

# Elements that are worth a copy, to look at them all at once; and at most of those that wait.
_JOINED, _MOST = 2**16, 2**18


def joined(seen: Sequence[Seen]) -> Optional[Seen]:
    """A copy of several micro-batches as one; None where they are not alike, or not small."""
    predictions, targets, _, weights = zip(*seen) if seen else ((), (), (), ())
    if {*map(type, (*predictions, *targets))} != {Tensor} or {*map(type, weights)} != {type(None)}:
        return None
    # What follows looks at each form once, not at each of many micro-batches.
    forms = {(p.shape, t.shape, p.dtype, t.dtype) for p, t in zip(predictions, targets)}
    if not all(len(p) and len(t) and p[0] == t[0] for p, t, *_ in forms):
        return None
    if len({(p[1:], t[1:], *dtypes) for p, t, *dtypes in forms}) > 1:
        return None
    if len(seen) * max(p.numel() + t.numel() for p, t, *_ in forms) > _JOINED:
        return None
    return _as_one(seen)


def _as_one(seen: Sequence[Seen]) -> Seen:
    predictions, targets, sizes, _ = zip(*seen)
    return torch.cat(predictions), torch.cat(targets), sum(sizes), None


class Waiting:
    """Executions whose metrics nobody has asked for yet.

    After the update of a network a metric finds nothing of its own in the processor's caches: what
    is computed of several executions at once costs hardly more than of one.
    """

    def __init__(self) -> None:
        self._known: object = None
        self._seen: List[Seen] = []
        self._elements = 0

    def learn(self, one: Seen) -> None:
        """The metrics take this. Of class indices they take, in such a form, whatever there is."""
        if one[0].shape != one[1].shape:
            self._known = _form(one)

    def takes(self, one: Seen) -> bool:
        """Let it wait, if it is known that the metrics will take it.

        Args:
            one: copies, as :func:`joined` makes them.
        """
        if _form(one) != self._known:
            return False
        self._seen.append(one)
        self._elements += one[0].numel() + one[1].numel()
        return True

    @property
    def are_many(self) -> bool:
        """Whether they should wait no longer."""
        return self._elements > _MOST

    def taken(self) -> Optional[Seen]:
        """All that wait, as one; None if none do. They wait no longer."""
        seen = self._seen
        self.forget()
        return _as_one(seen) if seen else None

    def forget(self) -> None:
        """None of them will be looked at."""
        self._seen, self._elements = [], 0


def _form(one: Seen) -> object:
    prediction, target, _, _ = one
    return prediction.shape[1:], target.shape[1:], prediction.dtype, target.dtype
