"""Operators of the compiled packages beside PyTorch Geometric, as models for IPUs have them.

Their kernels read values, which a recording doesn't have. While torch records, or another mode
takes its operators, they are computed by torch's own operators instead; the packages need not be
installed.
"""

from __future__ import annotations

from typing import Callable, Dict, List, Optional, Sequence, Tuple

import torch
from torch import Tensor
from torch.library import Library

from ipufit.poptorch._logging import error
from ipufit.poptorch._operators.replaced import scatter_reduce
from ipufit.poptorch._tracing import tracing


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


def register() -> List[Library]:
    """Register the operators; they are there as long as what is returned lives."""
    libraries = []
    for package, kernels in _KERNELS.items():
        library = Library(package, "IMPL")  # type: ignore[no-untyped-call]
        for name, kernel in kernels.items():
            # Above autograd, and below TorchScript. Without a mode nothing has this key.
            library.impl(name, kernel, "PythonTLSSnapshot")  # type: ignore[no-untyped-call]
        libraries.append(library)
    return libraries
