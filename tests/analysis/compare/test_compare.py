"""``Model.compare``: the recorded program against the module, and every fault is named."""

import copy
import functools
import json
import math
import operator

import pytest
import torch
from torch import nn

import ipufit
from ipufit.engines.embedded import context as context_module
from ipufit.errors import ConfigurationError, NotCompiledError
from ipufit.tracing.comparison import DEFAULTS, Comparison, Difference, Tolerance, distance
from tests import nets
from tests.told import refused

SAMPLE = nets.data(4)


class Recurrent(nn.Module):
    """An LSTM over the rows of the picture, whose eager kernel is another one in float32."""

    def __init__(self):
        super().__init__()
        self.rnn, self.head = nn.LSTM(4, 6, batch_first=True), nn.Linear(6, 5)

    def forward(self, x):
        return self.head(self.rnn(x.squeeze(1))[0].mean(1))


def built(net, optimizer="adam", loss="cross_entropy", **options):
    """A compiled model in float64."""
    torch.manual_seed(0)
    model = ipufit.Model(net().double(), engine="embedded")
    model.compile(optimizer, loss, **options)
    return model


NETS = [nets.MLP, nets.CNN, nets.Transformer, nets.Running, nets.Noise, Recurrent]


@pytest.mark.few("{'jit': 'graph'}-MLP", "{'jit': 'graph'}-Recurrent")
@pytest.mark.parametrize("net", NETS)
@pytest.mark.parametrize("options", [{"jit": "graph"}, {}, {"jit": "kernels"}], ids=str)
def test_programs_agree_with_their_modules(net, options):
    """Dropout, running statistics and buffers that forward changes included."""
    found = built(net, **options).compare(SAMPLE)
    assert found.ok, str(found)
    assert found.first is None
    assert found.counts["operator"] > 15
    assert found.counts["module"] > 1
    assert found.counts["gradient"] == sum(1 for _ in net().parameters())
    assert found.counts["loss"] == 1
    assert "agrees with the module run eagerly" in str(found)


@functools.lru_cache(maxsize=None)
def places(net):
    """The operators of what is recorded for a net: name, operator, and whether it is backward."""
    model = built(net, jit="graph")
    model.compare(SAMPLE)
    (recorded,) = model._session.engine._traced.values()
    return [
        (node.name, str(node.target))
        for node in recorded.graph.graph.nodes
        if node.op == "call_function"
        and node.target is not operator.getitem
        # Nobody may read a tensor that has never been written.
        and "empty" not in str(node.target)
    ]


def perturbed(target):
    """An operator whose result is a little off."""

    def off(value):
        if isinstance(value, (list, tuple)):
            first = next(place for place, each in enumerate(value) if each is not None)
            return type(value)([*value[:first], off(value[first]), *value[first + 1 :]])
        if value.dtype == torch.bool:
            return ~value
        return value + (1e-4 if value.is_floating_point() else 1)

    def faulty(*args, **kwargs):
        return off(target(*args, **kwargs))

    return faulty


def with_fault(monkeypatch, place):
    """From now on, what is recorded has a fault in this node."""
    original = context_module.capture

    def capture(*args):
        graph = original(*args)
        (node,) = (each for each in graph.graph.nodes if each.name == place)
        node.target = perturbed(node.target)
        graph.recompile()
        return graph

    monkeypatch.setattr(context_module, "capture", capture)


# Found out at collection, so that each fault is a test of its own.
FAULTS = [
    # Those of a transformer take long, and are the same and more of them.
    pytest.param(net, place, marks=[pytest.mark.long] if net is nets.Transformer else [])
    for net, count in ((nets.MLP, 35), (nets.CNN, 40), (nets.Transformer, 205))
    for place in range(count)
]


@pytest.mark.grid
@pytest.mark.parametrize(("net", "number"), FAULTS, ids=lambda v: getattr(v, "__name__", v))
def test_a_fault_in_any_operator_is_named(monkeypatch, net, number):
    """The operator itself, not one of the many that its fault spreads to."""
    name, target = places(net)[number % len(places(net))]
    with_fault(monkeypatch, name)
    first = built(net, jit="graph").compare(SAMPLE).first
    assert (first.kind, first.node, first.name) == ("operator", name, target)
    assert first.absolute > first.tolerance


@pytest.mark.parametrize(
    "net", [nets.MLP, nets.CNN, pytest.param(nets.Transformer, marks=pytest.mark.long)]
)
def test_the_faults_are_those_of_all_operators(net):
    """Forward and backward, of every net."""
    count = sum(fault.values[0] is net for fault in FAULTS)
    assert len(places(net)) <= count <= 1.5 * len(places(net))


