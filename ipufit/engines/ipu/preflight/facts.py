"""One thing that PopTorch 3.4 says of itself, where it says it, and what to do about it."""

from __future__ import annotations

import dataclasses
from typing import Any, Callable, Dict, Tuple

__all__ = ["COMMIT", "LIMITED", "SUPPORTED", "UNKNOWN", "UNSUPPORTED", "Fact", "Place", "always"]

# The last commit of branch sdk-release-3.4 of github.com/graphcore/poptorch: every line below is
# a line of this one.
COMMIT = "c2a8b17762f1d7106f7bf048ff011ab4fee7685e"

SUPPORTED = "supported"
LIMITED = "supported with limits"
UNSUPPORTED = "not supported"
UNKNOWN = "unknown"


@dataclasses.dataclass(frozen=True)
class Place:
    """A line of PopTorch's published repository.

    Attributes:
        file: its path there.
        line: counted from 1.
    """

    file: str
    line: int

    def __str__(self) -> str:
        return f"{self.file}, line {self.line}"


def always(_: Any) -> bool:
    """The condition of a fact that has none."""
    return True


@dataclasses.dataclass(frozen=True)
class Fact:
    """A row of the table.

    Attributes:
        group: "operators", "layers", "losses", "optimizers", "settings", "dtypes" or
            "control flow".
        key: its name, of which there is one in the table.
        subject: what it is looked up by: an operator such as "aten::topk", the name of a class, a
            setting, a dtype, or the cause of a failed recording.
        verdict: SUPPORTED, LIMITED or UNSUPPORTED; UNKNOWN where there is nothing to go by.
        says: what PopTorch's documentation or source says, in our words.
        places: where it does so, the documentation first.
        cure: what to do instead; empty where nothing has to be done.
        applies: whether the fact is one of this call, module, parameter group or tensor.
    """

    group: str
    key: str
    subject: str
    verdict: str
    says: str
    places: Tuple[Place, ...]
    cure: str = ""
    applies: Callable[[Any], bool] = always

    def as_dict(self) -> Dict[str, Any]:
        """All but the condition, for JSON."""
        return {
            "group": self.group,
            "key": self.key,
            "verdict": self.verdict,
            "says": self.says,
            "sources": [dataclasses.asdict(place) for place in self.places],
            "cure": self.cure,
        }
