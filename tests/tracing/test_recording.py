"""What is recorded directly is what torch's own tracer records."""

import threading

import pytest
import torch
from torch.fx.experimental import proxy_tensor
from torch.nn.functional import cross_entropy, dropout
from torch.utils._python_dispatch import TorchDispatchMode

from ipufit.tracing import recording
from ipufit.tracing.capture import capture
from tests import nets

pytestmark = pytest.mark.both_engines

X, W = torch.randn(4, 6), torch.randn(6, 3)
ONES = torch.ones(2)
TABLE = torch.arange(6.0)


def in_place(x, w):
    """Operators that change their arguments, views of these, and out=."""
    x.mul_(2).add_(1)
    x[:, 0].zero_()
    twice = torch.empty(4, 6)
    torch.add(x, x, out=twice)
    return [x @ w, x, twice]


def several_results(x, w):
    """A list, pairs, and one of which only a part is used."""
    first, second, _ = x.split(2, 1)
    value, place = (x @ w).max(1)
    parts = torch.unbind(first)
    return [second.sum(), value, place, parts[2], x.sort(1)[0], *torch.var_mean(x, 1)]


def constants(x, w):
    """Numbers of Python, a tensor made of them, one read from outside, and tensors of shapes."""
    scale = torch.tensor([1.0, 2.0, 3.0])
    rate = torch.tensor(0.5)
    grid = torch.arange(6, dtype=x.dtype) + torch.full((6,), 2.0) + TABLE
    return [x @ w * scale * rate.item(), x * grid, torch.zeros_like(x), x.new_ones(3)]


def random(x, w):
    """Draws of every kind."""
    noise = torch.randn_like(x) + torch.rand(6) + torch.randint(0, 3, (6,))
    return [dropout(x, 0.5) @ w, noise, torch.randperm(4), torch.bernoulli(x.sigmoid())]


def indexed(x, w):
    """Indices, whose results may have any size, and conversions."""
    return [
        x[torch.tensor([0, 2])],
        x[:, [3, 1]],
        x.double().to(torch.float16),
        x.cumsum(0) > w.sum(),
    ]


def complex_numbers(x, w):
    return [torch.fft.rfft(x).abs() * 2, torch.view_as_real(torch.polar(x, x))]


def memory_formats(x, w):
    """Results whose strides follow those of their arguments, and views of odd forms."""
    pictures = x.reshape(1, 2, 3, 4).contiguous(memory_format=torch.channels_last)
    wide = x.expand(2, 4, 6)
    return [
        pictures.relu(),
        (x.t() + 1) * x.t(),
        wide * 2,
        x.as_strided((2, 2), (1, 3), 5),
        x[1:].as_strided((2, 2), (1, 3)),
        x.diagonal().neg(),
        *x.t().chunk(2),
        x.new_empty_strided((2, 3), (1, 4)).zero_(),
        x.repeat(1, 2).narrow(1, 3, 4),
    ]


def alike_but_for_a_type(x, w):
    """The same operator with equal numbers of other types, other flags, and another default."""
    whole = torch.arange(24).reshape(4, 6)
    results = [whole * 1, whole * 1.0, whole * True, whole.sum(0), whole.sum(0, keepdim=True)]
    torch.set_default_dtype(torch.float64)
    try:
        results += [whole * 1.0, whole / 2]
    finally:
        torch.set_default_dtype(torch.float32)
    return [*results, whole / 2, x.sum(dtype=torch.float64), x.double().sum()]


def of_other_kinds(x, w):
    """Sparse and conjugate results, which torch alone can make."""
    sparse = x.to_sparse()
    turned = torch.view_as_complex(x.reshape(4, 3, 2)).conj()
    return [sparse.to_dense() + x, turned * 2, turned.resolve_conj().imag + 1, x.neg() + x.size(0)]


