"""Operators of a micro-batch: where they come from, what they take, and that nothing changes."""

import inspect
import random
import types

import numpy as np
import pytest
import torch
from torch import nn

import ipufit
from ipufit.engines.embedded.engine import EmbeddedEngine
from ipufit.engines.embedded.passes.select_kernels import lower
from ipufit.engines.embedded.profiling import operators, profile
from ipufit.engines.embedded.profiling.operators import places_of, profile_graph
from ipufit.engines.embedded.profiling.profile import OperatorProfiler, thin_curve
from ipufit.engines.embedded.programs.training import TrainingProgram
from ipufit.report import recorder
from ipufit.tracing.capture import capture
from ipufit.tracing.source_map import Origin, TracedCall
from tests.nets import CNN, MLP, Running, data
from tests.tape import Tapes


@pytest.fixture(autouse=True)
def no_page(monkeypatch):
    """The page has tests of its own."""
    monkeypatch.setattr(recorder, "write_page", lambda folder: None)


def fitted(folder, make=CNN, engine=EmbeddedEngine, dtype=torch.float64, compiling=None, **how):
    """A fit with a report in the folder, or without one: the model, the state of all generators."""
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    net = make().to(dtype)
    x, y = data(20)
    model = ipufit.Model(net, engine=engine)
    optimizer = torch.optim.Adam(net.parameters(), 0.01)
    model.compile(optimizer, "cross_entropy", metrics=["accuracy"], **(compiling or {}))
    report = None if folder is None else ipufit.Report(folder, overwrite=True)
    given = {"batch_size": 4, "epochs": 2, "seed": 1, "verbose": 0, **how}
    model.fit(x.to(dtype), y, callbacks=report, **given)
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()
    return model, states


def profiled(folder, monkeypatch, **how):
    """What the report of a fit has of its operators; a failure is one of the test."""
    found = {}
    original = recorder.Recorder._profiled

    def kept(self):
        found.update(original(self))
        return dict(found)

    monkeypatch.setattr(recorder.Recorder, "_profiled", kept)
    fitted(folder, **how)
    return found


def late():
    """Results are looked at after an execution, as on a GPU."""
    engine = EmbeddedEngine()
    engine.as_device = True
    return engine


def captured():
    """Executions are captured whole and replayed, as CUDA graphs are."""
    engine = late()
    engine.tape = Tapes()
    return engine


class Drawing(CNN):
    """Draws from Python's and NumPy's generators while it is recorded."""

    def forward(self, x):
        return super().forward(x) * (1 + 0 * random.random() + 0 * float(np.random.rand()))


WAYS = {
    "graph": {"compiling": {"jit": "graph"}},
    "auto": {"compiling": {"jit": "auto"}},
    "merged": {"make": MLP, "gradient_accumulation": 3},
    "accumulation": {"gradient_accumulation": 2, "ipus": 2, "device_iterations": 2},
    "eager": {"compiling": {"run_eagerly": True}},
    "loss scale": {"compiling": {"precision": ipufit.Precision(loss_scale="dynamic")}},
    "mixed": {"compiling": {"precision": "mixed_bfloat16"}, "dtype": torch.float32},
    "recompute": {"compiling": {"memory": ipufit.Memory(recompute=["conv", "norm"])}},
    "averages": {"compiling": {"ema": ipufit.EMA()}},
    "clipped": {"compiling": {"clip": ipufit.Clip(global_norm=0.5)}, "gradient_accumulation": 2},
    "buffers": {"make": Running},
    "drawing": {"make": Drawing},
    "late": {"engine": late},
    "captured": {"engine": captured},
}
# Each has what the profiler does otherwise.
QUICK = ("auto", "merged", "accumulation", "eager", "drawing", "captured")


# What "drawing" draws is of no use, and it is warned of it.
@pytest.mark.few("auto", "captured")
@pytest.mark.filterwarnings("ignore:a random number is drawn from random at:UserWarning")
@pytest.mark.parametrize(
    "way", [pytest.param(way, marks=() if way in QUICK else pytest.mark.long) for way in WAYS]
)
def test_a_fit_with_a_report_has_the_bits_of_one_without(tmp_path, way):
    """Weights, buffers, optimizer, history, generators, and the number of recordings."""
    (one, states), (other, expected) = (
        fitted(folder, **WAYS[way]) for folder in (tmp_path / "r", None)
    )
    for name, tensor in other.module.state_dict().items():
        assert torch.equal(one.module.state_dict()[name], tensor), name
    own, others = (m._session.optimizer.state_dict()["state"] for m in (one, other))
    assert own.keys() == others.keys()
    for key, state in others.items():
        for name, value in state.items():
            assert torch.equal(torch.as_tensor(own[key][name]), torch.as_tensor(value))
    assert one.history.history == other.history.history
    assert torch.equal(states[0], expected[0])
    assert states[1] == expected[1]
    assert str(states[2]) == str(expected[2])
    assert one._session.engine.captures == other._session.engine.captures


