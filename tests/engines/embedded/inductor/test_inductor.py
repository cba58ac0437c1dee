"""jit="inductor": whole updates, described for another process that compiles them.

Here the description runs as it is, by the function that is otherwise compiled; tests that compile
are in test_inductor_compiled.
"""

import copy
import itertools

import pytest
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

import ipufit
from ipufit.engines.embedded import timing
from ipufit.engines.embedded.inductor import build_spec, requirements, worker
from ipufit.engines.embedded.inductor import compiled as compiled_module
from ipufit.engines.embedded.inductor.compiled import CompiledPart
from ipufit.engines.embedded.inductor.update_spec import Request, UpdateFunction
from ipufit.engines.embedded.passes import cpu_kernels, small_convolutions
from ipufit.errors import NonFiniteLossError
from tests.core.test_precision import needs_half, needs_half_autocast
from tests.fitting import PLANS, Plan, assert_close, assert_equal, compiled, fit
from tests.nets import CNN, MLP, Running, Transformer, data
from tests.reference import train
from tests.told import refused
from tests.training.test_shapes import Pooled, close, loop, sequences, weights

pytestmark = pytest.mark.both_engines
rounds_half = pytest.mark.skipif(
    torch.__version__ < "2.13", reason="before torch 2.13, half precision runs as recorded"
)

TOLERANCE = 1e-10
OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.01),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, centered=True, momentum=0.5),
    "lamb": lambda p: ipufit.optim.LAMB(p, lr=0.01, weight_decay=0.01),
}


def plain_cnn():
    """Without dropout, and with weights in another memory order.

    A bias before BatchNorm has a gradient of rounding alone, which Adam makes as large as any.
    """
    net = CNN().double()
    net.conv.register_parameter("bias", None)
    net.drop = nn.Identity()
    return net.to(memory_format=torch.channels_last)


class Rows(nn.Module):
    """A recurrent layer over the rows of a picture, whose outputs are changed in another shape."""

    def __init__(self, **options):
        super().__init__()
        self.layer, self.head = nn.GRU(4, 6, batch_first=True, **options), nn.Linear(18, 5)

    def forward(self, x):
        return self.head(self.layer(x.squeeze(1))[0].flatten(1).exp())


NETS = {
    "mlp": lambda: MLP().double(),
    "cnn": plain_cnn,
    "transformer": lambda: Transformer().double(),
    "running": lambda: Running().double(),
    "rows": lambda: Rows().double(),
}


class Made(list):
    """Functions of the updates that were made in one call; of the others, of their micro-batches.

    Attributes:
        alone: these.
    """

    def __init__(self):
        super().__init__()
        self.alone = []


@pytest.fixture
def described(monkeypatch):
    """Descriptions run as they are; those of the calls so far."""
    made = Made()

    def begin(self, request, compiles):
        update = UpdateFunction(Request.of_json(request.to_json()).form)

        def run(*tensors):
            versions = [tensor._version for tensor in tensors]
            assert [tuple(t.shape) for t in tensors] == [shape for shape, _, _ in request.inputs]
            assert [t.stride() for t in tensors] == [stride for _, stride, _ in request.inputs]
            (made if request.form.blocks else made.alone).append(update)
            results = update(*tensors)
            count = request.form.leaves * request.form.micro_batches
            assert [tensor._version for tensor in tensors[-count:]] == versions[-count:]
            return results

        self._run, self.origin = run, "described"

    monkeypatch.setattr(CompiledPart, "_begin", begin)
    monkeypatch.setattr("ipufit.engines.embedded.engine.refuse_missing", lambda: None)
    return made


def embedded(net, optimizer, *loss, jit="inductor", **options):
    model, engine = compiled(net, optimizer, *loss, way="inductor", jit=jit, **options)
    return model, engine


def reasons(engine):
    return engine.training.way.explain()


TOGETHER = "Updates run described."
ALONE = "Where an update is smaller or mixes shapes, its micro-batches run described."


def calls(sizes, plan):
    """How many updates have all their micro-batches, of one shape; micro-batches of the others."""
    group = plan.ga * plan.replicas
    updates = [sizes[start : start + group] for start in range(0, len(sizes), group)]
    others = [update for update in updates if len(update) < group or len(set(update)) > 1]
    return len(updates) - len(others), sum(map(len, others))