def views(x, w):
    """Of every kind, of views, of nothing, and what is written through one."""
    flat = x.view(24)
    flat[1:3].mul_(2)
    return [
        x.t().unsqueeze(0).squeeze(0).expand(6, 4),
        x.permute(1, 0)[2],
        *x.split([1, 3]),
        *x.unbind(1),
        x.unfold(1, 2, 3),
        x[:0].view(0, 3, 2).transpose(1, 2),
        x[None, ..., None].movedim(1, 0).squeeze(),
        x.view(torch.int32) + 1,
        x.detach().view_as(x) * 2,
        torch.ops.aten.alias(x.diagonal()),
    ]


def batch_norm(values, mean, variance, weight=None, bias=None, training=False):
    """Torch's kernel, which its tracer may take others for."""
    settings = (mean, variance, training, 0.1, 1e-5)
    return torch.native_batch_norm(values, weight, bias, *settings)[0]


def of_many_sizes(x, w):
    """Operators whose results are like their arguments, of every size and other layouts."""
    results = []
    for shape in [(4, 6), (6, 4), (2, 12), (1, 24), (24, 1), (2, 3, 4), (3, 2, 4), (0, 5), (0, 6)]:
        values = torch.zeros(shape) + x.sum()
        results += [values.relu(), values + values, values > values, values * x.sum()]
        results += [values[:1] * 2 - values, values - 2 * values[:1], values.sum(0) - values]
        results += [values.transpose(0, 1) + values.transpose(0, 1), values[:, 1:].exp()]
    return results


def normalized(x, w):
    """Batch normalisation and its gradient, of every size and other layouts."""
    results = []
    for shape in [(4, 6), (2, 12), (6, 4), (2, 3, 2, 2), (4, 2, 3, 1), (4, 6, 1, 1), (1, 2, 3, 4)]:
        values = x.reshape(shape).requires_grad_()
        mean, scale = x.new_zeros(shape[1]), x.new_ones(shape[1]).requires_grad_()
        statistics = (mean, mean + 1)
        if shape[0] * values[0, 0].numel() > 1:
            results.append(batch_norm(values, *statistics, scale, scale, True))
            results.append(batch_norm(values, *statistics, training=True))
        results.append(batch_norm(values, *statistics, scale, scale, False))
        results.append(batch_norm(values.double(), *(each.double() for each in statistics)))
        results += torch.autograd.grad(sum(each.sum() for each in results[-2:]), [values, scale])
        if len(shape) == 4:
            last = values.to(memory_format=torch.channels_last)
            results.append(batch_norm(last, *statistics, scale, scale, True).relu())
    return [each.detach() for each in results]


def loss_and_gradients(net):
    """A function of pictures and classes over the parameters of a network."""
    names = [name for name, _ in net.named_parameters()]

    def step(x, y, *values):
        weights = [value.detach().requires_grad_() for value in values]
        outputs = torch.func.functional_call(net, dict(zip(names, weights)), (x,))
        loss = cross_entropy(outputs, y)
        return [loss, *torch.autograd.grad(loss, weights)]

    return step, [*nets.data(4), *(p.detach() for p in net.parameters())]


def again(function):
    """The function as it is, on copies, and on what it may have changed."""

    def three_times(x, w):
        return [*function(x.clone(), w.clone()), *function(x, w), *function(x, w)]

    return three_times


FUNCTIONS = [
    *(in_place, several_results, constants, random, indexed, complex_numbers),
    *(memory_formats, alike_but_for_a_type, of_other_kinds, views, of_many_sizes),
]
NETS = [nets.MLP, nets.CNN, nets.Transformer, nets.Running]


def described(graph):
    """Operators with the places of the nodes they read."""
    place = {node: number for number, node in enumerate(graph.graph.nodes)}

    def read(value):
        return torch.fx.node.map_arg(value, lambda node: f"node {place[node]}")

    return [
        (node.op, node.op == "call_function" and node.target, read(node.args), read(node.kwargs))
        for node in graph.graph.nodes
    ]


