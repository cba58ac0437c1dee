"""fit_many trains every model as its own fit does, in one program where that is possible."""

import copy
import functools
import math
import warnings

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import ipufit
from ipufit import poptorch
from ipufit.errors import (
    ConfigurationError,
    DataError,
    NonFiniteLossError,
    NotCompiledError,
    UnknownArgumentError,
)
from ipufit.search import fit_many, stacked
from tests.nets import CNN, MLP, Noise, Transformer
from tests.told import message

# Summed in another order.
CAN_DRAW = stacked._CAN_DRAW
CLOSE = {"rtol": 1e-10, "atol": 1e-10}


def data(samples=23):
    """Pictures of one channel and classes; 23 leave a tail in every plan."""
    torch.manual_seed(5)
    x = torch.randn(samples, 1, 3, 4, dtype=torch.float64)
    return x, torch.randint(0, 5, (samples,))


def build(net=MLP, seed=0, optimizer=torch.optim.Adam, lr=0.01, p=None, engine="auto", **options):
    """A compiled model in float64; what is left are arguments of the optimizer or compile."""
    of_optimizer = (
        "momentum",
        "weight_decay",
        "nesterov",
        "betas",
        "dampening",
        "amsgrad",
        "centered",
    )
    settings = {name: options.pop(name) for name in of_optimizer if name in options}
    torch.manual_seed(seed)
    module = net().double()
    for part in module.modules():
        if p is not None and isinstance(part, nn.Dropout):
            part.p = p
    model = ipufit.Model(module, engine=engine)
    made = optimizer(module if optimizer is sgd else module.parameters(), lr=lr, **settings)
    loss = options.pop("loss", "cross_entropy")
    model.compile(made, loss, **{"metrics": ["accuracy"], **options})
    return model


def in_float32(lr, engine="auto"):
    """A compiled model as most are."""
    torch.manual_seed(0)
    module = MLP()
    model = ipufit.Model(module, engine=engine)
    model.compile(torch.optim.Adam(module.parameters(), lr), "cross_entropy")
    return model


@pytest.fixture
def programs(monkeypatch):
    """How many models each program of several models was made for."""
    counts = []
    init = stacked.StackedModels.__init__

    def counted(self, models, orders_differ):
        counts.append(len(models))
        init(self, models, orders_differ)

    monkeypatch.setattr(stacked.StackedModels, "__init__", counted)
    return counts


class Running(nn.Module):
    """A buffer of its own that forward changes in place."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(12))
        self.head = nn.Linear(12, 5)

    def forward(self, x):
        """Take the running mean off."""
        x = x.flatten(1)
        if self.training:
            self.mean.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
        return self.head(x - self.mean)


class Parts(nn.Module):
    """A parameter without dimensions, a frozen one, and one that has two names."""

    def __init__(self):
        super().__init__()
        self.factor = nn.Parameter(torch.ones(()))
        self.offset = nn.Parameter(torch.randn(5), requires_grad=False)
        self.first = nn.Linear(12, 12)
        self.second = nn.Linear(12, 12)
        self.second.weight = self.first.weight
        self.head = nn.Linear(12, 5)

    def forward(self, x):
        """Use all of them."""
        x = self.second(self.first(x.flatten(1)).tanh())
        return self.head(x) * self.factor + self.offset


class Halves(nn.Module):
    """Biases are frozen: all parameters of a group of ``sgd``."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(12, 5)
        self.layer.bias.requires_grad_(False)

    def forward(self, x):
        """Apply the layer."""
        return self.layer(x.flatten(1))


def check(results, grid, x, y, make=build, seed=3, **options):
    """Compare with fits one after another; then train on, which needs all state to be there."""
    plan = {name: options[name] for name in ("batch_size", "ipus") if name in options}
    assert [each.setting for each in results] == grid
    for each in results:
        setting = each.setting
        alone = make(**setting)
        alone.fit(x, y, verbose=0, seed=setting.get("seed", seed), **options)
        assert each.error is None
        assert_same(each.model, alone)
    for model in (each.model, alone):
        model.fit(x, y, verbose=0, seed=1, **plan)
    assert_same(each.model, alone)


def assert_same(model, other):
    """Same values of epochs, weights, buffers, and state of the optimizer."""
    values, others = model.history.history, other.history.history
    assert values.keys() == others.keys()
    for name, each in values.items():
        assert each == pytest.approx(others[name], rel=1e-10, abs=1e-10), name
    tensors, wanted = model.module.state_dict(), other.module.state_dict()
    for name, tensor in tensors.items():
        torch.testing.assert_close(tensor, wanted[name], **CLOSE, msg=name)
    states = [each.optimizer.state_dict()["state"] for each in (model, other)]
    torch.testing.assert_close(*states, **CLOSE)


