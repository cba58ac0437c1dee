"""Over the stand-in, the IPU engine draws the numbers of the embedded engine."""

import copy

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import ipufit
from ipufit.engines.ipu.engine import IpuEngine
from ipufit.poptorch._precision import keep_float64
from tests.fitting import unmeasured
from tests.nets import CNN, Noise, data

pytestmark = pytest.mark.both_engines

X, Y = data(48)


@pytest.fixture(autouse=True)
def _wide():
    with keep_float64():
        yield


class Normed(CNN):
    """Without the bias before BatchNorm: of its gradient, all rounding, Adam would make steps."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 2, bias=False)


class Dropped(nn.Module):
    """Dropout without anything that replicas would keep of their own."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Flatten(), nn.Linear(12, 8), nn.Dropout(0.5), nn.Linear(8, 5)
        )

    def forward(self, x):
        return self.layers(x)


def compiled(engine, net, **options):
    model = ipufit.Model(copy.deepcopy(net), engine=engine)
    model.compile("adam", "cross_entropy", **options, **unmeasured(engine))
    return model


def fit(model, n=48, batch_size=4, **options):
    loader = DataLoader(TensorDataset(X[:n], Y[:n]), batch_size=batch_size)
    return model.fit(loader, verbose=0, **{"seed": 7, **options}).history["loss"]


def on_both(life):
    """Weights, and what a life gives, on both engines, which must agree."""
    found = []
    for engine in ("embedded", "ipu-standin"):
        model, seen = life(engine)
        found.append([*model.module.state_dict().values(), torch.tensor(seen)])
        model.close()
    for one, other in zip(*found):
        torch.testing.assert_close(other, one, rtol=0, atol=1e-10)


JOINED = {"device_iterations": 2, "gradient_accumulation": 2, "ipus": 2}


@pytest.mark.long
@pytest.mark.parametrize(
    ("kind", "plan", "n"),
    [
        (Normed, {}, 48),
        (Normed, {"device_iterations": 5}, 48),
        # Not with BatchNorm, of which replicas have statistics of their own until a program ends.
        (Dropped, JOINED, 48),
        (Dropped, JOINED, 40),
    ],
)
def test_masks_are_those_of_the_embedded_engine_whatever_the_plan(kind, plan, n):
    """With updates that are no full execution, and, at last, one of fewer micro-batches."""
    net = kind().double()

    def life(engine):
        model = compiled(engine, net)
        return model, fit(model, n, epochs=2, **plan)

    on_both(life)


@pytest.mark.long
def test_masks_go_on_over_fits_evaluations_and_predictions():
    """What runs in between takes the device, and draws nothing from training's numbers."""
    net = Normed().double()

    def life(engine):
        model, seen = compiled(engine, net), []
        held_out = DataLoader(TensorDataset(X[:9], Y[:9]), batch_size=4)
        for epoch in range(3):
            work = {"epochs": range(epoch, epoch + 1), "device_iterations": epoch + 1}
            seen += fit(model, **work, validation_data=held_out)
            model.evaluate(held_out, verbose=0)
            model.predict(X[:5], verbose=0)
        seen += fit(model, seed=8)
        return model, seen

    on_both(life)


@pytest.mark.long
def test_a_fit_that_begins_with_a_later_epoch_draws_as_one_that_has_come_there():
    """Only the seed and the count of updates decide: a resumed run needs nothing else."""
    net = Dropped().double()
    model = compiled("ipu-standin", net)
    whole = fit(model, epochs=2)
    parts = compiled("ipu-standin", net)
    first = fit(parts, epochs=1)
    assert first + fit(parts, epochs=range(1, 2)) == whole
    for one, other in zip(model.module.parameters(), parts.module.parameters()):
        assert torch.equal(one, other)


@pytest.mark.long
def test_a_module_that_is_random_in_eval_mode_gives_the_same_evaluation():
    net = Noise().double()

    def life(engine):
        model = compiled(engine, net)
        work = {"batch_size": 4, "device_iterations": 3, "verbose": 0}
        torch.manual_seed(3)
        seen = [model.evaluate(X[:n], Y[:n], **work)["loss"] for n in (48, 23, 48)]
        return model, [*seen, *model.predict(X[:23], **work).flatten().tolist()]

    on_both(life)


@pytest.mark.long
def test_the_seed_is_set_before_every_call_and_nothing_of_torchs_is_touched(monkeypatch):
    """On a device too, what is drawn depends on the count of updates and not on what ran before."""
    seen = []
    executor = ipufit.poptorch.PoplarExecutor
    setter = executor.rng_state

    def note(self, state):
        seen.append(state)
        setter.fset(self, state)

    monkeypatch.setattr(executor, "rng_state", property(setter.fget, note))
    model = ipufit.Model(Dropped().double(), engine=lambda: IpuEngine(ipufit.poptorch))
    model.compile("sgd", "cross_entropy")
    before = torch.get_rng_state()
    fit(model, device_iterations=5)
    assert torch.equal(torch.get_rng_state(), before)
    calls = seen[::2]  # the stand-in goes on by itself after each call
    assert [state[0] - calls[0][0] for state in calls] == [0, 5, 10, 11]
