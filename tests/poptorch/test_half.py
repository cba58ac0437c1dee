"""Models of float16, also where torch has no such operator: results of float32, rounded once."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from ipufit import poptorch
from ipufit.poptorch._precision import _in_single

# One unit in the last place of float16, and what adds up under the smallest normal number.
ROUNDED = {"rtol": 2**-10, "atol": 1e-4}


def half(*shape):
    """Numbers of float16 that are normally distributed."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0)).half()


class Apply(nn.Module):
    """Calls a function on its weight."""

    def __init__(self, function, *shape):
        super().__init__()
        self.weight = nn.Parameter(half(*shape))
        self.function = function

    def forward(self, x):
        return self.function(x, self.weight)


def repeated(x, weight):
    """Three products in the body of a loop."""
    return poptorch.for_loop(3, lambda t: (t @ weight).clamp(-1, 1), [x])[0]


def branched(x, weight):
    """A product in one of two bodies."""
    (out,) = poptorch.cond(weight.sum() > 1e6, lambda t: t, [x], lambda t: t @ weight, [x])
    return out


@pytest.mark.few
@pytest.mark.parametrize(
    ("function", "x", "weight"),
    [
        (torch.matmul, (3, 4), (4, 4)),
        (torch.matmul, (2, 3, 4), (2, 4, 4)),
        (lambda x, w: F.linear(x, w, w[0]), (3, 4), (4, 4)),
        (F.conv2d, (2, 3, 6, 6), (4, 3, 3, 3)),
        (F.conv_transpose1d, (2, 3, 6), (3, 4, 3)),
        (lambda x, w: (x * w).clamp(-0.5, 0.5), (5, 3), (3,)),
        (lambda x, w: F.layer_norm(x, (4,), w), (3, 4), (4,)),
        (lambda x, w: F.softmax(x * w, -1), (3, 4), (4,)),
    ],
)
def test_half_numbers_are_computed_in_float32_and_rounded(function, x, weight):
    model = Apply(function, *weight)
    x = half(*x)
    out = poptorch.inferenceModel(model)(x)
    assert out.dtype == torch.float16
    torch.testing.assert_close(out, function(x.float(), model.weight.float()).half(), **ROUNDED)


@pytest.mark.parametrize("function", [repeated, branched])
def test_bodies_compute_in_half_too(function):
    """Their results are rounded after each operator."""
    model = Apply(function, 4, 4)
    x = half(2, 4)
    single = model.weight.float()
    expected = x
    for _ in range(3 if function is repeated else 1):
        product = (expected.float() @ single).half()
        expected = product.float().clamp(-1, 1).half() if function is repeated else product
    torch.testing.assert_close(poptorch.inferenceModel(model)(x), expected, **ROUNDED)


def test_a_half_model_trains_like_one_of_float32():
    """A convolution, a linear layer and a loss, with their gradients and the weight update."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv1d(2, 3, 3)
            self.head = nn.Linear(12, 2)
            self.loss = nn.MSELoss()

        def forward(self, x, target):
            out = self.head(torch.relu(self.conv(x)).flatten(1))
            return out, self.loss(out, target)

    torch.manual_seed(0)
    net = Net().half()
    single = Net()
    single.load_state_dict(net.state_dict())
    x, target = half(4, 2, 6), half(4, 2)
    optimizer = poptorch.optim.SGD(net.parameters(), lr=0.5)
    training = poptorch.trainingModel(net, optimizer=optimizer)
    _, loss = training(x, target)

    _, expected = single(x.float(), target.float())
    expected.backward()
    torch.testing.assert_close(loss.float(), expected.detach(), rtol=3e-3, atol=0)
    for (name, weight), other in zip(net.named_parameters(), single.parameters()):
        updated = other.detach() - 0.5 * other.grad
        assert weight.dtype == torch.float16, name
        torch.testing.assert_close(weight.detach().float(), updated, rtol=5e-3, atol=2e-3)


def test_a_constant_of_half_may_be_all_the_half_there_is():
    class Table(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = half(3, 3)

        def forward(self, x):
            return x + (self.table @ self.table).float()

    model = Table()
    expected = model.table.float() @ model.table.float()
    out = poptorch.inferenceModel(model)(torch.zeros(3, 3))
    torch.testing.assert_close(out, expected.half().float(), **ROUNDED)


@pytest.mark.parametrize(
    ("layer", "size"),
    [
        (nn.MaxPool3d(2), (1, 2, 4, 4, 4)),
        (nn.MaxPool3d(2, stride=1, return_indices=True), (1, 2, 4, 4, 4)),
        (nn.RReLU(0.25, 0.25), (5, 3)),
    ],
)
def test_layers_that_torch_can_not_record_in_half(layer, size):
    """Of values alone that are among those that went in, or a quarter of one."""
    x = half(*size)
    found, expected = poptorch.inferenceModel(layer)(x), layer(x.float())
    if isinstance(expected, tuple):
        assert torch.equal(found[1], expected[1].int())
        found, expected = found[0], expected[0]
    assert found.dtype == torch.float16
    assert torch.equal(found, expected.half())


@pytest.mark.parametrize("reduction", ["none", "mean"])
def test_losses_of_classes_at_places_are_recorded_in_half(reduction):
    """Torch 2.0 runs them on zeros to record them, which it can't in float16."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(half(2, 3, 4))

        def forward(self, classes):
            loss = F.cross_entropy(self.weight, classes, reduction=reduction)
            return poptorch.identity_loss(loss.float().sum(), reduction="none")

    net, classes = Net(), torch.tensor([[0, 1, 2, 1], [2, 2, 0, 1]])
    other = net.weight.detach().float().requires_grad_()
    expected = F.cross_entropy(other, classes, reduction=reduction).sum()
    expected.backward()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
    loss = poptorch.trainingModel(net, poptorch.Options(), optimizer)(classes)
    torch.testing.assert_close(loss, expected.detach(), rtol=5e-3, atol=2e-3)
    updated = other.detach() - 0.5 * other.grad
    torch.testing.assert_close(net.weight.detach().float(), updated, rtol=5e-3, atol=2e-3)


