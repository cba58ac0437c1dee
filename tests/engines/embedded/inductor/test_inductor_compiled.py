"""jit="inductor", compiled: the numbers of the graph, within what a compiler may do.

Compiling takes 10 to 30 s on a quiet core, so few of these run without --exhaustive.
"""

import copy

import pytest
import torch
from torch import nn

from ipufit.engines.embedded.inductor import requirements
from ipufit.engines.embedded.passes import cpu_kernels
from ipufit.errors import ConfigurationError, NonFiniteLossError
from tests.core.test_precision import needs_half
from tests.engines.embedded.inductor.test_inductor import (
    NETS,
    OPTIMIZERS,
    TOLERANCE,
    Noisy,
    dropping_cnn,
    dropping_rows,
    embedded,
    pictures_by_channels,
    plain_cnn,
    reasons,
    rounds_half,
    skips_the_same,
    trained_masks,
)
from tests.fitting import Plan, assert_close, assert_equal, fit
from tests.nets import MLP, data
from tests.training.test_shapes import Pooled, sequences

pytestmark = [
    pytest.mark.both_engines,
    pytest.mark.skipif(
        requirements.missing() is not None, reason=f"jit='inductor' needs {requirements.missing()}"
    ),
]


@pytest.fixture
def cached(tmp_path, monkeypatch):
    """A directory of compiled programs of its own."""
    monkeypatch.setenv("IPUFIT_CACHE_DIR", str(tmp_path))
    return tmp_path / "compiled"


def trained(jit, x, y, plan=None):
    torch.manual_seed(0)
    model, engine = embedded(plain_cnn(), OPTIMIZERS["adam"], jit=jit, metrics=["accuracy"])
    return model, engine, fit(model, x, y, plan or Plan(4, 2, 1, 2)).history


@pytest.mark.long
def test_compiled_updates_are_those_of_the_graph_and_are_kept(cached):
    """Buffers of two replicas, outputs and a tail; then once more, from the directory."""
    x, y = data(29)
    graph, _, expected = trained("graph", x, y)
    found = []
    for origin in ("compiled by TorchInductor in", "compiled by TorchInductor before, and kept"):
        model, engine, history = trained("inductor", x, y)
        assert_close(model.module, graph.module, TOLERANCE)
        assert history["loss"] == pytest.approx(expected["loss"], rel=TOLERANCE)
        assert history["accuracy"] == expected["accuracy"]
        said, *of_others = reasons(engine)
        assert said.startswith(f"Updates run {origin}")
        assert all(f"its micro-batches run {origin}" in each for each in of_others)
        assert of_others
        found.append(said)
    assert found[0].endswith("as nothing was cached yet.")
    bad = x.clone()
    bad[9] = float("nan")
    before = copy.deepcopy(model.module)
    with pytest.raises(NonFiniteLossError):
        fit(model, bad[8:], y[8:], Plan(4, 2, 1, 2))
    assert_equal(model.module, before)


@pytest.mark.long
def test_the_text_of_a_compiler_that_fails_is_told(cached, monkeypatch, tmp_path):
    monkeypatch.setenv("CXX", "/bin/false")
    x, y = data(8)
    model, _ = embedded(MLP().double(), "sgd")
    with pytest.raises(
        ConfigurationError,
        match=r"(?s)compiles the program, but TorchInductor could not: .*jit='gr",
    ):
        fit(model, x, y)
    assert list(cached.glob("making-*")) == []


# Of float32, a few dozen updates of Adam make of the last bit no more than this.
NARROW = 1e-4