def known(value, memories):
    """What a graph knows of a result, with the number of its memory among those before."""
    if isinstance(value, torch.Tensor) and value.layout is not torch.strided:
        return (type(value), value.layout, value.shape, value.dtype, value.device)
    if isinstance(value, torch.Tensor):
        storage = value.untyped_storage()
        memory = memories.setdefault(storage._cdata, len(memories))
        place = (memory, storage.nbytes(), value.storage_offset())
        return (type(value), value.shape, value.stride(), *place, value.dtype, value.device)
    if isinstance(value, (list, tuple)):
        return [known(each, memories) for each in value]
    return value


def assert_alike(graph, expected):
    """Two graphs have the same operators, and know the same of results; old torch knows less."""
    assert described(graph) == described(expected)
    own, others = {}, {}
    for node, other in zip(graph.graph.nodes, expected.graph.nodes):
        if "val" in other.meta:
            assert known(node.meta["val"], own) == known(other.meta["val"], others), node


def by_torchs(thread, torchs, *given, **named):
    return torchs(*given, **named)


@pytest.fixture
def by_torch(monkeypatch):
    """Records a function as torch's tracer does, operator by operator."""

    def record(*arguments, **options):
        with monkeypatch.context() as patched:
            patched.setattr(recording, "_optional_arguments", lambda operator: None)
            patched.setattr(recording, "_dispatch_trace", by_torchs)
            return capture(*arguments, **options)

    return record


@pytest.fixture
def direct(monkeypatch):
    """Names of the operators that were recorded directly."""
    names = []
    follow = recording.OpRecorder._follow

    def note(recorder, result, kept, node):
        names.append(str(node.target))
        return follow(recorder, result, kept, node)

    monkeypatch.setattr(recording.OpRecorder, "_follow", note)
    return names


@pytest.fixture
def repeated(monkeypatch):
    """Results that were made without asking torch."""
    results, fakes, templates = [], recording._fakes, recording._templates

    def make(*arguments, **options):
        results.append(fakes(*arguments, **options))
        return results[-1]

    def first(*arguments):
        before = len(results)
        found = templates(*arguments)
        del results[before:]
        return found

    monkeypatch.setattr(recording, "_fakes", make)
    monkeypatch.setattr(recording, "_templates", first)
    return results


@pytest.mark.parametrize("function", FUNCTIONS)
def test_repeated_calls_have_the_results_that_torch_works_out(function, by_torch, repeated):
    graph = capture(again(function), [X, W])
    assert len(repeated) >= 3
    assert_alike(graph, by_torch(again(function), [X, W]))


@pytest.mark.parametrize("function", FUNCTIONS)
def test_the_graph_of_a_function_is_that_of_torch(function, by_torch, direct):
    graph = capture(function, [X, W])
    assert len(direct) > 3
    expected = by_torch(function, [X, W])
    assert_alike(graph, expected)
    torch.manual_seed(0)
    found = graph(X.clone(), W.clone())
    torch.manual_seed(0)
    assert all(map(torch.equal, found, expected(X.clone(), W.clone())))


@pytest.mark.long
@pytest.mark.parametrize("make", NETS)
def test_the_graph_of_a_step_is_that_of_torch(make, by_torch, direct):
    """Forward, loss and backward."""
    step, arguments = loss_and_gradients(make().double())
    graph = capture(step, arguments)
    calls = [node for node in graph.graph.nodes if node.op == "call_function"]
    assert len(direct) >= len(calls) - 3
    assert_alike(graph, by_torch(step, arguments))


