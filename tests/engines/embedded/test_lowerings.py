"""``jit`` of compile: how a recorded program runs."""

import copy
import itertools
import math
import types

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import ipufit
from ipufit.engines.embedded import timing
from ipufit.engines.embedded.engine import EmbeddedEngine
from ipufit.engines.embedded.inductor import requirements
from ipufit.engines.embedded.passes import cpu_kernels, simplify, small_convolutions
from ipufit.engines.embedded.passes.simplify import SHORT, fuse_concats
from ipufit.tracing.capture import capture
from tests.nets import MLP, data
from tests.told import refused


def compiling(**options):
    return lambda: ipufit.Model(MLP()).compile("adam", "cross_entropy", **options)


def test_two_ways_at_once_are_refused():
    refused(
        compiling(jit="graph", run_eagerly=True),
        "run_eagerly=True runs the module itself, but jit='graph' asks for a recorded program. "
        "Leave one of them out.",
    )


@pytest.mark.parametrize("options", [{"run_eagerly": True}])
def test_off_is_the_module_itself(options, capsys):
    model = ipufit.Model(MLP().double(), engine="embedded")
    model.compile("adam", "cross_entropy", **options)
    loader = DataLoader(TensorDataset(*data(8)), batch_size=4)
    model.explain(loader)
    assert "Runs the module itself, eagerly on the embedded engine" in capsys.readouterr().out


class Pictures(nn.Module):
    """Convolutions of one and of several channels, poolings, in-place ReLU, residual, groups."""

    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(1, 8, 3, padding=1)
        # No bias before BatchNorm: of its gradient, all rounding, Adam would make steps.
        self.second = nn.Conv2d(8, 8, 3, padding=1, bias=False)
        self.third = nn.Conv2d(8, 8, 3, stride=2, padding=1, groups=4, bias=False)
        self.norm, self.head = nn.BatchNorm2d(8), nn.Linear(8 * 2 * 2, 5)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.first(x), inplace=True), 2)
        x = x + F.relu(self.norm(self.second(x)))
        x = F.avg_pool2d(self.third(x).relu_(), 2, padding=1)
        return self.head(x.view(len(x), -1))


class Wide(nn.Module):
    """Products with and without a bias, with a ReLU behind them, of both layouts."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(96, 80), nn.Linear(80, 96, bias=False)
        self.head = nn.Linear(96, 5)

    def forward(self, x):
        x = x.flatten(1).repeat(1, 2)[:, :96]
        return self.head(self.second(F.relu(self.first(x))) + x)


def pictures(n, side=12):
    generator = torch.Generator().manual_seed(3)
    return torch.randn(n, 1, side, side, generator=generator), torch.arange(n) % 5


def fitted(net, n=64, **options):
    """A model after two epochs on pictures in micro-batches of 16, and the engine."""
    engine = EmbeddedEngine()
    model = ipufit.Model(copy.deepcopy(net), engine=lambda: engine)
    model.compile("adam", "cross_entropy", metrics=["accuracy"], **options)
    work = {"batch_size": 16, "epochs": 2, "device_iterations": 2, "seed": 1, "verbose": 0}
    history = model.fit(*pictures(n), **work)
    return model, engine, history


@pytest.fixture
def all_kernels(monkeypatch):
    """Whatever the sizes, and whatever is fastest here."""
    monkeypatch.setattr(cpu_kernels, "_SMALLEST_PRODUCT", 0)
    monkeypatch.setattr(cpu_kernels, "_SMALLEST_PICTURE", 0)
    for module in (cpu_kernels, small_convolutions):
        monkeypatch.setattr(module, "fastest", lambda key, make: list(make())[-1])


needs_onednn = pytest.mark.skipif(
    cpu_kernels._linear() is None, reason="this torch has no linear layers of oneDNN's"
)


@pytest.mark.few("Wide-matrix products by oneDNN")
@pytest.mark.long("ipu-standin")
@needs_onednn
@pytest.mark.usefixtures("all_kernels")
@pytest.mark.parametrize(
    ("kind", "what"),
    [
        (Pictures, "10 convolutions and poolings with channels last"),
        (Wide, "matrix products by oneDNN"),
    ],
)
def test_other_kernels_give_the_numbers_up_to_summation_order(kind, what):
    net = kind()
    one, _, told = fitted(net, 70, jit="graph")
    other, engine, history = fitted(net, 70, jit="kernels")
    assert what in engine.explain(other._session.config, {})[0]
    assert (told.params["jit"], history.params["jit"]) == ("graph", "kernels")
    for name, value in one.module.state_dict().items():
        torch.testing.assert_close(other.module.state_dict()[name], value, rtol=1e-4, atol=2e-5)
    torch.testing.assert_close(told.history["loss"], history.history["loss"], rtol=1e-5, atol=0)
    assert told.history["accuracy"] == history.history["accuracy"]
    x, _ = pictures(5)
    torch.testing.assert_close(one.predict(x), other.predict(x), rtol=1e-4, atol=1e-4)
    assert one.predict(x).stride() == other.predict(x).stride()


@pytest.mark.long
@pytest.mark.parametrize("kind", [Pictures, Wide])
def test_the_graph_has_the_bits_of_the_module_itself(kind):
    net = kind()
    one, _, told = fitted(net, 70, jit="graph")
    other, _, history = fitted(net, 70, run_eagerly=True)
    assert told.history["loss"] == history.history["loss"]
    for name, value in one.module.state_dict().items():
        assert torch.equal(other.module.state_dict()[name], value), name


class Joined(nn.Module):
    """Weights of all sizes, one of them twice, and one whose gradient is used and gathered."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(12, 40), nn.Linear(40, 40)
        self.third, self.head = nn.Linear(40, 40, bias=False), nn.Linear(40, 5)
        self.scale = nn.Parameter(torch.ones(40))

    def forward(self, x):
        x = F.relu(self.first(x.flatten(1)[:, :12]))
        x = self.second(self.second(x)) * self.scale + self.third(x).detach()
        return self.head(x + x @ self.third.weight)


