"""Floating-point exceptions: where a number is made that is none, and nowhere else."""

import pytest
import torch
from torch import nn

from ipufit import poptorch


def model(function, enabled=True):
    """An inference model of a function."""

    class Model(nn.Module):
        def forward(self, *given):
            return function(*given)

    options = poptorch.Options()
    options.Precision.enableFloatingPointExceptions(enabled)
    return poptorch.inferenceModel(Model(), options)


INF, NAN = float("inf"), float("nan")

TRAPS = [
    (lambda x: 3 / x, 0.0, "aten.reciprocal.default made an infinity of finite numbers"),
    (lambda x: x * 0, INF, "aten.mul.Tensor made a NaN of numbers"),
    (torch.log, -2.0, "aten.log.default made a NaN of numbers"),
    (torch.exp, 100.0, "aten.exp.default made an infinity of finite numbers"),
    (lambda x: x.half() * 6e4, 2.0, "aten.mul.Tensor made an infinity of finite numbers"),
    (lambda x: x > 1, NAN, "aten.gt.Scalar compared a NaN"),
    (lambda x: x <= 1, NAN, "aten.le.Scalar compared a NaN"),
]


@pytest.mark.parametrize(("function", "value", "what"), TRAPS)
def test_an_operator_that_makes_no_number_stops_the_run(function, value, what):
    with pytest.raises(poptorch.UnrecoverableError) as failure:
        model(function)(torch.tensor([1.0, value]))
    assert failure.value.message == (
        f"a floating-point exception: {what}. Look at its inputs, or leave "
        "Precision.enableFloatingPointExceptions off."
    )


@pytest.mark.parametrize(("function", "value", "what"), TRAPS)
def test_without_the_option_it_does_not(function, value, what):
    model(function, enabled=False)(torch.tensor([1.0, value]))


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x + 1,
        lambda x: x.masked_fill(x > 0, -INF).exp(),
        torch.isnan,
        lambda x: torch.full((2,), INF) + x,
    ],
)
def test_infinities_that_are_moved_or_written_down_are_no_exception(function):
    model(function)(torch.tensor([1.0, INF]))
    model(function)(torch.tensor([1.0, 2.0]))


def test_what_nothing_depends_on_raises_no_exception():
    """A graph network of several kinds of edges computes kinds that the result doesn't need."""

    def inverse_roots(degree):
        roots = (degree * 1).pow_(-0.5)
        return roots.masked_fill_(roots == INF, 0)

    def function(x, degree):
        inverse_roots(degree)
        return x + 1

    model(function)(torch.ones(2), torch.tensor([1.0, 0.0]))
    with pytest.raises(poptorch.UnrecoverableError, match="made an infinity"):
        model(lambda x, degree: x * inverse_roots(degree))(torch.ones(2), torch.tensor([1.0, 0.0]))
    with pytest.raises(poptorch.UnrecoverableError, match="made an infinity"):
        model(lambda x: x[1:].div_(0).shape and x)(torch.ones(2))
