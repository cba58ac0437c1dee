"""Operators and hints that only an IPU honours, met while another engine makes a program.

Operators are refused. Hints to the compiler are recorded, to be reported as without effect: the
stand-in for PopTorch reports its own here, those of the SDK don't tell that they were called.
"""

from __future__ import annotations

import contextlib
import contextvars
from typing import Callable, ContextManager, Dict, Iterator, List, Optional

from torch import Tensor

from ipufit.errors import CaptureError
from ipufit.utils import tree
from ipufit.utils.error_collector import within

_MAKING: contextvars.ContextVar[bool] = contextvars.ContextVar("making", default=False)


class PopTorchError(Exception):
    """Base class of the errors of PopTorch's stand-in.

    Attributes:
        message: the text alone, advice last.
        is_only_on_ipus: whether the error is about what nothing but an IPU can do.
    """

    message: str
    is_only_on_ipus = False


def only_on_ipus(error: Optional[BaseException]) -> Optional[str]:
    """Return the text of an error about what only an IPU can do, advice last; None of others."""
    if isinstance(error, PopTorchError) and error.is_only_on_ipus:
        return error.message
    return None


def for_this_engine() -> ContextManager[None]:
    """Make what is called in the block part of what this engine runs."""
    return within(_MAKING, True)


def is_for_this_engine() -> bool:
    """Tell whether this engine is to run the caller; no where a model is only looked at."""
    return _MAKING.get()


_INPUT = "set_overlap_for_input"
_CHECKPOINT = "recomputationCheckpoint"

_listeners: List[Callable[[str, object], None]] = []


@contextlib.contextmanager
def record_hints(batch: tree.Tree, hints: Dict[str, None]) -> Iterator[None]:
    """Record the names of the hints that are called in the context.

    Args:
        batch: whose tensors are the inputs.
        hints: names are added here.

    Raises:
        CaptureError: an input is marked that is none, which an IPU would refuse.
    """
    inputs = {id(leaf) for leaf in tree.flatten(batch)[0]}

    def record(name: str, argument: object) -> None:
        hints[name] = None
        tensors = tree.flatten(argument)[0] if name == _INPUT else []
        if any(isinstance(t, Tensor) and id(t) not in inputs for t in tensors):
            raise CaptureError(
                f"poptorch.{_INPUT} marks tensors of the batch, but was called with a computed "
                "tensor. Call it at the start of forward, on the input itself."
            )

    _listeners.append(record)
    try:
        yield
    finally:
        _listeners.pop()


def report_hint(name: str, argument: object) -> None:
    """Report a hint, by the name of its operator and its first argument, to all listeners."""
    for listener in _listeners:
        listener(name, argument)


def describe_hints(hints: Dict[str, None]) -> str:
    """A sentence for ``explain``; empty where there were none."""
    if not hints:
        return ""
    text = f"IPU annotations in forward, which have no effect here: {', '.join(sorted(hints))}."
    if _CHECKPOINT in hints:
        text += " To recompute here, use ipufit.Memory(recompute=['name of a layer'])."
    return text
