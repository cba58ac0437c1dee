"""Operators of PyTorch Geometric's compiled packages, against loops; none of them is installed."""

import math

import pytest
import torch
from torch.library import Library

from ipufit.poptorch import Error
from tests.poptorch.recording import record

SCHEMAS = {
    "torch_scatter": (
        "scatter_max(Tensor src, Tensor index, int dim, Tensor? out, int? dim_size) -> "
        "(Tensor, Tensor)",
        "scatter_min(Tensor src, Tensor index, int dim, Tensor? out, int? dim_size) -> "
        "(Tensor, Tensor)",
        "scatter_mul(Tensor src, Tensor index, int dim, Tensor? out, int? dim_size) -> Tensor",
    ),
    "torch_spline_conv": (
        "spline_basis(Tensor pseudo, Tensor kernel_size, Tensor is_open_spline, int degree) -> "
        "(Tensor, Tensor)",
        "spline_weighting(Tensor x, Tensor weight, Tensor basis, Tensor weight_index) -> Tensor",
    ),
}


@pytest.fixture(scope="module", autouse=True)
def packages():
    """Their operators, which need values, as those of the compiled packages do."""

    def needs_values(*args):
        return [tensor.tolist() for tensor in args if isinstance(tensor, torch.Tensor)] and args[0]

    libraries = []
    for package, schemas in SCHEMAS.items():
        libraries.append(Library(package, "DEF"))
        for schema in schemas:
            name = libraries[-1].define(schema)
            libraries[-1].impl(name, needs_values, "CompositeImplicitAutograd")
    return libraries  # which keep the operators


# Place 1 has no sources, and place 3 has equal ones.
INDEX = torch.tensor([0, 2, 3, 0, 3])
EACH = torch.tensor([[0, 2], [2, 3], [3, 0], [0, 0], [3, 3]])