def sgd(module, lr, **settings):
    """Two groups, of which biases do not decay."""
    biases = [p for name, p in module.named_parameters() if name.endswith("bias")]
    rest = [p for name, p in module.named_parameters() if not name.endswith("bias")]
    groups = [{"params": rest}, {"params": biases, "weight_decay": 0.0, "lr": 2 * lr}]
    return torch.optim.SGD(groups, lr=lr, **settings)


SETTINGS = {
    "sgd": {"optimizer": torch.optim.SGD},
    "momentum": {"optimizer": torch.optim.SGD, "momentum": 0.9, "nesterov": True},
    "dampening": {"optimizer": torch.optim.SGD, "momentum": 0.9, "dampening": 0.5},
    "adam": {},
    "amsgrad": {"amsgrad": True, "betas": (0.8, 0.99)},
    "frozen": {"net": Halves, "optimizer": sgd, "momentum": 0.9},
    "adamw": {"optimizer": torch.optim.AdamW},
    "rmsprop": {"optimizer": torch.optim.RMSprop, "momentum": 0.5, "centered": True},
    "groups": {"optimizer": sgd, "momentum": 0.9},
    "dropout": {"net": CNN, "optimizer": torch.optim.SGD},
    "sums": {
        "reduction": ipufit.Reduction(gradients="sum"),
        "optimizer": torch.optim.SGD,
        "lr": 1e-4,
    },
    "smoothing": {"loss": nn.CrossEntropyLoss(label_smoothing=0.1)},
    "weights of classes": {"loss": nn.CrossEntropyLoss(torch.arange(1.0, 6.0).double())},
    "function": {"loss": lambda prediction, target: prediction[range(len(target)), target].var()},
    "metrics": {"metrics": {"top": "top_2_accuracy", "most": lambda p, t: p.max()}},
    "buffers": {"net": Running},
    "parts": {"net": Parts},
}


@pytest.mark.parametrize("name", [name for name in SETTINGS if name != "dropout" or CAN_DRAW])
def test_each_model_ends_as_its_own_fit_leaves_it(name, programs):
    """Weights, buffers, state and values of epochs; seeds, rates and decays differ."""
    x, y = data()
    rate = SETTINGS[name].get("lr", 0.01)
    grid = [
        {"lr": factor * rate, "seed": seed, **decay}
        for factor, seed, decay in ((1, 0, {}), (2, 1, {"weight_decay": 0.1}))
    ]

    def make(lr, **setting):
        return build(**{**copy.deepcopy(SETTINGS[name]), "lr": lr, **setting})

    options = {"epochs": 2, "batch_size": 4}
    options.update({"validation_split": 0.2} if name == "adam" else {})
    results = ipufit.fit_many(make, grid, x, y, verbose=0, seed=3, **options)
    assert programs == [2]
    check(results, grid, x, y, make, **options)


@pytest.mark.skipif(not CAN_DRAW, reason="with this torch, models with dropout train alone")
@pytest.mark.parametrize(
    "plan",
    [
        {},
        {"device_iterations": 3},
        {"device_iterations": 2, "gradient_accumulation": 2},
        {"device_iterations": 2, "gradient_accumulation": 3, "ipus": 2},
    ],
    ids=str,
)
def test_every_plan_and_its_tails(plan, programs):
    """BatchNorm and dropout at rates of their own, with replicas and smaller last batches."""
    x, y = data()
    grid = [{"p": p, "lr": lr} for p, lr in ((0.1, 0.1), (0.3, 0.01), (0.25, 0.02))]

    def make(p, lr):
        return build(CNN, 2, torch.optim.SGD, lr, p, momentum=0.9)

    options = {"epochs": 2, "batch_size": 3, "seed": 7, **plan}
    results = ipufit.fit_many(make, grid, x, y, verbose=0, **options)
    assert programs == [3]
    check(results, grid, x, y, make, **options)


def test_buffers_of_all_replicas_are_those_of_a_fit(programs):
    """With which a fit with as many replicas goes on."""
    x, y = data()
    grid = [{"lr": 0.1}, {"lr": 0.01}]

    def make(lr):
        return build(Running, 0, torch.optim.SGD, lr)

    options = {"epochs": 2, "batch_size": 3, "seed": 7, "ipus": 2, "gradient_accumulation": 2}
    results = ipufit.fit_many(make, grid, x, y, verbose=0, **options)
    assert programs == [2]
    check(results, grid, x, y, make, **options)


