"""The FLOPs of operators that run are those of torch's own counter, and what that leaves out."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from ipufit.engines.embedded.profiling.operators import HostTimer, profile_graph
from ipufit.partition.flops import bytes_of, flops_of
from ipufit.tracing.capture import capture, recordable
from ipufit.tracing.recording import is_backward, mark_backward_pass

aten = torch.ops.aten


class Calls(nn.Module):
    """A function of a learned tensor and the input."""

    def __init__(self, function, *shape):
        super().__init__()
        self.function, self.weight = function, nn.Parameter(torch.randn(*shape))

    def forward(self, x):
        return self.function(self.weight, x)


class First(nn.Module):
    """The first result of a layer."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, *x):
        return self.layer(*x)[0]


class Attends(nn.Module):
    """Attention to itself."""

    def __init__(self, dropout=0.0):
        super().__init__()
        self.layer = nn.MultiheadAttention(8, 2, dropout, batch_first=True)

    def forward(self, x):
        return self.layer(x, x, x)[0]


class Dropping(nn.Module):
    """Attention with dropout, which torch computes in single operators."""

    def __init__(self):
        super().__init__()
        self.project = nn.Linear(6, 18)

    def forward(self, x):
        q, k, v = self.project(x).chunk(3, -1)
        return F.scaled_dot_product_attention(q, k, v, dropout_p=0.2)


MODULES = {
    "linear": (lambda: nn.Linear(5, 7), (4, 5)),
    "linear without bias": (lambda: nn.Linear(5, 7, bias=False), (4, 5)),
    "linear on sequences": (lambda: nn.Linear(5, 7), (4, 3, 5)),
    "two linear": (lambda: nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 3)), (4, 5)),
    "conv1d": (lambda: nn.Conv1d(3, 4, 3), (2, 3, 9)),
    "conv1d dilated": (lambda: nn.Conv1d(4, 6, 3, dilation=2, groups=2), (2, 4, 11)),
    "conv2d": (lambda: nn.Conv2d(3, 4, 3), (2, 3, 8, 8)),
    "conv2d strided": (lambda: nn.Conv2d(3, 4, 3, stride=2, padding=1), (2, 3, 9, 8)),
    "conv2d by channel": (lambda: nn.Conv2d(4, 8, 3, groups=4, padding=1), (2, 4, 6, 6)),
    "conv2d by rows": (lambda: nn.Conv2d(3, 4, (1, 5), stride=(1, 2)), (2, 3, 4, 11)),
    "two conv2d": (lambda: nn.Sequential(nn.Conv2d(1, 4, 3), nn.Conv2d(4, 2, 3)), (2, 1, 8, 8)),
    "conv3d": (lambda: nn.Conv3d(2, 4, 2, groups=2), (2, 2, 4, 5, 4)),
    "transposed 1d": (lambda: nn.ConvTranspose1d(3, 4, 3, stride=2), (2, 3, 5)),
    "transposed 2d": (lambda: nn.ConvTranspose2d(4, 6, 3, 2, groups=2), (2, 4, 5, 4)),
    "transposed 3d": (lambda: nn.ConvTranspose3d(2, 3, 2), (2, 2, 3, 3, 3)),
    "there and back": (
        lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.ConvTranspose2d(4, 3, 3)),
        (2, 3, 7, 7),
    ),
    "batch norm": (lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)), (2, 3, 6, 6)),
    "unfolded": (lambda: nn.Sequential(nn.Unfold(2), nn.Linear(9, 3)), (2, 2, 4, 4)),
    "bilinear": (lambda: Calls(lambda w, x: F.bilinear(x, x, w), 4, 5, 5), (3, 5)),
    "embedding": (lambda: nn.Sequential(nn.Embedding(9, 5), nn.Linear(5, 2)), None),
    "bag": (lambda: nn.Sequential(nn.EmbeddingBag(9, 5), nn.Linear(5, 2)), None),
    "lstm": (lambda: First(nn.LSTM(5, 6, 2, batch_first=True)), (3, 4, 5)),
    "gru": (lambda: First(nn.GRU(5, 6, bidirectional=True)), (4, 3, 5)),
    "rnn": (lambda: First(nn.RNN(5, 6)), (4, 3, 5)),
    "attention with dropout": (Dropping, (2, 2, 5, 6)),
    "weights of attention": (lambda: Attends(0.1), (2, 5, 8)),
    "encoder layer": (lambda: nn.TransformerEncoderLayer(8, 2, 16, 0.1), (5, 2, 8)),
    "mm": (lambda: Calls(torch.mm, 3, 4), (4, 5)),
    "bmm": (lambda: Calls(torch.bmm, 2, 3, 4), (2, 4, 5)),
    "addmm": (lambda: Calls(lambda w, x: torch.addmm(w, x, x), 4, 4), (4, 4)),
    "baddbmm": (lambda: Calls(lambda w, x: torch.baddbmm(w, x, w), 2, 4, 4), (2, 4, 4)),
    "matmul": (lambda: Calls(torch.matmul, 3, 4), (2, 4, 5)),
    "einsum": (lambda: Calls(lambda w, x: torch.einsum("ij,bjk->bik", w, x), 3, 4), (2, 4, 5)),
    "tensordot": (lambda: Calls(lambda w, x: torch.tensordot(w, x, 1), 3, 4), (4, 2)),
    "nothing": (lambda: nn.Sequential(nn.LayerNorm(5), nn.GELU(), nn.Softmax(-1)), (4, 5)),
}

