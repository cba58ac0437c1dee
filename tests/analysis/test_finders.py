"""Searches for a learning rate and a batch size leave no trace, and find what a hand loop finds."""

import contextlib
import random
import warnings

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import ipufit
from ipufit.analysis import tuner
from ipufit.errors import ConfigurationError, DataError
from tests.engines import CONFIGURATION_MARKS, EAGER_OR_NOT, but, own_step
from tests.faulty import Net, assert_clean, assert_same_bits, batches, compiled, fit, loader, state
from tests.nets import MLP, data
from tests.reference import train
from tests.told import message

# Drawing draws numbers that nothing depends on, and it is warned of them.
pytestmark = pytest.mark.filterwarnings("ignore:a random number is drawn from:UserWarning")


def generators():
    """States of all global generators of the host."""
    return torch.get_rng_state(), random.getstate(), str(np.random.get_state())


def recorded(engine):
    """How many programs it has made, or None on an IPU, where each search compiles its own."""
    return getattr(engine, "captures", None)


@contextlib.contextmanager
def untouched(model):
    """The block leaves weights, buffers, optimizer, counters, flags and generators alone."""
    before, drawn = state(model), generators()
    session = model._session
    counted = session.updates, session._runs, recorded(session.engine)
    flags = [module.training for module in model.module.modules()]
    grads = [p.grad for p in model.module.parameters()]
    history = model.history
    yield
    assert_same_bits(state(model), before)
    after = generators()
    assert torch.equal(after[0], drawn[0])
    assert after[1:] == drawn[1:]
    assert (session.updates, session._runs, recorded(session.engine)) == counted
    assert [module.training for module in model.module.modules()] == flags
    assert all(p.grad is grad for p, grad in zip(model.module.parameters(), grads))
    assert model.history is history
    assert_clean(model)


class Drawing(Net):
    """Draws from every generator while it is recorded, and fails where it is told to."""

    fails = None

    def forward(self, x):
        random.random()
        np.random.random()
        torch.rand(1)
        if self.fails is not None:
            raise self.fails
        return super().forward(x)


CONFIGURATIONS = {
    "plain": {},
    "schedule": {"lr_scheduler": lambda update: 0.1 * 0.9**update},
    "warm-up": {
        "lr_scheduler": lambda optimizer: torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda update: update / 10
        )
    },
    "averages": {"ema": ipufit.EMA(momentum=0.5, overwrite_frequency=2)},
    "fixed scale": {"precision": ipufit.Precision(loss_scale=64.0)},
    "dynamic scale": {"precision": ipufit.Precision(loss_scale=ipufit.LossScale(2.0**10, 3))},
    "clipped": {"clip": ipufit.Clip(norm=0.1)},
    "eager": {"run_eagerly": True},
    "every n": {"outputs": ipufit.Outputs("every_n", 2)},
    "sums": {"outputs": "sum"},
    "loss module": {"loss": nn.SmoothL1Loss()},
    "adam": {"optimizer": "adam"},
    "lamb": {"optimizer": "lamb"},
}


# An option is searched with as it is trained with, by the program of fit.
@pytest.mark.long
@pytest.mark.parametrize("name", but(CONFIGURATIONS, **CONFIGURATION_MARKS))
def test_a_search_leaves_no_trace_and_the_next_fit_has_the_same_bits(name):
    """A search that shifts a seed or a moment makes every later result irreproducible."""
    work = {"device_iterations": 2, "ipus": 2}

    def trained(searches):
        torch.manual_seed(3)
        model = compiled(**CONFIGURATIONS[name])
        fit(model, loader(16), **work)
        if searches:
            with untouched(model):
                found = model.find_lr(loader(16), updates=7, max_lr=1.0, ipus=2)
                assert len(found.losses) >= 3
            with untouched(model):
                x, y = batches(1, 16)[0]
                model.find_batch_size(x, y, effective_batch_size=8, ipus=2)
        fit(model, loader(16), **work)
        return model

    with_search, without = trained(True), trained(False)
    assert_same_bits(state(with_search), state(without))
    assert with_search.history.history == without.history.history
    assert with_search._session.updates == without._session.updates


@pytest.mark.long
def test_a_search_before_the_first_fit_leaves_no_trace():
    """The optimizer has no state yet, and has none afterwards."""
    model = compiled(Drawing())
    with untouched(model):
        model.find_lr(loader(), updates=5)
    assert model.optimizer.state_dict()["state"] == {}