def test_betas_and_rates_of_dropout_may_differ_where_a_group_is_frozen(programs):
    """Numbers of an optimizer in a tuple, of one group among others."""
    x, y = data()
    grid = [{"betas": betas} for betas in ((0.8, 0.99), (0.9, 0.999))]
    results = ipufit.fit_many(build, grid, x, y, verbose=0, seed=3, epochs=2)
    assert programs == [2]
    check(results, grid, x, y, epochs=2)


@pytest.mark.parametrize(
    "options",
    [
        {"loading": ipufit.Loading(fast_dev_run=True), "validation_split": 0.2},
        {"loading": ipufit.Loading(fast_dev_run=2)},
        {"loading": ipufit.Loading(overfit_batches=2)},
        {"loading": ipufit.Loading(limit_train_batches=3)},
        {"steps_per_epoch": 2},
    ],
    ids=str,
)
def test_shorter_epochs_are_those_of_a_fit(options, programs):
    """A trial has as many executions as that of one model, with as many updates."""
    x, y = data()
    options = {"epochs": 2, "batch_size": 4, **options}
    grid = [{"lr": 0.1}, {"lr": 0.01}]
    results = ipufit.fit_many(build, grid, x, y, verbose=0, seed=3, **options)
    assert programs == [2]
    check(results, grid, x, y, **options)


def test_blocks_of_the_module_are_looked_for_in_one_model(programs):
    """Where PopTorch's stand-in is loaded, IPUs that are given are shared out to its blocks."""
    assert poptorch.Block
    x, y = data()
    grid = [{"lr": 0.1}, {"lr": 0.01}]
    options = {"epochs": 1, "batch_size": 3, "seed": 7, "ipus": 2}
    results = ipufit.fit_many(build, grid, x, y, verbose=0, **options)
    assert programs == [2]
    check(results, grid, x, y, build, **options)


def test_a_dict_of_lists_stands_for_all_combinations():
    """In the order of its names, the last one fastest, as the settings of the results say."""
    x, y = data(8)
    results = ipufit.fit_many(build, {"lr": [0.1, 0.2], "seed": range(2)}, x, y, verbose=0)
    wanted = [{"lr": lr, "seed": seed} for lr in (0.1, 0.2) for seed in (0, 1)]
    assert [each.setting for each in results] == wanted
    assert [each.model.history.params["seed"] for each in results] == [0, 1, 0, 1]


def test_large_values_of_a_setting_are_shown_by_their_beginning():
    """A tensor of many numbers would hide the others."""
    result = ipufit.fit_many(
        lambda lr, initial: build(lr=lr),
        [{"lr": 0.1, "initial": torch.arange(900)}],
        *data(),
        verbose=0,
    )[0]
    shown = f"lr=0.1, initial=tensor([ {', '.join(map(str, range(14)))}, [...]: loss="
    assert str(result).startswith(shown)


def test_a_loss_that_is_no_number_ends_one_model_alone():
    """The others end as ever, and the table has no values of it."""
    x, y = data()
    grid = [{"lr": 0.1}, {"lr": 1e308}, {"lr": 0.2}]

    def make(lr):
        return build(Running, 0, torch.optim.SGD, lr)

    options = {"epochs": 2, "batch_size": 4, "device_iterations": 3}
    results = ipufit.fit_many(make, grid, x, y, verbose=0, seed=3, **options)
    error = results[1].error
    assert isinstance(error, NonFiniteLossError)
    assert str(error) == (
        "the loss became nan in epoch 1. Look for a learning rate that is too high, a log or "
        "division of zero, or non-finite data."
    )
    assert error.epoch == 0
    rest = [results[0], results[2]]
    check(rest, [grid[0], grid[2]], x, y, make, seed=3, **options)
    assert results.best("loss").error is None
    assert results[1].values == {}
    assert str(results[1]) == f"lr=1e+308: {error}"


def test_models_of_another_program_train_beside_the_others(programs):
    """Two widths make two programs; one that nobody shares runs by itself, and is named."""
    x, y = data()

    def make(width, lr=0.1):
        def net():
            return nn.Sequential(nn.Flatten(), nn.Linear(12, width), nn.Linear(width, 5))

        return build(net, 0, torch.optim.SGD, lr)

    grid = [{"width": 3}, {"width": 4}, {"width": 3, "lr": 0.2}, {"width": 4, "lr": 0.3}]
    results = ipufit.fit_many(make, grid, x, y, verbose=0, seed=3, epochs=2)
    assert programs == [2, 2]
    check(results, grid, x, y, make, seed=3, epochs=2)
    grid = [{"width": 3}, {"width": 4}, {"width": 3, "lr": 0.2}]
    with pytest.warns(UserWarning, match="one after another") as caught:
        results = ipufit.fit_many(make, grid, x, y, verbose=0, seed=3, epochs=2)
    assert [str(each.message) for each in caught] == [
        "1 of 3 models train one after another (number 1): no other model has the same "
        "layer '1', layer '2', tensor '1.weight'."
    ]
    check(results, grid, x, y, make, seed=3, epochs=2)


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("as_dataset", [True, False])
def test_samples_come_in_the_order_of_each_model(shuffle, as_dataset, programs):
    """Arrays and datasets of tensors, with and without an order for each model."""
    x, y = data()
    samples = (TensorDataset(x, y), None) if as_dataset else (x, y)
    grid = [{"lr": 0.1, "seed": 3}, {"lr": 0.1, "seed": 4}]
    options = {"batch_size": 8, "shuffle": shuffle, "epochs": 2, "validation_data": (x, y)}
    results = ipufit.fit_many(build, grid, *samples, verbose=0, **options)
    assert programs == [2]
    check(results, grid, *samples, **options)