@pytest.mark.parametrize(
    ("net", "optimizer", "dtype", "plan"),
    [
        ("mlp", "adam", torch.float64, Plan(4, 3, 2)),
        ("mlp", "sgd", torch.float32, Plan(4, 3)),
        ("mlp", "lamb", torch.float64, Plan(4, 1, 1, 2)),
        ("transformer", "adamw", torch.float64, Plan(4, 2)),
        # The bias of attention's keys has a gradient of rounding alone, which Adam would enlarge.
        ("transformer", "sgd", torch.float32, Plan(4, 2)),
        ("running", "rmsprop", torch.float64, Plan(3, 2, 2)),
        ("rows", "adam", torch.float64, Plan(4, 2, 2)),
        # In float32 torch may compute it by oneDNN, whose backward reads the outputs.
        ("rows", "sgd", torch.float32, Plan(4, 2)),
        ("cnn", "sgd", torch.float32, Plan(4, 2, 2)),
        ("dropout", "sgd", torch.float32, Plan(4, 2, 2)),
        ("noisy", "adam", torch.float64, Plan(4, 2, 1, 2)),
        ("dropping rows", "adam", torch.float64, Plan(4, 2, 2)),
    ],
)
@pytest.mark.long
def test_compiled_updates_of_many_kinds(net, optimizer, dtype, plan, cached):
    x, y = data(25)
    nets = []
    for jit in ("graph", "inductor"):
        torch.manual_seed(0)
        dropping = {"dropout": dropping_cnn, "noisy": Noisy, "dropping rows": dropping_rows}
        start = {**NETS, **dropping}[net]()
        if net != "running":
            start = start.to(dtype)
        model, engine = embedded(start, OPTIMIZERS[optimizer], jit=jit)
        fit(model, x.to(dtype), y, plan)
        nets.append(model.module)
    assert engine.training.way.jit == "inductor"
    assert_close(nets[1], nets[0], TOLERANCE if dtype == torch.float64 else NARROW)


@pytest.mark.long
@pytest.mark.usefixtures(pictures_by_channels.__name__)
def test_compiled_pictures_have_channels_last(cached):
    expected, _ = trained_masks("graph")
    module, engine = trained_masks("inductor")
    assert engine.training.way.jit == "inductor"
    assert_close(module, expected, NARROW)


@pytest.mark.long
def test_compiled_updates_are_skipped_at_the_same_loss_scales(cached):
    assert skips_the_same().training.way.jit == "inductor"


@pytest.mark.long
@rounds_half
@pytest.mark.parametrize("half", ["mixed_bfloat16", "mixed_float16"])
@pytest.mark.parametrize("net", ["mlp", "transformer"])
def test_compiled_half_precision_rounds_where_the_graph_does(net, half, cached):
    """They differ by less than either does from float32: by the order of summation alone."""
    x, y = data(24)
    changes = {}
    for jit, precision in (
        ("graph", "float32"),
        ("graph", half),
        ("inductor", half),
    ):
        torch.manual_seed(0)
        start = NETS[net]().float()
        before = nn.utils.parameters_to_vector(start.parameters()).detach().clone()
        model, engine = embedded(start, OPTIMIZERS["sgd"], jit=jit, precision=precision)
        fit(model, x.float(), y, Plan(4, 2))
        after = nn.utils.parameters_to_vector(model.module.parameters()).detach()
        changes[jit, precision] = after - before
    exact, graph, inductor = changes.values()
    assert engine.training.way.jit == "inductor"
    assert (inductor - graph).norm() < (graph - exact).norm()
    assert (inductor - exact).norm() < 2 * (graph - exact).norm()


def squares(output, target):
    return (output - nn.functional.one_hot(target, 5).to(output.dtype)).square().mean()


def adam(parameters):
    """With a number in the denominator that float16 can hold."""
    return torch.optim.Adam(parameters, lr=0.01, eps=1e-4, amsgrad=True)


