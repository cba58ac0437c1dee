"""``jit`` of compile with a backend of torch.compile, to which recorded graphs are handed."""

import functools
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

import ipufit
from ipufit.core.compile_arguments import Backend
from ipufit.core.train_config import TrainConfig
from ipufit.engines.embedded.zero import refuse_whole
from ipufit.errors import ConfigurationError
from tests.fitting import assert_equal
from tests.nets import Normed, data
from tests.told import message, refused

# Where torch's registry of backends can't be loaded, none can be named.
pytest.importorskip("torch._dynamo.backends.registry")


class Net(nn.Module):
    """BatchNorm, whose statistics forward writes, and dropout of what is not contiguous."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(4, 6)
        self.norm = nn.BatchNorm1d(3)
        self.drop = nn.Dropout(0.2)
        self.head = nn.Linear(6, 5)

    def forward(self, x):
        x = torch.tanh(self.norm(self.embed(x.squeeze(1))))
        return self.head(self.drop(x.transpose(0, 1)).mean(0))


def fitted(jit, optimizer="adam", rows=14, epochs=2, compiling=None, **options):
    torch.manual_seed(3)
    model = ipufit.Model(Net().double(), engine="embedded")
    model.compile(optimizer, "cross_entropy", jit=jit, **(compiling or {}))
    x, y = data(rows)
    work = {"batch_size": 3, "gradient_accumulation": 2, "device_iterations": 2, "seed": 1}
    model.fit(x, y, epochs=epochs, verbose=0, **{**work, **options})
    return model


def assert_close(model, other):
    ours, theirs = model.module.state_dict(), other.module.state_dict()
    for name, tensor in ours.items():
        torch.testing.assert_close(tensor, theirs[name], rtol=0, atol=1e-11, msg=name)
    torch.testing.assert_close(
        model.history.history["loss"], other.history.history["loss"], rtol=1e-12, atol=0
    )


class Recorded:
    """A backend that runs graphs as they are, and keeps them."""

    def __init__(self, change=None):
        self.graphs = []
        self.change = change

    def __call__(self, graph, inputs):
        self.graphs.append((graph, inputs))
        return graph.forward if self.change is None else self.change(graph)


# Torch 2.0's own first step of compiling says so.
@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")
@pytest.mark.parametrize(
    ("jit", "optimizer", "compiling"),
    [
        ("aot_eager", "adam", {}),
        ("eager", "sgd", {"clip": ipufit.Clip(global_norm=0.1), "ema": ipufit.EMA(momentum=0.9)}),
        ("eager", functools.partial(torch.optim.NAdam, lr=0.01), {"detect_nan": True}),
        ("eager", "lamb", {"memory": ipufit.Memory(recompute=["embed"])}),
    ],
    ids=["adam", "sgd", "nadam", "lamb"],
)
def test_the_numbers_are_those_of_the_graph(jit, optimizer, compiling):
    """Tails, dropout, buffers, rules, steps of torch's own: a backend changes nothing of these."""
    as_recorded = fitted("graph", optimizer, compiling=compiling)
    model = fitted(jit, optimizer, compiling=compiling)
    assert_close(model, as_recorded)
    assert model.history.params["jit"] == jit
    x, y = data(6)
    assert model.evaluate(x, y, batch_size=3, verbose=0) == pytest.approx(
        as_recorded.evaluate(x, y, batch_size=3, verbose=0), rel=1e-12
    )


def test_a_backend_gets_graphs_of_micro_batches_and_updates():
    """As torch.compile calls one: a graph module, and tensors that it may do with as it likes."""
    backend = Recorded()
    model = fitted(backend)
    model.predict(data(3)[0], batch_size=3, verbose=0)
    micro_batch, update, forward = backend.graphs[0], backend.graphs[1], backend.graphs[-1]
    for graph, inputs in backend.graphs:
        assert isinstance(graph, fx.GraphModule)
        placeholders = [node for node in graph.graph.nodes if node.op == "placeholder"]
        assert [node.meta["val"].shape for node in placeholders] == [t.shape for t in inputs]
        (output,) = (node for node in graph.graph.nodes if node.op == "output")
        assert type(output.args[0]) is tuple
        before = [p.clone() for p in model.module.parameters()]
        graph(*inputs)
        assert all(map(torch.equal, before, model.module.parameters()))
    # Weights, buffers, samples, targets, and the random numbers of a dropout.
    state = [*model.module.parameters(), *model.module.buffers()]
    assert len(micro_batch[1]) == len(state) + 2 + 1
    # Coefficients, weights, gradients, and two states.
    assert len(update[1]) == 5
    assert len(forward[1]) == len(state) + 1


def test_numbers_are_the_same_for_every_number_of_device_iterations():
    one, three = (fitted("eager", device_iterations=n) for n in (1, 3))
    assert_equal(one.module, three.module)


def test_a_run_that_goes_on_ends_with_the_same_bits(tmp_path):
    whole = fitted("eager", epochs=3)
    folder = str(tmp_path)
    fitted("eager", epochs=1, checkpoint=ipufit.Checkpoint(folder))
    resumed = fitted("eager", epochs=3, checkpoint=ipufit.Checkpoint(folder, resume="auto"))
    assert_equal(whole.module, resumed.module)


