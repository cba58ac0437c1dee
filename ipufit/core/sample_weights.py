"""How much each sample counts: weights brought into the shape of what they multiply."""

from __future__ import annotations

from typing import Sequence, Type

import torch
from torch import Tensor

from ipufit.core.objective_arguments import dtype_name
from ipufit.core.outputs import describe_value
from ipufit.errors import ConfigurationError

__all__ = ["as_weights", "broadcast_weights", "spread_shape", "total"]


def as_weights(weight: object, kind: Type[ConfigurationError]) -> Tensor:
    """Make sure that weights are one real tensor.

    Args:
        weight: what came as sample_weight.
        kind: of the error.

    Returns:
        The weights without gradient, with (batch, 1) made (batch,), as Keras does.

    Raises:
        ConfigurationError: of that kind; anything else.
    """
    if not isinstance(weight, Tensor):
        raise kind(
            f"sample_weight must be one tensor of shape (batch,), got {describe_value(weight)}. "
            "Give a dict or list of weights only where loss or metrics go by output."
        )
    if weight.is_complex() or not weight.dim():
        raise kind(
            "sample_weight must hold one real number for each sample, got shape "
            f"{tuple(weight.shape)}, dtype {dtype_name(weight.dtype)}. Give a tensor of shape "
            "(batch,)."
        )
    flat = weight.dim() == 2 and weight.shape[1] == 1
    return weight.detach().reshape(-1) if flat else weight.detach()


def spread_shape(weight: Tensor, shape: Sequence[int]) -> bool:
    """True if the weights have the leading dimensions of ``shape``."""
    return tuple(weight.shape) == tuple(shape[: weight.dim()])


def broadcast_weights(
    weight: Tensor, shape: Sequence[int], where: str, kind: Type[ConfigurationError]
) -> Tensor:
    """View weights so that they multiply values of some shape.

    Args:
        weight: shape (batch,), or more leading dimensions of ``shape``.
        shape: of the values.
        where: whose values, for the message: ``"loss 'mse'"``.
        kind: of the error.

    Returns:
        A view of shape (*weight.shape, 1, ..., 1), with as many dimensions as ``shape``.

    Raises:
        ConfigurationError: of that kind; other dimensions.
    """
    if not spread_shape(weight, shape):
        more = f", or leading dimensions of its values' shape {tuple(shape)}"
        raise kind(
            f"sample_weight must have shape ({shape[0]},) for {where}"
            f"{more if len(shape) > 1 else ''}, got {tuple(weight.shape)}. Give one weight for "
            "each sample."
        )
    return weight.reshape(tuple(weight.shape) + (1,) * (len(shape) - weight.dim()))


def total(weight: Tensor) -> Tensor:
    """The sum of all weights, shape (), float64."""
    return weight.sum(dtype=torch.float64)