@pytest.mark.long
def test_a_search_that_diverges_leaves_no_trace():
    """That is how most searches end."""
    model = compiled()
    fit(model)
    with untouched(model):
        found = model.find_lr(loader(40), min_lr=1e-3, max_lr=1e4, updates=60)
    assert found.diverged
    assert len(found.losses) < 60
    assert found.smoothed[-1] > 4 * min(found.smoothed)


@pytest.mark.long
def test_a_search_whose_loss_becomes_infinite_ends_there():
    """Overflow within an update comes before the smoothed loss has grown."""
    model = compiled(loss=lambda p, t: torch.exp((p - t).pow(2).mean()), optimizer="sgd")
    with untouched(model):
        found = model.find_lr(loader(40), min_lr=1e-4, max_lr=1e8, updates=30)
    assert found.diverged
    assert all(np.isfinite(found.losses))


@pytest.mark.few
@pytest.mark.long("ipu-standin")
@pytest.mark.parametrize("error", [ValueError("forward failed"), KeyboardInterrupt()])
def test_a_search_that_fails_leaves_no_trace(error):
    """Wherever it ends."""
    net = Drawing()
    model = compiled(net)
    fit(model)
    net.fails = error
    with untouched(model), pytest.raises(type(error)):
        model.find_lr(loader(), updates=5)


@pytest.mark.long
@pytest.mark.parametrize("searches", ["find_lr", "find_batch_size"])
def test_an_interrupted_search_leaves_no_trace(searches):
    """Ctrl-C in the middle, after some updates."""

    class Interrupted(TensorDataset):
        armed = False
        read = 0

        def __getitem__(self, index):
            self.read += 1
            if self.armed and self.read > 30:
                raise KeyboardInterrupt
            return super().__getitem__(index)

    dataset = Interrupted(*batches(1, 32)[0])
    model = compiled()
    fit(model)
    dataset.armed = True
    calls = {
        "find_lr": lambda: model.find_lr(dataset, batch_size=8, updates=20),
        "find_batch_size": lambda: model.find_batch_size(
            dataset, effective_batch_size=32, start=16
        ),
    }
    with untouched(model), pytest.raises(KeyboardInterrupt):
        calls[searches]()
    assert dataset.read > 30


@pytest.mark.long("ipu-standin")
def test_generators_of_a_loader_are_kept_too():
    """They are the user's, and set the order of the samples of the next fit."""
    orders = []
    for searches in (False, True):
        generator = torch.Generator().manual_seed(5)
        x, y = batches(1, 12)[0]
        shuffled = DataLoader(TensorDataset(x, y), 4, shuffle=True, generator=generator)
        model = compiled()
        if searches:
            before = generator.get_state()
            model.find_lr(shuffled, updates=5)
            assert torch.equal(generator.get_state(), before)
        orders.append([batch[0] for batch in shuffled])
    for left, right in zip(*orders):
        assert torch.equal(left, right)


@pytest.mark.long
@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("accumulation", [1, 2])
def test_the_losses_are_those_of_a_loop_with_these_rates(replicas, accumulation):
    """Otherwise the curve is that of another training."""
    x, y = data(24)
    net = MLP().double()
    model = ipufit.Model(net)
    model.compile(torch.optim.SGD(net.parameters(), 0.3, momentum=0.9), "cross_entropy")
    found = model.find_lr(
        DataLoader(TensorDataset(x, y), 3),
        min_lr=1e-3,
        max_lr=1.0,
        updates=10,
        ipus=replicas,
        gradient_accumulation=accumulation,
    )
    assert not found.diverged
    rates = np.geomspace(1e-3, 1.0, 10)
    np.testing.assert_allclose(found.learning_rates, rates, rtol=1e-12)
    optimizer = torch.optim.SGD(net.parameters(), 0.3, momentum=0.9)
    size, expected = 3 * replicas * accumulation, []
    for update, rate in enumerate(rates):
        optimizer.param_groups[0]["lr"] = rate
        first = update * size % 24
        part = slice(first, first + size)
        (loss, _), *_ = train(
            net, optimizer, nn.functional.cross_entropy, x[part], y[part], 1, 3, accumulation,
            replicas,
        )  # fmt: skip
        expected.append(loss)
    np.testing.assert_allclose(found.losses, expected, rtol=1e-10)
    average = 0.0
    for i, loss in enumerate(expected):
        average = 0.9 * average + 0.1 * loss
        assert found.smoothed[i] == pytest.approx(average / (1 - 0.9 ** (i + 1)), rel=1e-10)


