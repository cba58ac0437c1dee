"""How far apart two tensors are, and how far they may be."""

from __future__ import annotations

import dataclasses
import math
from typing import Dict, Optional, Tuple

import torch
from torch import Tensor

from ipufit.errors import ConfigurationError

__all__ = ["DEFAULTS", "Distance", "Tolerance", "distance"]

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
    """How far a tensor is from another one; NaN is as good as NaN."""
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
    """How far apart tensors may be: ``atol + rtol * (largest magnitude)``.

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
            is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
            if value is not None and not (is_number and 0 <= value < math.inf):
                raise ConfigurationError(
                    f"{name} must be None or a number of at least 0, got {value!r}. Leave it out "
                    "for the tolerance of the dtype."
                )

    def of(self, dtype: torch.dtype, scale: float) -> float:
        """The largest difference that is no fault.

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
