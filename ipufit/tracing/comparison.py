"""Comparison of a program with its reference: distances, tolerances, and where the two part."""

from __future__ import annotations

import dataclasses
import math
from typing import Dict, Optional, Tuple

import torch
from torch import Tensor

from ipufit.utils.console import TextReport
from ipufit.utils.error_collector import number_in

# Of the largest magnitude in a tensor, and besides that, by dtype: some thousand roundings.
DEFAULTS: Dict[torch.dtype, Tuple[float, float]] = {
    torch.float64: (1e-10, 1e-14),
    torch.float32: (1e-4, 1e-7),
    torch.float16: (1e-2, 1e-4),
    torch.bfloat16: (5e-2, 1e-3),
}


@dataclasses.dataclass(frozen=True)
class Distance:
    """Between two tensors of one shape.

    Attributes:
        absolute: the largest difference of two elements; infinite where one alone is NaN, or they
            are not the same infinity, or the shapes differ.
        scale: the largest finite magnitude in the second one.
    """

    absolute: float
    scale: float

    @property
    def relative(self) -> float:
        """The largest difference, of the largest magnitude."""
        if not self.absolute:
            return 0.0
        return self.absolute / self.scale if self.scale else math.inf


def distance(one: Tensor, other: Tensor) -> Distance:
    """Measure the distance of a tensor from another one; NaN is as good as NaN."""
    if one.shape != other.shape:
        return Distance(math.inf, math.inf)
    if not one.numel():
        return Distance(0.0, 0.0)
    dtype = torch.complex128 if one.is_complex() or other.is_complex() else torch.float64
    first, second = one.detach().to(dtype), other.detach().to(dtype)
    finite = first.isfinite() & second.isfinite()
    away = torch.where(finite, first - second, torch.zeros_like(first)).abs()
    same = (first == second) | (first.isnan() & second.isnan())
    is_lost = bool((~finite & ~same).any())
    scale = torch.where(second.isfinite(), second, torch.zeros_like(second)).abs().max()
    return Distance(math.inf if is_lost else float(away.max()), float(scale))


@dataclasses.dataclass(frozen=True)
class Tolerance:
    """Largest distance that tensors may have: ``atol + rtol * (largest magnitude)``.

    Attributes:
        rtol, atol: None for those of the dtype. Integers and booleans must be equal.
    """

    rtol: Optional[float] = None
    atol: Optional[float] = None

    def check(self) -> None:
        """Refuse what is no tolerance.

        Raises:
            ConfigurationError: one is neither None nor a number of at least 0.
        """
        for name, value in (("rtol", self.rtol), ("atol", self.atol)):
            if value is not None:
                words = (name, value, "None or a number of at least 0")
                advice = "Leave it out for the tolerance of the dtype."
                number_in(*words, lambda number: 0 <= number < math.inf, advice)

    def of(self, dtype: torch.dtype, scale: float) -> float:
        """Compute the largest difference that is no fault.

        Args:
            dtype: of the program's tensor.
            scale: the largest magnitude of the other one's.
        """
        if not dtype.is_floating_point and not dtype.is_complex:
            return 0.0
        if dtype.is_complex:
            dtype = torch.float64 if dtype is torch.complex128 else torch.float32
        rtol, atol = DEFAULTS.get(dtype, DEFAULTS[torch.float32])
        rtol = rtol if self.rtol is None else self.rtol
        atol = atol if self.atol is None else self.atol
        return atol + rtol * scale


_KINDS = ("operator", "module", "loss", "gradient", "buffer", "lowering")

_REFERENCES = {
    "eager": "the module run eagerly",
    "float64": "the module run eagerly in float64",
}