def test_inputs_by_name_and_several_of_them(programs):
    """Dicts go to the parameters of forward."""

    class Two(nn.Module):
        """Takes two inputs."""

        def __init__(self):
            super().__init__()
            self.head = nn.Linear(12, 5)

        def forward(self, second, first):
            """Subtract one from the other."""
            return self.head((first - 2 * second).flatten(1))

    x, y = data()
    grid = [{"lr": 0.1}, {"lr": 0.2}]

    def make(lr):
        return build(Two, lr=lr)

    inputs = {"first": x, "second": x.flip(0)}
    results = ipufit.fit_many(make, grid, inputs, y, verbose=0, seed=3, batch_size=8)
    assert programs == [2]
    check(results, grid, inputs, y, make, batch_size=8)


class Branch(nn.Module):
    """Depends on a value."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(12, 5)

    def forward(self, x):
        """Go by the sign of a sum."""
        x = x.flatten(1)
        return self.layer(x if x.sum() > 0 else -x)


class Large(nn.Module):
    """More parameters than gain by others."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(12, 2000), nn.Linear(2000, 5))

    def forward(self, x):
        """Apply both layers."""
        return self.layers(x)


class Unused(nn.Module):
    """A parameter that the loss does not depend on, which no optimizer moves."""

    def __init__(self):
        super().__init__()
        self.layer, self.rest = nn.Linear(12, 5), nn.Linear(1, 1)

    def forward(self, x):
        """Use one of two layers."""
        return self.layer(x.flatten(1))


class Words(nn.Module):
    """An embedding whose first row stays as it is."""

    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(4, 6, padding_idx=0), nn.Linear(6, 5)

    def forward(self, x):
        """Look up numbers that are made of the signs of the inputs."""
        x = x.flatten(1)
        return self.head(self.embed((x[:, ::2] > 0) + 2 * (x[:, 1::2] > 0)).mean(1))


class Uneven(nn.Module):
    """Parameters of two dtypes."""

    def __init__(self):
        super().__init__()
        self.layer, self.offset = nn.Linear(12, 5), nn.Parameter(torch.zeros(5))

    def double(self):
        """Convert the layer alone."""
        self.layer.double()
        return self

    def forward(self, x):
        """Add what has the other dtype."""
        return self.layer(x.flatten(1)) + self.offset


def fixed():
    """Options of PopTorch that say how many micro-batches an update has."""
    options = poptorch.Options()
    options.Training.gradientAccumulation(3)
    return options


ALONE = {
    "words": ({"net": Words}, "an embedding has a padding_idx"),
    "dtypes": ({"net": Uneven}, "parameters of its optimizer have several dtypes"),
    "options": ({"poptorch": fixed()}, "has settings of a config or poptorch"),
    "parallel": (
        {"parallel": ipufit.Parallel(auto_round_ipus=True)},
        "compile divides the model, or has settings",
    ),
    "last outputs": ({"outputs": "final"}, "compile has options for one model"),
    "attention": ({"net": Transformer}, "torch's attention can't run for several models at once"),
    "clip": ({"clip": ipufit.Clip(norm=1.0)}, "compile has options for one model"),
    "schedule": ({"lr_scheduler": "cosine"}, "{'lr_scheduler': 'Cosine'}."),
    "lamb": ({"optimizer": ipufit.optim.LAMB}, "its optimizer"),
    "own step": ({"optimizer": torch.optim.Adadelta}, "its optimizer"),
    "draws": ({"net": Noise}, "as one, they fail with"),
    "large": ({"net": Large}, "a net of 36,005 parameters is faster by itself"),
    "branch": ({"net": Branch, "run_eagerly": True}, "for one model: {'jit': 'off'}."),
    "unused": ({"net": Unused, "weight_decay": 0.1}, "the loss does not depend on 'rest.weight'"),
}


