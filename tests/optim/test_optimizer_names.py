"""Names, classes, objects and factories of optimizers."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn

from ipufit.errors import OptimizerError, UnknownNameError
from ipufit.optim.optimizers import LAMB
from ipufit.optim.resolve import resolve_optimizer

ACCEPTED = (
    "optimizer must be a name, a class of torch.optim, an optimizer built from the module's "
    "parameters(), a factory lambda params: optimizer, or several of them, got "
)


@pytest.fixture
def net():
    """Two layers, the first one frozen."""
    module = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    module[0].requires_grad_(False)
    return module


def resolve(optimizer, module):
    """Resolve for all parameters of a module."""
    return resolve_optimizer(optimizer, list(module.named_parameters()))


def held(optimizer):
    """The identities of all parameters of an optimizer, in order."""
    return [id(p) for group in optimizer.param_groups for p in group["params"]]


def refusal(optimizer, module):
    """The text of the OptimizerError that must come."""
    with pytest.raises(OptimizerError) as caught:
        resolve(optimizer, module)
    return str(caught.value)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("sgd", torch.optim.SGD),
        ("adam", torch.optim.Adam),
        ("adamw", torch.optim.AdamW),
        ("rmsprop", torch.optim.RMSprop),
        ("lamb", LAMB),
        ("LAMB", LAMB),
        ("Adagrad", torch.optim.Adagrad),
        ("NAdam", torch.optim.NAdam),
    ],
)
def test_a_name_gives_the_class_over_the_trainable_parameters(name, kind, net):
    """A frozen layer handed to the optimizer would decay although it is frozen."""
    optimizer = resolve(name, net)
    assert type(optimizer) is kind
    assert held(optimizer) == [id(p) for p in net[1].parameters()]


def test_names_have_the_defaults_of_torch(net):
    """Whoever knows torch's numbers must find them behind the name."""
    resolved = resolve("adamw", net).param_groups[0]
    plain = torch.optim.AdamW(net[1].parameters()).param_groups[0]
    assert {k: v for k, v in resolved.items() if k != "params"} == {
        k: v for k, v in plain.items() if k != "params"
    }


def test_sgd_by_name_has_one_rate_on_every_torch(net):
    """Without one, torch 2.0.1 refuses and later ones take 0.001; a name must not depend on it."""
    assert resolve("sgd", net).param_groups[0]["lr"] == 0.01


def test_an_unknown_name_gets_the_nearest():
    """A typing error should cost a second, not a search in the manual."""
    with pytest.raises(UnknownNameError) as caught:
        resolve("adamm", nn.Linear(1, 1))
    assert caught.value.nearest == "adam"
    assert {"sgd", "adam", "adamw", "rmsprop", "lamb", "adagrad"} <= set(caught.value.known)
    assert "optimizer" not in caught.value.known
    assert str(caught.value) == (
        "unknown optimizer 'adamm'. Did you mean 'adam'? Known names: "
        f"{', '.join(caught.value.known)}."
    )


def test_a_class_is_built_over_the_trainable_parameters(net):
    """The class is the shortest way to a default that is not among the names."""
    optimizer = resolve(torch.optim.Adamax, net)
    assert type(optimizer) is torch.optim.Adamax
    assert held(optimizer) == [id(p) for p in net[1].parameters()]


class _NeedsRate(torch.optim.SGD):
    """An optimizer whose rate has no default."""

    def __init__(self, params, lr):
        super().__init__(params, lr=lr)


class _RefusesParameters(torch.optim.SGD):
    """Like SGD of torch 2.0.1 and Muon: the refusal comes from inside, as a ValueError."""

    def __init__(self, params):
        raise ValueError("no such shape")


def test_a_class_that_needs_more_asks_for_a_factory(net):
    """The bare TypeError of Python doesn't say where the argument should go."""
    assert refusal(_NeedsRate, net) == (
        "an optimizer class must need nothing but parameters, got _NeedsRate (missing a required "
        "argument: 'lr'). Pass a factory: lambda params: _NeedsRate(params, lr=0.01)."
    )
    assert refusal(_RefusesParameters, net) == (
        "an optimizer class must need nothing but parameters, got _RefusesParameters (no such "
        "shape). Pass a factory: lambda params: _RefusesParameters(params, lr=0.01)."
    )