def test_replicas_schedules_and_half_precision():
    compiling = {"precision": "mixed_bfloat16", "lr_scheduler": lambda update: 0.1 / (1 + update)}
    as_recorded = fitted("graph", "sgd", compiling=compiling, ipus=2)
    assert_close(fitted("eager", "sgd", compiling=compiling, ipus=2), as_recorded)


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.recurrent = nn.LSTM(4, 6, batch_first=True)
        self.head = nn.Linear(6, 5)

    def forward(self, x):
        return self.head(self.recurrent(x.squeeze(1))[0][:, -1])


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")
def test_a_recurrent_layer_goes_along_whole():
    states = []
    for jit in ("graph", "aot_eager"):
        torch.manual_seed(0)
        model = ipufit.Model(Recurrent().double(), engine="embedded")
        model.compile("sgd", "cross_entropy", jit=jit)
        model.fit(*data(8), batch_size=4, verbose=0, seed=0)
        states.append(torch.cat([p.detach().flatten() for p in model.module.parameters()]))
    torch.testing.assert_close(*states, rtol=0, atol=1e-14)


def test_explain_says_what_compiles(capsys):
    memory = ipufit.Memory(recompute=["embed"])
    model = fitted("eager", "adagrad", rows=3, epochs=1, compiling={"memory": memory})
    capsys.readouterr()
    model.explain()
    text = capsys.readouterr().out
    for sentence in (
        "Hands recorded graphs to the backend 'eager' of "
        "torch.compile; each computes what the graph does, as was compared when it was compiled.",
        "The backend may undo the recomputation, and then needs more memory.",
        "The optimizer's step takes numbers that change, so updates run as recorded, not compiled.",
    ):
        assert sentence in text


class Static:
    """A backend whose results lie in the same memory in every call, as those of CUDA graphs do."""

    def __call__(self, graph, inputs):
        memory = []

        def run(*tensors):
            results = graph(*tensors)
            if not memory:
                memory.extend(result.clone() for result in results)
            for place, result in zip(memory, results):
                place.copy_(result)
            return tuple(memory)

        return run


def test_results_that_a_backend_would_write_over_are_copied():
    model, as_recorded = fitted(Static()), fitted("graph")
    assert_close(model, as_recorded)
    x, _ = data(8)
    outputs = [each.predict(x, batch_size=2, verbose=0) for each in (model, as_recorded)]
    torch.testing.assert_close(*outputs, rtol=0, atol=1e-11)


def test_names_that_are_registered_are_found():
    from torch._dynamo.backends import registry

    backend = Recorded()
    registry.register_backend(lambda graph, inputs: backend(graph, inputs), name="of_this_test")
    try:
        assert fitted("of_this_test", rows=3, epochs=1).history.params["jit"] == "of_this_test"
    finally:
        for table in (registry._BACKENDS, getattr(registry, "_COMPILER_FNS", {})):
            table.pop("of_this_test", None)
    assert backend.graphs


def compiling(**options):
    return lambda: ipufit.Model(Net()).compile("adam", "cross_entropy", **options)


def test_an_unknown_name_is_refused_with_all_there_are():
    text = message(compiling(jit="aot_eagr"))
    assert text.startswith(
        "unknown way to run a recorded program 'aot_eagr'. Did you mean 'aot_eager'? Known names: "
    )
    names = text.partition("Known names: ")[2].rstrip(".").split(", ")
    assert {"auto", "graph", "inductor", "aot_eager", "eager", "cudagraphs"} <= set(names)


@pytest.mark.parametrize("jit", [None, True, 3])
def test_what_is_neither_a_name_nor_a_function_is_refused(jit):
    refused(
        compiling(jit=jit),
        "jit must be 'auto' or 'graph' or 'kernels' or 'inductor' or 'cudagraph', or a backend of "
        f"torch.compile, by name or as a function, got {jit!r}.",
    )


def test_a_backend_compiles_no_module_that_runs_itself():
    refused(
        compiling(jit=Recorded(), run_eagerly=True),
        "run_eagerly=True runs the module itself, but "
        "jit='tests.engines.embedded.test_torch_compile.Recorded' asks for a recorded program. "
        "Leave one of them out.",
    )


def test_an_ipu_refuses_it_by_name():
    model = ipufit.Model(nn.Linear(4, 5), engine="ipu-standin")
    with pytest.raises(ConfigurationError) as caught:
        model.compile("sgd", "cross_entropy", jit="aot_eager")
    assert str(caught.value).startswith("an IPU can't run jit='aot_eager': Poplar alone compiles")


def raises(graph, inputs):
    raise ValueError("no such operator.\nat line 3")


def returns_nothing(graph, inputs):
    return None


def fails_in_a_call(graph, inputs):
    return lambda *tensors: tensors[99]


def one_result(graph, inputs):
    return lambda *tensors: graph(*tensors)[:1]