@pytest.mark.parametrize("name", ALONE)
def test_what_can_not_run_as_one_trains_one_after_another(name):
    """With the same numbers, and a warning that says why."""
    x, y = data()
    options, reason = ALONE[name]

    def make(lr):
        return build(lr=lr, **copy.deepcopy(options))

    with pytest.warns(UserWarning, match="models train one after another") as caught:
        results = ipufit.fit_many(make, {"lr": [0.1, 0.2]}, x, y, verbose=0, seed=3)
    (text,) = [str(each.message) for each in caught]
    assert text.startswith("2 of 2 models train one after another (number 0, 1): ")
    assert reason in text
    check(results, [{"lr": 0.1}, {"lr": 0.2}], x, y, make, seed=3)


class Rest(nn.Module):
    """Attention for small batches alone."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(12, 5)

    def forward(self, x):
        """Look up what the same vectors stand for."""
        x = x.flatten(1)
        if len(x) < 4:
            x = nn.functional.scaled_dot_product_attention(x, x, x)
        return self.layer(x)


@pytest.mark.parametrize("net", [nn.Linear, Words, Noise], ids=["other", "refused", "fails"])
def test_the_warning_comes_before_any_training(net):
    """Who does not want to wait for some of the models can still say so."""

    def make(net, lr):
        if net is nn.Linear:
            net = functools.partial(nn.Sequential, nn.Flatten(), nn.Linear(12, 5))
        return build(net, lr=lr)

    x, y = data()
    grid = [{"net": MLP, "lr": 0.1}, {"net": MLP, "lr": 0.2}, {"net": net, "lr": 0.1}]
    grid += [{"net": net, "lr": 0.2}] * (net is not nn.Linear)
    with pytest.raises(UserWarning, match="one after another") as end:
        ipufit.fit_many(make, grid, x, y, verbose=0, seed=3)
    assert end.value.results == []


@pytest.mark.parametrize("iterations", [100, 1])
def test_a_smaller_last_batch_that_can_not_run_as_one(iterations):
    """It is known before the first update, in whichever execution it comes."""

    def make(lr):
        return build(Rest, lr=lr)

    x, y = data()
    grid = [{"lr": 0.1}, {"lr": 0.2}]
    options = {"batch_size": 4, "epochs": 2, "device_iterations": iterations}
    with pytest.warns(UserWarning, match=r"number 0, 1\): torch's attention can't run"):
        results = ipufit.fit_many(make, grid, x, y, verbose=0, seed=3, **options)
    check(results, grid, x, y, make, **options)


class Scaled(nn.Dropout):
    """Computes with its rate."""

    def forward(self, x):
        """Scale what is left."""
        return super().forward(x) * (1 - self.p)


class Choosing(nn.Dropout):
    """Decides by its rate."""

    def forward(self, x):
        """Leave small rates out."""
        return x if self.p == 0.1 else super().forward(x)


class Weighing(nn.Module):
    """A loss with a buffer."""

    def __init__(self, factor):
        super().__init__()
        self.register_buffer("factor", torch.tensor(factor))

    def forward(self, prediction, target):
        """Multiply with the buffer."""
        return nn.functional.cross_entropy(prediction, target) * self.factor


class Times:
    """A loss that is an object with a number."""

    def __init__(self, factor):
        self.factor = factor

    def __call__(self, prediction, target):
        return nn.functional.cross_entropy(prediction, target) * self.factor

    def __repr__(self):
        return "Times()"


def dropout(kind):
    return lambda p: build(lambda: nn.Sequential(nn.Flatten(), kind(p), nn.Linear(12, 5)))


def classes(power):
    return build(loss=nn.CrossEntropyLoss(torch.arange(1.0, 6.0).double() ** power))


DIFFERENT = {
    "a rate that is a factor": (dropout(Scaled), "p", "for -: 'int' and '_RatesByModel'"),
    "a rate that decides": (dropout(Choosing), "p", "forward depends on the rate of a dropout"),
    "weights of classes": (classes, "power", "no other model has the same loss"),
    "a buffer of the loss": (
        lambda factor: build(loss=Weighing(factor)),
        "factor",
        "no other model has the same loss",
    ),
    "an object as a loss": (
        lambda factor: build(loss=Times(factor)),
        "factor",
        "no other model has the same values that forward and loss read",
    ),
}


@pytest.mark.parametrize("name", DIFFERENT)
def test_what_differs_trains_one_after_another(name):
    """Models that compute with other numbers are not one program."""
    x, y = data()
    make, argument, reason = DIFFERENT[name]
    grid = [{argument: value} for value in (0.1, 0.6)]
    with pytest.warns(UserWarning, match="one after another") as caught:
        results = ipufit.fit_many(make, grid, x, y, verbose=0, seed=3, epochs=2)
    assert all(reason in str(each.message) for each in caught)
    check(results, grid, x, y, make, epochs=2)


def test_parameters_of_a_loss_train_one_after_another():
    """They are moved with those of the net."""

    class Shifted(nn.Module):
        def __init__(self):
            super().__init__()
            self.shift = nn.Parameter(torch.zeros(5, dtype=torch.float64))

        def forward(self, prediction, target):
            return nn.functional.cross_entropy(prediction + self.shift, target)

    def make(lr):
        torch.manual_seed(0)
        net, loss = MLP().double(), Shifted()
        model = ipufit.Model(net)
        model.compile(torch.optim.SGD([*net.parameters(), *loss.parameters()], lr), loss)
        return model

    x, y = data()
    grid = [{"lr": 0.1}, {"lr": 0.2}]
    with pytest.warns(UserWarning, match="its optimizer trains parameters of the loss"):
        results = ipufit.fit_many(make, grid, x, y, verbose=0, seed=3)
    check(results, grid, x, y, make)


class Squares(Dataset):
    """Samples that are made one by one."""

    def __len__(self):
        return 12

    def __getitem__(self, index):
        return torch.full((12,), index / 12, dtype=torch.float64), index % 5


@pytest.mark.parametrize("kind", ["weights", "dataset", "weights of a dataset", "validation"])
def test_data_that_can_not_be_stacked_trains_one_after_another(kind):
    """Weights of samples, and samples that code makes."""
    x, y = data()
    samples, options, reason = (x, y), {"sample_weight": torch.rand(23)}, "samples have weights"
    if kind == "dataset":
        samples, options, reason = (Squares(), None), {}, "a Squares makes its samples one by one"
    if kind == "weights of a dataset":
        samples, options = (TensorDataset(x, y, torch.rand(23)), None), {}
    if kind == "validation":
        options = {"validation_data": (x, y, torch.rand(23)), "epochs": 2}
    with pytest.warns(UserWarning, match=f"number 0, 1\\): {reason}"):
        results = ipufit.fit_many(build, {"lr": [0.1, 0.2]}, *samples, verbose=0, seed=3, **options)
    check(results, [{"lr": 0.1}, {"lr": 0.2}], *samples, **options)


def test_another_engine_trains_one_after_another():
    """The stand-in for an IPU has a device for each program."""
    x, y = data(8)
    with pytest.warns(UserWarning, match="number 0, 1\\): several models train as one on a CPU"):
        results = ipufit.fit_many(
            lambda lr: in_float32(lr, "ipu-standin"), {"lr": [0.1, 0.2]}, x.float(), y, seed=0
        )
    assert [each.error for each in results] == [None, None]


def test_the_results_are_a_table(capsys):
    """A line for each setting with its last values, one for each epoch, and the best of all."""
    x, y = data()
    results = ipufit.fit_many(
        build, {"lr": [0.001, 0.1]}, x, y, epochs=2, seed=0, validation_split=0.2
    )
    losses = [each.model.history.history["val_loss"] for each in results]
    lines = capsys.readouterr().err.splitlines()
    assert lines == [
        f"epoch {epoch + 1}: 2 models, val_loss from {min(both):.4g} "
        f"(lr={0.001 if both[0] < both[1] else 0.1}) to {max(both):.4g}"
        for epoch, both in enumerate(zip(*losses))
    ]
    best = min(results, key=lambda each: each.values["val_loss"])
    assert results.best() is best
    assert results.best("val_accuracy").values["val_accuracy"] == max(
        each.values["val_accuracy"] for each in results
    )
    values = results[0].values
    assert [*values] == ["loss", "accuracy", "val_loss", "val_accuracy"]
    first, _ = str(results).splitlines()
    assert first == "lr=0.001: " + ", ".join(f"{name}={v:.4g}" for name, v in values.items())
    about = results[1].model.history.params
    assert about["directions"]["val_accuracy"] == "max"
    assert about["metrics"] == ["loss", "accuracy", "val_loss", "val_accuracy"]
    assert results[1].model.history.best_epoch("val_loss") in (0, 1)


def test_lines_of_epochs_say_which_models_they_are_of(capsys):
    """Where there are several groups; one number of models may be that of each."""
    x, y = data()
    ipufit.fit_many(build, {"net": [MLP, Halves], "lr": [0.1, 0.2]}, x, y, epochs=2, seed=0)
    lines = capsys.readouterr().err.splitlines()
    assert [line.partition(", loss from ")[0] for line in lines] == [
        f"group {group} of 2, epoch {epoch}: 2 models" for group in (1, 2) for epoch in (1, 2)
    ]


class Ending(Dataset):
    """Ends training with an error when a sample is read for the last time."""

    def __init__(self, error, reads):
        self.error, self.reads, self.samples = error, reads, [*zip(*data(8))]

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, index):
        self.reads -= 1
        if self.reads < 0:
            raise self.error
        return self.samples[index]


def test_ctrl_c_keeps_models_that_train_one_after_another():
    """Hours may be in them; a program that does not catch the interrupt prints what it has."""
    grid = {"lr": [0.01, 0.02, 0.03]}
    reads = 8 * 3 + 4  # two epochs of the first model, and one of the second
    with pytest.warns(UserWarning, match="3 of 3 models"), pytest.raises(KeyboardInterrupt) as end:
        ipufit.fit_many(build, grid, Ending(KeyboardInterrupt(), reads), epochs=2, verbose=0)
    results = end.value.results
    assert [each.setting for each in results] == [{"lr": 0.01}, {"lr": 0.02}]
    assert [each.model.history.epoch for each in results] == [[0, 1], [0]]
    assert results.best("loss") in results
    text = f"Ctrl-C ends fit_many; 2 of 3 models have finished an epoch\n{results}"
    assert str(end.value) == text


def test_ctrl_c_keeps_models_that_train_as_one(monkeypatch):
    """Those of another structure have not begun."""
    x, y = data()

    def press(line):
        raise KeyboardInterrupt

    monkeypatch.setattr(fit_many, "say", press)
    grid = {"lr": [0.01, 0.02], "net": [MLP, CNN]}
    with pytest.raises(KeyboardInterrupt, match="; 2 of 4 models have finished an epoch\n") as end:
        ipufit.fit_many(build, grid, x, y, epochs=3, seed=0, verbose=2)
    results = end.value.results
    assert [each.setting for each in results] == [{"lr": lr, "net": MLP} for lr in (0.01, 0.02)]
    check(results, [each.setting for each in results], x, y)


def test_an_error_keeps_models_that_were_trained():
    """What one model can't do takes nothing from those before it."""
    with pytest.warns(UserWarning, match="2 of 2 models"), pytest.raises(DataError) as end:
        ipufit.fit_many(
            build, {"lr": [0.01, 0.02]}, Ending(OSError("no such file"), 8 + 6), verbose=0
        )
    assert [each.setting for each in end.value.results] == [{"lr": 0.01}]


