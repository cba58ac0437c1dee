"""What a plan or an automatic division refuses, with the texts that say what to do."""

import copy

import pytest
import torch
from torch import nn

import ipufit
from ipufit.errors import (
    NotCompiledError,
    PartitionError,
    PlanError,
    UnknownNameError,
)
from tests.told import message

pytestmark = pytest.mark.both_engines

X, Y = torch.randn(4, 6), torch.tensor([0, 1, 2, 0])


def net():
    return nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3))


def compiled(module=None, **options):
    model = ipufit.Model(module or net())
    model.compile("adam", "cross_entropy", **options)
    return model


def test_a_plan_needs_compile_and_a_batch():
    """Or a fit before it."""
    message(lambda: ipufit.Model(net()).plan(X), kind=NotCompiledError)
    assert message(lambda: compiled().plan()) == (
        "plan needs a batch, plan((inputs, target)), or an earlier fit; got neither."
    )
    assert message(lambda: compiled().plan(iter([X]))) == (
        "plan needs a batch, or a loader that can be read again, got list_iterator, whose first "
        "batch would be lost. Pass one batch."
    )


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (
            {"schedule": "fast"},
            "schedule must be one of 'grouped', 'interleaved', 'sequential', got 'fast'.",
        ),
        (
            {"recompute": 1},
            "Memory.recompute must be True, False, or names of layers, got 1. Write for example "
            "recompute=['encoder.layers.0', 'encoder.layers.1'] or 'encoder.layers.*'.",
        ),
        (
            {"ipu_memory": 0},
            "ipu_memory must be an integer of at least 1 or None, got 0. It is in bytes. Leave it "
            "out for the memory of an IPU.",
        ),
        (
            {"strategy": "sharded", "schedule": "interleaved"},
            "schedule is for pipelines, but strategy='sharded' runs one stage at a time, got "
            "'interleaved'. Leave it out, or use strategy='pipelined'.",
        ),
        (
            {"stages": {"1": 1}, "strategy": "serial_phased"},
            "plan estimates stages that run as a pipeline or one after the other, got strategy="
            "'serial_phased', whose phases keep little on the IPU. Pass strategy='pipelined' to "
            "see its stages.",
        ),
        (
            {"ipus_per_replica": 4},
            "the module can be divided into 3 stages at most, got 4: a stage begins with a module "
            "that is called once, and none begins between two uses of a parameter. Use fewer "
            "IPUs, or untie weights.",
        ),
        (
            {"layers": "0"},
            "layers says which layers layers_per_ipu counts, but there is no layers_per_ipu. Pass "
            "both or none.",
        ),
        (
            {"stages": "auto", "layers_per_ipu": [1, 2]},
            "stages and layers_per_ipu both divide the module. Pass one of them.",
        ),
    ],
)
def test_arguments_that_can_not_work(options, text):
    """Each with what to do."""
    assert message(lambda: compiled().plan((X, Y), **options)) == text


def test_the_rules_of_the_batch_algebra_hold_for_a_plan_too():
    """IPUs that stages divide, an accumulation that fills the pipeline."""
    text = message(lambda: compiled().plan((X, Y), ipus=3), kind=PlanError)
    assert text.startswith("`ipus`, the total number of IPUs, must be a power of two, got 3.")
    text = message(
        lambda: compiled(parallel=ipufit.Parallel(stages={"1": 1})).plan(
            (X, Y), gradient_accumulation=2
        ),
        kind=PlanError,
    )
    assert text == (
        "`gradient_accumulation` must be at least 3 to fill a training pipeline of 2 stages, "
        "forward and backward, got 2. Try 3."
    )


def test_stages_that_can_not_work_are_refused_by_a_plan():
    """With the texts of fit."""
    text = message(lambda: compiled().plan((X, Y), stages={"3": 1}), kind=UnknownNameError)
    assert text.startswith("unknown module in stages '3'.")
    text = message(lambda: compiled().plan((X, Y), strategy="shared"), kind=UnknownNameError)
    assert text.startswith("unknown strategy 'shared'. Did you mean 'sharded'?")
    text = message(lambda: compiled().plan((X, Y), stages={"2": 0, "1": 1}), kind=PartitionError)
    assert text.startswith("stages must run in the order of their numbers, but '2' of stage 0")


