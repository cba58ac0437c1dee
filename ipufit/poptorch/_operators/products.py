"""Products of scattered numbers with a gradient that reads no values, as torch 2.0's does.

Of a place with value ``x`` and sources ``s_i`` the result is ``y = x * prod_i s_i``, or without the
``x``; a place without sources stays as it is. Hence

    dy/dx = prod_i s_i        dy/ds_i = x * prod_{j != i} s_j

where the last product is, of the product ``p`` of the sources that are not zero, ``p / s_i`` if
none is zero, ``p`` if only ``s_i`` is, and zero if another one is.
"""

from __future__ import annotations

from typing import Any, Callable, Tuple

import torch
from torch import Tensor

__all__ = ["in_place", "index_reduce", "scatter_reduce"]


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, input: Tensor, dim: int, index: Tensor, source: Tensor, include_self: bool
    ) -> Tensor:
        ctx.save_for_backward(input, index, source)
        ctx.dim, ctx.include_self = dim, include_self
        return torch.scatter_reduce(
            input, dim, index, source, reduce="prod", include_self=include_self
        )

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tuple[Any, ...]:
        input, index, source = ctx.saved_tensors
        dim, include_self = ctx.dim, ctx.include_self
        (gradient,) = gradients
        zero = source == 0
        zeros = torch.zeros_like(input).scatter_add(dim, index, zero.to(input.dtype))
        product = torch.ones_like(input).scatter_reduce(
            dim, index, source.masked_fill(zero, 1), reduce="prod"
        )
        if include_self:
            of_input = gradient * product.masked_fill(zeros > 0, 0)
            gradient = gradient * input
        else:
            of_input = gradient.scatter(dim, index, 0)
        others = product.gather(dim, index) / source.masked_fill(zero, 1)
        other_zeros = zeros.gather(dim, index) - zero.to(input.dtype)
        of_source = gradient.gather(dim, index) * others.masked_fill(other_zeros > 0, 0)
        return of_input, None, None, of_source, None


def _product(
    function: Callable[..., Tensor],
    input: Tensor,
    dim: int,
    index: Tensor,
    source: Tensor,
    reduce: str,
    include_self: bool,
    scattered: Callable[[], Tensor],
) -> Tensor:
    trained = torch.is_grad_enabled() and (input.requires_grad or source.requires_grad)
    if reduce != "prod" or not trained or not input.dim():
        return function(input, dim, index, source, reduce, include_self=include_self)
    places = scattered()
    used = source[tuple(slice(size) for size in places.shape)]
    result: Tensor = _Product.apply(  # type: ignore[no-untyped-call]
        input, dim, places, used, include_self
    )
    return result


def scatter_reduce(
    input: Tensor, dim: int, index: Tensor, src: Tensor, reduce: str, *, include_self: bool = True
) -> Tensor:
    """Compute ``torch.scatter_reduce`` with a gradient for products that can be recorded."""
    return _product(
        torch.scatter_reduce, input, dim, index, src, reduce, include_self, lambda: index
    )


def index_reduce(
    input: Tensor,
    dim: int,
    index: Tensor,
    source: Tensor,
    reduce: str,
    *,
    include_self: bool = True,
) -> Tensor:
    """Compute ``torch.index_reduce`` as a scatter in which every row goes to one position."""

    def scattered() -> Tensor:
        shape = [1] * source.dim()
        shape[dim] = -1
        return index.to(torch.int64).reshape(shape).expand_as(source)

    return _product(torch.index_reduce, input, dim, index, source, reduce, include_self, scattered)


def in_place(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return the in-place variant of a function, which changes its first argument."""

    def changed(input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        # What gradients are computed from must stay as it was.
        return input.copy_(function(input.clone(), *args, **kwargs))

    return changed