def is_described(made, engine, plan, count, epochs=2):
    """Tell whether all updates of epochs of so many samples were made so, and explain says it."""
    sizes = [min(plan.mb, count - start) for start in range(0, count, plan.mb)]
    together, alone = calls(sizes, plan)
    assert (len(made), len(made.alone)) == (epochs * together, epochs * alone)
    assert reasons(engine) == [TOGETHER] * bool(together) + [ALONE] * bool(alone)
    return True


@pytest.mark.few(
    "mlp-Plan(mb=4, di=1, ga=1, replicas=1)",
    "running-Plan(mb=3, di=2, ga=3, replicas=2)",
    "rows-Plan(mb=5, di=2, ga=2, replicas=1)",
)
@pytest.mark.parametrize("plan", PLANS, ids=str)
@pytest.mark.parametrize("net", NETS)
def test_described_updates_are_those_of_a_loop_by_hand(net, plan, described):
    torch.manual_seed(0)
    start = NETS[net]()
    x, y = data(23)
    model, engine = embedded(start, OPTIMIZERS["adam"], metrics=["accuracy"])
    history = fit(model, x, y, plan).history
    expected = copy.deepcopy(start)
    report = train(
        expected,
        OPTIMIZERS["adam"](expected.parameters()),
        nn.functional.cross_entropy,
        x,
        y,
        epochs=2,
        **plan.by_hand,
    )
    assert_close(model.module, expected, TOLERANCE)
    assert history["loss"] == pytest.approx([loss for loss, _ in report], rel=TOLERANCE)
    accuracy = [(p.argmax(1) == y).double().mean().item() for _, p in report]
    assert history["accuracy"] == pytest.approx(accuracy)
    assert is_described(described, engine, plan, 23)


class Noisy(nn.Module):
    """Random numbers of several kinds, of which one is written into a buffer."""

    def __init__(self):
        super().__init__()
        self.register_buffer("last", torch.zeros(12, dtype=torch.float64))
        self.encoder = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.2, batch_first=True)
        self.head = nn.Linear(12, 5)

    def forward(self, x):
        x = self.encoder(x.squeeze(1)).flatten(1)
        noise = torch.randn_like(x)
        self.last.copy_(noise[0])
        kept = torch.rand(x.shape[1], dtype=x.dtype) < 0.9
        return self.head((x + 0.1 * noise) * kept)


def dropping_rows():
    """Dropout between the parts of a recurrent layer, and behind it."""
    net = Rows(num_layers=3, dropout=0.3)
    net.head = nn.Sequential(nn.Dropout(0.2), net.head)
    return net.double()


def dropping_cnn():
    net = plain_cnn()
    net.drop = nn.Dropout(0.25)
    return net


@pytest.mark.few(
    "Noisy-Plan(mb=3, di=2, ga=3, replicas=2)", "rows-Plan(mb=5, di=2, ga=2, replicas=1)"
)
@pytest.mark.parametrize("plan", PLANS, ids=str)
@pytest.mark.parametrize(
    "net",
    [dropping_cnn, dropping_rows, lambda: Noisy().double()],
    ids=["cnn", "rows", "Noisy"],
)
def test_random_numbers_are_those_of_the_recorded_program(net, plan, described):
    x, y = data(23)
    nets, ends = [], []
    for jit in ("graph", "inductor"):
        torch.manual_seed(0)
        model, engine = embedded(net(), OPTIMIZERS["adam"], jit=jit)
        fit(model, x, y, plan)
        nets.append(model.module)
        ends.append(torch.rand(3))
    assert_close(nets[1], nets[0], TOLERANCE)
    assert torch.equal(*ends)
    assert is_described(described, engine, plan, 23)