def test_blocks_of_the_module_have_no_names():
    """The plan can't tell which modules they are around."""
    from ipufit import poptorch

    module = net()
    poptorch.BeginBlock(module[1], ipu_id=1)
    model = compiled(module, parallel=ipufit.Parallel(ipus_per_replica=2))
    assert message(lambda: model.plan((X, Y)), kind=PartitionError) == (
        "plan needs the modules that begin the stages, but this model is divided by its own "
        "blocks. Pass stages={'name of a module': number of its stage}, or stages='auto'."
    )


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (
            {},
            "stages='auto' needs the number of stages, because the IPUs of a replica are fixed "
            "before there is data. Pass for example ipus_per_replica=2, or "
            "stages=model.plan(x).stages, where plan finds the smallest number.",
        ),
        (
            {"ipus_per_replica": 2, "strategy": "serial_phased"},
            "stages='auto' divides a module for strategy='pipelined' or 'sharded', got "
            "'serial_phased'. Use one of them, or name the stages.",
        ),
        (
            {"ipus_per_replica": 2, "inference": ipufit.Parallel(stages="auto")},
            "inference.stages must map names of modules to numbers of stages, got 'auto'. Leave it "
            "out: inference then has the stages that stages='auto' finds for training.",
        ),
    ],
)
def test_an_automatic_division_that_can_not_work_is_refused_by_compile(options, text):
    """Before there is any data."""
    parallel = ipufit.Parallel(stages="auto", **options)
    assert message(compiled, parallel=parallel, kind=PartitionError) == text


def test_stages_that_do_not_fit_are_refused_before_any_update(monkeypatch):
    """By the estimate, which names the way out; the weights stay."""
    monkeypatch.setattr("ipufit.planner.planning.IPU_MEMORY", 500)
    model = compiled(parallel=ipufit.Parallel(stages="auto", ipus_per_replica=2))
    before = copy.deepcopy(model.module.state_dict())
    text = message(
        lambda: model.fit(X, Y, batch_size=4, gradient_accumulation=3, verbose=0),
        kind=PartitionError,
    )
    assert text == (
        "stages='auto' must find stages that fit in an IPU's 500 B, but no division into 2 does: "
        "in the most even one, the largest stage needs about 1.3 KiB, with activations recomputed. "
        "Use a larger ipus_per_replica or smaller micro-batches, or name the stages, which are not "
        "checked."
    )
    assert all(
        torch.equal(a, b) for a, b in zip(before.values(), model.module.state_dict().values())
    )


def test_questions_about_a_pipeline_that_have_no_answer():
    """Utilisation, accumulation and schedule."""
    plan = compiled().plan((X, Y), ipus_per_replica=2)
    text = message(lambda: plan.least_accumulation(1.5))
    assert text == (
        "utilisation must be a number above 0 and at most 1, got 1.5. Write 0.9 for 90 %."
    )
    text = message(lambda: plan.least_accumulation(0.9, "sequential"))
    assert text == (
        "a utilisation of 90.0 % can't be reached with the sequential schedule: these stages stay "
        "below 50.0 % for any number of micro-batches. Choose a lower value, or divide the work "
        "more evenly."
    )
    text = message(lambda: plan.utilisation(0))
    assert text == "gradient_accumulation must be a positive whole number or None, got 0."
    text = message(lambda: plan.timeline(schedule="groupd"))
    assert text == ("schedule must be one of 'grouped', 'interleaved', 'sequential', got 'groupd'.")


def test_an_optimizer_that_fails_on_zeros_is_named():
    """Its state can't be known."""

    class Odd(torch.optim.SGD):
        def step(self, closure=None):
            raise ValueError("not today")

    model = ipufit.Model(net())
    model.compile(lambda p: Odd(p, lr=0.1), "cross_entropy")
    assert message(lambda: model.plan((X, Y)), kind=PartitionError) == (
        "the optimizer state of Odd is measured by a step on zeros, but that fails with "
        "ValueError: not today. Make the plan with an optimizer that has the same state, such as "
        "'adam'."
    )