@dataclasses.dataclass(frozen=True)
class Difference:
    """Distance of one value of the program from the reference.

    :attr:`ipufit.Comparison.differences` has those above the tolerance.

    Attributes:
        kind: "operator", "module", "loss", "gradient", "buffer"; or "lowering" for a result that is
            right in the recorded graph, but wrong in what runs in its place.
        name: of the operator, such as "aten.mm.default"; of the module, "" for the user's own; of
            the parameter or buffer; "loss".
        module: name of the module that the operator belongs to; None if it belongs to no module.
        module_kind: class of that module; "" if there is none.
        node: name of the operator in the recorded graph; None for other kinds.
        is_backward: whether the operator is one of the backward pass.
        file: source file of the user's line that calls the operator; None for other kinds.
        line: number of that line.
        source: its text.
        absolute: the largest difference of two elements.
        relative: ``absolute`` divided by the largest magnitude in the reference.
        tolerance: largest ``absolute`` that is accepted.
    """

    kind: str
    name: str
    absolute: float
    relative: float
    tolerance: float
    module: Optional[str] = None
    module_kind: str = ""
    node: Optional[str] = None
    is_backward: bool = False
    file: Optional[str] = None
    line: Optional[int] = None
    source: str = ""

    @property
    def ok(self) -> bool:
        """True if the difference is within the tolerance."""
        return self.absolute <= self.tolerance

    def __str__(self) -> str:
        return (
            f"{self.kind} {self._called()}: max absolute difference {self.absolute:.3g}, relative "
            f"{self.relative:.3g}, tolerance {self.tolerance:.3g}"
        )

    def _called(self) -> str:
        if self.kind == "module":
            return f"{self.name!r} ({self.module_kind})" if self.name else f"({self.module_kind})"
        if self.kind != "operator":
            return self.name
        text = self.name
        if self.module == "loss":
            text += " of the loss"
        elif self.module is not None:
            text += f" of {self.module!r} ({self.module_kind})" if self.module else " of the module"
        text += ", backward" if self.is_backward else ""
        if self.file is not None:
            text += f", at {self.file}:{self.line}"
            text += f": `{self.source}`" if self.source else ""
        return text


@dataclasses.dataclass(frozen=True)
class Comparison(TextReport):
    """Comparison of the recorded program with its reference on one training micro-batch.

    Attributes:
        reference: "eager" or "float64".
        differences: all that exceed the tolerance, in the order in which they were computed.
        counts: how many of each kind were compared.
        largest: of the operators, the one with the largest relative difference, within the
            tolerance or not; None if none was compared.
        how: how the program runs, as ``explain`` says it.
    """

    reference: str
    differences: Tuple[Difference, ...]
    counts: Dict[str, int]
    largest: Optional[Difference] = None
    how: str = ""

    @property
    def ok(self) -> bool:
        """True if no difference exceeds the tolerance."""
        return not self.differences

    @property
    def first(self) -> Optional[Difference]:
        """First value that differs; None if there is none."""
        return next(iter(self.differences), None)

    def first_of(self, kind: str) -> Optional[Difference]:
        """The first difference of a kind; None if there is none.

        Args:
            kind: "operator", "module", "loss", "gradient", "buffer" or "lowering".
        """
        return next((each for each in self.differences if each.kind == kind), None)

    def as_dict(self) -> Dict[str, object]:
        """Return everything as plain numbers, texts, lists and dicts."""
        differences = [*map(dataclasses.asdict, self.differences)]
        return {"ok": self.ok, **dataclasses.asdict(self), "differences": differences}

    def __str__(self) -> str:
        with_what = _REFERENCES[self.reference]
        compared = ", ".join(
            f"{self.counts[kind]} {kind}{'s' if self.counts[kind] != 1 else ''}"
            for kind in ("module", "operator", "gradient")
            if kind in self.counts
        )
        if self.ok:
            lines = [f"The recorded program agrees with {with_what}: {compared} and the loss."]
            if self.largest is not None and self.largest.absolute:
                lines.append(f"The largest difference is that of {self.largest}.")
            return "\n".join(lines)
        lines = [f"The recorded program differs from {with_what} ({compared} compared)."]
        for kind in _KINDS:
            difference = self.first_of(kind)
            if difference is not None:
                count = sum(each.kind == kind for each in self.differences)
                more = f" ({count - 1} more)" if count > 1 else ""
                lines.append(f"First {difference}{more}")
        if self.first_of("lowering") is not None and self.how:
            lines.append(f"Instead of the recorded graph, this runs: {self.how}")
        return "\n".join(lines)