@pytest.mark.long
@pytest.mark.parametrize("kind", [Joined, Wide, Pictures])
def test_products_write_where_gradients_are_gathered_the_same_bits(kind, monkeypatch):
    written = []
    module = ipufit.engines.embedded.passes.select_kernels

    def gathered(graph):
        written.append(fuse_concats(graph))
        graph.lint()
        return written[-1]

    net = kind()
    results = []
    for smallest in (0, 10**9):
        for name in ("_SMALLEST_PRODUCT", "_SMALLEST_COPY", "_SMALLEST_WHOLE"):
            monkeypatch.setattr(simplify, name, smallest)
        monkeypatch.setattr(module, "fuse_concats", gathered)
        model, _, history = fitted(net, jit="graph")
        results.append((model.module.state_dict(), history.history["loss"], max(written)))
        written.clear()
    (state, losses, count), (apart, expected, none) = results
    assert count > 0
    assert none == 0
    assert losses == expected
    for name, value in state.items():
        assert torch.equal(value, apart[name]), name


def test_large_tensors_leave_for_the_whole_as_soon_as_they_are_there(monkeypatch):
    """Those that are written later, or are inputs, wait for the others."""

    def joined(a):
        first, written, turned = a.exp(), a.sin(), a.cos()
        written.mul_(2)
        return [torch.cat([first.view(-1), written.view(-1), a.view(-1), turned.t().reshape(-1)])]

    a = torch.rand(3, 3)
    graph = capture(joined, [a])
    before = graph(a)
    monkeypatch.setattr(simplify, "_SMALLEST_COPY", 9)
    monkeypatch.setattr(simplify, "_SMALLEST_WHOLE", 36)
    assert fuse_concats(graph.graph) == 0
    graph.recompile()
    assert torch.equal(graph(a)[0], before[0])
    names = [str(node.target) for node in graph.graph.nodes]
    copies = [i for i, name in enumerate(names) if name == "aten.copy_.default"]
    assert copies[0] < names.index("aten.mul_.Tensor")
    assert names[copies[-1] - 3] == "aten.clone.default"
    assert len(copies) == 2
    assert names.count("aten.cat.out") == 1


