"""Operators and hints that only an IPU honours, met while another engine makes a program.

Operators are refused. Hints to the compiler are noted, so that it can be said that they do nothing;
those of the SDK don't tell that they were called.
"""

from __future__ import annotations

import contextlib
import contextvars
import sys
from typing import Any, Dict, Iterator, Optional

from torch import Tensor

from ipufit.errors import CaptureError
from ipufit.utils import tree

__all__ = ["for_this_engine", "hints_noted", "is_for_this_engine", "only_on_ipus", "said_of"]

_MAKING: contextvars.ContextVar[bool] = contextvars.ContextVar("making", default=False)


def only_on_ipus(error: Optional[BaseException]) -> Optional[str]:
    """Return the text of an error about what only an IPU can do, advice last; None of others."""
    return getattr(error, "message", None) if getattr(error, "_is_only_on_ipus", False) else None


@contextlib.contextmanager
def for_this_engine() -> Iterator[None]:
    """Make what is called in the block part of what this engine runs."""
    token = _MAKING.set(True)
    try:
        yield
    finally:
        _MAKING.reset(token)


def is_for_this_engine() -> bool:
    """Tell whether this engine is to run the caller; no where a model is only looked at."""
    return _MAKING.get()


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
