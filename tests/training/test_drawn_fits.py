"""Fits whose settings are drawn at random equal loops written by hand."""

import copy
import random

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.optim import lr_scheduler

import ipufit
from ipufit.optim.resolve import class_by_name
from tests.nets import MLP
from tests.reference import train

REFUSED = pytest.mark.embedded_only("draws ways to run and bounds that an IPU refuses")

CLOSE = {"rtol": 1e-9, "atol": 1e-10}


class Normed(nn.Module):
    """BatchNorm and dropout."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(12, 8, bias=False)
        self.norm, self.drop = nn.BatchNorm1d(8), nn.Dropout(0.3)
        self.head = nn.Linear(8, 5)

    def forward(self, x):
        """Apply all layers."""
        return self.head(self.drop(torch.relu(self.norm(self.layer(x.flatten(1))))))


class Tied(nn.Module):
    """One weight in two layers, a number and a frozen parameter."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(12, 12), nn.Linear(12, 12)
        self.second.weight = self.first.weight
        self.head, self.factor = nn.Linear(12, 5), nn.Parameter(torch.ones(()))
        self.register_buffer("mean", torch.zeros(12))

    def forward(self, x):
        """Take a running mean off."""
        x = x.flatten(1)
        if self.training:
            self.mean.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
        return self.head(self.second(self.first(x - self.mean).tanh())) * self.factor


class Recurrent(nn.Module):
    """A recurrent layer over the rows of a picture."""

    def __init__(self):
        super().__init__()
        self.layer, self.head = nn.GRU(4, 6, batch_first=True), nn.Linear(6, 5)

    def forward(self, x):
        """Return what is made of the last row."""
        return self.head(self.layer(x.squeeze(1))[0][:, -1])


NETS = (MLP, Normed, Tied, Recurrent)
OPTIMIZERS = (
    *("sgd", "adam", "adamw", "rmsprop", "lamb", "adagrad", "adadelta", "adamax", "nadam", "radam"),
    *("asgd", "adafactor"),
)
SCHEDULES = {
    "steps": lambda optimizer: lr_scheduler.StepLR(optimizer, 2, 0.5),
    "inverse": lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step)),
    "cosine": lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, 5),
}
CLIPS = {
    "norm": lambda parameters, most: [nn.utils.clip_grad_norm_([p], most) for p in parameters],
    "global_norm": nn.utils.clip_grad_norm_,
    "value": nn.utils.clip_grad_value_,
}


def data(draws):
    generator = torch.Generator().manual_seed(draws.randrange(99))
    samples = draws.choice([12, 16, 23, 30])
    x = torch.randn(samples, 1, 3, 4, dtype=torch.float64, generator=generator)
    return x, torch.randint(0, 5, (samples,), generator=generator)


def make(net, name, draws):
    """Make a net with its optimizer; the same ones for the same draws."""
    torch.manual_seed(draws.randrange(99))
    module = net().double()
    options = {"lr": draws.choice([0.1, 0.01, 0.003])}
    if name in ("sgd", "rmsprop"):
        options["momentum"] = draws.choice([0, 0.5])
    if name in ("sgd", "rmsprop", "adam", "adamw"):
        options["weight_decay"] = draws.choice([0, 0.1])
    first, *rest = module.parameters()
    groups = [{"params": rest}, {"params": [first], "lr": options["lr"] / 2}]
    groups = draws.choice([[first, *rest], groups])
    return module, class_by_name(name)(groups, **options)


def check(seed):
    draws = random.Random(seed)
    x, y = data(draws)
    net, name = draws.choice(NETS), draws.choice(OPTIMIZERS)
    state = draws.getstate()
    module, optimizer = make(net, name, draws)
    draws.setstate(state)
    other, other_optimizer = make(net, name, draws)
    schedule, clip = draws.choice([None, *SCHEDULES]), draws.choice([None, *CLIPS])
    momentum, often = draws.choice([None, None, 0.5]), draws.choice([None, 2])
    most, size = {"norm": 0.3, "global_norm": 0.3, "value": 0.02}.get(clip), draws.choice([3, 4, 5])
    while len(x) % size == 1:  # BatchNorm needs two samples
        size += 1
    plan = {"gradient_accumulation": draws.choice([1, 2, 3]), "ipus": draws.choice([1, 2, 4])}
    options, epochs = {}, draws.choice([1, 2, 3])
    if schedule:
        options["lr_scheduler"] = SCHEDULES[schedule](optimizer)
    if clip:
        options["clip"] = ipufit.Clip(**{clip: most})
    if momentum:
        options["ema"] = ipufit.EMA(momentum, often)
    jit = draws.choice(["graph", "kernels", "auto", "off"])
    options.update({"run_eagerly": True} if jit == "off" else {"jit": jit})
    model = ipufit.Model(module)
    model.compile(optimizer, "cross_entropy", **options)
    history = model.fit(
        x,
        y,
        batch_size=size,
        epochs=epochs,
        shuffle=False,
        verbose=0,
        device_iterations=draws.choice([1, 2, 3, 8]),
        seed=seed,
        validation_data=draws.choice([None, (x, y)]),
        **plan,
    )

    scheduler = SCHEDULES[schedule](other_optimizer) if schedule else None
    averages = []

    def finish(parameters, update):
        if clip:
            CLIPS[clip](parameters, most)
        return True

    def after(net, updates):
        if scheduler is not None:
            scheduler.step()
        weights = [p.detach() for p in net.parameters()]
        if momentum and not averages:
            averages.extend(weight.clone() for weight in weights)
        for average, weight in zip(averages, weights):
            average.mul_(momentum).add_(weight, alpha=1 - momentum)
            if often and updates % often == 0:
                weight.copy_(average)

    plan = (plan["gradient_accumulation"], plan["ipus"])
    report = train(
        *(other, other_optimizer, functional.cross_entropy, x, y, epochs, size, *plan),
        seed=seed,
        finish=finish,
        after=after,
    )
    for average, parameter in zip(averages, other.parameters()):
        parameter.data.copy_(average)
    losses = [loss for loss, _ in report]
    assert history.history["loss"] == pytest.approx(losses, rel=1e-9)
    torch.testing.assert_close(dict(module.state_dict()), dict(other.state_dict()), **CLOSE)
    rates = [group["lr"] for group in other_optimizer.param_groups]
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx(rates)