@pytest.mark.long
@pytest.mark.parametrize("backward", [False, True])
def test_a_fault_is_told_with_all_that_it_spreads_to(monkeypatch, backward):
    """The first operator, then the first module, the loss, the first gradient."""
    target = "aten.tanh_backward.default" if backward else "aten.tanh.default"
    (name,) = (name for name, each in places(nets.MLP) if each == target)
    with_fault(monkeypatch, name)
    found = built(nets.MLP, jit="graph").compare(SAMPLE)
    assert not found.ok
    assert found.first.is_backward is backward
    assert found.first_of("loss") is None if backward else found.first_of("loss").absolute > 0
    assert found.first_of("gradient").name == "layers.0.weight"
    if not backward:
        assert found.first_of("module").name == "layers.1"
        assert found.first.module == "layers.1"
        assert (found.first.module_kind, found.first.file) == ("Tanh", nets.__file__)
        assert found.first.source == "return self.layers(x.flatten(1))"
        lines = str(found).splitlines()
        assert lines[0].startswith("The recorded program differs from the module run eagerly (")
        assert lines[1].startswith(
            f"First operator aten.tanh.default of 'layers.1' (Tanh), at {nets.__file__}:"
        )
        assert lines[2].startswith("First module 'layers.1' (Tanh): max absolute difference 0.0001")
    assert found.first_of("lowering") is None


def test_a_fault_of_a_lowering_is_told_apart(monkeypatch):
    """The graph is right then, and what runs in its place is not."""
    original = context_module.lower

    def lower(*given):
        lowered = original(*given)

        def run(*tensors):
            numbers, *rest = lowered.run(*tensors)
            return [numbers, *(value * 1.01 for value in rest)]

        return type(lowered)(run, "kernels", "Runs 3 matrix products by oneDNN.")

    monkeypatch.setattr(context_module, "lower", lower)
    found = built(nets.MLP).compare(SAMPLE)
    assert {each.kind for each in found.differences} == {"lowering"}
    assert found.first.name == "gradient layers.0.weight"
    assert "\nInstead of the recorded graph, this runs: Runs 3 matrix products" in str(found)


@pytest.mark.long
def test_a_fault_of_a_buffer_is_found():
    """What forward changes in place is part of the result."""
    numbers = iter(range(100))

    class Drifts(nets.Running):
        def forward(self, x):
            self.mean.add_(next(numbers))
            return super().forward(x)

    found = built(Drifts).compare(SAMPLE)
    assert found.first_of("buffer").name == "mean"


def test_it_is_what_fit_runs():
    """The very recording, not another one of the same module."""
    model = built(nets.CNN)
    model.fit(*nets.data(8), batch_size=4, verbose=0)
    engine = model._session.engine
    (before,) = engine._traced.values()
    captures = engine.captures
    assert model.compare(SAMPLE).ok
    assert list(engine._traced.values()) == [before]
    assert engine.captures == captures


def test_it_leaves_no_trace():
    """Weights, buffers, state, modes, counts and generators, and so the rest of training."""
    found = []
    for compares in (False, True):
        model = built(nets.CNN)
        model.module.eval()
        for _ in range(2):
            if compares:
                model.compare(SAMPLE)
                model.compare(SAMPLE)
            torch.manual_seed(3)
            model.fit(*nets.data(16), batch_size=4, ipus=2, verbose=0)
        assert not model.module.training
        state = copy.deepcopy(model.optimizer.state_dict()["state"])
        found.append((model.module.state_dict(), state, torch.rand(1), model.history.history))
    one, two = found
    assert all(torch.equal(one[0][name], two[0][name]) for name in one[0])
    assert all(
        torch.equal(one[1][key][name], value)
        for key, values in two[1].items()
        for name, value in values.items()
    )
    assert torch.equal(one[2], two[2])
    assert one[3] == two[3]


@pytest.mark.long
@pytest.mark.parametrize(
    "options",
    [{"precision": "mixed_bfloat16"}, {"precision": ipufit.Precision(loss_scale=8.0)}],
    ids=str,
)
def test_options_of_compile_hold(options):
    """Autocast and a loss scale are part of the program."""
    torch.manual_seed(0)
    model = ipufit.Model(nets.MLP(), engine="embedded")
    model.compile("sgd", "cross_entropy", **options)
    x, y = SAMPLE
    found = model.compare((x.float(), y))
    assert found.ok
    model.compile("sgd", "cross_entropy")
    assert found.counts["operator"] > model.compare((x.float(), y)).counts["operator"]