# Torch's counter takes the gradient of their weights for that of convolutions without groups.
GROUPED = ("conv1d dilated", "conv2d by channel", "conv3d", "transposed 2d")


def counted(net, x):
    """Forward and backward, as the operators of a recording are counted that runs."""
    names, weights = zip(*net.named_parameters())

    def step(*tensors):
        leaves = [tensor.detach().requires_grad_() for tensor in tensors[:-1]]
        state = dict(zip(names, leaves))
        loss = torch.func.functional_call(net, state, (tensors[-1],)).square().sum()
        with mark_backward_pass():
            return list(torch.autograd.grad(loss, leaves))

    given = [*(weight.detach() for weight in weights), x]
    graph = capture(step, given)
    with torch.no_grad():
        work, _ = profile_graph(graph, HostTimer(), given)
    sides = [0, 0]
    for node in graph.graph.nodes:
        if node.name in work.records:
            sides[is_backward(node)] += work.records[node.name].flops
    return sides


@pytest.mark.few("linear", "rnn")
@pytest.mark.parametrize("kind", MODULES)
def test_flops_are_those_of_torchs_own_counter(kind):
    """Forward and backward, of torch that has one (2.1); by the same operators on both sides."""
    counting = pytest.importorskip("torch.utils.flop_counter", reason="torch.utils.flop_counter")
    make, shape = MODULES[kind]
    torch.manual_seed(0)
    net, x = make(), torch.arange(6).view(2, 3) if shape is None else torch.randn(shape)
    with recordable():
        with counting.FlopCounterMode(display=False) as forward:
            loss = net(x).square().sum()
        with counting.FlopCounterMode(display=False) as backward:
            loss.backward()
    expected = [forward.get_total_flops(), backward.get_total_flops()]
    if kind in GROUPED:
        # The input gets no gradient: as many products as forward, each between other factors.
        expected[1] = expected[0]
    assert counted(net, x) == expected
    assert (sum(expected) > 0) is (kind not in ("nothing", "bilinear"))


@pytest.mark.parametrize("value", [6, 4])
def test_attention_in_one_operator_is_what_torch_says_of_it_on_a_gpu(value):
    """Torch's counter knows the operators of a GPU alone; the work is the same."""
    registry = pytest.importorskip("torch.utils.flop_counter", reason="flop_counter").flop_registry
    q, k, v = torch.zeros(2, 3, 5, 6), torch.zeros(2, 3, 7, 6), torch.zeros(2, 3, 7, value)
    out = torch.zeros(2, 3, 5, value)
    cpu = aten._scaled_dot_product_flash_attention_for_cpu
    gpu = registry[aten._scaled_dot_product_flash_attention]
    assert flops_of(cpu.default, (q, k, v), out) == gpu(q, k, v, out_val=(out,)) > 0
    cpu = aten._scaled_dot_product_flash_attention_for_cpu_backward
    gpu = registry[aten._scaled_dot_product_flash_attention_backward]
    expected = gpu(out, q, k, v, out_val=(q, k, v))
    assert flops_of(cpu.default, (out, q, k, v), (q, k, v)) == expected > 0


def test_products_with_vectors_count_as_products():
    """Torch's counter leaves them out; two per multiply-add as in all others."""
    m, v, b = torch.zeros(3, 4), torch.zeros(4), torch.zeros(2, 3, 4)
    assert flops_of(aten.mv.default, (m, v), torch.zeros(3)) == 24
    assert flops_of(aten.addmv.default, (torch.zeros(3), m, v), torch.zeros(3)) == 24
    assert flops_of(aten.dot.default, (v, v), torch.zeros(())) == 8
    given = (torch.zeros(3, 5), b, torch.zeros(2, 4, 5))
    assert flops_of(aten.addbmm.default, given, torch.zeros(3, 5)) == 2 * 2 * 3 * 4 * 5


def test_bytes_are_those_that_are_read_and_written():
    """In closed form, for what is easily counted twice, or though it is never touched."""
    a, b, table = torch.zeros(3, 4), torch.zeros(4, 5), torch.zeros(100, 4)
    out, places = torch.zeros(3, 5), torch.zeros(6, dtype=torch.int64)

    def moved(operator, *args, **kwargs):
        return bytes_of(operator, args, kwargs, operator(*args, **kwargs))

    assert moved(aten.mm.default, a, b) == moved(aten.mm.out, a, b, out=out) == 4 * (12 + 20 + 15)
    assert moved(aten.view.default, a, [12]) == moved(aten.t.default, a) == 0
    assert moved(aten.new_empty.default, a, [99]) == 0
    assert moved(aten.zeros_like.default, a) == 4 * 12
    assert moved(aten.copy_.default, a, torch.ones(3, 4)) == 4 * 24
    assert moved(aten.add_.Tensor, a, a.clone()) == 4 * 36
    assert moved(aten.embedding.default, table, places) == 4 * (24 + 24) + 8 * 6
    # One number in memory, whatever shape it is given.
    assert moved(aten.add.Tensor, a, torch.zeros(()).expand(3, 4)) == 4 * (12 + 1 + 12)