def test_best_of_nothing_known_says_what_there_is():
    """Names of values."""
    x, y = data(8)
    results = ipufit.fit_many(build, [{"lr": 0.1}, {"lr": 0.2}], x, y, seed=0, verbose=0)
    assert message(results.best, "val_loss") == (
        "the history must have a value of that name, got 'val_loss'. It has accuracy, loss."
    )


def on(net, lr):
    model = ipufit.Model(net)
    model.compile(torch.optim.SGD(net.parameters(), lr), "cross_entropy")
    return model


REFUSED = {
    "an empty grid": ({"grid": []}, "grid must be a list of settings"),
    "a grid of numbers": ({"grid": [1, 2]}, "grid must be a list of settings"),
    "a grid of a number": ({"grid": {"lr": 1}}, "with at least one setting, got {'lr': 1}"),
    "a checkpoint": ({"checkpoint": "runs"}, "but checkpoint would be those of one"),
    "callbacks": (
        {"callbacks": [ipufit.callbacks.EarlyStopping("loss")], "checkpoint": "runs"},
        "fit_many trains several models, but callbacks and checkpoint would be those of one. Leave "
        "it out, or call fit for each model.",
    ),
    "a grid of a name": ({"grid": {"optimizer": "adam"}}, "got {'optimizer': 'adam'}"),
    "a call": (
        {"build": 3},
        "build must be a function that makes a compiled ipufit.Model, got 3. Pass the function "
        "itself, without calling it.",
    ),
    "one net for all": (
        {"build": functools.partial(on, MLP().double())},
        "build must make a net of its own for each setting, but those of {'lr': 0.1} and "
        "{'lr': 0.2} have parameters in common. Make the net inside of build.",
    ),
    "a seed that is none": (
        {"grid": [{"lr": 0.1, "seed": 1.5}]},
        "seed must be an integer or None, got 1.5.",
    ),
    "a batch size that is none": ({"batch_size": "4"}, "batch_size must be an integer of at"),
    "no model": ({"build": lambda lr: None}, "ipufit.Model, got NoneType for {"),
    "a net": (
        {"build": lambda lr: MLP()},
        "build must return a compiled ipufit.Model, got MLP for {'lr': 0.1}. Make the model, call "
        "its compile, and return it.",
    ),
    "a name that build has not": (
        {"build": lambda lr, p=0: 1 / p, "grid": [{"lr": 0.1, "seed": 1}, {"lr": 0.2, "width": 3}]},
        "build must take the values of each setting by name, but build(lr, p) can't be called with "
        "lr, width: got an unexpected keyword argument 'width'. Rename values in grid, or "
        "parameters of build.",
    ),
    "a name that the grid has not": (
        {"build": lambda lr: 1 / 0, "grid": [{}]},
        "but build(lr) can't be called with nothing: missing a required argument: 'lr'. Rename",
    ),
    "not compiled": (
        {"build": lambda lr: ipufit.Model(nn.Linear(1, 1))},
        "fit_many needs a compiled model. Call model.compile",
    ),
    "a bad option": ({"epochs": -1}, "epochs must be"),
}


