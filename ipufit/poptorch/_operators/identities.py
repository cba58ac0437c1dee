"""Hints to a compiler of IPU programs, which return their argument unchanged."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ipufit.poptorch import enums
from ipufit.poptorch._errors import error
from ipufit.tracing.ipu_only import report_hint

__all__ = ["nop", "recomputationCheckpoint", "serializedMatMul", "set_available_memory"]


def nop(tensor: Tensor) -> Tensor:
    """Return the tensor; on an IPU this is an operator that the compiler does not remove.

    Raises:
        Error: it is no tensor.
    """
    if not isinstance(tensor, Tensor):
        raise error(
            f"nop must take a torch.tensor argument. {type(tensor)} is not supported. Call it "
            "once for each tensor."
        )
    return tensor


def recomputationCheckpoint(*tensors: Any) -> Any:
    """Return the tensors; a pipelined IPU program stores their values for the backward pass.

    Args:
        tensors: tensors, or one list or tuple of them.
    Returns:
        One tensor for one, a tuple for several, a list or tuple for one list or tuple.
    Raises:
        ValueError: one of them is no tensor.
    """
    if len(tensors) == 1 and isinstance(tensors[0], (list, tuple)):
        checkpointed = recomputationCheckpoint(*tensors[0])
        return type(tensors[0])(
            [checkpointed] if isinstance(checkpointed, Tensor) else checkpointed
        )
    for tensor in tensors:
        if not isinstance(tensor, Tensor):
            raise ValueError(
                f"All inputs must be tensors, or one list or tuple of them, got "
                f"{type(tensor).__name__}. Leave out what is not a tensor."
            )
    report_hint("recomputationCheckpoint", tensors)
    return tensors[0] if len(tensors) == 1 else tensors


def serializedMatMul(
    lhs: Tensor,
    rhs: Tensor,
    mode: enums.MatMulSerializationMode,
    factor: int = 0,
    keep_precision: bool = False,
) -> Tensor:
    """Return the matrix product, which an IPU would compute in parts, one after another.

    Args:
        lhs: as for ``torch.matmul``.
        rhs: as for ``torch.matmul``.
        mode: the dimension that is cut into parts. No part changes the value here.
        factor: number of parts.
        keep_precision: add the parts of half numbers in float32.
    Raises:
        AssertionError: ``mode``, ``factor`` or ``keep_precision`` is of another type.
    """
    if not isinstance(keep_precision, bool):
        raise AssertionError(
            f"serializedMatMul expects keep_precision to be True or False, got {keep_precision!r}."
        )
    if not isinstance(factor, int):
        raise AssertionError(
            f"serializedMatMul expects factor to be an int, got {factor!r}. Give the number of "
            "parts."
        )
    if not isinstance(mode, enums.MatMulSerializationMode):
        raise AssertionError(
            f"serializedMatMul expects mode to be a poptorch.MatMulSerializationMode, got {mode!r}."
        )
    report_hint("serializedMatMul", lhs)
    return torch.matmul(lhs, rhs)


def set_available_memory(tensor: Tensor, available_memory_proportion: float) -> Tensor:
    """Return the tensor; on an IPU its operator may use this proportion of memory.

    Args:
        tensor: the result of the operator, such as a convolution.
        available_memory_proportion: from 0 to 1. It changes nothing here.
    Raises:
        Error: it is no tensor, or no such proportion.
    """
    if not isinstance(tensor, Tensor):
        raise error(
            f"You may only set available memory for torch.tensor values. {type(tensor)} is not "
            "supported. Give the result of the operator that it is meant for."
        )
    if not 0 <= available_memory_proportion <= 1:
        raise error(
            "set_available_memory expects a proportion from 0 to 1, got "
            f"{available_memory_proportion!r}. Divide a percentage by 100."
        )
    report_hint("set_available_memory", tensor)
    return tensor