@pytest.mark.long
@rounds_half
@pytest.mark.parametrize("optimizer", [OPTIMIZERS["sgd"], adam], ids=["sgd", "adam"])
@pytest.mark.parametrize("half", [torch.bfloat16, pytest.param(torch.float16, marks=needs_half)])
def test_compiled_nets_in_half_precision_have_the_bits_of_the_graph(half, optimizer, cached):
    """Of a loss without a softmax, whose kernel of torch's rounds in between."""
    x, y = data(24)
    nets = []
    for jit in ("graph", "inductor"):
        torch.manual_seed(0)
        model, engine = embedded(MLP().to(half), optimizer, squares, jit=jit)
        fit(model, x.to(half), y, Plan(4, 2))
        nets.append(model.module)
    assert engine.training.way.jit == "inductor"
    assert_equal(*nets)


@pytest.mark.long
@pytest.mark.parametrize("threads", [1, 2])
def test_onednns_matrix_product_is_compiled_for_any_matrix(threads, cached, monkeypatch):
    """Of weights that change, and of matrices in another memory order."""
    if not torch.backends.mkldnn.is_available():
        pytest.skip("this torch has no oneDNN")
    monkeypatch.setattr(cpu_kernels, "use_onednn_matmul", _all_by_onednn)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        x, y = data(24)
        nets = []
        for jit in ("graph", "inductor"):
            torch.manual_seed(0)
            model, engine = embedded(MLP(), OPTIMIZERS["adam"], jit=jit)
            fit(model, x.float(), y, Plan(4, 3))
            nets.append(model.module)
    finally:
        torch.set_num_threads(before)
    assert engine.training.way.jit == "inductor"
    assert_close(nets[1], nets[0], NARROW)


@pytest.mark.long
@pytest.mark.parametrize("accumulation", [1, 2])
def test_what_is_compiled_of_each_shape_has_the_numbers_of_the_graph(cached, accumulation):
    """Updates in one call, and micro-batches of those that mix shapes; for every division."""
    batches = sequences([(length, 4) for length in (5, 9, 5, 5, 9, 9, 5, 9)])
    models = []
    for jit, iterations in (("graph", 2), ("inductor", 2), ("inductor", 1)):
        torch.manual_seed(0)
        model, engine = embedded(Pooled(drop=0.3).double(), OPTIMIZERS["adam"], "mse", jit=jit)
        how = {"gradient_accumulation": accumulation, "device_iterations": iterations}
        model.fit(batches, seed=0, verbose=0, epochs=2, **how)
        models.append(model)
    assert_close(models[1].module, models[0].module, TOLERANCE)
    assert_equal(models[2].module, models[1].module)
    assert models[1].history.params["jit"] == "inductor"
    kinds = engine.training.way._by_kind
    assert len(kinds) == 2 * accumulation
    assert all(part.jit for part in kinds.values())


@pytest.mark.long
@pytest.mark.parametrize("net", ["cnn", "rows"])
def test_compiled_micro_batches_go_with_an_optimizer_that_is_not(net, cached):
    """Buffers that they change, a gradient of one parameter alone, and a sample that is lost."""
    x, y = data(23)
    models = []
    for jit in ("graph", "inductor"):
        torch.manual_seed(0)
        model, engine = embedded(NETS[net](), lambda p: torch.optim.Adagrad(p, lr=0.01), jit=jit)
        fit(model, x, y, Plan(4, 2, 2))
        bad = x.clone()
        bad[9] = float("nan")
        with pytest.raises(NonFiniteLossError):
            fit(model, bad, y, Plan(4, 2, 2))
        models.append(model)
    assert engine.training is None or engine.training.way.jit == "inductor"
    assert models[1].history.params["jit"] == "inductor"
    assert_close(models[1].module, models[0].module, TOLERANCE)


def _all_by_onednn(graph):
    linear, transposed = torch.ops.mkldnn._linear_pointwise.default, torch.ops.aten.t.default
    products = [node for node in graph.nodes if node.target is torch.ops.aten.mm.default]
    assert len(products) == 3
    for node in products:
        left, right = node.args
        with graph.inserting_before(node):
            weight = graph.call_function(transposed, (right,))
            new = graph.call_function(linear, (left, weight, None, "none", [], ""))
        node.replace_all_uses_with(new)
        graph.erase_node(node)
