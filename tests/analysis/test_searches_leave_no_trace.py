"""A search for a learning rate or a batch size between two fits."""

import random

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import ipufit

X = torch.randn(24, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
Y = X[:, :2].sin()


# By an IPU.
REFUSED = {
    "ema": ipufit.EMA(momentum=0.8),
    "precision": ipufit.Precision(loss_scale=ipufit.LossScale(256.0, growth_interval=3)),
}


def trained(engine):
    """A model after its first fit, with all that an update can have."""
    torch.manual_seed(1)
    model = ipufit.Model(nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.2), nn.Linear(4, 2)).double())
    model.compile(
        lambda p: torch.optim.Adam(p, lr=0.05),
        "mse",
        **(REFUSED if engine == "embedded" else {}),
        lr_scheduler=lambda o: torch.optim.lr_scheduler.LinearLR(o, 0.1, total_iters=20),
        clip=ipufit.Clip(global_norm=0.5),
    )
    model.fit(loader(), verbose=0)
    return model


def loader():
    """Shuffled by torch's generator."""
    return DataLoader(TensorDataset(X, Y), batch_size=4, shuffle=True)


SEARCHES = {
    "find_lr": lambda model, seed: model.find_lr(loader(), updates=5, seed=seed),
    "find_batch_size": lambda model, seed: model.find_batch_size(
        X, Y, effective_batch_size=8, seed=seed
    ),
}


@pytest.mark.long
@pytest.mark.parametrize("seed", [None, 3])
@pytest.mark.parametrize("search", SEARCHES.values(), ids=SEARCHES)
def test_a_search_leaves_no_trace_in_the_next_fit(search, seed, engine):
    """Without a seed too: the next fit draws its own seed from torch's generator."""
    model, other = trained(engine), trained(engine)
    random.seed(2)
    torch.manual_seed(2)
    before = torch.get_rng_state(), random.getstate()
    search(model, seed)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]
    history = model.fit(loader(), epochs=2, verbose=0).history
    torch.manual_seed(2)
    assert other.fit(loader(), epochs=2, verbose=0).history == history
    for value, expected in zip(model.module.parameters(), other.module.parameters()):
        assert torch.equal(value, expected)