def test_an_object_is_kept_with_its_state(net):
    """Momentum of an earlier run belongs to the user and must go on."""
    own = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    net[1](net[0](torch.ones(1, 3))).sum().backward()
    own.step()
    state = dict(own.state)
    assert state
    assert resolve(own, net) is own
    assert dict(own.state) == state


def test_an_object_may_leave_parameters_out(net):
    """Fine-tuning a part is done by handing over a part."""
    own = torch.optim.SGD([net[1].bias], lr=0.1)
    assert resolve(own, net) is own


def test_foreign_parameters_are_refused(net):
    """An optimizer of an earlier copy of the module would train that copy, and this one stands."""
    own = torch.optim.Adam(
        [{"params": net[1].parameters()}, {"params": [nn.Parameter(torch.ones(5))]}]
    )
    expected = (
        "every parameter of the optimizer must be the module's, got one of shape (5,) in group 1 "
        "of Adam that is not. Build it from this module: Adam(module.parameters(), ...)."
    )
    assert refusal(own, net) == expected
    assert refusal(lambda params: own, net) == expected


def test_a_factory_gets_the_trainable_parameters(net):
    """It is the way to arguments without naming the module twice."""
    seen = []

    def factory(params):
        seen.append(params)
        return torch.optim.SGD(params, lr=0.5)

    optimizer = resolve(factory, net)
    assert optimizer.param_groups[0]["lr"] == 0.5
    assert type(seen[0]) is list
    assert [id(p) for p in seen[0]] == held(optimizer) == [id(p) for p in net[1].parameters()]
    assert resolve(functools.partial(LAMB, lr=0.3), net).param_groups[0]["lr"] == 0.3


def test_an_error_inside_a_factory_is_the_users_own(net):
    """Hiding it would hide the line that is wrong."""

    def factory(params):
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        resolve(factory, net)


def test_tied_weights_are_handed_over_once():
    """A tensor listed under two names would be updated twice or refused by torch."""
    shared = nn.Linear(2, 2)
    pairs = [("a.weight", shared.weight), ("b.weight", shared.weight), ("a.bias", shared.bias)]
    assert held(resolve_optimizer("sgd", pairs)) == [id(shared.weight), id(shared.bias)]


def test_a_factory_that_forgets_to_return_is_told(net):
    """A missing return is the usual slip, and None says nothing by itself."""
    assert refusal(lambda params: None, net) == (
        "an optimizer factory must return a torch optimizer, got NoneType. Write for example "
        "lambda params: torch.optim.SGD(params, lr=0.01)."
    )


@pytest.mark.parametrize("optimizer", ["sgd", torch.optim.Adam, lambda p: torch.optim.SGD(p, lr=1)])
def test_a_module_without_trainable_parameters_is_refused(optimizer):
    """An epoch over a frozen module would report a loss and change nothing."""
    tail = (
        "Unfreeze at least one with requires_grad_(True), or use compile(optimizer=None) to only "
        "evaluate and predict."
    )
    frozen = nn.Linear(2, 2).requires_grad_(False)
    assert refusal(optimizer, frozen) == (
        "the module has no trainable parameter: none of its 2 parameters requires gradients. "
        + tail
    )
    assert refusal(optimizer, nn.ReLU()) == (
        "the module has no trainable parameter: none of its 0 parameters requires gradients. "
        + tail
    )
    assert refusal(torch.optim.SGD(frozen.parameters(), lr=0.1), frozen) == (
        "the module has no trainable parameter: nothing that SGD holds requires gradients. " + tail
    )


@pytest.mark.parametrize(
    ("optimizer", "came"), [(None, "NoneType"), (0.1, "float"), (nn.Linear, "Linear")]
)
def test_anything_else_is_refused_with_the_list_of_what_is_accepted(optimizer, came, net):
    """The reader needs the four ways, not the type check that failed."""
    assert refusal(optimizer, net) == f"{ACCEPTED}{came}. Pass for example optimizer='adam'."