class Sampling(nn.Module):
    """Random numbers whose distribution is computed."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(12, 5)

    def forward(self, x):
        x = x.flatten(1)
        return self.head(x * torch.bernoulli(x.detach().sigmoid()))


@pytest.mark.long
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_rule_is_described(name, described):
    x, y = data(24)
    ways = {}
    for jit in ("graph", "inductor"):
        torch.manual_seed(0)
        model, _ = embedded(NETS["cnn"](), OPTIMIZERS[name], jit=jit)
        fit(model, x, y, Plan(3, 2, 2, 2))
        ways[jit] = model
    assert_close(ways["inductor"].module, ways["graph"].module, TOLERANCE)
    states = [list(model.optimizer.state.values()) for model in ways.values()]
    for graph, inductor in zip(*states):
        for key, value in graph.items():
            torch.testing.assert_close(inductor[key], value, rtol=0, atol=TOLERANCE)
    assert len(described) == 4


@pytest.mark.long
@pytest.mark.parametrize(
    "options",
    [
        {"clip": ipufit.Clip(norm=0.1)},
        {"clip": ipufit.Clip(global_norm=0.1)},
        {"clip": ipufit.Clip(value=0.01)},
        {"precision": ipufit.Precision(accumulation_dtype="float32")},
        {"reduction": ipufit.Reduction(gradients="sum")},
        {"reduction": ipufit.Reduction(normalize="micro_batches")},
        {"ema": ipufit.EMA(momentum=0.5, overwrite_frequency=3)},
        {"lr_scheduler": lambda update: 0.1 / (update + 1)},
        {"outputs": "final", "metrics": ["accuracy"]},
        {"outputs": "sum"},
        {"precision": ipufit.Precision(loss_scale=8.0)},
        {"memory": ipufit.Memory(recompute=["layers"])},
    ],
    ids=lambda options: next(iter(options)),
)
def test_what_compile_asks_for_is_described(options, described):
    x, y = data(26)
    nets = []
    for jit in ("graph", "inductor"):
        torch.manual_seed(0)
        model, _ = embedded(MLP().double(), OPTIMIZERS["adamw"], jit=jit, **options)
        history = fit(model, x, y, Plan(3, 2, 2, 2))
        nets.append((model.module, history.history))
    assert_close(nets[1][0], nets[0][0], 1e-7 if "accumulation_dtype" in options else TOLERANCE)
    for name in ("loss", *(["accuracy"] if "metrics" in options else [])):
        assert nets[1][1][name] == pytest.approx(nets[0][1][name], rel=1e-7)
    assert len(described) == 4


@pytest.mark.long
def test_weighted_samples_count_as_in_the_graph(described):
    x, y = data(26)
    weight = torch.linspace(0, 1, 26, dtype=torch.float64)
    nets = []
    for jit in ("graph", "inductor"):
        torch.manual_seed(0)
        model, _ = embedded(
            MLP().double(),
            OPTIMIZERS["sgd"],
            jit=jit,
            reduction=ipufit.Reduction(sample_weights="mean_with_sample_weight"),
        )
        model.fit(
            x, y, sample_weight=weight, batch_size=4, gradient_accumulation=2, seed=1, verbose=0
        )
        nets.append(model.module)
    assert_close(nets[1], nets[0], TOLERANCE)
    assert len(described) == 3


class Twins(nn.Module):
    """Two weights with one gradient, one whose gradient is the input, and one that gets none."""

    def __init__(self):
        super().__init__()
        self.a = nn.Parameter(torch.ones(3, 4, dtype=torch.float64))
        self.b = nn.Parameter(torch.ones(3, 4, dtype=torch.float64))
        self.c = nn.Parameter(torch.zeros(4, dtype=torch.float64), requires_grad=False)
        self.d = nn.Parameter(torch.zeros(5, dtype=torch.float64))
        self.e = nn.Parameter(torch.ones(4, 4, dtype=torch.float64))

    def forward(self, x):
        x = x.flatten(1)[:, :4]
        return ((self.a + self.b).sum(0) * x + self.c + (self.e * x[:4]).sum()).sum(1)


@pytest.mark.long
def test_gradients_that_share_memory_come_apart(described):
    x, _ = data(8)
    nets = []
    for jit in ("graph", "inductor"):
        model, _ = embedded(Twins(), OPTIMIZERS["sgd"], "mse", jit=jit)
        fit(model, x, torch.ones(8, dtype=torch.float64), Plan(4, 1, 2))
        nets.append(model.module)
    assert_close(nets[1], nets[0], TOLERANCE)
    assert len(described) == 2


def test_an_update_with_a_loss_that_is_not_finite_changes_nothing(described):
    """Buffers, weights, state and counters are those from before it, as in the graph."""
    x, y = data(24)
    x[14] = float("nan")
    nets, states = [], []
    for jit in ("graph", "inductor"):
        torch.manual_seed(0)
        model, _ = embedded(plain_cnn(), OPTIMIZERS["adam"], jit=jit)
        with pytest.raises(NonFiniteLossError, match="it became nan in update 3") as raised:
            fit(model, x, y, Plan(2, 6, 2))
        assert raised.value.update == 3
        nets.append(model.module)
        states.append(model.optimizer.state_dict()["state"])
    assert_close(nets[1], nets[0], TOLERANCE)
    assert {float(state["step"]) for state in states[1].values()} == {3.0}
    assert len(described) == 4


def test_what_a_callback_changes_is_worked_on(described):
    x, y = data(16)
    nets = []
    for jit in ("graph", "inductor"):
        torch.manual_seed(0)
        model, _ = embedded(MLP().double(), OPTIMIZERS["adam"], jit=jit)

        def change(epoch, logs, model=model):
            with torch.no_grad():
                model.module.layers[0].weight.mul_(0.5)
            model.optimizer.param_groups[0]["lr"] = 0.003
            for state in model.optimizer.state.values():
                state["exp_avg"].zero_()

        fit(model, x, y, callbacks=[ipufit.callbacks.LambdaCallback(on_epoch_end=change)])
        nets.append(model.module)
    assert_close(nets[1], nets[0], TOLERANCE)
    assert len(described) == 8


class Steep(nn.Module):
    """Some of the samples have a gradient that is infinite in float32 at a large loss scale."""

    def __init__(self):
        super().__init__()
        self.norm, self.head = nn.BatchNorm1d(12), nn.Linear(12, 5)

    def forward(self, x):
        return self.head(self.norm(x.flatten(1))) * x.flatten(1)[:, :1].abs().clamp(1, 1e30)


def weighted_output(output, target):
    return (output.sum(1) * (1 + target)).mean()


def skips_the_same(**options):
    """Train where gradients overflow, in both ways; the engine of the compiled one."""
    x, y = data(24)
    x = x.float()
    x[5, 0, 0, 0], x[16, 0, 0, 0] = 1e15, 1e16
    scale = ipufit.LossScale(2.0**80, growth_interval=2)
    options.update(precision=ipufit.Precision(loss_scale=scale), ema=ipufit.EMA(0.5))
    skipped, modules, states = [], [], []
    for jit in ("graph", "inductor"):
        torch.manual_seed(0)
        model, engine = embedded(Steep(), OPTIMIZERS["adam"], weighted_output, jit=jit, **options)
        skipped.append(fit(model, x, y, Plan(2, 3, 2), epochs=2).history["skipped_updates"])
        modules.append(model.module)
        states.append(model.optimizer.state_dict()["state"])
    assert skipped[0] == skipped[1]
    assert sum(skipped[0]) > 1
    assert_close(modules[1], modules[0], 1e-5)
    for place, values in states[0].items():
        for name, value in values.items():
            torch.testing.assert_close(states[1][place][name], value)
    return engine


@pytest.mark.parametrize("options", [{}, {"clip": ipufit.Clip(norm=0.5)}], ids=["plain", "clip"])
def test_updates_are_skipped_at_the_same_loss_scales(options, described):
    skips_the_same(**options)
    assert len(described) == 12


@rounds_half
@pytest.mark.parametrize(
    "way",
    [
        *("mixed_bfloat16", "bfloat16"),
        pytest.param("mixed_float16", marks=needs_half_autocast),
        pytest.param("float16", marks=needs_half),
    ],
)
def test_half_precision_is_described(way, described):
    x, y = data(24)
    nets = []
    for jit in ("graph", "inductor"):
        torch.manual_seed(0)
        net = MLP().float() if "mixed" in way else MLP().to(getattr(torch, way))
        x = x.to(next(net.parameters()).dtype)
        model, _ = embedded(net, "sgd", jit=jit, precision=way)
        fit(model, x, y, Plan(3, 2, 2))
        nets.append(model.module)
    assert_equal(*nets)
    assert len(described) == 8


def test_half_precision_runs_as_recorded_where_torch_does_not_round_it(described, monkeypatch):
    monkeypatch.setattr(build_spec, "_ROUNDS_HALF", "99")
    x, y = data(8)
    model, engine = embedded(MLP().float(), "sgd", jit="inductor", precision="mixed_bfloat16")
    fit(model, x.float(), y)
    assert described == []
    assert reasons(engine) == [
        "Updates run as recorded, not compiled: it computes in half precision, which needs torch "
        "2.13."
    ]


# Kernels of older torch round numbers themselves, and nothing is compiled with it.
@pytest.mark.skipif(requirements.loader() is None, reason="needs a torch that compiles")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_rounded_once_where_torch_does_it(dtype):
    """Numbers, too, as torch does it: a compiler that does not would train slower, or otherwise."""
    tensor, rate = torch.linspace(-3, 3, 64).to(dtype), torch.tensor(0.0501)
    other, half_rate = tensor.flip(0).contiguous(), rate.to(dtype)

    def update(p, q, c, h):
        products = [p * c, p / c, p.clone().mul_(c), p.clone().div_(c)]
        sums = [p.add(q, alpha=0.3), p.clone().sub_(q, alpha=0.3), torch.rsub(p, q, alpha=0.3)]
        moved = [p.lerp(q, 0.1), p.clone().lerp_(q, h), p.addcmul(q, p, value=0.3)]
        return [*products, *sums, *moved, p * (q + 0.0501), p.addcdiv(q, p.abs())]

    inputs = tensor, other, rate, half_rate
    graph = make_fx(update, tracing_mode="fake")(*inputs)
    worker._round_as_torch(graph.graph)
    graph.recompile()
    for one, expected in zip(graph(*inputs), update(*inputs)):
        assert one.dtype == dtype
        assert torch.equal(one, expected)
    products, sums, moved = 4 * 3, 3 * 3 + 2, 3 + 4 + 4 + 4
    names = [str(node.target) for node in graph.graph.nodes]
    assert names.count("prims.convert_element_type.default") == products + sums + moved
    assert not {"aten.mul_.Tensor", "aten.div_.Tensor"} & set(names)


@pytest.mark.skipif(requirements.loader() is None, reason="needs a torch that compiles")
def test_what_is_rounded_alike_anyway_stays():
    """Sums without numbers, products of halves, and all of float32."""

    def update(p, q, c, f):
        return [p + q, p * q, p + c, c * p, f * c, f.lerp(f, 0.1), f.add(f, alpha=0.3)]

    half = torch.ones(4, dtype=torch.bfloat16)
    graph = make_fx(update, tracing_mode="fake")(half, half, torch.tensor(0.1), torch.ones(4))
    before = [node.target for node in graph.graph.nodes]
    worker._round_as_torch(graph.graph)
    assert [node.target for node in graph.graph.nodes] == before


class OwnSGD(torch.optim.SGD):
    """A subclass may do anything in its step."""


class Spectrum(nn.Module):
    """Of the pictures' values."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(12, 5)

    def forward(self, x):
        return self.head(torch.fft.fft(x.flatten(1)).abs())


