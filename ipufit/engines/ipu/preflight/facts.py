"""Facts: one statement of PopTorch 3.4 each, with its source and a cure; and calls to look up."""

from __future__ import annotations

import dataclasses
from typing import Any, Callable, Dict, FrozenSet, Mapping, Optional, Tuple

__all__ = [
    "COMMIT",
    "LIMITED",
    "SUPPORTED",
    "UNKNOWN",
    "UNSUPPORTED",
    "Call",
    "CodeLocation",
    "Fact",
    "Line",
    "always",
    "canonical",
    "dispatcher",
    "guide",
    "operators_page",
]

# The last commit of branch sdk-release-3.4 of github.com/graphcore/poptorch: every line below is
# a line of this one.
COMMIT = "c2a8b17762f1d7106f7bf048ff011ab4fee7685e"

SUPPORTED = "supported"
LIMITED = "supported with limits"
UNSUPPORTED = "not supported"
UNKNOWN = "unknown"


@dataclasses.dataclass(frozen=True)
class Line:
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
    """Return True: the condition of a fact that has none."""
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
    places: Tuple[Line, ...]
    cure: str = ""
    applies: Callable[[Any], bool] = always

    def as_dict(self) -> Dict[str, Any]:
        """Return all but the condition, for JSON."""
        return {
            "group": self.group,
            "key": self.key,
            "verdict": self.verdict,
            "says": self.says,
            "sources": [dataclasses.asdict(place) for place in self.places],
            "cure": self.cure,
        }


def guide(page: str, line: int) -> Line:
    """Return the place of a line of a page of the user guide."""
    return Line(f"docs/user_guide/{page}.rst", line)


def operators_page(line: int) -> Line:
    """Return the place of a line of the guide's list of operators and layers."""
    return guide("supported_ops", line)


def canonical(name: str, line: int) -> Line:
    """Return the place of a line of the handlers that turn ATen operators into PopART's."""
    return Line(f"poptorch/source/popart_canonicalization/{name}.cpp", line)


def dispatcher(name: str, line: int) -> Line:
    """Return the place of a line of the code that takes operators from torch."""
    return Line(f"poptorch/source/dispatch_tracer/{name}", line)


@dataclasses.dataclass(frozen=True)
class CodeLocation:
    """Place in the user's code where something happened.

    Attributes:
        module: name of the innermost module that ran; "" for the model itself, "loss" for the loss.
        file, line: of the user's source, or that of a layer of torch's; None if no one's.
    """

    module: str = ""
    file: Optional[str] = None
    line: Optional[int] = None


@dataclasses.dataclass(frozen=True)
class Call:
    """A call of an operator.

    Attributes:
        name: such as "aten::add"; of what changes its argument, that of its other form.
        arguments: by name, defaults included; tensors have no values.
        constants: names of tensor arguments that depend on no input and no weight.
        is_constant_result: whether all of its tensors do so, and no random number is drawn.
        is_whole: False of an operator that torch writes with others, which come after it.
        location: the place of the call.
    """

    name: str
    arguments: Mapping[str, Any]
    constants: FrozenSet[str]
    is_constant_result: bool
    is_whole: bool
    location: CodeLocation

    def is_constant(self, name: str) -> bool:
        """Return True if an argument is known when the model is compiled."""
        return name in self.constants
