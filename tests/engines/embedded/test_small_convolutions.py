"""Convolutions with few positions run as matrix products where that is faster."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import ipufit
from ipufit.engines.embedded.engine import EmbeddedEngine
from ipufit.engines.embedded.passes import small_convolutions
from tests.engines.embedded.test_lowerings import later_process

__all__ = ["later_process"]

aten = torch.ops.aten

# Height, width, kernel, stride, padding, dilation.
GEOMETRIES = [
    (1, 1, 3, 1, 1, 1),
    (1, 1, 3, 2, 2, 1),
    (1, 1, 5, 1, 2, 1),
    (1, 1, 1, 1, 0, 1),
    (1, 1, 1, 2, 1, 1),
    (2, 2, 3, 1, 1, 1),
    (2, 2, 3, 2, 1, 1),
    (2, 1, 7, 2, 3, 1),
    (2, 1, 3, 1, 2, 2),
    (4, 2, 3, 3, 1, 1),
    (4, 2, 2, 1, 1, 2),
    (3, 2, 2, 2, 3, 2),
]


@pytest.mark.parametrize("cuts", [False, True])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize(("height", "width", "kernel", "stride", "padding", "dilation"), GEOMETRIES)
def test_products_are_the_convolution(
    height, width, kernel, stride, padding, dilation, with_bias, cuts
):
    torch.manual_seed(0)
    pictures = torch.randn(3, 4, height, width).double()
    weight = torch.randn(5, 4, kernel, kernel).double()
    bias = torch.randn(5).double() if with_bias else None
    settings = ([stride] * 2, [padding] * 2, [dilation] * 2, False, [0, 0], 1)
    expected = aten.convolution(pictures, weight, bias, *settings)
    result = small_convolutions._convolution(cuts, pictures, weight, bias, *settings)
    torch.testing.assert_close(result, expected)
    assert result.is_contiguous()
    gradient = torch.randn_like(expected)
    of = (gradient, pictures, weight, [5] if with_bias else None, *settings)
    for mask in ([True, True, with_bias], [False, True, False], [True, False, False]):
        expected = aten.convolution_backward(*of, mask)
        results = small_convolutions._convolution_backward(cuts, *of, mask)
        assert [result is not None for result in results] == mask
        for result, wanted in zip(results, expected):
            if result is not None:
                torch.testing.assert_close(result, wanted)


@pytest.mark.parametrize(
    ("side", "seen"),
    [
        # Begin, end, padding, positions, for (size, length, stride, padding, dilation).
        ((1, 3, 1, 1, 1), (1, 2, 0, 1)),
        ((2, 3, 2, 1, 1), (1, 3, 0, 1)),
        ((2, 3, 1, 1, 1), (0, 3, 1, 2)),
        ((2, 7, 1, 3, 1), (2, 5, 1, 2)),
        ((2, 7, 2, 3, 1), (3, 5, 0, 1)),
        ((4, 3, 1, 1, 1), (0, 3, 1, 4)),
    ],
)
def test_weights_that_see_padding_alone_are_left_out(side, seen):
    begin, end, padding, positions = seen
    assert small_convolutions._part(True, *side)[3] == positions
    assert small_convolutions._part(False, *side) == (0, side[1], side[3], positions)
    assert small_convolutions._part(True, *side) == (begin, end, padding, positions)


class Narrowing(nn.Module):
    """Convolutions that end with few positions: with stride, a bias, in-place ReLU, all outputs."""

    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, stride=2, padding=1)
        self.second = nn.Conv2d(8, 8, 3, stride=2, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(8)
        self.third, self.fourth = nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(8, 8, 1)
        self.head = nn.Linear(8, 5)

    def forward(self, x):
        x = F.relu(self.first(x), inplace=True)
        x = F.relu(self.norm(self.second(x)))
        maps = self.third(x)
        x = F.relu_(self.fourth(maps)) + x
        return self.head(x.mean((2, 3))), maps


def loss(outputs, target):
    return F.cross_entropy(outputs[0], target) + outputs[1].square().mean()


def pictures(n):
    generator = torch.Generator().manual_seed(3)
    return torch.randn(n, 3, 8, 8, generator=generator), torch.arange(n) % 5


def trained(net, jit):
    engine = EmbeddedEngine()
    model = ipufit.Model(copy.deepcopy(net), engine=lambda: engine)
    model.compile("adam", loss, jit=jit)
    history = model.fit(*pictures(64), batch_size=16, epochs=2, seed=1, verbose=0)
    return model, engine.explain(model._session.config, {}), history


@pytest.mark.long("ipu-standin")
@pytest.mark.parametrize("way", ["all", "seeing"])
def test_a_fit_has_the_numbers_of_the_convolutions(way, monkeypatch, later_process):
    torch.manual_seed(0)
    net = Narrowing()
    one, said, expected = trained(net, "graph")
    assert said == []
    monkeypatch.setattr(small_convolutions, "_FEWEST_WEIGHTS", 0)
    offered = {}

    def fastest(key, make):
        offered[str(key[:3])] = ways = make()
        return way if way in ways else "all"

    monkeypatch.setattr(small_convolutions, "fastest", fastest)
    other, (said,), history = trained(net, "kernels")
    # Three have at most eight positions, and a backward each.
    assert said == "Runs 6 convolutions of few positions as products."
    # Of the one with a single weight, the product is measured once.
    assert sorted(["seeing" in ways for ways in offered.values()]) == [False] * 2 + [True] * 4
    torch.testing.assert_close(history.history["loss"], expected.history["loss"], rtol=1e-5, atol=0)
    for name, value in one.module.state_dict().items():
        torch.testing.assert_close(other.module.state_dict()[name], value, rtol=1e-3, atol=1e-4)
    x, _ = pictures(5)
    for result, wanted in zip(other.predict(x), one.predict(x)):
        torch.testing.assert_close(result, wanted, rtol=1e-3, atol=1e-4)
        assert result.stride() == wanted.stride()


@pytest.mark.parametrize(
    ("layer", "side", "fewest"),
    [
        (nn.ConvTranspose2d(8, 8, 1), 2, 0),
        (nn.Conv2d(8, 8, 3, groups=2), 4, 0),
        (nn.Conv2d(8, 8, 3, padding=1), 3, 0),
        (nn.Conv2d(8, 8, 3, padding=1), 2, 577),
        (nn.Conv2d(8, 8, 3, padding=1).double(), 2, 0),
        (nn.Conv2d(8, 8, 3, padding=1).to(memory_format=torch.channels_last), 2, 0),
    ],
    ids=["transposed", "groups", "positions", "weights", "float64", "channels last"],
)
def test_others_stay_convolutions(layer, side, fewest, monkeypatch):
    monkeypatch.setattr(small_convolutions, "_FEWEST_WEIGHTS", fewest)
    monkeypatch.setattr(small_convolutions, "fastest", lambda *_: pytest.fail("is measured"))
    x = torch.randn(4, 8, side, side, dtype=next(layer.parameters()).dtype)
    model = ipufit.Model(nn.Sequential(layer, nn.Flatten()), engine="embedded")
    model.compile("sgd", "mse", jit="kernels")
    model.fit(x, torch.zeros_like(model.module(x)), batch_size=2, verbose=0)


def test_products_that_compute_something_else_are_not_measured(monkeypatch):
    ways = {"convolution": torch.abs, "all": torch.neg, "seeing": lambda x: x.abs() * (1 + 1e-6)}
    assert list(small_convolutions._on_random_tensors(ways, [(3, 4)])) == ["convolution", "seeing"]