@pytest.mark.few(
    "<lambda>-sgd-options1-it computes with complex numbers",
)
@pytest.mark.parametrize(
    ("net", "optimizer", "options", "reason"),
    [
        (Sampling, "sgd", {}, "it draws random numbers that depend on more than a shape"),
        (lambda: Spectrum().double(), "sgd", {}, "it computes with complex numbers"),
    ],
)
def test_what_does_not_fit_runs_as_recorded_and_says_why(
    net, optimizer, options, reason, described
):
    x, y = data(8)
    nets = []
    for jit in ("graph", "inductor"):
        torch.manual_seed(0)
        start = net()
        start = start if "precision" in options else start.double()
        given = optimizer if isinstance(optimizer, str) else lambda p: OwnSGD(p, lr=0.1)
        model, engine = embedded(start, given, jit=jit, **options)
        fit(model, x.to(next(start.parameters()).dtype), y)
        nets.append(model.module)
    assert_equal(nets[1], nets[0])
    assert described == []
    assert reasons(engine) == [f"Updates run as recorded, not compiled: {reason}."]
    assert reasons(engine)[0] in model._session.explain()


@pytest.mark.parametrize(
    ("change", "needs"),
    [
        (
            {"loader": lambda: None},
            f"a torch that compiles programs into libraries, which torch {torch.__version__} "
            "can't. Install torch 2.6 or newer, or pass jit='graph'.",
        ),
        (
            {"loader": lambda: object, "_compiler": lambda: "no-such-compiler"},
            "a C++ compiler, and 'no-such-compiler' was not found. Install one (apt install g++, "
            "or xcode-select --install on a Mac), set CXX to one, or pass jit='graph'.",
        ),
    ],
)
def test_compile_says_what_is_missing(change, needs, monkeypatch):
    if "_compiler" in change and requirements.missing() is not None:
        pytest.skip(f"jit='inductor' needs {requirements.missing()}")
    for name, value in change.items():
        monkeypatch.setattr(requirements, name, value)
    model = ipufit.Model(MLP(), engine="embedded")
    refused(
        lambda: model.compile("adam", "cross_entropy", jit="inductor"),
        f"jit='inductor' needs {needs}",
    )


