"""What a pass without values says of a module is what a real pass does."""

import copy

import pytest
import torch
from torch import nn

from ipufit.core.batch import MicroBatch
from ipufit.core.train_config import Precision
from ipufit.losses import resolve_loss
from ipufit.planner.measure import measure
from tests.fitting import assert_equal

pytestmark = pytest.mark.both_engines

LOSS = resolve_loss("cross_entropy")


class Recurrent(nn.Module):
    """A GRU of two layers, of which the last step is read."""

    def __init__(self):
        super().__init__()
        self.gru, self.head = nn.GRU(5, 6, 2, batch_first=True), nn.Linear(6, 3)

    def forward(self, x):
        return self.head(self.gru(x)[0][:, -1])


class Pooled(nn.Module):
    """Something, and then the mean over the tokens."""

    def __init__(self, *layers):
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def forward(self, x):
        return self.layers(x).mean(1)


class Shared(nn.Module):
    """One tensor that three operators keep, and a layer that is used twice."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x):
        h = torch.relu(self.layer(x))
        return self.layer(h) * h


NETS = {
    "encoder layer": (
        lambda: Pooled(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)),
        torch.randn(3, 5, 8),
    ),
    "no dropout": (
        lambda: Pooled(nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True)),
        torch.randn(3, 5, 8),
    ),
    "conv": (
        lambda: nn.Sequential(
            nn.Conv2d(3, 4, 3, bias=False),
            nn.BatchNorm2d(4),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(4, 6, 3, stride=2),
            nn.ConvTranspose2d(6, 3, 2),
            nn.Flatten(),
        ),
        torch.randn(3, 3, 12, 12),
    ),
    "gru": (Recurrent, torch.randn(3, 4, 5)),
    "embedding": (lambda: Pooled(nn.Embedding(7, 5), nn.Linear(5, 3)), torch.arange(6).view(3, 2)),
    "shared": (Shared, torch.randn(3, 3)),
}
TARGET = torch.tensor([0, 1, 2])


def traced(kind, loss=LOSS, **options):
    """A net, a batch, and what is measured of them."""
    torch.manual_seed(0)
    make, x = NETS[kind]
    net = make()
    batch = MicroBatch.of((x,), {}, TARGET if loss is not None else None, len(x))
    return net, x, measure(net, loss, batch, list(net.parameters()), **options)


def kept(net, run):
    """Bytes that autograd really keeps, each storage once, without parameters and buffers."""
    own = {t.untyped_storage().data_ptr() for t in (*net.parameters(), *net.buffers())}
    found = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            # The tensor stays, so that its address is nobody else's.
            found[storage.data_ptr()] = storage.nbytes(), tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        run()
    return sum(size for size, _ in found.values())


def saved_bytes(trace):
    """Bytes that autograd keeps of the whole pass, each storage once."""
    return sum(trace.sizes[key] for key in set().union(*(s.saved for s in trace.segments)))


@pytest.mark.long
@pytest.mark.parametrize("with_loss", [True, False])
@pytest.mark.parametrize("kind", NETS)
def test_activations_are_what_torch_keeps_for_the_backward_pass(kind, with_loss):
    """To the byte, for shared tensors and views too."""
    net, x, trace = traced(kind, LOSS if with_loss else None)
    expected = kept(net, lambda: LOSS(net(x), TARGET) if with_loss else net(x))
    assert saved_bytes(trace) == expected > 0


# Torch's counter leaves out attention in one operator on a CPU.
@pytest.mark.long
@pytest.mark.parametrize("kind", [kind for kind in NETS if kind != "no dropout"])
def test_flops_are_those_of_torchs_own_counter(kind):
    """Forward and backward, of torch that has one."""
    counting = pytest.importorskip("torch.utils.flop_counter")
    net, x, trace = traced(kind)
    with counting.FlopCounterMode(display=False) as forward:
        loss = LOSS(net(x), TARGET).value
    with counting.FlopCounterMode(display=False) as backward:
        loss.backward()
    assert sum(s.forward.flops for s in trace.segments) == forward.get_total_flops()
    assert sum(s.backward.flops for s in trace.segments) == backward.get_total_flops()


def test_flops_and_activations_in_closed_form():
    """Two linear layers with a ReLU between, by hand; the first needs no gradient of its input."""
    net = nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 3))
    batch = MicroBatch.of((torch.zeros(4, 5),), {}, None, 4)
    trace = measure(net, None, batch, list(net.parameters()))
    first, relu, last = (s for s in trace.segments if s.name)
    assert [s.name for s in trace.segments] == ["", "0", "1", "2"]
    assert (first.forward.flops, first.backward.flops) == (2 * 4 * 5 * 7, 2 * 4 * 5 * 7)
    assert (relu.forward.flops, relu.backward.flops) == (0, 0)
    assert (last.forward.flops, last.backward.flops) == (2 * 4 * 7 * 3, 2 * 2 * 4 * 7 * 3)
    # The ReLU keeps its result, which the last layer keeps as its input: one tensor.
    assert relu.saved == last.saved
    assert saved_bytes(trace) == 4 * (4 * 5 + 4 * 7)
    assert [trace.sizes[key] for key in first.saved] == [4 * 4 * 5]
    assert (relu.state, first.state) == (set(), {"net.0.weight", "net.0.bias"})
    assert sorted({trace.born[key] for key in last.reads}) == [2, 3]  # its own result is looked at
    assert all(s.forward.clocks > 0 and s.backward.clocks > 0 for s in (first, relu, last))


def test_a_grouped_convolution_meets_the_filters_of_its_group():
    """Gradients of input and weight take as many multiply-adds as forward, each."""
    net = nn.Sequential(nn.Conv2d(4, 4, 1), nn.Conv2d(4, 6, 3, groups=2))
    batch = MicroBatch.of((torch.zeros(2, 4, 5, 5),), {}, None, 2)
    last = measure(net, None, batch, list(net.parameters())).segments[-1]
    products = 2 * 6 * 3 * 3 * (4 // 2) * 3 * 3
    assert (last.forward.flops, last.backward.flops) == (2 * products, 4 * products)


def test_attention_in_one_operator_counts_like_its_products():
    """What is fused on one torch and not on another."""

    class Attention(nn.Module):
        def forward(self, q, k, v):
            return nn.functional.scaled_dot_product_attention(q, k, v)

    q, k = torch.randn(2, 3, 4, 8), torch.randn(2, 3, 5, 8)
    trace = measure(Attention(), None, MicroBatch.of((q, k, k), {}, None, 2), [])
    assert sum(s.forward.flops for s in trace.segments) == 2 * (2 * 3 * 4 * 5 * 8) * 2


def test_a_frozen_layer_has_no_gradient_to_compute():
    """Nothing is kept for what no gradient goes through."""
    net = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3))
    batch = MicroBatch.of((torch.zeros(4, 5),), {}, None, 4)
    trace = measure(net, None, batch, list(net[1].parameters()))
    assert [s.backward.flops for s in trace.segments] == [0, 0, 2 * 4 * 7 * 3]
    assert trace.segments[1].saved == set()
    alone = measure(net, None, batch, [])
    assert saved_bytes(alone) == sum(s.backward.clocks for s in alone.segments) == 0


@pytest.mark.long
def test_half_precision_takes_less_time_and_memory():
    """The clocks of a product go down fourfold, of what is moved twofold."""
    full, half = (
        traced("embedding", precision=Precision(name))[2] for name in (None, "mixed_bfloat16")
    )
    assert saved_bytes(half) < saved_bytes(full)
    linear = [next(s for s in t.segments if s.name == "layers.1") for t in (full, half)]
    assert linear[0].forward.flops == linear[1].forward.flops


@pytest.mark.long
@pytest.mark.parametrize("kind", ["conv", "encoder layer"])
def test_measuring_leaves_no_trace(kind):
    """Weights, buffers, modes, gradients, hooks and random numbers."""
    torch.manual_seed(0)
    make, x = NETS[kind]
    net = make().eval()
    before, state = copy.deepcopy(net), torch.get_rng_state()
    measure(net, LOSS, MicroBatch.of((x,), {}, TARGET, 3), list(net.parameters()))
    assert_equal(net, before)
    assert torch.equal(torch.get_rng_state(), state)
    assert not any(part.training for part in net.modules())
    assert all(p.grad is None for p in net.parameters())
    assert vars(net).keys() == vars(before).keys()
