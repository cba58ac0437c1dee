"""Schedules as a table inside the program: the curve belongs to the updates, not to the calls."""

import copy
import math
import warnings
from functools import partial

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import (
    CosineAnnealingLR,
    LinearLR,
    OneCycleLR,
    ReduceLROnPlateau,
    SequentialLR,
    StepLR,
)
from torch.utils.data import DataLoader, TensorDataset

import ipufit
from ipufit.errors import ConfigurationError, NonFiniteLossError
from ipufit.optim.schedules import AtEpochEnd
from tests.engines import EAGER_OR_NOT, embedded_only
from tests.nets import CNN, MLP, data

X, Y = data(50)
LOADER = DataLoader(TensorDataset(X, Y), 5)


def warm_up(optimizer):
    """Up for five updates, then down for fifteen."""
    up = LinearLR(optimizer, 0.1, total_iters=5)
    return SequentialLR(optimizer, [up, CosineAnnealingLR(optimizer, 15)], [5])


def weights(net):
    return torch.cat([p.detach().flatten() for p in net.parameters()])


def fit(net, optimizer, epochs=2, di=1, compile_options=None):
    """Train; returns the model and its history."""
    model = ipufit.Model(net)
    model.compile(optimizer, "cross_entropy", metrics=["accuracy"], **(compile_options or {}))
    history = model.fit(LOADER, epochs=epochs, device_iterations=di, seed=3, verbose=0)
    return model, history


@pytest.mark.long
@pytest.mark.parametrize(
    "eager",
    EAGER_OR_NOT,
    ids=["traced", "eager"],
)
def test_warm_up_gives_the_same_bits_for_every_device_iterations(eager):
    """Elsewhere a scheduler moves once per call of the program, so the curve depends on it."""
    start = CNN().double()
    found = {}
    for di in (1, 2, 5, 10):
        net = copy.deepcopy(start)
        optimizer = torch.optim.AdamW(net.parameters(), 0.01)
        options = {"lr_scheduler": warm_up(optimizer), "run_eagerly": eager}
        _, history = fit(net, optimizer, di=di, compile_options=options)
        found[di] = (weights(net), history.history)
    for di in (2, 5, 10):
        assert torch.equal(found[di][0], found[1][0])
        assert found[di][1] == found[1][1]


@pytest.mark.long("ipu-standin")
@pytest.mark.few
@pytest.mark.parametrize(
    "make",
    [
        warm_up,
        partial(StepLR, step_size=3, gamma=0.5),
        partial(OneCycleLR, max_lr=0.1, total_steps=20),
        partial(CosineAnnealingLR, T_max=20),
    ],
    ids=["warm-up", "step", "one-cycle", "cosine"],
)
@pytest.mark.parametrize("di", [1, 4])
def test_a_torch_scheduler_trains_as_in_a_loop_written_by_hand(make, di):
    net = MLP().double()
    other = copy.deepcopy(net)
    fit(
        net,
        torch.optim.SGD(net.parameters(), 0.05, momentum=0.9),
        di=di,
        compile_options={"lr_scheduler": make},
    )
    optimizer = torch.optim.SGD(other.parameters(), 0.05, momentum=0.9)
    scheduler = make(optimizer)
    for _ in range(2):
        for x, y in LOADER:
            optimizer.zero_grad()
            nn.functional.cross_entropy(other(x), y).backward()
            optimizer.step()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # SequentialLR of torch 2.0.1 warns of itself
                scheduler.step()
    torch.testing.assert_close(weights(net), weights(other), rtol=0, atol=1e-12)


@pytest.mark.long
def test_any_number_of_the_optimizer_can_be_scheduled():
    net = MLP().double()
    other = copy.deepcopy(net)
    tables = {"lr": lambda u: 0.1 / (1 + u), "momentum": lambda u: 0.5 + 0.02 * u}
    fit(
        net,
        torch.optim.SGD(net.parameters(), 1.0, momentum=0.1),
        di=3,
        compile_options={"lr_scheduler": tables},
    )
    optimizer = torch.optim.SGD(other.parameters(), 1.0, momentum=0.1)
    for update, (x, y) in enumerate(list(LOADER) * 2):
        for name, table in tables.items():
            optimizer.param_groups[0][name] = table(update)
        optimizer.zero_grad()
        nn.functional.cross_entropy(other(x), y).backward()
        optimizer.step()
    torch.testing.assert_close(weights(net), weights(other), rtol=0, atol=1e-12)


@pytest.mark.long
@pytest.mark.parametrize("di", [1, 4])
@pytest.mark.parametrize(
    "make",
    [
        partial(torch.optim.SGD, lr=0.1, momentum=0.9),
        partial(torch.optim.Adam, lr=0.01),
        partial(torch.optim.AdamW, lr=0.01),
        partial(torch.optim.RMSprop, lr=0.01),
        partial(ipufit.optim.LAMB, lr=0.01),
    ],
    ids=["sgd", "adam", "adamw", "rmsprop", "lamb"],
)
def test_a_scheduled_weight_decay_may_begin_at_zero_and_return_to_it(make, di):
    """Zero is where a decay that warms up begins, and no other program."""
    net = MLP().double()
    other = copy.deepcopy(net)

    def decay(update):
        return 0.02 * max(0, 8 - abs(update - 10))

    def groups(net):
        first, *rest = net.parameters()
        return [{"params": [first]}, {"params": rest}]

    tables = [{"weight_decay": decay}, {}]
    fit(net, make(groups(net), weight_decay=0.0), di=di, compile_options={"lr_scheduler": tables})
    optimizer = make(groups(other), weight_decay=0.0)
    for update, (x, y) in enumerate(list(LOADER) * 2):
        optimizer.param_groups[0]["weight_decay"] = decay(update)
        optimizer.zero_grad()
        nn.functional.cross_entropy(other(x), y).backward()
        optimizer.step()
    torch.testing.assert_close(weights(net), weights(other), rtol=0, atol=1e-11)