def test_a_library_that_does_not_load_is_compiled_again(tmp_path, monkeypatch):
    """One of an earlier system, say."""
    monkeypatch.setenv("IPUFIT_CACHE_DIR", str(tmp_path))

    class Compiling:
        def __init__(self, request, store):
            raise RuntimeError("compiles")

    def load(self, library, origin):
        raise RuntimeError("undefined symbol")

    monkeypatch.setattr("ipufit.engines.embedded.engine.refuse_missing", lambda: None)
    monkeypatch.setattr(compiled_module, "Compilation", Compiling)
    monkeypatch.setattr(CompiledPart, "_load", load)
    dropped = []
    monkeypatch.setattr(
        compiled_module.LibraryStore, "find", lambda self, parts: tmp_path / "program.so"
    )
    monkeypatch.setattr(
        compiled_module.LibraryStore, "drop", lambda self, parts: dropped.append(parts)
    )
    x, y = data(8)
    model, _ = embedded(MLP().double(), "sgd")
    with pytest.raises(RuntimeError, match="compiles"):
        fit(model, x, y)
    assert len(dropped) == 1


class Deep(nn.Module):
    """Layers with values to compute again, two of which get random numbers."""

    def __init__(self):
        super().__init__()
        sizes = (12, 16, 16, 5)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(*each), nn.Tanh(), nn.Dropout(0.2), nn.Linear(each[1], each[1]))
            for each in zip(sizes, sizes[1:])
        )

    def forward(self, x):
        x = x.flatten(1)
        for layer in self.layers:
            x = layer(x)
        return x