@pytest.mark.parametrize("name", ["a grid of tensors", "no model", "one net for all"])
def test_errors_show_the_beginning_of_large_settings(name):
    """They printed hundreds of lines of a tensor, and what to do behind them."""
    x, y = data(8)
    weights, net = torch.rand(900), MLP().double()
    grid = [{"lr": 0.1, "weights": weights}, {"lr": 0.2, "weights": weights}]
    makes = {
        "no model": lambda lr, weights: None,
        "one net for all": lambda lr, weights: on(net, lr),
    }
    arguments = makes.get(name, build), [weights] if name == "a grid of tensors" else grid
    with pytest.raises(ConfigurationError) as raised:
        ipufit.fit_many(*arguments, x, y, seed=0, verbose=0)
    text = str(raised.value)
    assert "tensor([" in text
    assert "[...]" in text
    assert "\n" not in text
    assert len(text) < 500


@pytest.mark.parametrize("name", REFUSED)
def test_arguments_that_can_not_work_are_refused_before_training(name):
    """With what was expected, what came, and what to do."""
    x, y = data(8)
    options, text = REFUSED[name]
    arguments = {"build": build, "grid": {"lr": [0.1, 0.2]}, **options}
    with pytest.raises((ConfigurationError, NotCompiledError)) as raised:
        ipufit.fit_many(arguments.pop("build"), arguments.pop("grid"), x, y, verbose=0, **arguments)
    assert text in str(raised.value)


