"""Time and work of operators, added up by where they come from."""

from __future__ import annotations

import dataclasses
from typing import Any, Callable, Dict, List, Mapping, Tuple

from ipufit.engines.embedded.profiling.profiling_interpreter import OpRecord
from ipufit.tracing.source_map import LOSS, Origin

__all__ = ["GRADIENTS", "Place", "rows_of"]

# Stands for the module of what joins the gradients of all modules.
GRADIENTS = "gradients"


@dataclasses.dataclass(frozen=True)
class Place:
    """Where an operator comes from.

    Attributes:
        origin: its module and line.
        direction: "forward", "backward" or "optimizer".
    """

    origin: Origin
    direction: str

    @property
    def module(self) -> str:
        """Its name; of what belongs to no module, what it does."""
        if self.origin.module is not None:
            return self.origin.module
        return GRADIENTS if self.direction == "backward" else LOSS


def rows_of(
    looked: Mapping[str, OpRecord], places: Mapping[str, Place], seconds: Callable[[str], float]
) -> List[Dict[str, Any]]:
    """One for all calls of an operator that come from one line, the longest first.

    Args:
        looked: what each call does, by its name.
        places: where it comes from.
        seconds: tells how long it takes.
    """
    found: Dict[Any, Dict[str, Any]] = {}
    for name, each in looked.items():
        place = places[name]
        row = found.setdefault(_key(each.operator, place), _empty(each.operator, place))
        row["calls"] += 1
        row["seconds"] += seconds(name)
        row["flops"] += each.flops
        row["bytes"] += each.bytes
    return sorted(found.values(), key=lambda row: -row["seconds"])


def _key(operator: str, place: Place) -> Tuple[object, ...]:
    origin = place.origin
    return operator, place.direction, place.module, origin.kind, origin.file, origin.line


def _empty(operator: str, place: Place) -> Dict[str, Any]:
    origin = place.origin
    return {
        "operator": operator,
        "direction": place.direction,
        "module": place.module,
        "kind": origin.kind,
        "file": origin.file,
        "line": origin.line,
        "source": origin.source,
        "calls": 0,
        "seconds": 0.0,
        "flops": 0,
        "bytes": 0,
    }
