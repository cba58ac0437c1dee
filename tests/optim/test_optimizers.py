"""Optimizers inside the program equal torch's, number for number."""

import copy
import functools

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import ipufit
from ipufit.optim.optimizers import LAMB
from tests.engines import EAGER_OR_NOT, has_no_variant, own_step, runs_eagerly
from tests.nets import MLP, data
from tests.reference import follow, train

# 50 updates of 4 samples, and the first 10 of them.
X, Y = data(200)
LOADER = DataLoader(TensorDataset(X, Y), batch_size=4)
TEN = DataLoader(TensorDataset(X[:40], Y[:40]), batch_size=4)

SGD, ADAM, ADAMW, RMSPROP = (
    torch.optim.SGD,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.RMSprop,
)
# Of every kind, each state that it can have; and the same with other numbers.
STATES = [
    (SGD, {"lr": 0.1}),
    (SGD, {"lr": 0.1, "momentum": 0.9}),
    (ADAM, {"lr": 0.01}),
    pytest.param(ADAM, {"lr": 0.01, "amsgrad": True}, marks=has_no_variant),
    (ADAMW, {"lr": 0.01}),
    (RMSPROP, {"lr": 0.01}),
    (RMSPROP, {"lr": 0.01, "centered": True}),
    (RMSPROP, {"lr": 0.01, "momentum": 0.9}),
    (RMSPROP, {"lr": 0.01, "momentum": 0.9, "centered": True, "weight_decay": 0.01}),
    (LAMB, {"lr": 0.01}),
]
OTHERS = [
    (SGD, {"lr": 0.1, "weight_decay": 0.01}),
    pytest.param(
        SGD,
        {"lr": 0.1, "momentum": 0.9, "dampening": 0.3, "weight_decay": 0.02},
        marks=has_no_variant,
    ),
    (SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    pytest.param(SGD, {"lr": 0.02, "momentum": 0.5, "maximize": True}, marks=has_no_variant),
    (ADAM, {"lr": 0.01, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.1}),
    pytest.param(ADAM, {"lr": 0.01, "maximize": True}, marks=has_no_variant),
    (ADAMW, {"lr": 0.01, "weight_decay": 0.0}),
    pytest.param(ADAMW, {"lr": 0.01, "weight_decay": 0.2, "amsgrad": True}, marks=has_no_variant),
    (RMSPROP, {"lr": 0.01, "alpha": 0.9, "eps": 1e-6, "weight_decay": 0.05}),
    (LAMB, {"lr": 0.01, "bias_correction": False, "weight_decay": 0.0}),
    (LAMB, {"lr": 0.01, "max_weight_norm": 0.5}),
    (LAMB, {"lr": 0.01, "max_weight_norm": None, "betas": (0.8, 0.95)}),
]
CASES = [*STATES, *OTHERS]


def at_length(case):
    """A case that runs with --exhaustive."""
    values, marks = (case.values, case.marks) if hasattr(case, "marks") else (case, ())
    return pytest.param(*values, marks=[*marks, pytest.mark.long])


def also(case, run_eagerly):
    """A case, and whether it runs eagerly."""
    values, marks = (case.values, case.marks) if hasattr(case, "marks") else (case, ())
    return pytest.param(*values, run_eagerly, marks=[*marks, *(runs_eagerly,) * run_eagerly])


STATES_AND_OTHERS = [*STATES, *map(at_length, OTHERS)]
# One of each kind, and the rest at length.
KINDS = [
    case if place in (1, 2, 4, 8, 9) else at_length(case)
    for place, case in enumerate([*STATES, *OTHERS])
]


def name_of(case):
    """A readable test id."""
    if isinstance(case, dict):
        return ",".join(f"{key}={value}" for key, value in case.items())
    if isinstance(case, bool):
        return "eager" if case else "traced"
    return case.__name__


def grouped(net, lr):
    """Two parameter groups: weights, and biases with a rate of their own."""
    weights = [p for name, p in net.named_parameters() if name.endswith("weight")]
    biases = [p for name, p in net.named_parameters() if name.endswith("bias")]
    return [{"params": weights}, {"params": biases, "lr": lr / 3}]


def fit(net, optimizer, epochs=1, loader=LOADER, **options):
    """Train with ipufit; returns the model."""
    model = ipufit.Model(net)
    model.compile(optimizer, "cross_entropy", **options)
    model.fit(loader, epochs=epochs, device_iterations=8, verbose=0)
    return model


def by_hand(net, optimizer, epochs=1, loader=LOADER):
    """Train with a loop."""
    x, y = loader.dataset.tensors
    train(net, optimizer, nn.functional.cross_entropy, x, y, epochs, mb=4)


def assert_equal(first, second, atol=1e-12):
    """All parameters agree."""
    for (name, value), other in zip(first.named_parameters(), second.parameters()):
        torch.testing.assert_close(value, other, rtol=0, atol=atol, msg=name)


# Eagerly the same rules run, without a recording.
@pytest.mark.long("ipu-standin")
@pytest.mark.parametrize(
    ("kind", "options", "eager"),
    [*(also(case, False) for case in CASES), *(also(case, True) for case in KINDS)],
    ids=name_of,
)
def test_fifty_updates_equal_torch(kind, options, eager):
    """Users carry their learning rates over: the same settings must give the same weights."""
    net = MLP().double()
    other = copy.deepcopy(net)
    start = copy.deepcopy(net)
    fit(net, kind(grouped(net, options["lr"]), **options), run_eagerly=eager)
    by_hand(other, kind(grouped(other, options["lr"]), **options))
    assert_equal(net, other)
    assert not torch.equal(net.layers[0].weight, start.layers[0].weight)


@pytest.mark.few
@pytest.mark.long("ipu-standin")
@pytest.mark.parametrize(("kind", "options"), STATES_AND_OTHERS, ids=name_of)
def test_a_run_goes_from_torch_to_ipufit_and_back(kind, options):
    """Optimizer state moves both ways: an epoch by hand, one in ipufit, one by hand again."""
    net = MLP().double()
    other = copy.deepcopy(net)
    optimizer = kind(grouped(net, options["lr"]), **options)
    by_hand(net, optimizer, loader=TEN)
    fit(net, optimizer, loader=TEN)
    by_hand(net, optimizer, loader=TEN)
    by_hand(other, kind(grouped(other, options["lr"]), **options), epochs=3, loader=TEN)
    assert_equal(net, other)


@pytest.mark.long("ipu-standin")
@pytest.mark.few(
    "SGD-lr=0.1,momentum=0.9",
    "Adam-lr=0.01,amsgrad=True",
    "AdamW-lr=0.01",
    "RMSprop-lr=0.01,momentum=0.9,centered=True,weight_decay=0.01",
    "LAMB-lr=0.01",
)
@pytest.mark.parametrize(("kind", "options"), STATES_AND_OTHERS, ids=name_of)
def test_the_state_left_behind_is_torchs(kind, options):
    """Names, shapes and dtypes of the state are those that torch's own step makes."""
    net = MLP().double()
    other = copy.deepcopy(net)
    optimizer, expected = kind(net.parameters(), **options), kind(other.parameters(), **options)
    fit(net, optimizer, loader=TEN)
    by_hand(other, expected, loader=TEN)
    for parameter, reference in zip(net.parameters(), other.parameters()):
        own = {k: v for k, v in optimizer.state[parameter].items() if v is not None}
        wanted = {k: v for k, v in expected.state[reference].items() if v is not None}
        assert set(own) == set(wanted)
        for name, value in wanted.items():
            assert type(own[name]) is type(value)
            own_value, wanted_value = torch.as_tensor(own[name]), torch.as_tensor(value)
            # RMSprop's momentum grows to 13 here; 1e-12 is meant for numbers around one.
            scale = max(1.0, float(wanted_value.double().abs().max()))
            # Compares dtypes too.
            torch.testing.assert_close(
                own_value, wanted_value, rtol=0, atol=1e-12 * scale, msg=name
            )
    optimizer.load_state_dict(expected.state_dict())


@pytest.mark.long
def test_parameters_of_different_age_keep_their_own_count():
    """A head that joins later has a bias correction of its own, as in torch."""
    net = MLP().double()
    other = copy.deepcopy(net)

    def two_ages(net, second_run):
        old = list(net.layers[0].parameters())
        optimizer = ADAM(old, lr=0.01)
        follow(net, optimizer, LOADER)
        optimizer.add_param_group({"params": list(net.layers[2].parameters())})
        second_run(net, optimizer)
        return optimizer

    first = two_ages(net, fit)
    second = two_ages(other, functools.partial(follow, batches=LOADER))
    assert_equal(net, other)
    assert [float(s["step"]) for s in first.state.values()] == [100, 100, 50, 50]
    assert [float(s["step"]) for s in second.state.values()] == [100, 100, 50, 50]


@pytest.mark.long("ipu-standin")
def test_frozen_and_unused_parameters_stay():
    """Neither gradient nor decay may touch what does not take part."""
    net = MLP().double()
    net.spare = nn.Linear(3, 3).double()
    net.layers[0].weight.requires_grad_(False)
    before = copy.deepcopy(net.state_dict())
    model = fit(net, ADAMW(net.parameters(), lr=0.01, weight_decay=0.5))
    after = net.state_dict()
    for name in before:
        still = name.startswith("spare") or name == "layers.0.weight"
        assert torch.equal(before[name], after[name]) == still, name
    assert net.spare.weight not in model.optimizer.state


@pytest.mark.long("ipu-standin")
def test_only_the_parameters_of_the_optimizer_are_trained():
    """Handing part of a module to the optimizer is how torch users train a head."""
    net = MLP().double()
    other = copy.deepcopy(net)
    fit(net, SGD(net.layers[2].parameters(), lr=0.1))
    optimizer = SGD(other.layers[2].parameters(), lr=0.1)
    follow(other, optimizer, LOADER)
    assert_equal(net, other)


@pytest.mark.long
def test_gradients_are_summed_on_request():
    """Sum over micro-batches acts as a learning rate that grows with them."""
    net = nn.Sequential(nn.Flatten(), nn.Linear(12, 5)).double()
    other = copy.deepcopy(net)
    loader = DataLoader(TensorDataset(X[:40], Y[:40]), batch_size=5)
    work = {"gradient_accumulation": 2, "ipus": 2, "verbose": 0}
    for module, rate, reduction in ((net, 0.01, "sum"), (other, 0.04, "mean")):
        model = ipufit.Model(module)
        model.compile(
            SGD(module.parameters(), lr=rate),
            "cross_entropy",
            reduction=ipufit.Reduction(gradients=reduction),
        )
        model.fit(loader, **work)
    assert_equal(net, other)


@pytest.mark.long("ipu-standin")
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_in_a_tail_every_sample_counts_the_same(reduction):
    """A loss that sums over its micro-batch keeps its scale in a smaller one, as one that
    averages."""
    net = nn.Sequential(nn.Flatten(), nn.Linear(12, 5)).double()
    other = copy.deepcopy(net)
    loader = DataLoader(TensorDataset(X[:7], Y[:7]), batch_size=5)
    losses = []
    for module, loss, rate in (
        (net, nn.CrossEntropyLoss(), 0.5),
        (other, nn.CrossEntropyLoss(reduction="sum"), 0.1),
    ):
        model = ipufit.Model(module)
        model.compile(
            SGD(module.parameters(), lr=rate), loss, reduction=ipufit.Reduction(gradients=reduction)
        )
        history = model.fit(loader, epochs=2, gradient_accumulation=2, verbose=0)
        losses.append(history.history["loss"])
    assert_equal(net, other)
    assert [5 * value for value in losses[0]] == pytest.approx(losses[1], abs=1e-12)


class Halved(torch.optim.Optimizer):
    """A user's optimizer: plain descent with the rate halved by a tensor in its state."""

    def __init__(self, params, lr=0.5):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["rate"] = torch.full_like(p, group["lr"])
                p.sub_(state["rate"] * p.grad)
                state["rate"].mul_(0.9)


# More of them, with schedules, are in test_own_steps.py.
OWN_STEP = [torch.optim.Adadelta, torch.optim.Rprop, Halved]


@pytest.mark.long
@pytest.mark.parametrize("kind", OWN_STEP, ids=lambda kind: kind.__name__)
@own_step
def test_any_other_optimizer_runs_through_its_own_step(kind):
    """An optimizer that ipufit does not know is not refused for that."""
    net = MLP().double()
    other = copy.deepcopy(net)
    optimizer = kind(grouped(net, 0.02), lr=0.02)
    fit(net, optimizer, loader=TEN)
    fit(net, optimizer, loader=TEN)
    expected = kind(grouped(other, 0.02), lr=0.02)
    by_hand(other, expected, epochs=2, loader=TEN)
    assert_equal(net, other)
    for parameter, reference in zip(net.parameters(), other.parameters()):
        assert optimizer.state[parameter].keys() == expected.state[reference].keys()
        for name, value in expected.state[reference].items():
            torch.testing.assert_close(
                torch.as_tensor(optimizer.state[parameter][name]), torch.as_tensor(value)
            )


class ChangeRate(ipufit.callbacks.Callback):
    """Sets a hyper-parameter before the second epoch."""

    def __init__(self, name, value):
        super().__init__()
        self.change = {name: value}

    def on_epoch_begin(self, epoch, logs=None):
        if epoch == 1:
            for group in self.model.optimizer.param_groups:
                group.update(self.change)


@pytest.mark.long("ipu-standin")
def test_a_learning_rate_changed_by_a_callback_is_used():
    """It is an input of the program, not a constant."""
    net = MLP().double()
    other = copy.deepcopy(net)
    model = ipufit.Model(net)
    model.compile(ADAM(net.parameters(), lr=0.01), "cross_entropy")
    model.fit(LOADER, epochs=2, callbacks=[ChangeRate("lr", 0.002)], verbose=0)
    optimizer = ADAM(other.parameters(), lr=0.01)
    by_hand(other, optimizer)
    optimizer.param_groups[0]["lr"] = 0.002
    by_hand(other, optimizer)
    assert_equal(net, other)


def test_differentiable_is_refused():
    """A graph through the update can't leave the program."""
    net = MLP()
    model = ipufit.Model(net)
    model.compile(ADAM(net.parameters(), differentiable=True), "cross_entropy")
    with pytest.raises(ipufit.errors.OptimizerError) as caught:
        model.fit(LOADER, verbose=0)
    assert str(caught.value) == (
        "differentiable=True keeps a graph through the update, which a traced program can't "
        "return; got it in Adam. Build the optimizer without it."
    )


@pytest.mark.long
def test_half_of_the_parameters_in_another_dtype():
    """Parameters of different dtypes are updated side by side."""
    net = nn.Sequential(nn.Flatten(), nn.Linear(12, 6).double(), Cast(), nn.Linear(6, 5))
    other = copy.deepcopy(net)
    fit(net, SGD(net.parameters(), lr=0.1, momentum=0.9))
    by_hand(other, SGD(other.parameters(), lr=0.1, momentum=0.9))
    # float32 in the head: rounding, 50 times.
    assert_equal(net, other, atol=1e-5)
    assert [p.dtype for p in net.parameters()] == [torch.float64] * 2 + [torch.float32] * 2


class Cast(nn.Module):
    """To float32."""

    def forward(self, x):
        return x.float()


@pytest.mark.long
def test_weights_keep_their_memory_format():
    """A channels-last module stays one, with the same numbers."""
    net = nn.Sequential(nn.Conv2d(1, 4, 2), nn.Flatten(), nn.Linear(24, 5)).double()
    other = copy.deepcopy(net)
    net = net.to(memory_format=torch.channels_last)
    net.register_parameter("unused", nn.Parameter(torch.ones(2, 3).t()))
    strides = [p.stride() for p in net.parameters()]
    fit(net, ADAM(net.parameters(), lr=0.01))
    by_hand(other, ADAM(other.parameters(), lr=0.01))
    assert [p.stride() for p in net.parameters()] == strides
    for name, value in other.named_parameters():
        torch.testing.assert_close(dict(net.named_parameters())[name], value, rtol=0, atol=1e-12)


class InTheFirst(torch.optim.SGD):
    """Keeps what it remembers with its first parameter alone."""

    def step(self, closure=None):
        group = self.param_groups[0]
        state = self.state[group["params"][0]]
        state["seen"] = state.get("seen", torch.zeros((), dtype=torch.float64)) + 1
        for parameter in group["params"]:
            if parameter.grad is not None:
                parameter.sub_(parameter.grad * group["lr"] / state["seen"])


@pytest.mark.long
@pytest.mark.parametrize("run_eagerly", EAGER_OR_NOT)
@pytest.mark.parametrize(
    "make",
    [
        pytest.param(torch.optim.Adadelta, marks=own_step),
        pytest.param(torch.optim.Rprop, marks=own_step),
        pytest.param(InTheFirst, marks=own_step),
        ADAM,
    ],
    ids=["adadelta", "rprop", "first", "adam"],
)
def test_a_parameter_unfrozen_between_two_fits_starts_its_state_beside_the_others(
    make, run_eagerly
):
    """With a step of the optimizer's own too: what is new has no state, what is there goes on."""
    net = MLP().double()
    other = copy.deepcopy(net)
    names = ["layers.2.weight", "layers.2.bias"]
    model = ipufit.Model(net)
    model.compile(make(net.parameters(), lr=0.01), "cross_entropy", run_eagerly=run_eagerly)
    optimizer = make(other.parameters(), lr=0.01)
    loader = DataLoader(TensorDataset(X[:24], Y[:24]), batch_size=4)
    for frozen in (True, False, False):
        for name in names:
            net.get_parameter(name).requires_grad_(not frozen)
            other.get_parameter(name).requires_grad_(not frozen)
        model.fit(loader, verbose=0)
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(other(x), y).backward()
            with torch.no_grad():
                optimizer.step()
        for name, value in net.named_parameters():
            expected = other.get_parameter(name)
            torch.testing.assert_close(value, expected, rtol=0, atol=1e-12, msg=name)
