"""Helpers for tests of models."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["allclose"]


def allclose(ref: object, other: object) -> bool:
    """Return True if two structures of tensors have one shape and close values.

    Args:
        ref: a tensor, or a list or tuple of such structures.
        other: what to compare.
    Raises:
        AssertionError: something else inside of ``ref``.
        RuntimeError: tensors of different types of number.
    """
    if isinstance(ref, Tensor):
        if not isinstance(other, Tensor):
            return False
        try:
            torch.broadcast_shapes(ref.shape, other.shape)  # type: ignore[no-untyped-call]
        except RuntimeError:
            return False
        return torch.allclose(other, ref)
    if not isinstance(ref, (list, tuple)):
        raise AssertionError(
            f"allclose compares tensors, lists and tuples of them, got {type(ref).__name__}. Take "
            "the tensors out of it."
        )
    kind = tuple if isinstance(ref, tuple) else list
    if not isinstance(other, kind) or len(ref) != len(other):
        return False
    return all(allclose(mine, theirs) for mine, theirs in zip(ref, other))