def test_what_else_is_gathered_stays():
    """Products that something else reads or writes, or that are not joined flat."""

    def joined(a, b):
        read, written, apart = a @ b, (a @ b).relu_(), a @ b
        flat = torch.cat([read.view(-1), written.view(-1), (a @ b).t().reshape(-1)])
        return [flat, read, torch.cat([apart, apart]), torch.cat([a.view(-1), b.view(-1)])]

    a, b = torch.rand(3, 3), torch.rand(3, 3)
    graph = capture(joined, [a, b])
    before = graph(a, b)
    assert fuse_concats(graph.graph) == 0
    assert [torch.equal(*pair) for pair in zip(graph(a, b), before)] == [True] * 4


def test_what_is_joined_with_nothing_is_not_copied():
    """Unless what it is in is an input's, a constant's, returned, or written later."""
    constant = torch.rand(9)

    def joined(a):
        own, shared, late = a.exp(), a.sin(), a.cos()
        wholes = [torch.cat([own]), torch.cat([shared]), torch.cat([shared]), torch.cat([late])]
        late.mul_(2)
        returned = a.tan()
        return [*wholes, torch.cat([a]), torch.cat([constant]), torch.cat([returned]), returned]

    a = torch.rand(9)
    graph = capture(joined, [a])
    before = graph(a)
    fuse_concats(graph.graph)
    graph.recompile()
    after = graph(a)
    assert all(map(torch.equal, after, before))
    assert [str(node.target) for node in graph.graph.nodes].count("aten.cat.default") == 5
    assert len({t.untyped_storage().data_ptr() for t in (*after, a, constant)}) == 10


def fastest_is(monkeypatch, choice):
    """Let measurement find this way the fastest wherever there are several."""
    module = ipufit.engines.embedded.passes.select_kernels
    monkeypatch.setattr(module, "fastest", lambda key, make, **_: list(make())[choice])


@pytest.mark.long("ipu-standin")
@needs_onednn
@pytest.mark.usefixtures("all_kernels")
@pytest.mark.parametrize(("choice", "way"), [(0, "graph"), (1, "kernels")])
def test_auto_takes_what_is_measured_to_be_faster(choice, way, monkeypatch):
    fastest_is(monkeypatch, choice)
    model, engine, history = fitted(Pictures())
    assert history.params["jit"] == engine.way == way
    (why,) = engine.explain(model._session.config, {})
    if way == "graph":
        assert why.startswith("Runs the graph as it was recorded: ")
        assert why.endswith(" with channels last would not be faster.")
    else:
        assert why.startswith("Runs ")


@pytest.mark.long("ipu-standin")
@needs_onednn
@pytest.mark.usefixtures("all_kernels")
def test_kernels_that_compute_something_else_are_not_used(monkeypatch):
    right = cpu_kernels.to_channels_last

    def wrong(graph):
        for node in graph.nodes:
            if node.target is torch.ops.aten.relu.default:
                node.target = torch.ops.aten.sigmoid.default
        return right(graph)

    monkeypatch.setattr(cpu_kernels, "to_channels_last", wrong)
    model, engine, history = fitted(Pictures(), jit="kernels")
    assert history.params["jit"] == "graph"
    (why,) = engine.explain(model._session.config, {})
    assert why == "Runs the graph as it was recorded: other kernels give different numbers."


@pytest.mark.parametrize(
    ("off", "way"), [(1e-4, "kernels"), (3e-2, "graph")], ids=["a rounding", "another kernel"]
)
@pytest.mark.long("ipu-standin")
@needs_onednn
@pytest.mark.usefixtures("all_kernels")
def test_a_value_on_the_other_side_of_a_kink_is_no_other_kernel(off, way, monkeypatch):
    """The step of a ReLU is 0 for one order of summation and 1 for the other."""
    linear = cpu_kernels._linear()

    def rounds_otherwise(x, w, bias, after, *rest):
        result = linear(x, w, bias, "none", *rest) + (0.0 if bias is None else off)
        return result.relu() if after == "relu" else result

    monkeypatch.setattr(cpu_kernels, "_linear", lambda: rounds_otherwise)
    net = Kinks()
    _, _, told = fitted(net, jit="graph")
    _, _, history = fitted(net, jit="kernels")
    assert history.params["jit"] == way
    torch.testing.assert_close(told.history["loss"], history.history["loss"], rtol=1e-2, atol=0)