def test_what_is_computed_again_waits_for_the_gradients_of_what_follows(described):
    """A compiler that may compute it with the first time keeps it, as if there were one time."""
    x, y = data(24)
    nets = []
    for recompute in (None, ["layers.*"]):
        torch.manual_seed(0)
        memory = ipufit.Memory(recompute=recompute)
        model, _ = embedded(Deep().double(), OPTIMIZERS["adam"], memory=memory)
        fit(model, x, y, Plan(4, 1, 2))
        nets.append(model.module)
    assert_equal(*nets)
    lines = described[-1]._form.code.splitlines()
    waits = [place for place, line in enumerate(lines) if "aten.where.self(" in line]
    again = [place for place, line in enumerate(lines) if "aten.tanh.default(" in line]
    gradients = [place for place, line in enumerate(lines) if "aten.tanh_backward." in line]
    assert len(waits) == len(gradients) == 3
    assert len(again) == 6
    # The first one computed again is of the last layer.
    for wait, value, gradient in zip(waits, again[3:], gradients):
        assert wait < value < gradient
    assert waits[0] < again[3] < gradients[0] < waits[1] < again[4] < gradients[1]


SHAPES = [(3, 4), (3, 4), (5, 4), (5, 4), (3, 4), (5, 4), (5, 4), (5, 4), (3, 4), (3, 2)]


class EndError(Exception):
    """What ends a run in these tests."""


def shaped(described, jit="inductor", drop=0.0, **plan):
    """A fit on updates of one shape, of several, and of fewer micro-batches; what ran compiled."""
    torch.manual_seed(0)
    model, engine = embedded(Pooled(drop).double(), OPTIMIZERS["adamw"], "mse", jit=jit)
    before = len(described), len(described.alone)
    how = {"gradient_accumulation": 2, "epochs": 2, "seed": 1, "verbose": 0, **plan}
    model.fit(sequences(SHAPES), **how)
    return model, engine, (len(described) - before[0], len(described.alone) - before[1])