@pytest.mark.parametrize(
    "product",
    [torch.matmul, lambda x, w: torch.bmm(x[None], w[None])[0], lambda x, w: x @ w[0]],
)
def test_products_of_half_and_float32_are_of_float32(product):
    """PopTorch casts the half; torch's kernels take one type alone."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(half(4, 4))

        def forward(self, x):
            out = product(x, self.weight)
            return out, poptorch.identity_loss(out.sum(), reduction="none")

    net, x = Net(), torch.randn(3, 4)
    other = net.weight.detach().float().requires_grad_()
    expected = product(x, other)
    expected.sum().backward()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
    out, _ = poptorch.trainingModel(net, poptorch.Options(), optimizer)(x)
    assert out.dtype == torch.float32
    torch.testing.assert_close(out, expected.detach())
    updated = other.detach() - 0.5 * other.grad
    assert net.weight.dtype == torch.float16
    torch.testing.assert_close(net.weight.detach().float(), updated, rtol=5e-3, atol=2e-3)


def test_an_operator_in_place_changes_the_tensor_that_it_was_given():
    x = half(4)
    given = x.clone()
    out = _in_single(torch.ops.aten.mul_.Scalar, (given, 3.0), {})
    assert out is given
    assert torch.equal(given, (x.float() * 3).half())


@pytest.mark.parametrize(
    ("function", "shape", "expected"),
    [
        (lambda x, w: (x * w).unsqueeze_(0), (4,), (1, 4)),
        (lambda x, w: (x * w).unsqueeze_(0).squeeze_(0), (4,), (4,)),
        (lambda x, w: (x * w).t_(), (3, 4), (4, 3)),
        # Torch 2.0 squeezes the result of the product in place.
        (lambda x, w: F.linear(x, w.expand(5, 4)), (4,), (5,)),
    ],
)
def test_an_operator_in_place_that_changes_the_shape_alone_does(function, shape, expected):
    out = poptorch.inferenceModel(Apply(function, 4))(half(*shape))
    assert out.shape == expected
    torch.testing.assert_close(out, function(half(*shape), half(4)), **ROUNDED)


@pytest.mark.parametrize(
    ("function", "arguments", "options", "dtype"),
    [
        (torch.ops.aten.add.Tensor, (half(2), half(2)), {}, torch.float16),
        (torch.ops.aten.add.Tensor, (half(2), torch.ones(2)), {}, torch.float32),
        (torch.ops.aten.add.Tensor, (half(2), torch.tensor(1.0)), {}, torch.float16),
        (torch.ops.aten.lt.Tensor, (half(2), half(2)), {}, torch.bool),
        (torch.ops.aten.sum.dim_IntList, (half(2), [0]), {"dtype": torch.float16}, torch.float16),
        (torch.ops.aten.sum.dim_IntList, (half(2), [0]), {"dtype": torch.float32}, torch.float32),
    ],
)
def test_the_type_of_a_result_is_torchs(function, arguments, options, dtype):
    """As torch promotes types, or as asked for."""
    assert function(*arguments, **options).dtype == dtype
    assert _in_single(function, arguments, options).dtype == dtype


def test_other_errors_of_an_operator_are_left_alone():
    """Those of torch come before anything is computed, too, and are not tried again."""

    class Index(nn.Module):
        def forward(self, x, place):
            return x[place]

    with pytest.raises((IndexError, RuntimeError), match=r"out of (bounds|range)"):
        poptorch.inferenceModel(Index())(half(2), torch.tensor([7]))


def test_an_operator_that_lacks_half_is_left_alone_without_it(monkeypatch):
    """Whole numbers give float32, and do not become half."""

    class Ratio(nn.Module):
        def forward(self, x, a, b):
            return x / 3, a / b

    monkeypatch.setattr("ipufit.poptorch._precision._LACKING", {torch.ops.aten.div.Tensor})
    thirds, ratio = poptorch.inferenceModel(Ratio())(half(2), torch.tensor([1]), torch.tensor([3]))
    assert thirds.dtype == torch.float16
    assert ratio.dtype == torch.float32
    assert torch.equal(ratio, torch.tensor([1 / 3]))


LARGEST = 65504.0


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda x: x * 1e5, [0.0, LARGEST, -LARGEST]),
        (lambda x: x - 100000 * torch.ones(3, dtype=torch.int32), [-LARGEST] * 3),
        (lambda x: (x * 6e4)[:, None] @ (x * 10)[None, 1:2], [[0.0], [LARGEST], [-LARGEST]]),
        (lambda x: (x.float() * 1e6).half(), [0.0, LARGEST, -LARGEST]),
        (lambda x: x.clone().mul_(6e4).add_(x * 6e4), [0.0, LARGEST, -LARGEST]),
        (lambda x: x.masked_fill(x > 0, -1e9), [0.0, -LARGEST, -2.0]),
        (lambda x: x.masked_fill(x > 0, -float("inf")), [0.0, -float("inf"), -2.0]),
        (lambda x: 1 / x, [float("inf"), 1.0, -0.5]),
        (lambda x: torch.where(x > 0, float("inf"), x) * 6e4, [0.0, float("inf"), -LARGEST]),
    ],
)
def test_half_numbers_that_overflow_are_the_largest(function, expected):
    """A device clips results of half precision; infinities that are not too large numbers stay."""
    model = Apply(lambda x, _: function(x), 1)
    out = poptorch.inferenceModel(model)(torch.tensor([0.0, 1.0, -2.0]).half())
    assert out.dtype == torch.float16
    assert torch.equal(out, torch.tensor(expected).half())


def test_a_softmax_of_half_over_a_row_that_is_all_masked_is_finite():
    """A mask of -100000 leaves equal shares, where infinities make NaN, and the model trains."""

    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.scores = nn.Parameter(half(2, 3))

        def forward(self, mask):
            shares = torch.softmax(self.scores - 100000 * mask, -1)
            return shares, poptorch.identity_loss((shares**2).float().sum(), reduction="none")

    model = Attention()
    training = poptorch.trainingModel(
        model, optimizer=poptorch.optim.SGD(model.parameters(), lr=0.5)
    )
    shares, _ = training(torch.tensor([[1, 1, 1], [0, 1, 0]], dtype=torch.int32))
    assert torch.equal(shares[0], torch.full((3,), 1 / 3).half())
    assert shares[1, 1] == 0
    assert torch.isfinite(model.scores).all()


def test_accumulated_gradients_of_half_that_overflow_are_the_largest():
    """Two micro-batches whose gradients add up to too much."""
    model = Apply(lambda x, w: poptorch.identity_loss(x * w, reduction="sum"), 1)
    options = poptorch.Options()
    options.Training.gradientAccumulation(2)
    options.Training.accumulationAndReplicationReductionType(poptorch.ReductionType.Sum)
    optimizer = poptorch.optim.SGD(model.parameters(), lr=1.0, accum_type=torch.float16)
    model.weight.data.fill_(0)
    poptorch.trainingModel(model, options, optimizer)(torch.full((2,), 5e4).half())
    assert model.weight.item() == -LARGEST


def test_statistics_in_half_precision_stay_those_of_replicas():
    """torch 2.0 normalises no float16: what is copied back is no change of the model's own."""

    class Normalised(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.BatchNorm1d(3)

        def forward(self, x):
            y = self.norm(x)
            return y, poptorch.identity_loss(y.square().sum(), reduction="none")

    net, x = Normalised().half(), torch.randn(8, 3).half()
    options = poptorch.Options().replicationFactor(2)
    poptorch.trainingModel(net, options, poptorch.optim.SGD(net.parameters(), lr=0.0))(x)
    expected = 0.1 * x[:4].float().mean(0)
    torch.testing.assert_close(net.norm.running_mean.float(), expected, atol=1e-3, rtol=1e-2)