@pytest.mark.long
@needs_onednn
@pytest.mark.usefixtures("all_kernels")
def test_what_is_said_is_about_the_last_fit(monkeypatch):
    """Whatever an earlier one with larger micro-batches ran as, and a later one has recorded."""
    fastest_is(monkeypatch, 1)
    model, engine, history = fitted(Pictures())
    assert history.params["jit"] == "kernels"
    fastest_is(monkeypatch, 0)
    for size, way in ((8, "graph"), (16, "kernels"), (8, "graph")):
        history = model.fit(*pictures(64), batch_size=size, seed=1, verbose=0)
        assert history.params["jit"] == engine.way == way
        (why,) = engine.explain(model._session.config, {})
        assert ("as it was recorded" in why) == (way == "graph")


@pytest.mark.long
def test_small_programs_and_float64_stay_as_recorded():
    for net in (Pictures().double(), Wide()):
        engine = EmbeddedEngine()
        model = ipufit.Model(net, engine=lambda engine=engine: engine)
        model.compile("adam", "cross_entropy", jit="kernels")
        x, y = pictures(16)
        x = x.to(next(net.parameters()).dtype)
        model.fit(x, y, batch_size=8, verbose=0)
        assert engine.way == "graph"
        assert engine.explain(model._session.config, {}) == []