def test_updates_of_every_shape_are_compiled(described):
    """Those that mix shapes, or are smaller, by micro-batches; the numbers are those of a loop."""
    model, engine, made = shaped(described)
    expected, _ = loop(Pooled(), sequences(SHAPES), 2, epochs=2)
    close(weights(model), expected)
    together, alone = calls(SHAPES, Plan(ga=2))
    assert made == (2 * together, 2 * alone) == (2 * 3, 2 * 4)
    assert len(set(map(id, described))) == 2
    assert len(set(map(id, described.alone))) == 3
    assert sorted(reasons(engine)) == [TOGETHER, ALONE]
    for number, part in enumerate(engine.training.way._by_kind.values()):
        part.origin = f"described as {'abcde'[number]}"
    shapes = [line.partition(": ")[0] for line in reasons(engine)]
    long, short, fewer = (f"Batches of ({n}, {t}), ({n}, 2)" for n, t in ((4, 5), (4, 3), (2, 3)))
    assert sorted(shapes) == [fewer, short, short, long, long]


@pytest.mark.parametrize("iterations", [3, 6])
def test_what_is_compiled_depends_on_each_update_alone(iterations, described):
    """On no division into executions: bits, and how often each library is called."""
    model, _, made = shaped(described, drop=0.3)
    other, _, again = shaped(described, drop=0.3, device_iterations=iterations)
    assert made == again
    assert_equal(model.module, other.module)
    recorded, _, _ = shaped(described, drop=0.3, jit="graph")
    assert_close(model.module, recorded.module, TOLERANCE)


def test_a_run_of_every_shape_goes_on_with_the_same_bits(described, tmp_path):
    """Within an epoch, wherever it ends: none of the libraries is missed or used twice."""
    several = []

    def part(updates, **options):
        """A fit that ends after so many updates."""
        left = itertools.count()

        def end(batch, logs):
            if next(left) == updates:
                raise EndError

        callback = ipufit.callbacks.LambdaCallback(on_train_batch_begin=end)
        before = len(described), len(described.alone)
        try:
            return shaped(described, drop=0.3, callbacks=[callback], **options)[0]
        finally:
            several.append((len(described) - before[0], len(described.alone) - before[1]))

    whole = part(None)
    goes_on = ipufit.Checkpoint(tmp_path, every_updates=1, resume="auto")
    for updates in (3, 4):
        with pytest.raises(EndError):
            part(updates, checkpoint=goes_on)
    assert_equal(part(None, checkpoint=goes_on).module, whole.module)
    assert tuple(map(sum, zip(*several[1:]))) == several[0]


def decay(update):
    return 0.01 * (update >= 3)


def push(update):
    return 0.9 * (update >= 3)


@pytest.mark.parametrize("iterations", [1, 4])
def test_settings_that_are_on_in_some_updates_have_libraries_of_their_own(iterations, described):
    """Momentum from the fourth update on, which is another rule: in the middle of an execution."""
    x, y = data(26)
    nets = []
    for jit in ("graph", "inductor"):
        torch.manual_seed(0)
        schedule = {"momentum": push, "weight_decay": decay}
        model, _ = embedded(
            MLP().double(), lambda p: torch.optim.SGD(p, lr=0.05), jit=jit, lr_scheduler=schedule
        )
        fit(model, x, y, Plan(4, iterations))
        nets.append(model.module)
    assert_close(nets[1], nets[0], TOLERANCE)
    assert len(described) == 14
    # Of the smaller last update both have momentum.
    assert len(set(map(id, described))) == 3
    assert described.alone == []


@pytest.mark.parametrize(
    ("optimizer", "options", "why"),
    [
        (lambda p: OwnSGD(p, lr=0.1), {}, "OwnSGD runs through its own step"),
        (lambda p: torch.optim.Adagrad(p, lr=0.1), {}, "Adagrad runs through its own step"),
        (
            lambda p: torch.optim.LBFGS(p, lr=0.01, max_iter=2),
            {},
            "LBFGS runs through its own step",
        ),
        (
            {"conv": "sgd", "*": "adam"},
            {"clip": {"conv": ipufit.Clip(norm=0.1)}},
            "optimizers have their own gradient clipping",
        ),
    ],
    ids=["subclass", "adagrad", "lbfgs", "clip"],
)
def test_micro_batches_are_compiled_where_the_optimizer_is_not(optimizer, options, why, described):
    x, y = data(23)
    nets = []
    for jit in ("graph", "inductor"):
        torch.manual_seed(0)
        model, engine = embedded(plain_cnn(), optimizer, jit=jit, **options)
        fit(model, x, y, Plan(4, 2, 2))
        nets.append(model.module)
    assert_close(nets[1], nets[0], TOLERANCE)
    assert described == []
    assert len(described.alone) >= 12
    assert reasons(engine) == [f"As {why}, micro-batches alone run described."]
    assert engine.training.way.jit == "inductor"


