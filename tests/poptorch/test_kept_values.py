"""Backward through values that forward has overwritten: as if each change made a new tensor."""

import pytest
import torch
from torch import nn

from ipufit import poptorch
from ipufit.poptorch._precision import keep_float64

X, LR = [1.0, 2.0, 0.5], 0.1


class Net(nn.Module):
    """A weight, a buffer and a function of them, whose result is the loss."""

    def __init__(self, function):
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([2.0, -0.5, 3.0], dtype=torch.float64))
        self.register_buffer("state", torch.tensor([1.0, 3.0, 2.0], dtype=torch.float64))
        self.function = function

    def forward(self, x):
        return poptorch.identity_loss(self.function(x, self.weight, self.state).sum(), "none")


def overwrites_the_input(x, w, b):
    y = x * w
    x += 1
    return y * y + x


def adds_to_an_input(x, w, b):
    return (x * w) ** 2 + x + 1


def overwrites_a_buffer(x, w, b):
    y = x * w * b
    b.mul_(2)
    return y + b


def doubles_a_buffer(x, w, b):
    return x * w * b + 2 * b


def overwrites_a_result(x, w, b):
    y = torch.exp(x * w)
    y += 1
    return y


def adds_to_a_result(x, w, b):
    return torch.exp(x * w) + 1


def clears_a_result(x, w, b):
    y = (x * w).sigmoid()
    z = y * y
    y.zero_()
    return z + y


def leaves_a_result(x, w, b):
    return (x * w).sigmoid() ** 2


def overwrites_parts(x, w, b):
    y = x * w
    y[0] = 5.0
    z = y * y
    y[1:].mul_(y[1:])
    return z * y


def makes_parts(x, w, b):
    y = torch.cat([torch.full_like(x[:1], 5.0), (x * w)[1:]])
    return y * y * torch.cat([y[:1], y[1:] ** 2])


def is_written_into(x, w, b):
    y = x * w
    z = y.exp()
    torch.mul(y, y, out=y) if not y.requires_grad else y.copy_(y * y)
    return z + y


def is_squared(x, w, b):
    y = x * w
    return y.exp() + y * y


def steps_in_a_loop(x, w, b):
    y = x * w
    for _ in range(3):
        y.mul_(w).sin_()
    return y


def steps_anew(x, w, b):
    y = x * w
    for _ in range(3):
        y = (y * w).sin()
    return y


@pytest.mark.few
@pytest.mark.parametrize(
    ("in_place", "plain"),
    [
        (overwrites_the_input, adds_to_an_input),
        (overwrites_a_buffer, doubles_a_buffer),
        (overwrites_a_result, adds_to_a_result),
        (clears_a_result, leaves_a_result),
        (overwrites_parts, makes_parts),
        (is_written_into, is_squared),
        (steps_in_a_loop, steps_anew),
    ],
)
def test_gradients_are_those_of_the_values_at_the_time(in_place, plain):
    net, x = Net(in_place), torch.tensor(X, dtype=torch.float64)
    weight, state = net.weight.detach().clone().requires_grad_(), net.state.clone()
    loss = plain(x, weight, state).sum()
    (gradient,) = torch.autograd.grad(loss, weight)
    model = poptorch.trainingModel(net, None, torch.optim.SGD(net.parameters(), lr=LR))
    with keep_float64():
        found = model(x)
    torch.testing.assert_close(found, loss.detach(), rtol=0, atol=1e-12)
    expected = weight.detach() - LR * gradient
    torch.testing.assert_close(net.weight.detach(), expected, rtol=0, atol=1e-12)


@pytest.mark.long
def test_what_is_overwritten_stays_overwritten():
    net, x = Net(overwrites_the_input), torch.tensor(X)
    poptorch.trainingModel(net)(x)
    assert x.tolist() == [2.0, 3.0, 1.5]
    net = Net(overwrites_a_buffer)
    poptorch.trainingModel(net)(torch.tensor(X))
    assert net.state.tolist() == [2.0, 6.0, 4.0]


def test_nothing_is_copied_that_is_not_overwritten():
    def plain(x, w, b):
        return torch.relu_(x * w) * b

    model = poptorch.trainingModel(Net(plain))
    model.compile(torch.tensor(X))
    graph = model._executable.recorded.graph.graph
    copied = [node.args[0] for node in graph.nodes if node.target is torch.ops.aten.clone.default]
    assert all(source.meta["val"].dim() == 0 for source in copied)  # the loss alone
