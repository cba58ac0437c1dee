"""Complex parameters train as in torch's own optimizers, which take each as two real ones."""

import copy

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import ipufit
from ipufit.errors import OptimizerError
from tests.engines import embedded_only

GENERATOR = torch.Generator().manual_seed(0)
X = torch.randn(22, 4, generator=GENERATOR, dtype=torch.float64)
Y = torch.randint(0, 3, (22,), generator=GENERATOR)

complex_numbers = embedded_only("PopTorch has no complex numbers")


class Spectral(nn.Module):
    """Filters in the frequencies of its rows, before a real layer."""

    def __init__(self):
        super().__init__()
        self.mix = nn.Parameter(torch.randn(3, 3, dtype=torch.complex128))
        self.shift = nn.Parameter(torch.randn(3, dtype=torch.complex128))
        self.head = nn.Linear(4, 3).double()

    def forward(self, x):
        frequencies = torch.fft.rfft(x) @ self.mix + self.shift
        return self.head(torch.fft.irfft(frequencies, n=4))


def built():
    """A module, and a copy of it."""
    torch.manual_seed(0)
    net = Spectral()
    return net, copy.deepcopy(net)


MAKES = {
    "sgd": lambda p: torch.optim.SGD(p, 0.05, momentum=0.9, weight_decay=0.1),
    "adamw": lambda p: torch.optim.AdamW(p, 0.02, weight_decay=0.1),
    "rmsprop": lambda p: torch.optim.RMSprop(p, 0.01),
    # Its own step, over complex tensors.
    "adagrad": lambda p: torch.optim.Adagrad(p, 0.05),
}


def fitted(net, make, compiling=(), **options):
    """A model that is trained on batches of eight, the last one of six."""
    model = ipufit.Model(net)
    model.compile(make(net.parameters()), "cross_entropy", **dict(compiling))
    data = DataLoader(TensorDataset(X, Y), batch_size=8)
    model.fit(data, **{"epochs": 3, "verbose": 0, **options})
    return model


def by_hand(net, make, accumulation=1, clip=None):
    """The loop."""
    optimizer, parts = make(net.parameters()), [slice(0, 8), slice(8, 16), slice(16, 22)]
    for _ in range(3):
        for start in range(0, 3, accumulation):
            update = parts[start : start + accumulation]
            size = sum(len(Y[rows]) for rows in update)
            optimizer.zero_grad()
            for rows in update:
                loss = nn.functional.cross_entropy(net(X[rows]), Y[rows], reduction="sum")
                (loss / size).backward()
            if clip is not None:
                nn.utils.clip_grad_norm_(net.parameters(), clip)
            optimizer.step()
    return optimizer


def assert_same(one, other, atol=1e-12):
    """All parameters agree."""
    for value, wanted in zip(one.parameters(), other.parameters()):
        torch.testing.assert_close(value, wanted, rtol=0, atol=atol)


@complex_numbers
@pytest.mark.parametrize("compiling", [{}, {"run_eagerly": True}], ids=["recorded", "eager"])
@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("name", MAKES)
def test_weights_and_state_are_those_of_the_loop(name, accumulation, compiling):
    """With accumulation, tails, and the state that torch's optimizer has."""
    net, twin = built()
    model = fitted(net, MAKES[name], compiling, gradient_accumulation=accumulation)
    optimizer = by_hand(twin, MAKES[name], accumulation)
    assert_same(net, twin)
    for one, other in zip(net.parameters(), twin.parameters()):
        for key, value in optimizer.state[other].items():
            if value is not None:
                torch.testing.assert_close(model.optimizer.state[one][key], value)


@complex_numbers
@pytest.mark.parametrize("compiling", [{}, {"run_eagerly": True}], ids=["recorded", "eager"])
def test_a_norm_is_that_of_complex_gradients(compiling):
    """And replicas and device iterations change nothing."""
    net, twin = built()
    compiling = {"clip": ipufit.Clip(global_norm=0.1), **compiling}
    fitted(net, MAKES["adamw"], compiling, device_iterations=2)
    by_hand(twin, MAKES["adamw"], clip=0.1)
    # clip_grad_norm_ adds 1e-6 to the norm.
    assert_same(net, twin, atol=1e-6)


@complex_numbers
@pytest.mark.parametrize("compiling", [{}, {"run_eagerly": True}], ids=["recorded", "eager"])
def test_a_run_goes_on_with_the_same_bits(tmp_path, compiling):
    """A checkpoint holds complex weights and state."""
    nets = [built()[0] for _ in range(3)]
    options = {**compiling, "ema": ipufit.EMA(momentum=0.5)}
    fitted(nets[0], MAKES["adamw"], options)
    fitted(nets[1], MAKES["adamw"], options, epochs=1, checkpoint=tmp_path)
    goes_on = ipufit.Checkpoint(tmp_path, resume="auto")
    fitted(nets[2], MAKES["adamw"], options, checkpoint=goes_on)
    assert_same(nets[0], nets[2], atol=0)


def test_an_ipu_refuses_them():
    """Before anything is compiled."""
    net = nn.Module()
    net.mix, net.forward = nn.Parameter(torch.ones(4, dtype=torch.complex64)), (lambda x: x)
    model = ipufit.Model(net, engine="ipu-standin")
    model.compile("sgd", "cross_entropy")
    with pytest.raises(OptimizerError, match="must be real on an IPU and where processes divide"):
        model.fit(X, Y, verbose=0)