def test_batches_and_unknown_arguments_are_refused():
    """A loader is one for all models; names are those of fit."""
    x, y = data(8)
    with pytest.raises(DataError, match="done with a DataLoader: it comes in batches, or has no"):
        ipufit.fit_many(build, {"lr": [0.1]}, DataLoader(TensorDataset(x, y)))
    with pytest.raises(UnknownArgumentError, match="epoch"):
        ipufit.fit_many(build, {"lr": [0.1, 0.2]}, x, y, verbose=0, epoch=3)


def test_what_is_wrong_with_data_is_told_as_for_one_model():
    """With the names of its layers and the shapes of its samples, and without a warning."""
    x, y = data(8)
    texts = []
    for fit in (
        lambda: ipufit.fit_many(build, {"lr": [0.1, 0.2]}, x[..., :3], y, verbose=0, seed=0),
        lambda: build().fit(x[..., :3], y, verbose=0, seed=0),
    ):
        texts.append(message(fit, kind=DataError))
    assert texts[0] == texts[1]
    assert "layer 'layers.0'" in texts[0]


def test_seeds_are_drawn_before_models_are_made():
    """A build that seeds the generator for its weights would give all of them the same one."""
    x, y = data(8)
    seeds = []
    for _ in range(2):
        torch.manual_seed(1)
        results = ipufit.fit_many(build, [{"lr": 0.1}] * 2, x, y, verbose=0)
        seeds.append([each.seed for each in results])
    assert seeds[0] == seeds[1]
    assert seeds[0][0] != seeds[0][1]


def test_one_setting_is_nothing_to_warn_of():
    """No other model could be one with it."""
    x, y = data(8)
    (result,) = ipufit.fit_many(build, [{"lr": 0.1}], x, y, verbose=0, seed=3)
    check([result], [{"lr": 0.1}], x, y)


def test_float32_agrees_near_rounding_and_nothing_is_warned_of():
    """As people train."""
    x, y = data()

    grid = [{"lr": lr} for lr in (0.01, 0.02)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        results = ipufit.fit_many(in_float32, grid, x.float(), y, epochs=3, seed=3, verbose=0)
    for each in results:
        alone = in_float32(**each.setting)
        alone.fit(x.float(), y, epochs=3, seed=3, verbose=0)
        for one, other in zip(each.model.module.parameters(), alone.module.parameters()):
            torch.testing.assert_close(one, other)
        assert not math.isnan(each.model.history.history["loss"][-1])
