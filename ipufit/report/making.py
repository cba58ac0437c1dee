"""The files that are made of what a run has written down."""

from __future__ import annotations

__all__ = ["make"]


def make(folder: str) -> None:
    """Make everything that is for people to look at, from the facts in the folder."""