@pytest.mark.long("ipu-standin")
def test_the_rate_of_the_last_update_is_in_history():
    net = MLP().double()
    _, history = fit(net, "adam", di=5, compile_options={"lr_scheduler": lambda u: 0.1 * 0.5**u})
    assert history.history["learning_rate"] == [0.1 * 0.5**9, 0.1 * 0.5**19]


@pytest.mark.long("ipu-standin")
def test_an_interval_of_epochs_moves_on_at_their_ends():
    net = MLP().double()
    options = {
        "lr_scheduler": partial(StepLR, step_size=1, gamma=0.5),
        "lr_scheduler_interval": "epoch",
    }
    _, history = fit(net, torch.optim.SGD(net.parameters(), 0.8), 3, di=4, compile_options=options)
    assert history.history["learning_rate"] == [0.8, 0.4, 0.2]


@pytest.mark.long("ipu-standin")
def test_a_plateau_is_looked_for_at_epoch_ends():
    """A learning rate that is far too high: the loss does not fall, so the rate does."""
    net = MLP().double()
    options = {
        "lr_scheduler": lambda own: ReduceLROnPlateau(own, factor=0.1, patience=0, threshold=10.0)
    }
    _, history = fit(net, torch.optim.SGD(net.parameters(), 0.5), 3, compile_options=options)
    assert history.history["learning_rate"] == pytest.approx([0.5, 0.05, 0.005])


@pytest.mark.long
def test_a_plateau_watches_the_value_it_is_told_to():
    """Accuracy does not grow elevenfold after the first epoch, so the rate falls after the next."""
    net = MLP().double()
    optimizer = torch.optim.SGD(net.parameters(), 0.5)
    plateau = ReduceLROnPlateau(optimizer, mode="max", factor=0.1, patience=0, threshold=10.0)
    _, history = fit(
        net, optimizer, 3, compile_options={"lr_scheduler": AtEpochEnd(plateau, "accuracy")}
    )
    assert history.history["learning_rate"] == pytest.approx([0.5, 0.5, 0.05])


@pytest.mark.long("ipu-standin")
@pytest.mark.few
@pytest.mark.parametrize("bad", [math.nan, math.inf, -0.1])
@pytest.mark.parametrize("di", [1, 4])
def test_a_rate_that_no_update_can_use_is_found_before_the_first_update(bad, di):
    net = MLP().double()
    before = weights(net).clone()
    options = {"lr_scheduler": lambda u: bad if u == 7 else 0.1}
    with pytest.raises(ConfigurationError, match="update 7"):
        fit(net, "adam", di=di, compile_options=options)
    assert torch.equal(weights(net), before)


@pytest.mark.long("ipu-standin")
def test_a_schedule_that_ends_too_early_is_found_before_the_first_update():
    net = MLP().double()
    before = weights(net).clone()
    options = {"lr_scheduler": partial(OneCycleLR, max_lr=0.1, total_steps=15)}
    with pytest.raises(ConfigurationError, match="15"):
        fit(net, torch.optim.SGD(net.parameters(), 0.1), compile_options=options)
    assert torch.equal(weights(net), before)


@embedded_only("an IPU sees a loss when its update is done")
@pytest.mark.parametrize("late", [False, True], ids=["at once", "late"])
def test_a_failed_execution_leaves_the_schedule_at_the_update_that_failed(late):
    """Whoever lowers the rate and goes on must find the schedule where the weights are."""
    x = X.clone()
    x[27] = math.nan  # in update 5, the second of its execution
    net = MLP().double()
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    scheduler = StepLR(optimizer, 1, gamma=0.5)
    model = ipufit.Model(net)
    model.compile(optimizer, "cross_entropy", lr_scheduler=scheduler)
    model._session.engine.as_device = late
    with pytest.raises(NonFiniteLossError) as caught:
        model.fit(DataLoader(TensorDataset(x, Y), 5), device_iterations=4, seed=1, verbose=0)
    assert caught.value.update == 5
    assert scheduler.last_epoch == 5
    assert optimizer.param_groups[0]["lr"] == 0.1 * 0.5**5


@pytest.mark.long("ipu-standin")
def test_a_second_fit_goes_on_where_the_first_one_stopped():
    net = MLP().double()
    model = ipufit.Model(net)
    model.compile("adam", "cross_entropy", lr_scheduler=lambda u: 0.1 * 0.9**u)
    model.fit(LOADER, epochs=1, verbose=0)
    history = model.fit(LOADER, epochs=1, device_iterations=3, verbose=0)
    assert history.history["learning_rate"] == [0.1 * 0.9**19]
