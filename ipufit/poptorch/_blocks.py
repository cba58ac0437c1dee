"""Where the operators of a recording go: the blocks that the model has opened and closed."""

from __future__ import annotations

__all__ = ["Blocks"]


class Blocks:
    """The blocks of one recording, in the order in which they were entered."""