class Two(nn.Module):
    """A layer, a line of the user's own, and another layer."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(12, 6), nn.Linear(6, 5)

    def forward(self, x):
        x = self.first(x.flatten(1))
        x = x * torch.sigmoid(x)  # here
        return self.second(x)


@pytest.mark.long
@pytest.mark.parametrize("jit", ["graph", "kernels"])
def test_every_operator_is_told_with_its_module_and_line(tmp_path, monkeypatch, jit):
    """Also of what stands in the place of what was recorded."""
    found = profiled(tmp_path / "r", monkeypatch, make=Two, compiling={"jit": jit})
    assert (found["micro_batch_size"], found["device"], found["note"]) == (4, "cpu", "")
    assert found["timed"].startswith("node by node, by the clock of the host; the shortest time of")
    rows = found["rows"]
    line = inspect.getsource(Two).splitlines().index("        x = x * torch.sigmoid(x)  # here")
    first = inspect.getsourcelines(Two)[1]
    own = [row for row in rows if row["source"].endswith("# here")]
    assert {row["line"] for row in own} == {first + line}
    assert {row["file"] for row in own} == {__file__}
    assert {(row["module"], row["kind"]) for row in own} == {("", "Two")}
    # Old versions of torch don't say which operator a gradient belongs to, but the module.
    tells = hasattr(torch._C._autograd, "_get_sequence_nr")
    assert {row["direction"] for row in own} == {"forward", *(["backward"] * tells)}
    products = {(row["module"], row["direction"]): row["flops"] for row in rows if row["flops"]}
    # The first layer's input needs no gradient.
    assert products == {
        ("first", "forward"): 2 * 4 * 12 * 6,
        ("first", "backward"): 2 * 4 * 12 * 6,
        ("second", "forward"): 2 * 4 * 6 * 5,
        ("second", "backward"): 2 * 2 * 4 * 6 * 5,
    }
    assert {row["module"] for row in rows} == {"", "first", "second", "loss", "gradients"}
    assert {row["direction"] for row in rows if row["module"] == "gradients"} == {"backward"}
    assert all(row["seconds"] >= 0 and row["calls"] >= 1 for row in rows)
    (update,) = (row for row in rows if row["direction"] == "optimizer")
    weights = sum(p.numel() for p in Two().parameters())
    # Weights and two averages read and written, and the gradient read.
    assert (update["operator"], update["bytes"]) == ("Adam", 7 * 8 * weights)
    assert update["seconds"] > 0


@pytest.mark.long
def test_what_is_computed_again_comes_from_where_it_was_computed_first(tmp_path, monkeypatch):
    """Its second time is in the backward pass."""
    how = {
        "compiling": {"memory": ipufit.Memory(recompute=["conv"]), "jit": "graph"},
        "make": Recomputed,
    }
    rows = profiled(tmp_path / "r", monkeypatch, **how)["rows"]
    found = [row for row in rows if row["operator"] == "aten.sigmoid.default"]
    assert [(row["module"], row["calls"]) for row in found] == [("conv", 1), ("conv", 1)]
    assert {row["direction"] for row in found} == {"forward", "backward"}
    assert len({(row["file"], row["line"]) for row in found}) == 1


class Gate(nn.Module):
    """What is cheap to compute again."""

    def forward(self, x):
        return torch.sigmoid(x * x) * x


class Recomputed(nn.Module):
    """A gate between two layers."""

    def __init__(self):
        super().__init__()
        self.first, self.conv, self.last = nn.Linear(12, 6), Gate(), nn.Linear(6, 5)

    def forward(self, x):
        return self.last(self.conv(self.first(x.flatten(1))))


def looked_at(step, arguments, jit):
    """A lowered step: what each node does, and which recorded node it is said to come from."""
    graph = capture(step, arguments)
    lowered = lower(graph, arguments, jit).graph
    calls = [TracedCall("", Origin(node.name), [node.name]) for node in graph.graph.nodes]
    work, _ = profile_graph(lowered, operators.HostTimer(), arguments)
    places = places_of(lowered, graph, calls)
    return {name: (places[name].module, each.operator) for name, each in work.records.items()}, work


def test_a_product_that_writes_elsewhere_stands_for_the_one_that_was_recorded():
    """With all that was put there for it, and its FLOPs."""
    a, b = torch.randn(128, 64), torch.randn(64, 128)

    def step(a, b):
        return [torch.cat([a.sum(0), (a @ b).view(-1)])]

    found, run = looked_at(step, [a, b], "graph")
    assert ("mm", "aten.mm.out") in found.values()
    assert ("cat", "aten.copy_.default") in found.values()
    assert {module for module, _ in found.values()} == {"sum_1", "mm", "cat"}
    assert sum(each.flops for each in run.records.values()) == 2 * 128 * 64 * 128


def test_what_is_put_before_an_operator_belongs_to_it():
    """Pictures with channels last."""
    x, w = torch.randn(16, 3, 64, 64), torch.randn(8, 3, 3, 3)

    def step(x, w):
        return [torch.relu(torch.nn.functional.conv2d(x, w))]

    found, _ = looked_at(step, [x, w], "kernels")
    assert list(found.values()) == [
        ("convolution", "channels_last"),
        ("convolution", "channels_last"),
        ("convolution", "aten.convolution.default"),
        ("relu", "aten.relu.default"),
        ("relu", "as_recorded"),
    ]


@pytest.mark.long
def test_the_note_says_what_runs_otherwise(tmp_path, monkeypatch):
    """Merged micro-batches, and captured executions."""
    found = profiled(tmp_path / "r", monkeypatch, **WAYS["merged"])
    assert found["note"] == (
        "3 micro-batches run as one larger batch: operators are those of one micro-batch alone, "
        "memory is that of the larger batch."
    )
    assert found["micro_batch_size"] == 4
    found = profiled(tmp_path / "r", monkeypatch, **WAYS["captured"])
    expected = "Executions replay CUDA graphs; these are the operators that were captured."
    assert found["note"] == expected


def test_what_has_no_recording_says_so(tmp_path, monkeypatch):
    """In place of the table."""
    found = profiled(tmp_path / "r", monkeypatch, **WAYS["eager"])
    assert found == {
        "missing": (
            "the module itself runs, so there is no recording whose operators could be timed"
        )
    }
    divided = types.SimpleNamespace(placement=types.SimpleNamespace(weights=object()))
    program = types.SimpleNamespace(state=divided, _takes_turns=False)
    assert TrainingProgram.profile(program, None) == {
        "missing": (
            "the weights are divided over processes, and one process alone can't run a micro-batch"
        )
    }


def test_without_room_for_copies_there_is_a_reason(tmp_path, monkeypatch):
    """Torch has one error for many things, of which this one is known."""

    def fails(self):
        raise RuntimeError("[enforce fail] not enough memory: you tried to allocate 99 bytes.\nC++")

    monkeypatch.setattr(OperatorProfiler, "_run", fails)
    found = profiled(tmp_path / "r", monkeypatch)
    assert found == {
        "missing": "there was not enough memory for copies of the weights: [enforce fail] not "
        "enough memory: you tried to allocate 99 bytes."
    }


def test_a_failure_nobody_thought_of_does_not_end_training(tmp_path, monkeypatch):
    """It is told, in the report and at once, and the fit goes on."""

    def fails(self, batch):
        raise KeyError("what")

    monkeypatch.setattr(TrainingProgram, "profile", fails)
    with pytest.warns(RuntimeWarning, match="could not be timed \\(KeyError: 'what'\\)"):
        found = profiled(tmp_path / "r", monkeypatch)
    assert found == {"missing": "KeyError: 'what'"}


@pytest.mark.long
def test_nobody_is_timed_who_is_not_asked_for(tmp_path, monkeypatch):
    """Report(operators=False)."""
    monkeypatch.setattr(TrainingProgram, "profile", None)
    model = ipufit.Model(MLP().double(), engine="embedded")
    model.compile("sgd", "cross_entropy")
    report = ipufit.Report(tmp_path / "r", operators=False)
    model.fit(*data(8), batch_size=4, verbose=0, callbacks=report)


@pytest.mark.long
def test_the_peak_is_measured_once():
    """For each dtype, in a process; a machine reaches no more in a program, but for caches."""
    profile._peak_of.cache_clear()
    found = profile._peak_of(torch.float32, torch.device("cpu"))
    assert found["dtype"] == "float32"
    assert 1e8 < found["flops"] < 1e15
    assert 1e7 < found["bytes"] < 1e13
    assert profile._peak_of(torch.float32, torch.device("cpu")) is found


def test_what_a_machine_can_not_compute_has_no_peak(monkeypatch):
    """Products of halves on old processors."""

    def fails(*_, **__):
        raise RuntimeError("\"addmm_impl_cpu_\" not implemented for 'Half'")

    monkeypatch.setattr(torch, "mm", fails)
    found = profile._peak_of.__wrapped__(torch.float16, torch.device("cpu"))
    assert (found["dtype"], found["flops"]) == ("float16", None)
    assert found["bytes"] > 0


def test_a_long_curve_keeps_its_peak():
    """It is drawn through the highest of several points."""
    points = [("op", "", "forward", value % 977) for value in range(7001)]
    points[3333] = ("high", "", "forward", 5000)
    found = thin_curve(points)
    assert len(found) <= 2000
    assert ["high", "", "forward", 5000] in found
    assert thin_curve(points[:3]) == [["op", "", "forward", value] for value in range(3)]


def test_on_a_gpu_events_are_looked_at_after_a_round(monkeypatch):
    """The host waits once, not for each call."""
    log, now = [], iter(range(100))

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self, stream):
            assert stream == "stream"
            self.at = next(now)

        def elapsed_time(self, other):
            assert log == ["synchronize"] * len(log) != []
            return 1000.0 * (other.at - self.at)

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: "stream")
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: log.append("synchronize"))
    timer = operators.timer_for(torch.device("cuda"))
    for wait in (3, 1):
        begun = timer.begin()
        for _ in range(wait - 1):
            next(now)
        timer.end("a", begun)
        timer.end_round()
    assert (timer.seconds("a"), timer.seconds("b")) == (1.0, 0.0)
    assert timer.method == "by events on the device"
    assert log == ["synchronize"] * 2
