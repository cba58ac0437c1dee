"""Both engines make equal numbers: models, plans, optimizers, tails, metrics, sample weights."""

import copy
import itertools

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import ipufit
from ipufit.poptorch._precision import keep_float64
from tests.engines.ipu.test_engine import OPTIMIZERS, assert_alike
from tests.fitting import Plan, unmeasured
from tests.nets import MLP, data
from tests.points import only

pytestmark = pytest.mark.both_engines


class Recurrent(nn.Module):
    """A GRU over two rows of the picture: recording takes long."""

    def __init__(self):
        super().__init__()
        self.cell = nn.GRU(4, 6, batch_first=True)
        self.head = nn.Linear(6, 5)

    def forward(self, x):
        return self.head(self.cell(x.squeeze(1)[:, :2])[0][:, -1])


class Attentive(nn.Module):
    """Attention over the rows, without biases: the keys' has a gradient of rounding alone."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(4, 8)
        self.parts = nn.Linear(8, 3 * 8, bias=False)
        self.head = nn.Linear(8, 5)

    def forward(self, x):
        query, key, value = self.parts(self.embed(x.squeeze(1))).chunk(3, -1)
        weights = (query @ key.transpose(1, 2)).softmax(-1)
        return self.head((weights @ value).mean(1))


class Dropped(MLP):
    """Random numbers, the same on either engine."""

    def __init__(self):
        super().__init__()
        self.layers.insert(2, nn.Dropout(0.3))


KINDS = [MLP, Attentive, Recurrent, Dropped]
PLANS = [Plan(4, 3), Plan(4, 2, 2), Plan(3, 2, 3, 2)]
# Full executions; updates left over; micro-batches left over; a smaller last micro-batch.
SIZES = {"full": 72, "updates": 84, "micro-batches": 60, "samples": 23}


def life(engine, net, optimizer, plan, n, weighted):
    """All that a user can see of a fit with validation, an evaluation and a prediction."""
    x, y = data(n)
    weights = torch.linspace(0.5, 2.0, n, dtype=torch.float64)
    tensors = (x, y, weights) if weighted else (x, y)
    model = ipufit.Model(copy.deepcopy(net), engine=engine)
    made = OPTIMIZERS[optimizer](model.module.parameters())
    model.compile(
        made,
        "cross_entropy",
        metrics=None if weighted else ["accuracy"],
        weighted_metrics=["accuracy"] if weighted else None,
        lr_scheduler=torch.optim.lr_scheduler.ExponentialLR(made, 0.9),
        lr_scheduler_interval="epoch",
        **unmeasured(engine),
    )
    history = model.fit(
        DataLoader(TensorDataset(*tensors), batch_size=plan.mb),
        epochs=2,
        ipus=plan.replicas,
        device_iterations=plan.di,
        gradient_accumulation=plan.ga,
        validation_data=DataLoader(TensorDataset(*(t[:9] for t in tensors)), batch_size=4),
        seed=5,
        verbose=0,
    )
    found = {
        "history": history.history,
        "evaluation": model.evaluate(
            x, y, sample_weight=weights if weighted else None, batch_size=4, verbose=0
        ),
        "prediction": model.predict(x, batch_size=5, device_iterations=2, ipus=2, verbose=0),
        "weights": dict(model.module.state_dict()),
        "optimizer": model.optimizer.state_dict()["state"],
    }
    model.close()
    return found


# What is left over goes by the size and the plan, and a net that is quickly recorded shows it;
# each of the other nets is there once.
QUICK = {
    (MLP, PLANS[0], "sgd", "updates", True),
    (MLP, PLANS[1], "adam", "samples", True),
    (Attentive, PLANS[1], "sgd", "full", False),
    (Recurrent, PLANS[0], "lamb", "full", False),
    (Dropped, PLANS[2], "adam", "micro-batches", True),
}


@pytest.mark.parametrize(
    ("kind", "plan", "optimizer", "size", "weighted"),
    only(QUICK, itertools.product(KINDS, PLANS, ("sgd", "adam", "lamb"), SIZES, (False, True))),
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_everything_that_is_seen_is_equal(kind, plan, optimizer, size, weighted):
    """In float64, up to the order of summation."""
    if kind is Dropped and size == "samples":
        pytest.skip("a micro-batch that is filled up draws a mask of the full shape")
    torch.manual_seed(3)
    net = kind().double()
    with keep_float64():
        found = [
            life(engine, net, optimizer, plan, SIZES[size], weighted)
            for engine in ("embedded", "ipu-standin")
        ]
    assert_alike(*found)


@pytest.mark.few
@pytest.mark.parametrize("size", ["full", "updates", "micro-batches"])
def test_a_loss_reads_weights_through_the_users_module(size):
    """Calls that are left over have programs, and copies of the module, of their own."""
    found = []
    x, y = (part[: SIZES[size]] for part in data(84))
    for engine in ("embedded", "ipu-standin"):
        torch.manual_seed(3)
        net = MLP().double()

        def loss(output, target, net=net):
            penalty = sum(
                (layer.weight**2).sum() for layer in net.layers if hasattr(layer, "weight")
            )
            return nn.functional.cross_entropy(output, target) + 0.1 * penalty

        with keep_float64():
            model = ipufit.Model(net, engine=engine)
            model.compile("sgd", loss, **unmeasured(engine))
            work = {"batch_size": 4, "gradient_accumulation": 3, "device_iterations": 2}
            history = model.fit(x.double(), y, epochs=2, verbose=0, seed=1, **work)
        found.append((history.history["loss"], [p.detach() for p in net.parameters()]))
    torch.testing.assert_close(*found, rtol=1e-12, atol=1e-12)
