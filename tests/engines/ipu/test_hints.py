"""Marks for an IPU in forward: overlapped IO on the stand-in, and what is said without an IPU."""

import pytest
import torch
from torch import nn

import ipufit
from ipufit import IPUConfig, poptorch
from ipufit.errors import ConfigurationError

LOOP = poptorch.OverlapMode.OverlapAccumulationLoop
X = torch.arange(96.0).reshape(24, 4).sin()
Y = torch.arange(24) % 3


class Net(nn.Module):
    """Marked where the flags say."""

    def __init__(self, *marks):
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head = nn.Linear(4, 4), nn.Linear(4, 3)
        self.marks = frozenset(marks)

    def forward(self, x):
        if "input" in self.marks:
            x = poptorch.set_overlap_for_input(x, LOOP)
        x = self.body(x)
        if "inside" in self.marks:
            x = poptorch.set_overlap_for_input(x, LOOP)
        if "memory" in self.marks:
            x = poptorch.set_available_memory(x, 0.3)
        if "checkpoint" in self.marks:
            x = poptorch.recomputationCheckpoint(x)
        if "product" in self.marks:
            mode = poptorch.MatMulSerializationMode.OutputChannels
            x = x + poptorch.serializedMatMul(x, self.body.weight, mode, 2)
        x = self.head(x)
        if "output" in self.marks and not self.training:
            x = poptorch.set_overlap_for_output(x, LOOP)
        return x


def options(sharded=True, tiles=32):
    made = poptorch.Options()
    if tiles:
        made.TensorLocations.numIOTiles(tiles)
    if sharded:
        made.setExecutionStrategy(poptorch.ShardedExecution())
    return made


def ran(net, engine, **given):
    model = ipufit.Model(net, engine=engine)
    model.compile("sgd", "cross_entropy", metrics=["accuracy"], **given)
    work = {"batch_size": 4, "verbose": 0}
    history = model.fit(X, Y, seed=1, gradient_accumulation=2, **work).history
    return model, history, model.evaluate(X, Y, **work), model.predict(X, **work)


@pytest.mark.long
@pytest.mark.both_engines
def test_overlapped_io_on_one_ipu_changes_no_number(engine):
    """Tiles for it, and no pipeline: said by whole options, for training and for inference."""
    marked = ran(Net("input", "output"), engine, poptorch=(options(), options()))
    plain = ran(Net(), engine)
    assert marked[1:3] == plain[1:3]
    assert torch.equal(marked[3], plain[3])


@pytest.mark.long
def test_the_tiles_and_the_strategy_reach_the_stand_in():
    """Without one of them it refuses, and what it says is what helps."""
    net = Net("input")
    for given, text in (
        ({"sharded": False}, "Overlapped IO is not supported with poptorch.PipelinedExecution."),
        ({"tiles": 0}, "No IO tiles allocated."),
    ):
        with pytest.raises(ipufit.errors.DeviceError, match=text):
            ran(net, "ipu-standin", poptorch=options(**given))
    with pytest.raises(ConfigurationError, match="For overlapped IO on one IPU use"):
        ran(net, "ipu-standin", parallel=ipufit.Parallel(strategy="sharded"))
    ran(net, "ipu-standin", poptorch=(options(), options()))


@pytest.mark.both_engines
def test_a_mark_on_what_is_no_input_is_refused(engine):
    """On an IPU as without one."""
    with pytest.raises(ipufit.errors.IpufitError, match="Call it at the start"):
        ran(Net("inside"), engine, poptorch=options())


@pytest.mark.long
def test_explain_names_the_marks_that_change_nothing(capsys):
    marks = ("input", "output", "memory", "product", "checkpoint")
    model, *_ = ran(Net(*marks), "embedded")
    capsys.readouterr()
    model.explain()
    assert (
        "IPU annotations in forward, which have no effect here: recomputationCheckpoint, "
        "serializedMatMul, set_available_memory, set_overlap_for_input, set_overlap_for_output. To "
        "recompute here, use ipufit.Memory(recompute=['name of a layer'])."
    ) in capsys.readouterr().out.splitlines()
    model, *_ = ran(Net("memory"), "embedded", run_eagerly=True)
    model.explain()
    assert "change nothing here: set_available_memory.\n" in capsys.readouterr().out
    model, *_ = ran(Net(), "embedded")
    model.explain()
    assert "Marks for an IPU" not in capsys.readouterr().out


def test_recomputation_is_listed_as_what_it_is_on_each_engine():
    """The stand-in marks, and computes nothing again; a pipeline on IPUs does."""
    config = IPUConfig(recompute_checkpoint_every_layer=True)
    name = "recompute_checkpoint_every_layer=True: "
    standin = config.report("ipu-standin").partition("no effect here:")[2]
    assert name + "the outputs of every repeated layer are marked, but the stand-in" in standin
    assert name + "recomputationCheckpoint for the outputs" in config.report("ipu")
    assert name + "recompute=True: every repeated layer" in config.report("embedded")
