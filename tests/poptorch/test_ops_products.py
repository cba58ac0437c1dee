"""Products of scattered numbers and their gradients, against a loop over the places."""

import pytest
import torch

from tests.poptorch.recording import record

# Places 0 to 2 of each column: two sources, three, none; the last column has fewer.
PLACES = torch.tensor([[0, 1, 1], [1, 0, 0], [0, 1, 1], [1, 1, 0]])


def by_hand(x, places, source, include_self):
    """The products along the first dimension, differentiably."""
    rows = []
    for row in range(x.shape[0]):
        line = []
        for column in range(x.shape[1]):
            factors = [
                source[i, column]
                for i in range(places.shape[0])
                if column < places.shape[1] and places[i, column] == row
            ]
            if include_self or not factors:
                factors.append(x[row, column])
            product = factors[0]
            for factor in factors[1:]:
                product = product * factor
            line.append(product)
        rows.append(torch.stack(line))
    return torch.stack(rows)


def gradients(function, x, source):
    """The result, and the gradients of a weighted sum of it."""
    x, source = x.detach().requires_grad_(), source.detach().requires_grad_()
    result = function(x, source)
    weights = torch.arange(1.0, 1 + result.numel(), dtype=x.dtype).reshape(result.shape)
    found = torch.autograd.grad([(result * weights).sum()], [x, source])
    return [result.detach(), *found]


def numbers(*shape, zeros=()):
    """Numbers of both signs, of which some are zero."""
    made = torch.randn(*shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    for place in zeros:
        made[place] = 0
    return made


ONE, SEVERAL = ((0, 0),), ((0, 0), (2, 0), (3, 1))


@pytest.mark.few
@pytest.mark.parametrize("include_self", [True, False])
@pytest.mark.parametrize(
    ("own_zeros", "zeros", "columns"),
    [((), (), 3), ((), (), 2), (((1, 0),), ONE, 3), ((), SEVERAL, 2), (((1, 0),), SEVERAL, 3)],
)
def test_a_scattered_product_and_its_gradients(own_zeros, zeros, columns, include_self):
    """With no zero among the factors of a place, one, and several; with unused sources."""
    x, source = numbers(3, 3, zeros=own_zeros), numbers(4, 3, zeros=zeros)
    places = PLACES[:, :columns]

    def model(x, source):
        function = torch.scatter_reduce if zeros else torch.Tensor.scatter_reduce
        return function(x, 0, places, source, reduce="prod", include_self=include_self)

    recorded = record(lambda x, source: gradients(model, x, source), x, source)
    expected = gradients(lambda x, s: by_hand(x, places, s, include_self), x, source)
    torch.testing.assert_close(recorded(x, source), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("include_self", [True, False])
@pytest.mark.parametrize("dim", [0, 1, -1])
def test_a_product_of_rows_and_its_gradients(dim, include_self):
    x, source = numbers(3, 3), numbers(4, 3, zeros=[(2, 1)])
    index = torch.tensor([1, 0, 1, 1])

    def model(x, source):
        if dim:
            source = source.t()
        function = torch.index_reduce if dim else torch.Tensor.index_reduce
        return function(x, dim, index, source, "prod", include_self=include_self)

    def expected(x, source):
        places = index[:, None].expand(4, 3)
        if dim:
            return by_hand(x.t(), places, source, include_self).t()
        return by_hand(x, places, source, include_self)

    recorded = record(lambda x, source: gradients(model, x, source), x, source)
    torch.testing.assert_close(
        recorded(x, source), gradients(expected, x, source), rtol=1e-12, atol=1e-12
    )


@pytest.mark.parametrize("rows", [True, False])
def test_a_product_may_take_the_place_of_what_went_in(rows):
    """A view of a tensor that is changed shows it, and gradients go through."""
    x, source = numbers(3, 3), numbers(4, 3)
    index = torch.tensor([1, 0, 1, 1])

    def model(x, source):
        changed = x * 1
        view = changed[:2]
        if rows:
            changed.index_reduce_(0, index, source, "prod")
        else:
            changed.scatter_reduce_(0, PLACES, source, "prod")
        return view

    def expected(x, source):
        return by_hand(x, index[:, None].expand(4, 3) if rows else PLACES, source, True)[:2]

    recorded = record(lambda x, source: gradients(model, x, source), x, source)
    torch.testing.assert_close(
        recorded(x, source), gradients(expected, x, source), rtol=1e-12, atol=1e-12
    )


@pytest.mark.parametrize("reduce", ["sum", "mean", "amax", "amin", "prod"])
def test_other_reductions_and_models_without_gradients_are_torchs_own(reduce):
    x, source = numbers(3, 3), numbers(4, 3)
    (got,) = record(lambda x, s: x.scatter_reduce(0, PLACES, s, reduce), x, source)(x, source)
    assert torch.equal(got, x.scatter_reduce(0, PLACES, source, reduce))