def test_what_another_thread_records_goes_torchs_way():
    """Its inputs are named after the arguments, by which torch's compilers know them."""

    def squared(tangents):
        return tangents * tangents

    found, record = [], proxy_tensor.make_fx(squared, tracing_mode="fake")

    def step(x, w):
        thread = threading.Thread(target=lambda: found.append(record(torch.ones(2))))
        thread.start()
        thread.join()
        return [x @ w]

    own = capture(step, [X, W])
    (other,) = found
    assert next(iter(other.graph.nodes)).name == "tangents_1"
    assert [node.name for node in own.graph.nodes][:2] == ["arg0_1", "arg1_1"]


def test_what_needs_torchs_tracer_goes_to_it(direct):
    """A tensor made of numbers, whose value may be read, and one that is no input."""
    capture(constants, [X, W])
    assert "aten.lift_fresh_copy.default" not in direct
    assert "aten._local_scalar_dense.default" not in direct
    assert "aten.arange.default" in direct or "aten.arange.start_step" in direct


def test_a_mode_of_the_users_has_its_part_in_what_is_recorded(by_torch):
    """Around the recording, or in it."""

    class Doubled(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            return result * 2 if func is torch.ops.aten.relu.default else result

    def step(x, w):
        return [(x @ w).relu()]

    def step_in_mode(x, w):
        with Doubled():
            return step(x, w)

    with Doubled():
        assert_alike(capture(step, [X, W]), by_torch(step, [X, W]))
    graph = capture(step_in_mode, [X, W])
    assert torch.equal(graph(X, W)[0], step(X, W)[0] * 2)


def test_a_recording_inside_of_another_has_a_graph_of_its_own():
    inner = []

    def step(x, w):
        inner.append(capture(lambda y: [y.exp() + 1], [ONES]))
        return [(x @ w).relu()]

    graph = capture(step, [X, W])
    targets = [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]
    # torch 2.14 leaves views there that nobody reads.
    targets = [target for target in targets if target != "aten.alias.default"]
    assert targets == ["aten.mm.default", "aten.relu.default"]
    assert torch.equal(inner[0](torch.zeros(2))[0], torch.full((2,), 2.0))


def test_a_graph_is_compiled_when_it_is_called_and_reads_like_any_other():
    graph = capture(lambda x, w: [x @ w], [X, W])
    assert "torch.ops.aten.mm.default" in graph.code
    assert torch.equal(graph(X, W)[0], X @ W)


class Known(torch.fx.Interpreter):
    """Compares each result with what the graph knows of it."""

    compared = 0

    def run_node(self, node):
        result = super().run_node(node)
        if node.op == "call_function":
            self.compared += 1
            assert self.form(result) == self.form(node.meta["val"]), node
        return result

    def form(self, value):
        if isinstance(value, torch.Tensor):
            # Of a single value, the stride says nothing, and is another in a kernel's result.
            strides = [step for step, size in zip(value.stride(), value.shape) if size > 1]
            return (value.shape, strides, value.storage_offset(), value.dtype)
        return [self.form(each) for each in value] if isinstance(value, (list, tuple)) else value


def test_normalized_values_of_any_size_are_as_known():
    """Some versions of torch's tracer have other operators for them, so kernels are asked."""
    graph = Known(capture(again(normalized), [X, W]))
    with torch.no_grad():
        graph.run(X, W)
    assert graph.compared > 100


def test_torch_is_asked_once_for_what_differs_by_its_size_alone(monkeypatch):
    """What torch works out in Python for each of the sizes takes a third of a recording."""
    asked, templates = [], recording._templates

    def note(func, *arguments):
        asked.append(func.overloadpacket.__name__)
        return templates(func, *arguments)

    monkeypatch.setattr(recording, "_templates", note)

    def step(x, w):
        sums = []
        for size in (2, 3, 4):
            for training in (False, True):
                values, statistics = x.view(-1, size), (w.new_zeros(size), w.new_ones(size))
                sums.append(batch_norm(values, *statistics, training=training).tanh().sum())
        return sums

    capture(step, [X, W])
    assert [asked.count(name) for name in ("native_batch_norm", "tanh", "view")] == [2, 1, 0]
