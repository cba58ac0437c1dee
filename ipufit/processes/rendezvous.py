"""Where the processes of a run find each other."""

from __future__ import annotations

import dataclasses

__all__ = ["Place"]


@dataclasses.dataclass(frozen=True)
class Place:
    """Where the processes of a run find each other.

    Attributes:
        host: the machine of process 0.
        port: on which it listens.
        is_hosted: whether somebody else, as torchrun, listens there for it.
        attempt: how often the run was begun before at the same place.
    """

    host: str
    port: int
    is_hosted: bool = False
    attempt: int = 0
