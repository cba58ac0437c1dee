"""A run goes on in a torch loop, in ipufit and in PopTorch, wherever it was begun."""

import copy
import itertools

import pytest
import torch
from torch import nn

import ipufit
from ipufit import poptorch
from ipufit.optim.state import from_poptorch, to_poptorch
from ipufit.poptorch._precision import keep_float64
from tests.nets import MLP, data
from tests.told import refused

pytestmark = pytest.mark.both_engines

X, Y = data(24)

# By name: torch's class, and the settings.
KINDS = {
    "sgd": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    "sgd without momentum": (torch.optim.SGD, {"lr": 0.1}),
    "adam": (torch.optim.Adam, {"lr": 0.01}),
    "adamw": (torch.optim.AdamW, {"lr": 0.01, "weight_decay": 0.1}),
    "rmsprop": (torch.optim.RMSprop, {"lr": 0.01}),
    "rmsprop, centred with momentum": (
        torch.optim.RMSprop,
        {"lr": 0.01, "centered": True, "momentum": 0.5},
    ),
    "lamb": (ipufit.optim.LAMB, {"lr": 0.01}),
}
PLACES = ["loop", "fit", "poptorch"]


class WithLoss(nn.Module):
    """What PopTorch is given."""

    def __init__(self, net):
        super().__init__()
        self.net = net

    def forward(self, x, y):
        outputs = self.net(x)
        return outputs, nn.functional.cross_entropy(outputs, y)


def batches(first, last):
    return [slice(2 * i, 2 * i + 2) for i in range(first, last)]


def loop(net, optimizer, first, last, settings):
    for rows in batches(first, last):
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(X[rows]), Y[rows]).backward()
        optimizer.step()


def fit(net, optimizer, first, last, settings):
    model = ipufit.Model(net, engine="embedded")
    model.compile(optimizer, "cross_entropy")
    rows = slice(2 * first, 2 * last)
    model.fit(X[rows], Y[rows], batch_size=2, shuffle=False, verbose=0)


def in_poptorch(net, optimizer, first, last, settings):
    module = WithLoss(net).train()
    own = getattr(poptorch.optim, type(optimizer).__name__)(module.parameters(), **settings)
    with keep_float64():
        to_poptorch(optimizer, own, module)
        program = poptorch.trainingModel(module, optimizer=own)
        for rows in batches(first, last):
            program(X[rows], Y[rows])
        program.copyWeightsToHost()
        from_poptorch(own, optimizer, module, updates=last)
        program.destroy()


HOW = {"loop": loop, "fit": fit, "poptorch": in_poptorch}


# Kinds and orders one after the other stand for each kind in each order.
ORDERS = list(itertools.permutations(PLACES))
RUNS = [
    pytest.param(
        name,
        places,
        id=f"{name}-{'-'.join(places)}",
        marks=() if place == number % len(ORDERS) else pytest.mark.long,
    )
    for number, name in enumerate(KINDS)
    for place, places in enumerate(ORDERS)
]


@pytest.mark.few
@pytest.mark.parametrize(("name", "places"), RUNS)
def test_a_run_goes_on_anywhere(name, places):
    kind, settings = KINDS[name]
    torch.manual_seed(0)
    start = MLP().double()
    whole, net = copy.deepcopy(start), start
    if kind is ipufit.optim.LAMB:
        fit(whole, kind(whole.parameters(), **settings), 0, 12, settings)
        places = [place if place != "loop" else "fit" for place in places]
    else:
        loop(whole, kind(whole.parameters(), **settings), 0, 12, settings)
    optimizer = kind(net.parameters(), **settings)
    for place, first in zip(places, (0, 4, 8)):
        HOW[place](net, optimizer, first, first + 4, settings)
    for own, wanted in zip(net.parameters(), whole.parameters()):
        torch.testing.assert_close(own, wanted, rtol=0, atol=1e-11)


def test_what_does_not_fit_is_refused():
    net = MLP()
    adam = torch.optim.Adam(net.parameters())
    own = poptorch.optim.Adam(net.parameters(), lr=0.1)
    sgd = poptorch.optim.SGD(net.parameters(), lr=0.1)
    refused(
        lambda: to_poptorch(torch.optim.Adagrad(net.parameters()), own, net),
        "the state of SGD, Adam, AdamW, RMSprop, LAMB can move to a device and back, got Adagrad. "
        "Use one of these.",
    )
    refused(
        lambda: from_poptorch(sgd, adam, net),
        "the state of Adam moves to and from poptorch.optim.Adam, got SGD. Use the same kind on "
        "both sides.",
    )
    refused(
        lambda: to_poptorch(adam, own, nn.Linear(1, 1)),
        "the optimizer's 4 parameters must be those of the module, which has 0 of them. Pass the "
        "module that PopTorch is given to train.",
    )
