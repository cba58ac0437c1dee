"""Where the stages begin, and on which IPUs they are."""

from __future__ import annotations

import dataclasses
from typing import List, Sequence, Tuple

from ipufit.partition.tied_weights import Visit

__all__ = ["Division"]


@dataclasses.dataclass(frozen=True)
class Division:
    """What the arguments of ``compile`` say of the stages.

    Attributes:
        begins: as in :class:`ipufit.partition.partition.Partition`.
        stages: how many, as far as the arguments tell.
        places: as there: the IPU of each stage, if one goes back to an earlier IPU.
    """

    begins: Tuple[Tuple[str, int], ...] = ()
    stages: int = 1
    places: Tuple[int, ...] = ()

    @staticmethod
    def along(visits: Sequence[Visit]) -> Division:
        """A stage for every change of the IPU, from IPU 0 on."""
        begins: List[Tuple[str, int]] = []
        places = [0]
        for visit in visits:
            if visit.ipu != places[-1]:
                places.append(visit.ipu)
            begins.append((visit.name, len(places) - 1))
        returns = places != list(range(len(places)))
        return Division(tuple(begins), len(places), tuple(places) if returns else ())
