"""Hints to a compiler for IPUs in a forward that runs without one: noted, so that it can be said.

They are those of the stand-in for PopTorch. The SDK's own don't tell that they were called.
"""

from __future__ import annotations

import contextlib
import sys
from typing import Any, Dict, Iterator

from torch import Tensor

from ipufit.errors import CaptureError
from ipufit.utils import tree

__all__ = ["hints_noted", "said_of"]

_INPUT = "set_overlap_for_input"
_CHECKPOINT = "recomputationCheckpoint"


@contextlib.contextmanager
def hints_noted(batch: Any, hints: Dict[str, None]) -> Iterator[None]:
    """Note the names of the hints in the block.

    Args:
        batch: whose tensors are the inputs.
        hints: names are added here.

    Raises:
        CaptureError: an input is marked that is none, which an IPU would refuse.
    """
    standin = sys.modules.get("ipufit.poptorch._hints")
    if standin is None:
        yield
        return
    inputs = {id(leaf) for leaf in tree.flatten(batch)[0]}

    def note(name: str, given: Any) -> None:
        hints[name] = None
        tensors = tree.flatten(given)[0] if name == _INPUT else []
        if any(isinstance(t, Tensor) and id(t) not in inputs for t in tensors):
            raise CaptureError(
                f"poptorch.{_INPUT} marks tensors of the batch, but was called with one that was "
                "computed from them. Call it first of all in forward, on the input itself."
            )

    with standin.hints_watched(note):
        yield


def said_of(hints: Dict[str, None]) -> str:
    """A sentence for ``explain``; empty where there were none."""
    if not hints:
        return ""
    text = f"Marks for an IPU in forward, which change nothing here: {', '.join(sorted(hints))}."
    if _CHECKPOINT in hints:
        text += " What recomputes here is recompute=['name of a layer'] of compile."
    return text