def plain_numbers(graph, inputs):
    return lambda *tensors: [each.tolist() for each in graph(*tensors)]


def narrower(graph, inputs):
    return lambda *tensors: [each.float() for each in graph(*tensors)]


def other_values(graph, inputs):
    return lambda *tensors: [each * (1 + 1e-6) for each in graph(*tensors)]


def writes_nothing(graph, inputs):
    return lambda *tensors: graph(*(each.clone() for each in tensors))


def first_call_alone(graph, inputs):
    results = []

    def run(*tensors):
        results.append(graph(*tensors))
        return [each + len(results) - 1 for each in results[-1]]

    return run


BAD = {
    raises: "failed to compile the graph of a micro-batch: ValueError: no such operator",
    returns_nothing: "must return a function of tensors that runs the graph of a micro-batch, "
    "but returned None",
    fails_in_a_call: "compiled the graph of a micro-batch, but that fails: IndexError: tuple index "
    "out of range",
    one_result: "must return what the graph of a micro-batch does, but there are 1 of them, and "
    "not 2",
    plain_numbers: "must return what the graph of a micro-batch does, but number 0 is {loss}, and "
    "no tensor",
    narrower: "must return what the graph of a micro-batch does, but number 0 is float32 of shape "
    "() on cpu, and not float64 of shape () on cpu",
    other_values: "must return what the graph of a micro-batch does, but number 0 has other values",
    writes_nothing: "must write into its inputs what the graph of a micro-batch does, but number "
    "{place} has other values",
    first_call_alone: "must return in every call what the graph of a micro-batch does, but number "
    "0 has other values",
}


@pytest.mark.parametrize("backend", BAD, ids=lambda each: each.__name__)
def test_a_backend_that_does_something_else_is_an_error_before_any_update(backend):
    torch.manual_seed(0)
    net = Normed().double()
    before = [tensor.clone() for tensor in net.state_dict().values()]
    x, y = data(4)
    loss = F.cross_entropy(net(x), y).item()
    net.norm.reset_running_stats()
    model = ipufit.Model(net, engine="embedded")
    model.compile("sgd", "cross_entropy", jit=backend)
    with pytest.raises(ConfigurationError) as caught:
        model.fit(x, y, batch_size=4, shuffle=False, verbose=0)
    name = f"tests.engines.embedded.test_torch_compile.{backend.__name__}"
    what = BAD[backend].format(loss=loss, place=4)
    assert str(caught.value) == (
        f"jit={name!r} compiles recorded graphs with that backend of torch.compile, which "
        f"{what}. Use another backend, or jit='auto', which needs none."
    )
    assert all(map(torch.equal, before, net.state_dict().values()))


def test_the_update_is_held_against_its_graph_too():
    def spoils_updates(graph, inputs):
        is_update = not any("loss" in str(node.target) for node in graph.graph.nodes)
        return (lambda *tensors: tensors) if is_update else graph.forward

    assert "the graph of an update" in message(fitted, spoils_updates, "sgd")


def test_random_numbers_that_depend_on_values_are_those_of_the_graph():
    """What can't be drawn before stays in the graph: a backend with numbers of its own shows."""

    class Chooses(nn.Linear):
        def forward(self, x):
            return super().forward(x * torch.bernoulli(torch.sigmoid(x)))

    def others(graph, inputs):
        def run(*tensors):
            torch.rand(1)
            return graph(*tensors)

        return run

    def fit(jit):
        torch.manual_seed(0)
        model = ipufit.Model(Chooses(12, 5).double(), engine="embedded")
        model.compile("sgd", "cross_entropy", jit=jit)
        x, y = data(4)
        model.fit(x.flatten(1), y, batch_size=4, verbose=0, seed=0)
        return model.module

    assert_equal(fit("graph"), fit(Recorded()))
    with pytest.raises(ConfigurationError, match="it draws random numbers, which may"):
        fit(others)


def test_weights_in_parts_are_refused():
    backend = Backend("eager", Recorded())
    config = TrainConfig(shard_optimizer=True, shard_weights=True, jit="eager", backend=backend)
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    refused(
        lambda: refuse_whole(optimizer, config),
        "shard='weights' needs a recorded program, which gathers weights only while they are "
        "read, but got jit='eager', a backend of torch.compile, which compiles whole graphs. "
        "Use shard='optimizer', or jit='auto'.",
    )


@pytest.mark.skipif("openxla" not in torch._dynamo.list_backends(()), reason="torch has none")
def test_a_backend_whose_package_is_missing_is_refused_by_compile(monkeypatch):
    """torch's own name for it imports the package with the first graph, hours after a queue."""
    monkeypatch.setitem(sys.modules, "torch_xla", None)
    model = ipufit.Model(nn.Linear(4, 5))
    assert message(model.compile, "sgd", "cross_entropy", jit="openxla") == (
        "jit='openxla' names a backend of torch.compile that can't be loaded: ImportError: Please "
        "follow the instruction in https://github.com/pytorch/xla#pytorchxla to install torch_xla. "
        "Install what it needs, or use jit='auto'."
    )