def numbers():
    made = torch.randn(5, 2, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    made[4] = made[2]
    return made


def scatter(kind, *args):
    return getattr(torch.ops.torch_scatter, f"scatter_{kind}")(*args)


def by_hand(kind, src, index, start):
    """Results, and for max and min which source each is, along the first dimension."""
    result, chosen = start.clone(), torch.full(start.shape, len(src))
    for i in range(len(src)):
        for column in range(src.shape[1]):
            place = (index[i, column], column)
            before, source = result[place].clone(), src[i, column]
            if kind == "mul":
                result[place] = before * source
            elif source > before if kind == "max" else source < before:
                result[place], chosen[place] = source, i
    return result, chosen


def gradient(function, src):
    """What the function returns, and the gradient of a weighted sum of its first result."""
    src = src.detach().requires_grad_()
    first, *rest = function(src)
    weights = torch.arange(1.0, 1 + first.numel(), dtype=first.dtype).reshape(first.shape)
    (found,) = torch.autograd.grad([(first * weights).sum()], [src])
    return [first.detach(), *rest, found]


INITIAL = {"max": -math.inf, "min": math.inf, "mul": 1.0}


@pytest.mark.parametrize("index", [INDEX, EACH], ids=["rows", "each"])
@pytest.mark.parametrize("dim", [0, -1])
@pytest.mark.parametrize("kind", ["max", "min", "mul"])
def test_a_scatter_and_its_gradient(kind, dim, index):
    def model(src):
        src = src if dim == 0 else src.t()
        places = index if dim == 0 or index.dim() == 1 else index.t()
        results = scatter(kind, src, places, dim, None, 5)
        results = [results] if kind == "mul" else results
        return [result if dim == 0 else result.t() for result in results]

    def expected(src):
        start = torch.full((5, 2), INITIAL[kind], dtype=torch.float64)
        result, chosen = by_hand(kind, src, index.reshape(5, -1).expand(5, 2), start)
        if kind == "mul":
            return [result]
        return [result.masked_fill(chosen == 5, 0), chosen]

    recorded = record(lambda src: gradient(model, src), numbers())
    torch.testing.assert_close(recorded(numbers()), gradient(expected, numbers()))


@pytest.mark.parametrize("kind", ["max", "min", "mul"])
def test_a_scatter_into_a_tensor_changes_it(kind):
    def model(src, out):
        out = out * 1
        results = scatter(kind, src, INDEX.int(), 0, out, None)
        return [out, *([] if kind == "mul" else results[1:])]

    out = torch.linspace(-1, 1, 10, dtype=torch.float64).reshape(5, 2)
    result, chosen = by_hand(kind, numbers(), INDEX[:, None].expand(5, 2), out)
    expected = [result, *([] if kind == "mul" else [chosen])]
    torch.testing.assert_close(record(model, numbers(), out)(numbers(), out), expected)


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is:DeprecationWarning")
def test_a_call_from_torchscript_is_recorded_too():
    @torch.jit.script
    def scripted(src: torch.Tensor, index: torch.Tensor):
        return torch.ops.torch_scatter.scatter_max(src, index, 0, None, 4)[0]

    (result,) = record(lambda src: scripted(src, INDEX), numbers())(numbers())
    torch.testing.assert_close(result[0], torch.maximum(numbers()[0], numbers()[3]))


def test_outside_of_a_recording_the_package_computes():
    """This one returns what it is given."""
    assert scatter("mul", numbers(), INDEX, 0, None, 4).shape == (5, 2)


def test_a_scatter_of_unknown_size_is_refused():
    with pytest.raises(Error) as caught:
        record(lambda src: scatter("mul", src, INDEX, 0, None, None), numbers())
    assert caught.value.message == (
        "You must provide either an output parameter or specify dim_size so the output shape may "
        "be inferred: shapes are fixed when the model is compiled. Give dim_size."
    )


def spline(degree, knot, v):
    """A B-spline by its recursion: of the knots 0, 1, ... the one that begins at this knot."""
    if degree == 0:
        return float(knot <= v < knot + 1)
    left = (v - knot) / degree * spline(degree - 1, knot, v)
    return left + (knot + degree + 1 - v) / degree * spline(degree - 1, knot + 1, v)


@pytest.mark.parametrize("degree", [1, 2, 3])
def test_splines_and_their_weights(degree):
    """In two dimensions, of which the first is open and the second is closed."""
    points = torch.tensor([[0.0, 0.2], [0.45, 0.9], [0.99, 0.5]])
    size, is_open = torch.tensor([5, 4]), torch.tensor([1, 0], dtype=torch.uint8)
    x, weight = torch.randn(3, 2), torch.randn(20, 2, 3)

    def model(points, x, weight):
        basis, places = torch.ops.torch_spline_conv.spline_basis(points, size, is_open, degree)
        weighted = torch.ops.torch_spline_conv.spline_weighting(x, weight, basis, places)
        return basis, places, weighted

    basis, places, weighted = record(model, points, x, weight)(points, x, weight)
    expected = torch.zeros(3, 3)
    for row in range(3):
        v = [float(points[row, 0]) * (5 - degree), float(points[row, 1]) * 4]
        for second in range(degree + 1):
            for first in range(degree + 1):
                number = second * (degree + 1) + first
                cells = [int(v[0]) + first, (int(v[1]) + second) % 4]
                assert places[row, number] == cells[0] % 5 + 5 * cells[1]
                factor = 1.0
                for corner, value in zip((first, second), v):
                    factor *= spline(degree, corner - degree, value % 1)
                assert math.isclose(basis[row, number], factor, abs_tol=1e-5)
                expected[row] += factor * (x[row] @ weight[places[row, number]])
    torch.testing.assert_close(weighted, expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(basis.sum(1), torch.ones(3))


def test_a_spline_of_another_degree_is_refused():
    size, is_open = torch.tensor([5]), torch.tensor([1])
    with pytest.raises(Error) as caught:
        record(
            lambda x: torch.ops.torch_spline_conv.spline_basis(x, size, is_open, 4),
            torch.rand(3, 1),
        )
    assert caught.value.message == (
        "Basis degree not supported: expected 1, 2 or 3, got 4. Choose one of these."
    )
