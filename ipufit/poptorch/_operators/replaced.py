"""Replacements for functions that torch, its oldest supported version, or packages can't record."""

from __future__ import annotations

from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.library import Library
from torch.utils._pytree import tree_map

from ipufit.poptorch._logging import error
from ipufit.poptorch._tracing import tensors_in, tracing
from ipufit.tracing import recurrent
from ipufit.tracing.unread_values import ctc_loss_and_gradient, one_hot_by_comparison


class _Product(torch.autograd.Function):
    """Product of scattered numbers, whose gradient reads no values, unlike that of torch 2.0.

    For a place with value ``x`` and sources ``s_i`` the result is ``y = x * prod_i s_i``, or
    without the ``x``; a place without sources stays as it is. Hence

        dy/dx = prod_i s_i        dy/ds_i = x * prod_{j != i} s_j

    where the last product is, of the product ``p`` of the sources that are not zero, ``p / s_i`` if
    none is zero, ``p`` if only ``s_i`` is, and zero if another one is.
    """

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
    def backward(ctx: Any, *gradients: Tensor) -> Tuple[Optional[Tensor], ...]:
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


def _index_reduce(
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


def _in_place(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return the in-place variant of a function, which changes its first argument."""

    def changed(input: Tensor, *args: object, **kwargs: object) -> Tensor:
        # What gradients are computed from must stay as it was.
        return input.copy_(function(input.clone(), *args, **kwargs))

    return changed


def _bincount(input: Tensor, weights: Optional[Tensor] = None, minlength: int = 0) -> Tensor:
    """Count how often each number under ``minlength`` occurs; larger ones are not counted."""
    if weights is None:
        weights = torch.ones(input.shape, dtype=torch.int64, device=input.device)
    elif weights.dtype != torch.float32:
        weights = weights.double()
    # The last place takes what is not counted.
    places = input.to(torch.int64).clamp(max=minlength)
    sums = torch.zeros(minlength + 1, dtype=weights.dtype, device=input.device)
    return sums.scatter_add(0, places, weights)[:minlength]


_RUNNING = ("running_mean", "running_var")


def _in_single(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compute a function of half-precision input in float32, because torch 2.0 can't record it.

    Tensors among its other arguments are widened too. Running statistics, which it may change, are
    the first two of these, if it has any.
    """

    def computed(input: Tensor, *args: object, **kwargs: object) -> object:
        if input.dtype not in (torch.float16, torch.bfloat16):
            return function(input, *args, **kwargs)
        wide, named = tree_map(lambda v: v.float() if isinstance(v, Tensor) else v, (args, kwargs))
        results = function(input.float(), *wide, **named)
        statistics = [*zip(args[:2], wide)]
        statistics += [(kwargs[name], named[name]) for name in _RUNNING if name in kwargs]
        for statistic, value in statistics:
            if isinstance(statistic, Tensor) and value is not statistic:
                statistic.copy_(value)
        if isinstance(results, Tensor):
            return results.to(input.dtype)
        values, places = results
        return values.to(input.dtype), places

    return computed


def _batch_norm(
    input: Tensor,
    running_mean: Optional[Tensor],
    running_var: Optional[Tensor],
    weight: Optional[Tensor] = None,
    bias: Optional[Tensor] = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """Compute ``torch.nn.functional.batch_norm`` for half precision and any type of statistics.

    A device changes running statistics along with the weights: not in a model for inference, even
    where the layer is in training mode and normalises with the micro-batch's own.
    """
    trace = tracing()
    if training and trace is not None and not trace.training:
        running_mean = running_var = None
    rest = (weight, bias, training, momentum, eps)
    normalised: Tensor = _in_single(F.batch_norm)(input, running_mean, running_var, *rest)
    return normalised


def _mse_loss(input: Tensor, target: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Compute ``torch.nn.functional.mse_loss``, with a gradient for operands of two dtypes."""
    dtype = torch.promote_types(input.dtype, target.dtype)
    return F.mse_loss(input.to(dtype), target.to(dtype), *args, **kwargs)


def _kl_div(
    input: Tensor,
    target: Tensor,
    size_average: Optional[bool] = None,
    reduce: Optional[bool] = None,
    reduction: str = "mean",
    log_target: bool = False,
) -> Tensor:
    """Compute ``torch.nn.functional.kl_div``, whose "batchmean" is no loss but a part of one.

    PopTorch makes a loss of the operator within, which sums; torch's function then divides by the
    batch. So training differentiates the sum, and the mean is what is returned.
    """
    divides = reduction == "batchmean"
    reduction = "sum" if divides else reduction
    loss = F.kl_div(input, target, size_average, reduce, reduction, log_target=log_target)
    trace = tracing()
    if trace is not None:
        loss = trace.mark_loss(loss, reduced=True)
    return loss / input.shape[0] if divides and input.dim() else loss


def _typed_by_out(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Compute a cumulative function in the type of ``out``, which torch 2.0 does not record."""

    def typed(*args: Any, **kwargs: Any) -> Tensor:
        if isinstance(kwargs.get("out"), Tensor) and kwargs.get("dtype") is None:
            kwargs["dtype"] = kwargs["out"].dtype
        return function(*args, **kwargs)

    return typed


def _whole(kind: str) -> Callable[..., object]:
    """Record a recurrent layer as one operator, or step by step in half precision."""
    original = getattr(torch, kind)

    def layer(*args: object, **kwargs: object) -> object:
        if any(tensor.dtype == torch.float16 for tensor in tensors_in([args, kwargs])):
            return original(*args, **kwargs)
        kernels = [(torch.backends.mkldnn, "enabled", True)]
        return recurrent.call_whole(kind, kernels, *args, **kwargs)

    return layer


def _assign(tensor: Tensor, places: Any, values: Any) -> None:
    """Assign to places of a tensor; over a mask as the device does, by a choice of two tensors.

    Torch takes the gradient of the values at the mask's places, of which there may be any number.
    A choice has the same gradient, of a fixed shape, if each place gets the same values.
    """
    if isinstance(places, Tensor) and places.dtype == torch.bool and isinstance(values, Tensor):
        inner = tensor.dim() - places.dim()
        is_shared = values.dim() <= inner + (values.shape[:1] == (1,))
        fits = tensor.shape[: places.dim()] == places.shape and values.dtype == tensor.dtype
        if is_shared and fits:
            padded = places.reshape(*places.shape, *[1] * inner)
            tensor.copy_(torch.where(padded, values, tensor))
            return
    tensor[places] = values


# What takes the place of a function of torch, with the same arguments.
REPLACED: Dict[object, Callable[..., object]] = {
    **{getattr(torch, kind): _whole(kind) for kind in recurrent.KINDS},
    Tensor.__setitem__: _assign,
    **dict.fromkeys((torch.bincount, Tensor.bincount), _bincount),
    F.one_hot: one_hot_by_comparison,
    F.ctc_loss: lambda *args, **kwargs: ctc_loss_and_gradient(*args, **kwargs)[0],
    torch.ctc_loss: lambda *args, **kwargs: ctc_loss_and_gradient(*args, **kwargs)[0],
    F.batch_norm: _batch_norm,
    F.instance_norm: _in_single(F.instance_norm),
    F.kl_div: _kl_div,
    F.max_pool3d: _in_single(F.max_pool3d),
    F.max_pool3d_with_indices: _in_single(F.max_pool3d_with_indices),
    F.mse_loss: _mse_loss,
    F.rrelu: _in_single(F.rrelu),
    **dict.fromkeys((torch.scatter_reduce, Tensor.scatter_reduce), scatter_reduce),
    Tensor.scatter_reduce_: _in_place(scatter_reduce),
    **dict.fromkeys((torch.index_reduce, Tensor.index_reduce), _index_reduce),
    Tensor.index_reduce_: _in_place(_index_reduce),
    torch.cumprod: _typed_by_out(torch.cumprod),
    torch.cumsum: _typed_by_out(torch.cumsum),
}


def _start(
    src: Tensor, index: Tensor, dim: int, out: Optional[Tensor], dim_size: Optional[int], value: int
) -> Tuple[int, Tensor, Tensor]:
    """Return the dimension, the index of each source, and what the results start from."""
    dim %= src.dim()
    if out is None:
        if dim_size is None and tracing() is not None:
            raise error(
                "You must provide either an output parameter or specify dim_size so the output "
                "shape may be inferred: shapes are fixed when the model is compiled. Give dim_size."
            )
        rows = int(index.max()) + 1 if dim_size is None else dim_size
        out = src.new_full((*src.shape[:dim], rows, *src.shape[dim + 1 :]), value)
    shape = [1] * dim if index.dim() == 1 else []
    shape += index.shape
    shape += [1] * (src.dim() - len(shape))
    return dim, index.to(torch.int64).reshape(shape).expand(src.shape), out


def _extreme(reduce: str) -> Callable[..., Tuple[Tensor, Tensor]]:
    """Return the scatter that takes the largest or smallest source of each place, and which one.

    The first of equal ones gets the gradient. A place without sources is zero.
    """

    def scatter(
        src: Tensor, index: Tensor, dim: int, out: Optional[Tensor], dim_size: Optional[int]
    ) -> Tuple[Tensor, Tensor]:
        dim, index, start = _start(src, index, dim, out, dim_size, 0)
        size = src.shape[dim]
        with torch.no_grad():
            best = torch.scatter_reduce(
                start, dim, index, src, reduce, include_self=out is not None
            )
            order = torch.arange(size, device=src.device)
            order = order.reshape([-1 if d == dim else 1 for d in range(src.dim())])
            order = torch.where(src == best.gather(dim, index), order, size)
            chosen = torch.full_like(start, size, dtype=torch.int64)
            chosen = chosen.scatter_reduce(dim, index, order, "amin")
        sources = src.gather(dim, chosen.clamp(max=size - 1))
        values = torch.where(chosen < size, sources, start)
        return values if out is None else out.copy_(values), chosen

    return scatter


def _scatter_mul(
    src: Tensor, index: Tensor, dim: int, out: Optional[Tensor], dim_size: Optional[int]
) -> Tensor:
    """Multiply the sources of each place; one without any is 1."""
    dim, index, start = _start(src, index, dim, out, dim_size, 1)
    values = scatter_reduce(start, dim, index, src, "prod")
    return values if out is None else out.copy_(values)


# Of each degree, the polynomials of a B-spline over an interval.
_SPLINES: Dict[int, Callable[[Tensor], Sequence[Tensor]]] = {
    1: lambda v: (1 - v, v),
    2: lambda v: (0.5 * (1 - v) ** 2, 0.5 + v - v**2, 0.5 * v**2),
    3: lambda v: (
        (1 - v) ** 3 / 6,
        (4 - 6 * v**2 + 3 * v**3) / 6,
        (1 + 3 * v + 3 * v**2 - 3 * v**3) / 6,
        v**3 / 6,
    ),
}


def _spline_basis(
    pseudo: Tensor, kernel_size: Tensor, is_open_spline: Tensor, degree: int
) -> Tuple[Tensor, Tensor]:
    """Return the factors of the weights around each point of the unit cube, and which these are.

    There are ``(degree + 1) ** dimensions`` of both for each point.
    """
    if degree not in _SPLINES:
        raise error(
            f"Basis degree not supported: expected 1, 2 or 3, got {degree}. Choose one of these."
        )
    count, dims = degree + 1, pseudo.shape[1]
    corners = torch.arange(count**dims, device=pseudo.device)
    size = kernel_size.to(torch.int64)
    points = pseudo.float() * (size - degree * is_open_spline.to(torch.int64))
    cells = points.floor()
    basis, places = torch.ones_like(points[:, :1]), torch.zeros_like(corners)[None]
    stride = torch.ones_like(size[0])
    for d in range(dims):
        corner = corners // count**d % count
        splines = torch.stack(list(_SPLINES[degree](points[:, d] - cells[:, d])), dim=1)
        basis = basis * splines[:, corner]
        places = places + (cells[:, d, None].to(torch.int64) + corner) % size[d] * stride
        stride = stride * size[d]
    return basis.to(pseudo.dtype), places


def _spline_weighting(x: Tensor, weight: Tensor, basis: Tensor, weight_index: Tensor) -> Tensor:
    """Multiply the rows of ``x`` by sums of matrices, of which ``basis`` has the factors."""
    return torch.einsum("es,esio,ei->eo", basis, weight[weight_index.to(torch.int64)], x)


# Operators of the compiled packages beside PyTorch Geometric, as models for IPUs have them. Their
# own kernels read values, which a recording doesn't have. While torch records, or another mode
# takes its operators, they are computed by torch's own operators instead; the packages need not be
# installed.
_KERNELS: Dict[str, Dict[str, Callable[..., object]]] = {
    "torch_scatter": {
        "scatter_max": _extreme("amax"),
        "scatter_min": _extreme("amin"),
        "scatter_mul": _scatter_mul,
    },
    "torch_spline_conv": {
        "spline_basis": _spline_basis,
        "spline_weighting": _spline_weighting,
    },
}


def _register() -> List[Library]:
    """Register the operators; they are there as long as what is returned lives."""
    libraries = []
    for package, kernels in _KERNELS.items():
        library = Library(package, "IMPL")  # type: ignore[no-untyped-call]
        for name, kernel in kernels.items():
            # Above autograd, and below TorchScript. Without a mode nothing has this key.
            library.impl(name, kernel, "PythonTLSSnapshot")  # type: ignore[no-untyped-call]
        libraries.append(library)
    return libraries


_LIBRARIES = _register()