class Kinks(nn.Module):
    """Sums that are 0 but for their rounding, and steps in the gradient there."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(96, 80), nn.Linear(80, 96)
        self.head = nn.Linear(96, 5)
        with torch.no_grad():
            self.second.weight[0], self.second.bias[0] = 0.0, -5e-5
            self.head.weight[:, 0] *= 0.1

    def forward(self, x):
        x = torch.tanh(self.first(x.flatten(1).repeat(1, 2)[:, :96]))
        return self.head(F.relu(self.second(x)))


class Tied(nn.Module):
    """One matrix at both ends, whose gradient is the sum of a lookup's and a product's."""

    def __init__(self):
        super().__init__()
        self.embed, self.mixed = nn.Embedding(40, 64), nn.Linear(64, 64)

    def forward(self, words):
        return self.mixed(self.embed(words)).mean(1) @ self.embed.weight.t()


@needs_onednn
@pytest.mark.usefixtures("all_kernels")
@pytest.mark.long("ipu-standin")
def test_the_gradient_of_a_matrix_used_twice_is_gathered():
    net, words = Tied(), torch.randint(40, (64, 6), generator=torch.Generator().manual_seed(1))
    results = []
    for jit in ("graph", "kernels"):
        model = ipufit.Model(copy.deepcopy(net), engine="embedded")
        model.compile("adam", "cross_entropy", jit=jit)
        history = model.fit(words, words[:, 0], batch_size=16, seed=1, verbose=0)
        assert history.params["jit"] == jit
        results.append(model.module.embed.weight.detach().clone())
    torch.testing.assert_close(*results, rtol=1e-4, atol=2e-5)


class Draws(nn.Module):
    """Dropout on pictures, of which every number has its place in memory."""

    def __init__(self):
        super().__init__()
        self.conv, self.head = nn.Conv2d(1, 4, 3), nn.Linear(4 * 100, 5)

    def forward(self, x):
        return self.head(F.dropout(self.conv(x), 0.5, self.training).flatten(1))


class Writes(Draws):
    """A write through a view, which must reach what it is a view of."""

    def forward(self, x):
        x = self.conv(x)
        x.view(-1).mul_(2.0)
        return self.head(x.flatten(1))


class Restrides(Draws):
    """A view by strides."""

    def forward(self, x):
        x = self.conv(x)
        return self.head(x.as_strided((len(x), 400), (400, 1)))


@pytest.mark.long("ipu-standin")
@pytest.mark.usefixtures("all_kernels")
@pytest.mark.parametrize("kind", [Draws, Writes, Restrides])
def test_what_goes_by_the_layout_keeps_it(kind):
    """Also evaluation, where nothing is drawn, has the numbers of the module itself."""
    net = kind()
    one, engine, told = fitted(net, jit="kernels")
    said = engine.explain(one._session.config, {})
    assert not any("channels last" in sentence for sentence in said)
    _, _, history = fitted(net, run_eagerly=True)
    torch.testing.assert_close(told.history["loss"], history.history["loss"], rtol=1e-5, atol=0)


class Transposed(nn.Module):
    """Calls a layer with its channels in dimension 1, as batch norm of sequences is called."""

    def __init__(self, layer):
        super().__init__()
        self.first, self.layer, self.head = nn.Linear(6, 6), layer, nn.Linear(6, 5)
        self.double()

    def forward(self, x):
        hidden = self.layer(self.first(x.view(len(x), -1, 6)).transpose(1, 2))
        return self.head(hidden.transpose(1, 2)).mean(1)


class Smooth(nn.Module):
    """A loss within the module, whose gradient torch expects in another layout than it has."""

    def forward(self, x):
        return F.smooth_l1_loss(x, torch.ones(x.shape, dtype=x.dtype), reduction="none")


@pytest.mark.parametrize("layer", [nn.BatchNorm1d(6), nn.LogSigmoid(), Smooth()], ids=repr)
def test_kernels_that_keep_to_no_expected_layout_train(layer):
    """Fake tensors have the strides that torch expects; what is a view of these may be a copy."""
    torch.manual_seed(0)
    net = Transposed(layer)
    twin, (x, y) = copy.deepcopy(net), data(8)
    x = torch.randn(8, 30, dtype=torch.float64)
    model = ipufit.Model(net, engine="embedded")
    model.compile(torch.optim.SGD(net.parameters(), lr=0.1), "cross_entropy", jit="graph")
    model.fit(x, y, batch_size=4, epochs=2, shuffle=False, verbose=0)
    optimizer = torch.optim.SGD(twin.parameters(), lr=0.1)
    for rows in (slice(4), slice(4, 8)) * 2:
        optimizer.zero_grad()
        F.cross_entropy(twin(x[rows]), y[rows]).backward()
        optimizer.step()
    for one, other in zip(net.state_dict().values(), twin.state_dict().values()):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


compiles = pytest.mark.skipif(requirements.loader() is None, reason="needs a torch that compiles")
fakes_rows = pytest.mark.skipif(
    torch.__version__ < "2.6", reason="this torch has no fake tensors of this layout"
)


class Neighbours(nn.Module):
    """Means over the neighbours of a graph, which a sparse buffer has."""

    def __init__(self, layout):
        super().__init__()
        self.register_buffer("adjacency", getattr(torch.eye(4).roll(1, 0), layout)())
        self.first, self.head = nn.Linear(12, 6), nn.Linear(6, 5)

    def forward(self, x):
        hidden = torch.sparse.mm(self.adjacency, self.first(x.flatten(1)))
        return self.head(hidden.relu())


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
@pytest.mark.parametrize("jit", ["graph", "kernels", pytest.param("inductor", marks=compiles)])
@pytest.mark.parametrize("layout", ["to_sparse", pytest.param("to_sparse_csr", marks=fakes_rows)])
def test_sparse_buffers_of_any_layout_train(layout, jit, capsys):
    """Those in rows have neither memory of one kind nor strides."""
    weights, (x, y) = [], data(8)
    for sparse in (layout, "to_dense"):
        torch.manual_seed(0)
        model = ipufit.Model(Neighbours(sparse), engine="embedded")
        model.compile("sgd", "cross_entropy", jit=jit if sparse == layout else "graph")
        model.fit(x.float(), y, batch_size=4, epochs=2, seed=0, verbose=0)
        weights.append([*model.module.parameters()])
        if sparse == layout:
            model.explain(x.float(), batch_size=4)
    for one, other in zip(*weights):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-6)
    said = "Updates run as recorded, not compiled: it computes with sparse tensors."
    assert (said in capsys.readouterr().out) == (jit == "inductor")


@pytest.mark.parametrize("is_written", [False, True])
def test_what_is_written_through_a_view_is_no_copy(is_written):
    """Whatever layout its source has by then; what is only read may be one."""

    def function(x):
        whole = x + 1
        flat = whole.view(-1)
        if is_written:
            flat.mul_(2)
        return [whole, flat.exp()]

    graph = capture(function, [torch.ones(2, 3)])
    simplify.call_directly(graph.graph)
    view = torch.ops.aten.view.default if is_written else torch.Tensor.reshape
    assert [n.target for n in graph.graph.nodes if n.target in (*simplify.VIEWS, view)] == [view]
    graph.recompile()
    assert all(map(torch.equal, graph(torch.ones(2, 3)), function(torch.ones(2, 3))))


def test_short_calls_are_the_same_operators():
    """Each function calls the operator that it stands for, and no other."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Seen(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.called.append(func)
            return func(*args, **(kwargs or {}))

    square, row = torch.rand(2, 2), torch.rand(2)
    arguments = {
        "_log_softmax.default": (square, 1, False),
        "_log_softmax_backward_data.default": (square, square, 1, torch.float32),
        "_softmax.default": (square, 1, False),
        "_softmax_backward_data.default": (square, square, 1, torch.float32),
        "addmm.default": (row, square, square),
        "mm.default": (square, square),
        "mm.out": (square, square),
        "ne.Scalar": (row, -100),
        "unbind.int": (square, 0),
        "new_empty.default": (square, [4]),
        "bmm.default": (square[None], square[None]),
        "cat.default": ([square, square],),
        "cat.out": ([row, row],),
        "expand.default": (square, [3, 2, 2]),
        "permute.default": (square, [1, 0]),
        "select.int": (square, 0, 1),
        "squeeze.dim": (square, 0),
        "sum.dim_IntList": (square, [0], True),
        "transpose.int": (square, 0, 1),
        "unsqueeze.default": (square, 0),
        "view.default": (square, [-1]),
    }
    results = {"mm.out": {"out": torch.rand(2, 2)}, "cat.out": {"out": torch.rand(4)}}
    one = {"clone", "ones_like", "relu", "t"}
    for operator, function in SHORT.items():
        name = str(operator).replace("aten.", "")
        # Recurrent layers are compared with torch's in test_recurrent.py.
        if name == "reshape.default" or name.startswith("ipufit."):
            continue
        given = arguments.get(name) or ((square,) if name.split(".")[0] in one else (square, row))
        with torch.no_grad(), Seen() as seen:
            seen.called = []
            function(*given, **results.get(name, {}))
        assert seen.called == [operator]


