"""The engine that shows how one is written: it trains like a loop by hand."""

import copy
import inspect

import pytest
import torch
from torch import nn

import ipufit
from ipufit.engines import Program
from ipufit.engines.program import ForwardingProgram
from ipufit.errors import ConfigurationError, NonFiniteLossError
from ipufit.testing import EagerEngine

X = torch.randn(22, 4, generator=torch.Generator().manual_seed(0))
Y = torch.randn(22, 3, generator=torch.Generator().manual_seed(1))


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3))


def compiled(module=None, **options):
    model = ipufit.Model(module or net(), engine=EagerEngine)
    model.compile(lambda p: torch.optim.Adam(p, lr=0.01), "mse", **options)
    return model


def fit(model, **options):
    arguments = {"batch_size": 4, "shuffle": False, "verbose": 0, **options}
    return model.fit(X, Y, **arguments)


def loop_by_hand(module, epochs):
    """Two micro-batches of four an update; the last update has six samples, in four and two."""
    optimizer = torch.optim.Adam(module.parameters(), lr=0.01)
    means = []
    for _ in range(epochs):
        total = 0.0
        for x, y in zip(X.split(8), Y.split(8)):
            optimizer.zero_grad()
            for micro_x, micro_y in zip(x.split(4), y.split(4)):
                loss = nn.functional.mse_loss(module(micro_x), micro_y)
                (loss * (len(micro_x) / len(x))).backward()
                total += loss.item() * len(micro_x)
            optimizer.step()
        means.append(total / len(X))
    return means


@pytest.mark.long("ipu-standin")
def test_it_trains_evaluates_and_predicts_like_a_loop_by_hand():
    """To the last bit: the same torch operators in the same order."""
    module = net()
    model = compiled(copy.deepcopy(module), metrics=["mae"])
    history = fit(model, gradient_accumulation=2, epochs=3)
    losses = loop_by_hand(module, 3)
    assert history.history["loss"] == losses
    for ours, theirs in zip(model.module.state_dict().values(), module.state_dict().values()):
        assert torch.equal(ours, theirs)
    module.eval()
    with torch.no_grad():
        outputs = module(X)
    assert torch.equal(model.predict(X, batch_size=22, verbose=0), outputs)
    loss, error = model.evaluate(X, Y, batch_size=22, verbose=0).values()
    assert loss == nn.functional.mse_loss(outputs, Y).item()
    assert error == pytest.approx((outputs - Y).abs().mean().item(), rel=1e-6)
    assert all(parameter.grad is None for parameter in model.module.parameters())


def test_it_logs_every_execution():
    model = compiled()
    fit(model, gradient_accumulation=2, device_iterations=2)
    model.predict(X, batch_size=11, verbose=0)
    assert model._session.engine.log == [
        "train: 4 micro-batches, 16 samples",
        "train: 2 micro-batches, 6 samples",
        "predict: 1 micro-batches, 11 samples",
        "predict: 1 micro-batches, 11 samples",
    ]
    assert "calls the module itself" in model._session.explain()


class Logs(nn.Module):
    """Draws random numbers, and logs a value."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(net(), nn.Dropout(0.5))

    def forward(self, x):
        y = self.body(x)
        ipufit.log("size", y.abs().mean())
        return y


@pytest.mark.long("ipu-standin")
def test_random_numbers_and_logged_values_are_those_of_the_embedded_engine():
    """The seam says what they depend on: seed, update and place."""
    eager, embedded = compiled(Logs()), ipufit.Model(Logs(), engine="embedded")
    embedded.compile(lambda p: torch.optim.Adam(p, lr=0.01), "mse", run_eagerly=True)
    first, second = (fit(model, seed=3, epochs=2).history for model in (eager, embedded))
    assert first.keys() == second.keys() == {"loss", "size"}
    for name in first:
        assert first[name] == pytest.approx(second[name], rel=1e-6)


@pytest.mark.long("ipu-standin")
def test_a_run_goes_on_from_its_checkpoint(tmp_path):
    """State goes out through ``read_state`` and in through ``write_state``."""
    whole, stopped, resumed = compiled(), compiled(), compiled()
    fit(whole, epochs=4, seed=1)
    fit(stopped, epochs=2, seed=1, checkpoint=str(tmp_path))
    fit(resumed, epochs=4, seed=1, checkpoint=ipufit.Checkpoint(str(tmp_path), resume="auto"))
    states = (model.module.state_dict().values() for model in (resumed, whole))
    for ours, theirs in zip(*states):
        assert torch.equal(ours, theirs)


def test_it_refuses_at_compile_what_it_does_not_do():
    with pytest.raises(ConfigurationError) as caught:
        compiled(clip=ipufit.Clip(norm=1.0), reduction=ipufit.Reduction(gradients="sum"))
    assert str(caught.value) == (
        "the eager engine makes only plain updates, got gradient_reduction='sum', clipnorm=1.0. "
        "Leave this out, or use engine='embedded'."
    )
    with pytest.raises(ConfigurationError) as caught:
        fit(compiled(), ipus=2)
    assert str(caught.value) == (
        "the eager engine has one replica, got 2. Leave ipus out and train in one process, or use "
        "engine='embedded'."
    )


def test_a_loss_that_is_not_finite_comes_before_its_update():
    model = compiled()
    before = copy.deepcopy(model.module[0].weight)
    with pytest.raises(NonFiniteLossError) as caught:
        model.fit(X * float("nan"), Y, verbose=0)
    assert (caught.value.update, caught.value.epoch) == (0, 0)
    assert torch.equal(model.module[0].weight, before)


def test_a_forwarding_program_forwards_everything():
    """What it left out would have the default, and nobody would see that the ability is gone."""
    members = {name for name, value in vars(Program).items() if inspect.isfunction(value)}
    members |= {name for name, value in vars(Program).items() if isinstance(value, property)}
    assert len(members) > 15
    assert members <= set(vars(ForwardingProgram))
