"""The numbers of ipufit are those of a loop written by hand."""

import copy
import itertools

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import ipufit
from tests.engines import ragged
from tests.nets import CNN, MLP, Transformer, data
from tests.reference import train

pytestmark = pytest.mark.grid

OPTIMIZERS = {
    MLP: lambda parameters: torch.optim.Adam(parameters, lr=0.01),
    CNN: lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
    Transformer: lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
}
SIZES = list(itertools.product((1, 3, 8), (1, 2, 5), (1, 3), (1, 2, 4)))
# Nets whose recordings take long, at a few places for all of them.
FEW = {CNN: [(1, 2, 3, 4), (3, 5, 1, 2), (8, 1, 3, 4)], Transformer: [(3, 2, 3, 2)]}


def marks(kind, mb, ga, replicas, is_long):
    """What takes long, and what an IPU refuses: BatchNorm counts batches, padding among them."""
    has_exact_tails = kind is not CNN or (replicas == 1 and 1 in (mb, ga))
    return [pytest.mark.long] * is_long + [ragged] * (not has_exact_tails)


POINTS = [
    pytest.param(
        kind,
        *size,
        marks=marks(kind, size[0], *size[2:], size not in FEW.get(kind, SIZES)),
        id="-".join(map(str, (kind.__name__, *size))),
    )
    for kind in (MLP, CNN, Transformer)
    for size in SIZES
]
# Summation in another order: float64 leaves about 1e-16 relative, a few dozen updates amplify it.
TOLERANCE = 1e-10


def lengths(mb, di, ga, replicas):
    """Dataset lengths that leave every kind of tail, and none."""
    update = mb * ga * replicas
    combined = update * di
    return sorted(
        {
            combined,  # none
            combined + 1,  # one sample
            combined + mb * (ga * replicas // 2) + mb // 2 + 1,  # within a micro-batch of an update
            max(1, update - 1),  # less than one update
            combined - update + mb,  # less than one execution
        }
    )


@pytest.fixture(scope="module")
def model(request):
    """One compiled model for all plans, so that each micro-batch size is recorded once."""
    torch.manual_seed(1)
    net = request.param().double()
    model = ipufit.Model(net)
    model.compile(
        OPTIMIZERS[request.param](net.parameters()), "cross_entropy", metrics=["accuracy"]
    )
    return model


@pytest.mark.long("ipu-standin")
@pytest.mark.few
@pytest.mark.parametrize(("model", "mb", "di", "ga", "replicas"), POINTS, indirect=["model"])
def test_fit_equals_a_loop_written_by_hand(model, mb, di, ga, replicas):
    """Weights, losses and metrics are exact for every plan and every kind of tail."""
    net = model.module
    start = copy.deepcopy(net.state_dict())
    updates = 0
    for n in lengths(mb, di, ga, replicas):
        x, y = data(n)
        by_hand = copy.deepcopy(net)
        model.optimizer.state.clear()
        expected = train(
            by_hand,
            OPTIMIZERS[type(net)](by_hand.parameters()),
            nn.functional.cross_entropy,
            x,
            y,
            epochs=2,
            mb=mb,
            ga=ga,
            replicas=replicas,
            seed=5,
            first_update=model._session.updates,
        )
        history = model.fit(
            DataLoader(TensorDataset(x, y), batch_size=mb),
            epochs=2,
            ipus=replicas,
            device_iterations=di,
            gradient_accumulation=ga,
            seed=5,
            verbose=0,
        ).history
        for name, value in by_hand.state_dict().items():
            torch.testing.assert_close(
                net.state_dict()[name], value, rtol=0, atol=TOLERANCE, msg=f"{name}, n={n}"
            )
        for epoch, (loss, predictions) in enumerate(expected):
            assert history["loss"][epoch] == pytest.approx(loss, abs=TOLERANCE)
            right = (predictions.argmax(1) == y).double().mean().item()
            assert history["accuracy"][epoch] == pytest.approx(right, abs=TOLERANCE)
        updates += 1
        net.load_state_dict(start)
    assert updates == len(lengths(mb, di, ga, replicas))