@REFUSED
@pytest.mark.parametrize("seed", range(8))
def test_any_settings_equal_a_loop_by_hand(seed):
    """Nets, optimizers, schedules, clipping, averages, plans, tails and ways to run."""
    check(seed)


@REFUSED
@pytest.mark.long
@pytest.mark.parametrize("seed", range(8, 200))
def test_many_more_settings_equal_a_loop_by_hand(seed):
    """More of them."""
    check(seed)


class Walk:
    """A model and what it should equal, with calls that are made of both."""

    def __init__(self, seed, folder):
        self.draws = draws = random.Random(seed)
        self.x, self.y = data(draws)
        name = draws.choice(["sgd", "adam", "adamw", "rmsprop", "nadam"])
        net = draws.choice([MLP, Tied, Recurrent])
        state = draws.getstate()
        self.module, optimizer = make(net, name, draws)
        draws.setstate(state)
        self.other, self.optimizer = make(net, name, draws)
        self.model = ipufit.Model(self.module)
        jit = draws.choice(["graph", "kernels", "auto", "off"])
        options = {"run_eagerly": True} if jit == "off" else {"jit": jit}
        self.model.compile(optimizer, "cross_entropy", **options)
        self.pairs = [*zip(self.module.parameters(), self.other.parameters())]
        self.path = folder / "weights.safetensors"

    def step(self, x, y):
        self.other.train()
        self.optimizer.zero_grad()
        loss = functional.cross_entropy(self.other(x), y)
        loss.backward()
        self.optimizer.step()
        return loss.item()

    def outputs(self):
        with torch.no_grad():
            return self.other.eval()(self.x)

    def fit(self, size):
        plan = {"batch_size": size, "device_iterations": self.draws.choice([1, 2, 4])}
        history = self.model.fit(self.x, self.y, shuffle=False, seed=0, verbose=0, **plan)
        batches = [*zip(self.x.split(size), self.y.split(size))]
        loss = sum(self.step(x, y) * len(x) for x, y in batches) / len(self.x)
        assert history.history["loss"] == pytest.approx([loss], rel=1e-9)

    def evaluate(self, size):
        loss = self.model.evaluate(self.x, self.y, batch_size=size, verbose=0)["loss"]
        by_hand = functional.cross_entropy(self.outputs(), self.y).item()
        assert loss == pytest.approx(by_hand, rel=1e-9)

    def predict(self, size):
        predictions = self.model.predict(self.x, batch_size=size, verbose=0)
        torch.testing.assert_close(predictions, self.outputs(), **CLOSE)

    def train_on_batch(self, size):
        batch = self.x[:size], self.y[:size]
        loss = self.model.train_on_batch(*batch)["loss"]
        assert loss == pytest.approx(self.step(*batch), rel=1e-9)

    def change_rate(self, size):
        for optimizer in (self.model.optimizer, self.optimizer):
            optimizer.param_groups[0]["lr"] *= 0.5

    def freeze(self, size):
        parameters = self.draws.choice(self.pairs[1:])
        for parameter in parameters:
            parameter.requires_grad_(not parameter.requires_grad)
            parameter.grad = None

    def change_weight(self, size):
        for parameter in self.draws.choice(self.pairs):
            parameter.data = parameter.data * 1.1

    def save_and_load(self, size):
        self.model.save_weights(self.path)
        for parameter in self.module.parameters():
            parameter.data.zero_()
        self.model.load_weights(self.path)

    def change_mode(self, size):
        self.module.train(self.draws.choice([True, False]))

    def load_state(self, size):
        self.model.optimizer.load_state_dict(copy.deepcopy(self.model.optimizer.state_dict()))


CALLS = (
    *(Walk.fit, Walk.fit, Walk.evaluate, Walk.predict, Walk.train_on_batch, Walk.change_rate),
    *(Walk.freeze, Walk.change_weight, Walk.save_and_load, Walk.change_mode, Walk.load_state),
)


def walk(seed, folder):
    """Make calls in an order that is drawn, and compare after each."""
    both = Walk(seed, folder)
    for call in [both.draws.choice(CALLS) for _ in range(8)]:
        call(both, both.draws.choice([3, 4, 5]))
        states = [dict(module.state_dict()) for module in (both.module, both.other)]
        torch.testing.assert_close(*states, **CLOSE)


@REFUSED
@pytest.mark.parametrize("seed", range(5))
def test_calls_in_any_order_equal_a_loop_by_hand(seed, tmp_path):
    """Rates, frozen parameters, weights and states change between them."""
    walk(seed, tmp_path)


@REFUSED
@pytest.mark.long
@pytest.mark.parametrize("seed", range(5, 100))
def test_many_more_calls_equal_a_loop_by_hand(seed, tmp_path):
    """More of them."""
    walk(seed, tmp_path)