@pytest.mark.long
@pytest.mark.parametrize(
    ("rates", "expected"),
    [((0.1, 0.01), (1.0, 0.1)), ((0.0, 0.5), (0.0, 1.0)), ((0.0, 0.0), (1.0, 1.0))],
)
def test_rates_of_groups_keep_their_ratios(rates, expected, monkeypatch):
    """A frozen group stays frozen; where nothing learns, all groups are tried alike."""
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3))
    groups = [{"params": part.parameters(), "lr": lr} for part, lr in zip(net, rates)]
    model = compiled(net, optimizer=torch.optim.SGD(groups))
    seen = []
    starts = [part.weight.detach().clone() for part in net]
    moved = []

    class Moved(tuner.RangeTest):
        def end_execution(self, epoch, outputs):
            moved.append([(p.weight - s).abs().max().item() for p, s in zip(net, starts)])
            seen.append([group["lr"] for group in model._session._optimizer.param_groups])
            super().end_execution(epoch, outputs)

    monkeypatch.setattr(tuner, "RangeTest", Moved)
    found = model.find_lr(loader(), min_lr=1e-3, max_lr=1e-1, updates=4)
    assert [group["lr"] for group in model.optimizer.param_groups] == list(rates)
    # After an update the optimizer holds the rates of the next one.
    for i, own in enumerate(seen[:-1]):
        for rate, ratio in zip(own, expected):
            assert rate == pytest.approx(ratio * found.learning_rates[i + 1], rel=1e-12)
    assert [amount > 0 for amount in moved[-1]] == [ratio > 0 for ratio in expected]


def test_a_schedule_at_zero_does_not_hide_the_ratios():
    """A warm-up stands at a rate of 0 before the first update."""
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3))
    groups = [{"params": part.parameters(), "lr": lr} for part, lr in zip(net, (0.1, 0.2))]
    optimizer = torch.optim.SGD(groups)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.optim.lr_scheduler.LambdaLR(optimizer, lambda update: update / 10)
    assert [group["lr"] for group in optimizer.param_groups] == [0.0, 0.0]
    assert tuner._ratios(optimizer) == [1.0, 2.0]


def test_data_that_can_be_read_once_is_refused():
    """The search would use it up."""
    model = compiled()
    assert message(model.find_lr, iter(batches(3)), kind=DataError) == (
        "training data must be readable again after a search, got a list_iterator, which can be "
        "read only once. Pass a DataLoader or another object whose __iter__ starts again."
    )


BAD_RANGES = {
    "min_lr must be a positive number, got 0.": {"min_lr": 0},
    "min_lr must be a positive number, got True.": {"min_lr": True},
    "max_lr must be a positive number, got inf.": {"max_lr": float("inf")},
    "max_lr must be a positive number, got '1'.": {"max_lr": "1"},
    "max_lr must be more than min_lr, got 0.1 and 0.1. Try min_lr=1e-7, max_lr=10.": {
        "min_lr": 0.1,
        "max_lr": 0.1,
    },
    "updates must be an integer of at least 3, got 2. 100 gives a clear curve.": {"updates": 2},
    "updates must be an integer of at least 3, got 9.0. 100 gives a clear curve.": {"updates": 9.0},
    "seed must be an integer or None, got 1.5.": {"seed": 1.5},
}


@pytest.mark.parametrize("text", BAD_RANGES)
def test_a_range_that_cannot_be_tested_is_refused(text):
    """Before anything runs."""
    model = compiled()
    with untouched(model), pytest.raises(ConfigurationError) as caught:
        model.find_lr(loader(), **BAD_RANGES[text])
    assert str(caught.value) == text


def test_a_loss_that_is_never_finite_is_told():
    """There is no curve to draw."""
    model = compiled(loss=lambda p, t: (p - t).pow(2).mean() / 0.0)
    with untouched(model), pytest.raises(ConfigurationError) as caught:
        model.find_lr(loader(), min_lr=1e-5)
    assert str(caught.value) == (
        "a range test needs a finite loss at its lowest rate, but the loss was not finite at "
        "1e-05. Look for non-finite data, or lower min_lr."
    )


@own_step
@pytest.mark.parametrize("optimizer", [torch.optim.Adagrad, torch.optim.Adafactor, "muon"])
def test_any_optimizer_has_a_range(optimizer):
    """Recorded or not, one or several; and it is put back as it was."""
    model = compiled(optimizer=optimizer)
    with untouched(model):
        assert len(model.find_lr(loader(), updates=4).losses) == 4