@pytest.mark.long
def test_a_choice_that_is_measured_decides_about_no_program_that_is_kept(described, monkeypatch):
    """Another process may measure otherwise, and finds the library all the same."""
    parts, codes = [], []

    def begin(self, request, compiles):
        parts.append(request.parts())
        codes.append(request.form.code)
        self._run = UpdateFunction(request.form)

    monkeypatch.setattr(CompiledPart, "_begin", begin)
    x, y = data(8)
    for products in (cpu_kernels.use_onednn_matmul, _other_products):
        torch.manual_seed(0)
        monkeypatch.setattr(cpu_kernels, "use_onednn_matmul", products)
        model, _ = embedded(MLP().double(), "sgd")
        fit(model, x, y)
    assert codes[0] != codes[1]
    assert parts[0] == parts[1]


def _other_products(graph):
    for node in list(graph.nodes):
        if node.target is torch.ops.aten.mm.default:
            node.target = torch.ops.aten.matmul.default


class Masks(nn.Module):
    """A class for each pixel: its outputs and their gradients are pictures, too."""

    def __init__(self):
        super().__init__()
        self.first, self.norm = nn.Conv2d(1, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.last = nn.Conv2d(8, 3, 3, padding=1)

    def forward(self, x):
        x = nn.functional.relu(self.norm(self.first(x)))
        x = nn.functional.max_pool2d(x, 2)
        return nn.functional.interpolate(self.last(x), scale_factor=2)


def norm(output, target):
    return output.norm()


def trained_masks(jit):
    """Weights after two epochs, and the engine."""
    torch.manual_seed(0)
    model, engine = embedded(Masks(), OPTIMIZERS["sgd"], jit=jit, metrics=[norm])
    x = torch.randn(32, 1, 8, 8)
    fit(model, x, (x[:, 0] > 0).long(), Plan(4, 2))
    return model.module, engine


@pytest.fixture
def pictures_by_channels(monkeypatch):
    """Channels last is the fastest, whatever the sizes."""
    monkeypatch.setattr(cpu_kernels, "_SMALLEST_PICTURE", 0)
    monkeypatch.setattr(timing, "seconds_of", lambda calls, *_: [1.0] + [0.5] * (len(calls) - 1))
    monkeypatch.setattr(timing, "_known", {})


@pytest.mark.usefixtures("pictures_by_channels")
def test_pictures_have_channels_last_where_the_recorded_program_has_them(described):
    expected, _ = trained_masks("graph")
    module, engine = trained_masks("inductor")
    assert_close(module, expected, 1e-5)
    assert engine.training.way.jit == "inductor"
    code = described[0]._form.code
    assert code.count("_channels_last(") == 9
    assert code.count("_as_recorded(") > 0


def test_convolutions_of_few_positions_are_products(described, monkeypatch):
    monkeypatch.setattr(small_convolutions, "_FEWEST_WEIGHTS", 0)
    monkeypatch.setattr(small_convolutions, "fastest", lambda key, make: "seeing")
    net = nn.Sequential(nn.Conv2d(1, 4, 3, stride=4, padding=1), nn.ReLU(), nn.Flatten())
    x, modules = torch.randn(32, 1, 8, 8), []
    for jit in ("graph", "inductor"):
        model, engine = embedded(copy.deepcopy(net), OPTIMIZERS["sgd"], jit=jit)
        fit(model, x, torch.arange(32) % 16, Plan(4, 2))
        modules.append(model.module)
    assert engine.training.way.jit == "inductor"
    assert_close(modules[1], modules[0], 1e-5)
    code = described[0]._form.code
    assert code.count("aten.im2col") == 2
    assert code.count("aten.convolution") == 0
