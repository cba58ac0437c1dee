"""A copy of the user's module in a program of its own, for code that refers to the user's."""

from __future__ import annotations

import contextlib
from typing import Any, Dict, Iterator, List, Optional, Tuple

from torch import nn

__all__ = ["in_place_of"]


@contextlib.contextmanager
def in_place_of(original: Optional[nn.Module], copied: nn.Module) -> Iterator[None]:
    """In the block the user's module has the parameters and buffers of its copy.

    A loss that is a function may read them through the user's module, as a penalty of weights does.

    Args:
        original: the user's module; None where there is no copy.
        copied: the copy of it.
    """
    changed: List[Tuple[Dict[str, Any], Dict[str, Any]]] = []
    if original is not None:
        for mine, other in zip(original.modules(), copied.modules()):
            for kind in ("_parameters", "_buffers"):
                there = vars(mine)[kind]
                changed.append((there, dict(there)))
                there.update(vars(other)[kind])
    try:
        yield
    finally:
        for there, before in changed:
            there.update(before)