@pytest.mark.long
@pytest.mark.parametrize("name", ["find_lr", "find_batch_size"])
def test_a_search_needs_an_optimizer_and_its_own_time(name):
    """Inside fit, another program has the weights."""
    x, y = batches(1, 16)[0]
    arguments = {"effective_batch_size": 8} if name == "find_batch_size" else {}
    model = compiled(optimizer=None)
    assert message(getattr(model, name), x, y, **arguments) == (
        f"{name} needs an optimizer, but compile got none, which only evaluates and predicts. Call "
        "compile with one, such as optimizer='adam'."
    )
    model = compiled()
    inside = ipufit.callbacks.LambdaCallback(
        on_epoch_end=lambda epoch, logs: getattr(model, name)(x, y, **arguments)
    )
    assert message(fit, model, callbacks=[inside]) == (
        f"{name} was called inside fit, from a callback or the data. Call it after fit has "
        "returned."
    )


class Hungry(nn.Module):
    """Runs out of memory above a number of samples."""

    def __init__(self, most, error=None):
        super().__init__()
        self.head = nn.Linear(4, 3)
        self.most = most
        self.error = error or RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB")

    def forward(self, x):
        if len(x) > self.most:
            raise self.error
        return self.head(x)


@pytest.mark.long
@pytest.mark.parametrize("run_eagerly", EAGER_OR_NOT)
@pytest.mark.parametrize(
    ("most", "batch_size", "accumulation", "sizes"),
    [(8, 8, 2, [2, 4, 8, 16]), (7, 4, 4, [2, 4, 8]), (100, 16, 1, [2, 4, 8, 16])],
)
def test_the_largest_batch_that_fits_is_found(most, batch_size, accumulation, sizes, run_eagerly):
    """Always with the same number of samples per update, or the learning rate would be wrong."""
    model = compiled(Hungry(most), run_eagerly=run_eagerly)
    x, y = batches(1, 32)[0]
    with untouched(model):
        found = model.find_batch_size(x, y, effective_batch_size=32, ipus=2)
    assert (found.batch_size, found.gradient_accumulation) == (batch_size, accumulation)
    assert found.batch_size * found.gradient_accumulation * 2 == 32
    assert [size for size, _ in found.tried] == sizes
    fits = [size <= most for size in sizes]
    assert [rate is not None for _, rate in found.tried] == fits
    assert all(rate > 0 for _, rate in found.tried if rate is not None)


@pytest.mark.long
@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried"),
        RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate"),
    ],
)
def test_every_form_of_the_error_is_known(error):
    """Those of the accelerator, of torch on the host and of Python."""
    model = compiled(Hungry(4, error))
    x, y = batches(1, 32)[0]
    assert model.find_batch_size(x, y, effective_batch_size=32).batch_size == 4


@pytest.mark.long("ipu-standin")
def test_another_error_of_the_module_is_raised():
    """It is no sign of a batch that is too large."""
    error = RuntimeError("a bug")
    model = compiled(Hungry(4, error))
    x, y = batches(1, 32)[0]
    with untouched(model), pytest.raises(RuntimeError, match="a bug"):
        model.find_batch_size(x, y, effective_batch_size=32)


BAD_SIZES = {
    "effective_batch_size must be an integer of at least 1, got 0.": {"effective_batch_size": 0},
    "effective_batch_size must be an integer of at least 1, got 8.0.": {
        "effective_batch_size": 8.0
    },
    "start must be an integer of at least 1, got True.": {
        "effective_batch_size": 8,
        "start": True,
    },
    "effective_batch_size must be a multiple of start × replicas (3 × 2 = 6), got 16. Try 12.": {
        "effective_batch_size": 16,
        "start": 3,
        "ipus": 2,
    },
    "effective_batch_size must be at most the number of samples, 32, got 64. Larger batches "
    "can't be tried with so few samples.": {"effective_batch_size": 64},
    "the smallest micro-batch must fit into memory, but 16 samples do not. Pass a smaller `start`, "
    "or make the module smaller.": {"effective_batch_size": 32, "start": 16},
}


@pytest.mark.parametrize("text", BAD_SIZES)
def test_a_search_for_a_size_that_cannot_work_is_refused(text):
    """With what would work."""
    model = compiled(Hungry(4))
    x, y = batches(1, 32)[0]
    with untouched(model), pytest.raises(ConfigurationError) as caught:
        model.find_batch_size(x, y, **BAD_SIZES[text])
    assert str(caught.value) == text


def test_a_loader_has_its_own_batch_size():
    """So there is nothing to look for."""
    model = compiled()
    assert message(model.find_batch_size, loader(), effective_batch_size=8) == (
        "find_batch_size needs samples, but the training data already comes in batches, from a "
        "DataLoader. Pass tensors, arrays or the dataset."
    )
