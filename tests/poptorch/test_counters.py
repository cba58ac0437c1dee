"""Counters, latencies, synthetic data, the compilation's time and the names of spans."""

import datetime

import pytest
import torch
from torch import nn

from ipufit import poptorch
from ipufit.poptorch import OutputMode, profiling
from ipufit.poptorch._compiled import latency
from ipufit.poptorch.poptorch_core import Error


class Product(nn.Module):
    def forward(self, x, y):
        return x * y


class Fit(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(1, 1)
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, x, y):
        self.seen.add_(1)
        out = self.linear(x)
        return out, nn.functional.mse_loss(out, y)


def options(mode=OutputMode.All, period=None, di=1, ga=1, replicas=1):
    made = poptorch.Options().deviceIterations(di).replicationFactor(replicas)
    made.outputMode(mode, period).showCompilationProgressBar(False).broadcastBuffers(False)
    made.Training.gradientAccumulation(ga)
    return made


def counts(model):
    return {event: [len(t) for t in times] for event, times in model.getPerfCounters().items()}


@pytest.mark.few
@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize(
    ("mode", "period", "share"),
    [
        (OutputMode.All, None, lambda di, ga: di * ga),
        (OutputMode.EveryN, 2, lambda di, ga: di * ga // 2),
        (OutputMode.Final, None, lambda di, ga: 1),
        (OutputMode.Sum, None, lambda di, ga: 1),
    ],
)
def test_every_transfer_is_counted(mode, period, share, replicas):
    """Inputs of every micro-batch; outputs of those that come back."""
    di, ga = 4, 2
    model = poptorch.trainingModel(Fit(), options(mode, period, di, ga, replicas))
    batch = torch.ones(di * ga * replicas, 1)
    model(batch, batch)
    outputs = share(di, ga) * replicas
    assert counts(model) == {
        "input": [di * ga * replicas] * 2,
        "input_complete": [di * ga * replicas] * 2,
        "output": [outputs] * 2,
        "output_complete": [outputs] * 2,
    }
    for shortest, longest, mean in (
        model.getHostIpuLatency(),
        model.getComputeLatency(),
        model.getIpuHostLatency(),
        model.getLatency(),
    ):
        assert 0 <= shortest <= mean <= longest


def test_times_are_in_order():
    model = poptorch.inferenceModel(Product(), options(di=2))
    model(torch.ones(2), torch.ones(2))
    times = model.getPerfCounters()
    for step in range(2):
        line = [times[e][0][step] for e in ("input", "input_complete", "output", "output_complete")]
        assert line == sorted(line)


def test_only_the_last_call_counts_and_copies_are_given():
    model = poptorch.inferenceModel(Product(), options())
    assert counts(model) == {e: [0] for e in counts(model)}
    for _ in range(2):
        model(torch.ones(1), torch.ones(1))
    assert counts(model)["input"] == [1, 1]
    model.getPerfCounters()["input"].clear()
    assert counts(model)["input"] == [1, 1]


def test_a_latency_is_the_time_from_the_first_input_to_the_last_output():
    assert latency([1.0, 2.0, 5.0, 9.0], [4.0, 10.0]) == (3.0, 5.0, 4.0)
    assert latency([2.0, 6.0], [3.0, 8.0]) == (1.0, 2.0, 1.5)


@pytest.mark.parametrize(("starts", "ends"), [([], []), ([], [1.0]), ([1.0], [])])
def test_without_one_of_the_events_a_latency_is_zero(starts, ends):
    assert latency(starts, ends) == (0.0, 0.0, 0.0)


def test_a_model_without_inputs_has_no_latency():
    class Only(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(2))

        def forward(self):
            return self.weight * 2

    model = poptorch.inferenceModel(Only(), options())
    model()
    assert model.getLatency() == (0.0, 0.0, 0.0)
    assert counts(model)["output"] == [1]


def test_synthetic_data_brings_shapes_and_no_counts():
    opts = options(di=4).enableSyntheticData(True)
    model = poptorch.inferenceModel(Product(), opts)
    result = model(torch.ones(4, 3), torch.ones(4, 3))
    assert torch.equal(result, torch.zeros(4, 3))
    assert counts(model) == {
        "input": [0, 0],
        "input_complete": [0, 0],
        "output": [0],
        "output_complete": [0],
    }
    assert model.getLatency() == (0.0, 0.0, 0.0)


def test_nothing_is_trained_for_the_host_on_synthetic_data():
    """Made-up indices are valid ones, and weights do not come back."""

    class Table(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Embedding(3, 2)

        def forward(self, i):
            return poptorch.identity_loss(self.table(i).sum(), "none")

    module = Table()
    before = module.table.weight.detach().clone()
    model = poptorch.trainingModel(module, options().enableSyntheticData(True))
    assert model(torch.tensor([2, 1])).item() == 0
    assert torch.equal(module.table.weight.detach(), before)
    assert model.copyWeightsToHostIfNeeded() is False


def test_synthetic_data_leaves_the_callers_tensors():
    class Change(nn.Module):
        def forward(self, x):
            x.mul_(2)
            return x.sum()

    x = torch.ones(2)
    poptorch.inferenceModel(Change(), options().enableSyntheticData(True))(x)
    assert x.tolist() == [1, 1]
    poptorch.inferenceModel(Change(), options().enableSyntheticData(False))(x)
    assert x.tolist() == [2, 2]


def test_the_time_of_the_compilation_needs_the_bar(capsys, tmp_path):
    model = poptorch.inferenceModel(Product(), poptorch.Options())
    with pytest.raises(Error, match="Please compile the model before obtaining compilation time"):
        model.compilationTime()
    model.compile(torch.ones(1), torch.ones(1))
    assert model.compilationTime() > datetime.timedelta()
    assert "Graph compilation: 100%" in capsys.readouterr().err
    model.save(str(tmp_path / "x"), export_model=False)
    loaded = poptorch.inferenceModel(Product(), poptorch.Options())
    loaded.loadExecutable(str(tmp_path / "x"))
    assert loaded.compilationTime() == datetime.timedelta()
    assert capsys.readouterr().err == ""
    quiet = poptorch.inferenceModel(Product(), options())
    quiet.compile(torch.ones(1), torch.ones(1))
    assert capsys.readouterr().err == ""
    with pytest.raises(Error, match="Please set showCompilationProgressBar option"):
        quiet.compilationTime()


def test_a_compilation_that_fails_leaves_the_bar_for_the_next_one(capsys):
    class Moody(nn.Module):
        fails = True

        def forward(self, x):
            if self.fails:
                raise ZeroDivisionError
            return x + 1

    module = Moody()
    model = poptorch.inferenceModel(module, poptorch.Options())
    with pytest.raises(ZeroDivisionError):
        model.compile(torch.ones(1))
    bar = model.options._progress_bar
    assert bar.compilation_time is None
    Moody.fails = False
    model.compile(torch.ones(1))
    assert bar.compilation_time > datetime.timedelta()
    assert "Graph compilation: 100%" in capsys.readouterr().err


def test_spans_have_the_names_of_the_channel(tmp_path, monkeypatch):
    names = []
    original = profiling.Channel.tracepoint

    def noted(self, name):
        names.append(f"{self._name}.{name}")
        return original(self, name)

    monkeypatch.setattr(profiling.Channel, "tracepoint", noted)
    path, batch = str(tmp_path / "x"), (torch.ones(1, 1), torch.ones(1, 1))
    model = poptorch.trainingModel(Fit(), options())
    model.compileAndExport(path, *batch)
    assert names == [
        f"poptorch.trainingModel.{name}"
        for name in (
            "compileAndExport",
            "compile",
            "modelCompilation",
            "copyWeightsToDevice",
            "saveExecutableToFile",
        )
    ]
    names.clear()
    model(*batch)
    model.copyWeightsToHost()
    model.setOptimizer(poptorch.optim.SGD(model.model.parameters(), lr=0.01))
    model.destroy()
    assert names == [
        f"poptorch.trainingModel.{name}"
        for name in ("modelExecution", "copyWeightsToHost", "setOptimizer", "destroy")
    ]
    names.clear()
    other = poptorch.inferenceModel(Product(), options())
    other.compile(*batch)
    assert names[0] == "poptorch.inferenceModel.compile"
