"""Attributes that are others for a while."""

from __future__ import annotations

import contextlib
from typing import Any, Dict, Iterable, Iterator, List, Mapping, Tuple

__all__ = ["replaced"]


@contextlib.contextmanager
def replaced(given: Iterable[Tuple[Any, Mapping[str, Any]]]) -> Iterator[None]:
    """In the block these objects have these attributes of their own, by name.

    Args:
        given: each object with its attributes.
    """
    before: List[Tuple[Dict[str, Any], Mapping[str, Any], Dict[str, Any]]] = []
    try:
        for each, own in given:
            there = vars(each)
            before.append((there, own, {name: there[name] for name in own if name in there}))
            there.update(own)
        yield
    finally:
        for there, own, kept in before:
            there.update(kept)  # in its old place: a recording depends on the order
            for name in own:
                if name not in kept:
                    there.pop(name, None)