@pytest.mark.both_engines
def test_what_was_measured_once_holds(monkeypatch):
    monkeypatch.setattr(timing, "seconds_of", lambda calls, *_: [1.0, 0.5])
    calls = []
    key = ("a key of this test's own",)

    def make(name):
        calls.append(name)
        return dict.fromkeys(["first", "second"], int)

    assert timing.fastest(key, lambda: make(1)) == "second"
    assert timing.fastest(key, lambda: make(2)) == "second"
    assert calls == [1]


def test_a_way_that_is_hardly_faster_is_not_taken(monkeypatch):
    monkeypatch.setattr(timing, "seconds_of", lambda calls, *_: [1.0, 0.95])
    assert timing.fastest(("another key",), lambda: dict.fromkeys("ab", int)) == "a"


@pytest.mark.skipif(cpu_kernels._linear() is None, reason="this torch has no other products")
def test_a_transposed_product_is_tried_only_where_it_may_pay():
    """What oneDNN has computed once stays in its cache."""
    layouts = itertools.product((False, True), repeat=2)
    columns = {layout: cpu_kernels._ways(4, 5, 6, layout, False) for layout in layouts}
    assert [("turned" in ways) for ways in columns.values()] == [False, False, True, True]
    for ways in columns.values():
        for call in ways.values():
            assert sorted(call().shape) == [4, 6]