@pytest.mark.long
def test_double_precision_shows_what_single_precision_loses():
    """By the operator with the largest relative difference."""

    class Cancels(nn.Module):
        def __init__(self):
            super().__init__()
            self.head = nn.Linear(12, 5)

        def forward(self, x):
            y = self.head(x.flatten(1))
            return (y + 1000) - 1000

    x, y = SAMPLE
    model = ipufit.Model(Cancels(), engine="embedded")
    model.compile("sgd", "cross_entropy")
    assert model.compare((x.float(), y)).ok
    found = model.compare((x.float(), y), "float64", rtol=1e-5)
    assert not found.ok
    assert found.largest.name == "aten.sub.Tensor"
    assert found.first.name == "aten.sub.Tensor"
    assert found.first.line == Cancels.forward.__code__.co_firstlineno + 2
    assert "differs from the module run eagerly in float64" in str(found)


@pytest.mark.long
def test_tolerances_are_the_users():
    """A looser one lets pass what the default does not."""
    x, y = SAMPLE
    model = ipufit.Model(nets.MLP(), engine="embedded")
    model.compile("sgd", "cross_entropy")
    sample = (x.float(), y)
    assert model.compare(sample, "float64").ok
    assert not model.compare(sample, "float64", rtol=0, atol=0).ok
    assert model.compare(sample, "float64", rtol=0, atol=1e-3).ok


@pytest.mark.long
def test_a_loader_gives_its_first_batch():
    """As for ``plan`` and ``summary``."""
    model = built(nets.MLP)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*SAMPLE), batch_size=2)
    assert model.compare(loader).ok


def test_all_of_it_is_plain_data():
    """For a report that is written to a file."""
    found = built(nets.MLP).compare(SAMPLE, rtol=0, atol=0)
    told = json.loads(json.dumps(found.as_dict()))
    assert told["ok"] is found.ok
    assert told["reference"] == "eager"
    assert told["counts"]["loss"] == 1


@pytest.mark.parametrize(
    ("one", "other", "absolute", "relative"),
    [
        ([1.0, 2.0], [1.0, 4.0], 2.0, 0.5),
        ([math.nan, math.inf], [math.nan, math.inf], 0.0, 0.0),
        ([math.nan, 1.0], [1.0, 1.0], math.inf, math.inf),
        ([-math.inf, 1.0], [math.inf, 1.0], math.inf, math.inf),
        ([0.5], [0.0], 0.5, math.inf),
        ([], [], 0.0, 0.0),
        ([1.0], [1.0, 2.0], math.inf, math.nan),
    ],
)
def test_distances(one, other, absolute, relative):
    """Not-a-number and infinities are values like others, if both have them."""
    found = distance(torch.tensor(one), torch.tensor(other))
    assert found.absolute == absolute
    assert found.relative == relative or math.isnan(relative)


def test_integers_must_be_equal():
    """There is no rounding to forgive."""
    assert Tolerance(1.0, 1.0).of(torch.int64, 100.0) == 0.0
    for dtype, (rtol, atol) in DEFAULTS.items():
        assert Tolerance().of(dtype, 2.0) == atol + 2 * rtol


def test_what_can_not_be_compared_is_refused():
    """Each with what to do."""
    model = built(nets.CNN)
    refused(
        lambda: model.compare(SAMPLE, "float64"),
        "reference='float64' needs a module without random numbers, because they differ between "
        "dtypes, but this one draws some. Turn random layers off, such as dropout, or use "
        "reference='eager'.",
    )
    refused(
        lambda: model.compare(SAMPLE, "keras", rtol=-1),
        "reference must be 'eager' or 'float64', got 'keras'.\n"
        "rtol must be None or a number of at least 0, got -1. Leave it out for the tolerance of "
        "the dtype.",
    )
    refused(
        lambda: built(nets.MLP, run_eagerly=True).compare(SAMPLE),
        "compare compares the recorded program with the module, but run_eagerly=True records "
        "none. Compile without it.",
    )
    other = ipufit.Model(nets.MLP().float(), engine="ipu-standin")
    other.compile("sgd", "cross_entropy")
    refused(
        lambda: other.compare(SAMPLE),
        "compare runs the recorded program operator by operator, which needs engine='embedded', "
        "got engine 'ipu-standin'. Make the model with ipufit.Model(module, engine='embedded').",
    )
    with pytest.raises(NotCompiledError):
        ipufit.Model(nets.MLP()).compare(SAMPLE)
    with pytest.raises(ConfigurationError, match="compare needs an optimizer"):
        built(nets.MLP, optimizer=None).compare(SAMPLE)


def test_differences_say_what_they_are():
    """A short line for each."""
    told = Difference("module", "", 0.5, math.inf, 1e-3, module_kind="Net")
    assert str(told) == ("module (Net): max absolute difference 0.5, relative inf, tolerance 0.001")
    assert str(Difference("operator", "aten.add.Tensor", 1.0, 1.0, 0.0, "loss")).startswith(
        "operator aten.add.Tensor of the loss: "
    )
    assert Comparison("eager", (told,), {"module": 1}).first_of("module") is told
