"""One operator that a model called, as PopTorch would see it."""

from __future__ import annotations

import dataclasses
from typing import Any, FrozenSet, Mapping, Optional

__all__ = ["Call", "Seen"]


@dataclasses.dataclass(frozen=True)
class Seen:
    """Where in the user's code something happened.

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
        seen: where.
    """

    name: str
    arguments: Mapping[str, Any]
    constants: FrozenSet[str]
    is_constant_result: bool
    is_whole: bool
    seen: Seen

    def is_constant(self, name: str) -> bool:
        """Whether an argument is known when the model is compiled."""
        return name in self.constants