@pytest.mark.parametrize(
    ("first", "expected", "again", "rounds"),
    [
        ([0.4, 0.3], False, False, 0),
        ([0.4, 0.35], False, False, 1),
        ([0.02, 0.01], False, False, 2),
        ([0.02, 0.019], False, False, 7),
        # What was measured in parts needs one call that agrees; one that doesn't is repeated.
        ([0.4, 0.35], True, False, 0),
        ([0.04, 0.035], True, False, 0),
        ([0.3, 0.4], True, False, 1),
        # What is measured again in training needs one long call.
        ([0.4, 0.35], False, True, 0),
        ([0.3, 0.4], True, True, 0),
        ([0.02, 0.019], False, True, 7),
    ],
    ids=str,
)
def test_first_calls_decide_where_they_are_long_and_clear(
    first, expected, again, rounds, monkeypatch
):
    calls = []
    # Calls take no time, however busy the machine is.
    monkeypatch.setattr(timing, "time", types.SimpleNamespace(perf_counter=lambda: 0.0))
    ways = [lambda: calls.append("a"), lambda: calls.append("b")]
    seconds = {"first": first, "expected": expected, "again": again}
    timing.seconds_of(ways, lambda way: way() or first[ways.index(way)], **seconds)
    assert calls == ["a", "b"] * rounds


@pytest.mark.parametrize(
    ("seconds", "expected", "choice"), [(0.95, False, "a"), (0.95, True, "b"), (1.05, True, "a")]
)
def test_what_is_faster_in_parts_is_taken_unless_it_is_slower(seconds, expected, choice):
    measured = itertools.cycle([1.0, seconds])
    ways = {"a": int, "b": int}
    key = ("in parts", seconds, expected)
    assert timing.fastest(key, lambda: ways, lambda _: next(measured), (), expected) == choice


@pytest.fixture
def later_process(monkeypatch, tmp_path):
    """Forgets what this process has measured; what it kept in a file of its own stays."""
    monkeypatch.setenv("IPUFIT_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(timing.os, "getloadavg", lambda: (0.0, 0.0, 0.0), raising=False)

    def forget():
        monkeypatch.setattr(timing, "_known", {})

    forget()
    return forget


def test_a_later_process_measures_nothing_again(later_process, monkeypatch):
    monkeypatch.setattr(timing, "seconds_of", lambda calls, *_: [1.0, 0.5])
    ways = dict.fromkeys(["first", "second"], int)
    assert timing.fastest(("a key",), lambda: ways) == "second"
    later_process()
    assert timing.measured_choices() == {}
    assert timing.fastest(("a key",), lambda: pytest.fail("is measured")) == "second"
    # A checkpoint has what this run has used, not all that was ever measured here.
    assert timing.fastest(("another key",), lambda: ways) == "second"
    later_process()
    timing.fastest(("a key",), lambda: pytest.fail("is measured"))
    assert list(timing.measured_choices().values()) == ["second"]


def test_a_choice_on_a_busy_machine_is_for_this_process_alone(later_process, monkeypatch):
    """Its times say more of the other work than of the kernels."""
    monkeypatch.setattr(timing.os, "cpu_count", lambda: 4)
    monkeypatch.setattr(timing, "seconds_of", lambda calls, *_: [1.0, 0.5])
    ways = dict.fromkeys(["first", "second"], int)
    for load, is_kept in ((6.1, False), (6.0, True)):
        monkeypatch.setattr(timing.os, "getloadavg", lambda load=load: (load, 0.0, 0.0))
        assert timing.fastest((load,), lambda: ways) == "second"
        assert timing.fastest((load,), lambda: pytest.fail("is measured")) == "second"
        later_process()
        measured = []
        timing.fastest((load,), lambda measured=measured: measured.append(1) or ways)
        assert len(measured) == (not is_kept)


@pytest.mark.parametrize("text", ["", "[1]", '{"a": 1}', "{"])
def test_a_damaged_file_of_choices_is_measured_anew(text, later_process, monkeypatch):
    monkeypatch.setattr(timing, "seconds_of", lambda calls, *_: [1.0, 0.5])
    timing.cache_dir().mkdir()
    timing._file().write_text(text)
    for _ in range(2):
        assert timing.fastest(("a key",), lambda: {"first": int, "second": int}) == "second"
        later_process()
    assert timing.fastest(("a key",), lambda: pytest.fail("is measured")) == "second"


def test_the_newest_choices_are_kept(later_process, monkeypatch):
    monkeypatch.setattr(timing, "seconds_of", lambda calls, *_: [1.0])
    monkeypatch.setattr(timing, "_KEPT", 2)
    for key in "abc":
        timing.fastest((key,), lambda: {"only": int})
    later_process()
    for key in "bc":
        timing.fastest((key,), lambda: pytest.fail("is measured"))
    made = []
    timing.fastest(("a",), lambda: made.append("a") or {"only": int})
    assert made == ["a"]


def test_without_a_place_to_keep_them_choices_are_made(later_process, monkeypatch, tmp_path):
    monkeypatch.setattr(timing, "seconds_of", lambda calls, *_: [1.0, 0.5])
    (tmp_path / "cache").write_text("a file")
    assert timing.fastest(("a key",), lambda: {"first": int, "second": int}) == "second"


@needs_onednn
@pytest.mark.usefixtures("all_kernels")
def test_kernels_that_were_compared_by_an_earlier_process_are_not_again(later_process, monkeypatch):
    module = ipufit.engines.embedded.passes.select_kernels
    monkeypatch.setattr(timing, "seconds_of", lambda calls, *_: [1.0, 0.5])
    net = Wide()
    _, engine, history = fitted(net)
    assert history.params["jit"] == engine.way == "kernels"
    later_process()
    monkeypatch.setattr(module, "_compare", lambda *_: pytest.fail("is compared"))
    _, engine, again = fitted(net)
    assert engine.way == "kernels"
    assert again.history["loss"] == history.history["loss"]


@needs_onednn
@pytest.mark.usefixtures("all_kernels")
def test_weights_that_a_run_only_reads_are_not_compared(monkeypatch):
    """Both runs have the same tensors."""
    module, compared = ipufit.engines.embedded.passes.select_kernels, []
    right = module.agree

    def agree(one, other):
        compared.append(one is other)
        return right(one, other)

    monkeypatch.setattr(module, "agree", agree)
    fitted(Wide(), jit="kernels")
    assert set(compared) == {False}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.complex128])
