"""Models of fit_many whose settings are drawn at random end as their own fits leave them."""

import random
import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

import ipufit
from tests.nets import CNN, MLP
from tests.search.test_fit_many import CAN_DRAW, Halves, Parts, Running, Words, assert_same, data


class Numbers(nn.Module):
    """An embedding, and rates of dropout in two places."""

    def __init__(self):
        super().__init__()
        self.embed, self.drop, self.head = nn.Embedding(4, 6), nn.Dropout(0.2), nn.Linear(6, 5)
        self.last = nn.Dropout(0.0)

    def forward(self, x):
        """Look up numbers that are made of the signs of the inputs."""
        x = x.flatten(1)
        x = self.embed((x[:, ::2] > 0) + 2 * (x[:, 1::2] > 0)).mean(1)
        return self.last(self.head(self.drop(x)))


class Pictures(CNN):
    """Without a bias before BatchNorm: its gradient is nothing but rounding."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 2, bias=False)


def own_loss(prediction, target):
    return functional.cross_entropy(prediction, target) + 0.1 * prediction.square().mean()


NETS = (MLP, Pictures, Pictures, Running, Parts, Halves, Numbers, Numbers, Words)
OPTIMIZERS = {
    torch.optim.SGD: ("momentum", 0.9),
    torch.optim.RMSprop: ("momentum", 0.5),
    torch.optim.Adam: ("betas", (0.8, 0.99)),
    torch.optim.AdamW: ("betas", (0.9, 0.9)),
}


def draw(seed):
    """Draw a function that makes models, a grid for it, and arguments of fit."""
    draws = random.Random(seed)
    net, kind = draws.choice(NETS if CAN_DRAW else NETS[:1]), draws.choice([*OPTIMIZERS])
    has_groups = draws.random() < 0.4
    loss = draws.choice(["cross_entropy", own_loss, "smooth", "weighted"])
    options = {"jit": draws.choice(["auto", "graph", "kernels"])}
    options["metrics"] = draws.choice([[], ["accuracy"], ["accuracy", "top_2_accuracy"]])
    how = draws.choice([{}, {}, {"gradients": "sum"}, {"normalize": "micro_batches"}])
    if how:
        options["reduction"] = ipufit.Reduction(**how)
    if draws.random() < 0.1:
        options["clip"] = ipufit.Clip(global_norm=0.1)

    def build(lr, seed, decay=0.0, moves=False, p=None, power=1):
        torch.manual_seed(seed)
        module = net().double()
        for part in module.modules():
            if p is not None and isinstance(part, nn.Dropout):
                part.p = p
        name, value = OPTIMIZERS[kind]
        first, *rest = module.parameters()
        groups = [{"params": rest, "lr": 2 * lr}, {"params": [first], "weight_decay": 0.0}]
        settings = {"lr": lr, "weight_decay": decay, **({name: value} if moves else {})}
        optimizer = kind(groups if has_groups else [first, *rest], **settings)
        losses = {
            "smooth": nn.CrossEntropyLoss(label_smoothing=0.1),
            "weighted": nn.CrossEntropyLoss(torch.arange(1.0, 6.0).double() ** power),
        }
        model = ipufit.Model(module)
        model.compile(optimizer, losses.get(loss, loss), **options)
        return model

    grid = []
    for _ in range(draws.choice([2, 3, 4])):
        setting = {"lr": draws.choice([0.001, 0.003, 0.01]), "seed": draws.randrange(3)}
        more = {"decay": 0.1, "moves": True, "p": draws.choice([0.0, 0.1, 0.5]), "power": 2}
        setting.update({name: value for name, value in more.items() if draws.random() < 0.3})
        grid.append(setting)
    x, y = data(draws.choice([12, 17, 23]))
    samples = draws.choice([(x, y), (x.numpy(), y.numpy()), (TensorDataset(x, y), None)])
    arguments = {"epochs": draws.choice([1, 2, range(1, 3)]), "batch_size": draws.choice([3, 5])}
    more = {
        "device_iterations": draws.choice([1, 2, 5]),
        "gradient_accumulation": draws.choice([2, 3]),
        "ipus": draws.choice([2, 4]),
        "shuffle": draws.choice([True, False]),
        "validation_data": draws.choice([(x, y), (x, y, torch.rand(len(x)))]),
        "steps_per_epoch": 2,
    }
    arguments.update({name: value for name, value in more.items() if draws.random() < 0.35})
    if "steps_per_epoch" not in arguments:
        loading = draws.choice([{}, {}, {"limit_train_batches": 2}, {"fast_dev_run": True}])
        arguments["loading"] = ipufit.Loading(**loading)
    return build, grid, samples, arguments


def check(seed):
    build, grid, samples, arguments = draw(seed)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*one after another")
        results = ipufit.fit_many(build, grid, *samples, verbose=0, **arguments)
    for setting, result in zip(grid, results):
        alone = build(**setting)
        alone.fit(*samples, verbose=0, seed=setting["seed"], **arguments)
        assert_same(result.model, alone)
        # All state must be there to go on.
        plan = {name: arguments[name] for name in ("ipus", "batch_size") if name in arguments}
        for model in (result.model, alone):
            model.fit(*samples, verbose=0, seed=1, **plan)
        assert_same(result.model, alone)


@pytest.mark.parametrize("seed", range(6))
def test_any_settings_end_as_their_own_fits(seed):
    """Nets, numbers of optimizers, losses, plans, data, validation and shorter epochs."""
    check(seed)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(6, 150))
def test_many_more_settings_end_as_their_own_fits(seed):
    """More of them."""
    check(seed)
