"""What is known of the first value that is not finite, and how to say it."""

from __future__ import annotations

import dataclasses
from typing import Optional, Sequence, Tuple

__all__ = ["NonFiniteValue", "Operand"]


@dataclasses.dataclass(frozen=True)
class Operand:
    """A tensor that an operator was called with.

    Attributes:
        shape: its dimensions.
        minimum, maximum: of its finite elements; None where it has none.
        nans, infinities: how many elements are NaN, and how many infinite.
    """

    shape: Tuple[int, ...]
    minimum: Optional[float]
    maximum: Optional[float]
    nans: int = 0
    infinities: int = 0

    def __str__(self) -> str:
        size = " x ".join(map(str, self.shape)) or "one number"
        values = "nothing finite"
        if self.minimum is not None and self.maximum is not None:
            values = f"{self.minimum:.6g} to {self.maximum:.6g}"
        more = [f"{self.nans} NaN"] if self.nans else []
        more += [f"{self.infinities} infinite"] if self.infinities else []
        return f"({size}): {', '.join([values, *more])}"


@dataclasses.dataclass(frozen=True)
class NonFiniteValue:
    """Where the first value that is not finite came from.

    Attributes:
        cause: "data" or "weights", if it was there before; "forward" or "backward", if an operator
            of that pass made it; "accumulation", if the gradients of the micro-batches are finite
            and their sum is not; "optimizer", if the gradient is finite and the new weights are
            not; "unknown", if a replay gave other numbers.
        made: "nan" or "inf".
        replica, micro_batch: whose; the micro-batch by its number in the update, from 0.
        micro_batches: how many the update has.
        module: name of the module, "" for the user's own and "loss" for the loss; None where
            nobody knows.
        kind: class of the module.
        operator: such as "aten.log.default".
        file, line, source: the user's line.
        samples: rows of the micro-batch with such a value; () where they can't be told.
        offset: samples of the execution that come before the micro-batch.
        operands: the floating-point tensors that the operator was called with.
        parameter: name of the parameter or buffer whose gradient or value it is, if it is one's.
    """

    cause: str
    made: str = "nan"
    replica: int = 0
    micro_batch: int = 0
    micro_batches: int = 1
    module: Optional[str] = None
    kind: str = ""
    operator: Optional[str] = None
    file: Optional[str] = None
    line: Optional[int] = None
    source: str = ""
    samples: Tuple[int, ...] = ()
    offset: int = 0
    operands: Sequence[Operand] = ()
    parameter: Optional[str] = None

    def describe(self) -> str:
        """Sentences."""
        if self.cause == "optimizer":
            return (
                "The gradient was finite, so the optimizer's step made it: look at its learning "
                "rate and eps, and for state that was not finite before."
            )
        if self.cause == "accumulation":
            return (
                f"The gradient of each of the {self.micro_batches} micro-batches is finite, but "
                "their sum is not: use accumulation_dtype=torch.float32, or a smaller loss."
            )
        if self.cause == "unknown":
            return (
                "The update was run again operator by operator, with finite values everywhere: "
                "model.compare shows where the recorded program computes something else."
            )
        where = f"replica {self.replica}, micro-batch {self.micro_batch} of {self.micro_batches}"
        if self.cause == "weights":
            return f"It was there before: {self.parameter!r} is not finite, seen in {where}."
        if self.cause == "data":
            return (
                f"The data was not finite: {self.made} in {where}, {self.rows()}. Leave such "
                "samples out, or fill what is missing."
            )
        return f"{self._first()} in {where}. {self._values()}"

    def _first(self) -> str:
        passes = "forward" if self.cause == "forward" else "backward"
        whose = "of a module nobody knows"
        if self.module == "loss":
            whose = "of the loss"
        elif self.module is not None:
            name = f"module {self.module!r}" if self.module else "the module itself"
            whose = f"of {name} ({self.kind})" if self.kind else f"of {name}"
        at = ""
        if self.file is not None:
            source = f": `{self.source}`" if self.source else ""
            at = f", at {self.file}:{self.line}{source},"
        back = "the gradient of " if self.cause == "backward" and self.file is not None else ""
        at = at.replace(", at ", f", {back}what is at ", 1) if back else at
        return f"The {passes} pass made the first {self.made}: {self.operator} {whose}{at}"

    def _values(self) -> str:
        text = ""
        if self.operands:
            text = f"Its operands were {'; '.join(map(str, self.operands))}. "
        if self.samples:
            text += f"It is in {self.rows()}."
        return text.rstrip()

    def rows(self) -> str:
        """The samples, as text."""
        if not self.samples:
            return "in values that belong to no single sample"
        shown = ", ".join(map(str, self.samples[:8]))
        more = f" and {len(self.samples) - 8} more" if len(self.samples) > 8 else ""
        return f"sample{'s' if len(self.samples) > 1 else ''} {shown}{more} of the micro-batch"
