"""Where two recordings of the same micro-batch differ."""

from __future__ import annotations

import dataclasses
import difflib
from typing import Any, Iterator, List, Optional, Sequence, Tuple

import torch
from torch import Tensor

from ipufit.analysis.check.trace_facts import Operation
from ipufit.tracing.capture import Frame

__all__ = ["Difference", "differences", "same_results"]

# Of one and the same computation, what another order of summation may change.
_RELATIVE, _ABSOLUTE = 1e-3, 1e-5

# How many operators are looked at to see which of them only one program has.
_AHEAD = 300


@dataclasses.dataclass(frozen=True)
class Difference:
    """An operator that is not the same in both.

    Attributes:
        kind: "constant" of a number or text, "folded" of a tensor that Python made, "program"
            where the operators are others.
        frame: the user's line.
        before, after: what differs, as text.
        titles: where the tensors are kept, of which that is known.
    """

    kind: str
    frame: Optional[Frame]
    before: str
    after: str
    titles: Tuple[str, ...]


def differences(one: Sequence[Operation], other: Sequence[Operation]) -> List[Difference]:
    """All changed values, up to the first operator that is another one.

    What changes in torch's own derivative of a line says nothing more than the line.
    """
    found = list(_differences(one, other))
    placed = [difference for difference in found if difference.frame is not None]
    return placed or found


def _differences(one: Sequence[Operation], other: Sequence[Operation]) -> Iterator[Difference]:
    has_changed = False
    for place, (a, b) in enumerate(zip(one, other)):
        if a.name != b.name or a.structure != b.structure:
            if not has_changed:
                yield _parting(one[place:], other[place:])
            return
        for before, after in zip(a.values, b.values):
            if type(before) is type(after) and repr(before) == repr(after):
                continue
            has_changed = True
            is_plain = isinstance(before, (bool, int, float, complex, str))
            kind = "constant" if is_plain else "folded"
            titles = tuple(dict.fromkeys((*a.titles, *b.titles)))
            yield Difference(kind, a.frame, str(before), str(after), titles)
            break
    if not has_changed and len(one) != len(other):
        shorter = min(len(one), len(other))
        yield _parting(one[shorter:], other[shorter:])


def _parting(one: Sequence[Operation], other: Sequence[Operation]) -> Difference:
    """Where two programs part: the line of what only one of them has."""
    keys = [[(o.name, o.frame) for o in part[:_AHEAD]] for part in (one, other)]
    matcher = difflib.SequenceMatcher(None, keys[0], keys[1], autojunk=False)
    a, b = one[:1], other[:1]
    for tag, begin, end, start, stop in matcher.get_opcodes():
        if tag != "equal":
            a, b = one[begin:end], other[start:stop]
            break
    frames = [o.frame for o in (*b, *a) if o.frame is not None]
    before, after = (part[0].name if part else "nothing" for part in (a, b))
    return Difference("program", frames[0] if frames else None, before, after, ())


def same_results(one: Sequence[Any], other: Sequence[Any]) -> bool:
    """Whether two runs came to the same numbers."""
    pairs: List[Tuple[Tensor, Tensor]] = list(zip(one, other))
    return len(one) == len(other) and all(
        a.shape == b.shape
        and torch.allclose(a.double(), b.double(), _RELATIVE, _ABSOLUTE, equal_nan=True)
        for a, b in pairs
        if not (a.is_complex() or b.is_complex())
    )