@pytest.mark.parametrize("shape", [(), (0, 3), (1, 70000), (5, 3, 40000), (200000,)])
def test_large_tensors_are_compared_in_pieces(shape, dtype):
    """The largest difference counts in relation to the largest value, wherever they are."""
    one = torch.ones(shape, dtype=dtype)
    assert cpu_kernels.agree(one, one.clone())
    if not one.numel():
        return
    off = cpu_kernels._TOLERANCES.get(dtype, cpu_kernels._TOLERANCE_OF_OTHERS)
    for factor, is_close in ((0.5, True), (2.0, False)):
        other = one.clone()
        other.view(-1)[-1] += 1000 * factor * off
        one.view(-1)[0] = other.view(-1)[0] = 1000
        assert cpu_kernels.agree(one, other) == (is_close or one.dim() == 0)


@pytest.mark.parametrize(
    ("left", "right", "is_close"),
    [
        ([math.nan, 1.0], [math.nan, 1.0], True),
        ([math.nan, 1.0], [math.nan, 1.1], False),
        ([1.0, 1.0], [math.nan, 1.0], False),
        ([math.inf, 1.0], [math.inf, 1.0], True),
        ([math.inf, 1.0], [-math.inf, 1.0], False),
        ([math.nan, math.nan], [math.nan, math.nan], True),
    ],
)
def test_values_that_are_not_finite_agree_with_the_same(left, right, is_close):
    assert cpu_kernels.agree(torch.tensor(left), torch.tensor(right)) == is_close


@needs_onednn
@pytest.mark.usefixtures("all_kernels")
def test_a_first_micro_batch_of_nan_is_named_and_not_what_compares_kernels():
    model = ipufit.Model(Wide(), engine="embedded")
    model.compile("adam", "cross_entropy", jit="kernels")
    x, y = pictures(16)
    with pytest.raises(ipufit.errors.NonFiniteLossError, match=r"update 0\. .* not finite: nan"):
        model.fit(x * math.nan, y, batch_size=16, verbose=0)
