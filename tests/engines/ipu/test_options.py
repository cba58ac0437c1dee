"""PopTorch's options: what ipufit sets of them, and what it says of those handed over."""

import pytest
import torch
from torch import nn

import ipufit
import ipufit.poptorch as poptorch
from ipufit.engines.ipu.sdk import ignored_options

pytestmark = pytest.mark.both_engines


def explained(**options):
    """What explain() says of a model compiled for the stand-in."""
    model = ipufit.Model(nn.Linear(3, 2), engine="ipu-standin")
    model.compile("sgd", "mse", **options)
    model.fit(torch.ones(4, 3), torch.ones(4, 2), batch_size=2, verbose=0)
    return model.explain


@pytest.mark.few
@pytest.mark.parametrize("verbose", [0, 2])
def test_compiling_draws_no_bar(capsys, verbose):
    """It would stand in every log file, and between the lines of ipufit."""
    model = ipufit.Model(nn.Linear(3, 2), engine="ipu-standin")
    model.compile("sgd", "mse")
    model.fit(torch.ones(5, 3), torch.ones(5, 2), batch_size=2, verbose=verbose)
    model.predict(torch.ones(4, 3), batch_size=2, verbose=verbose)
    assert "Graph compilation" not in capsys.readouterr().err


@pytest.mark.long
@pytest.mark.parametrize("shown", [True, False])
def test_options_of_the_users_own_decide_about_the_bar(capsys, shown):
    options = poptorch.Options().showCompilationProgressBar(shown)
    explained(poptorch=options)
    assert ("Graph compilation" in capsys.readouterr().err) == shown


def test_explain_names_the_options_that_change_nothing(capsys):
    training = poptorch.Options().logDir("logs").modelName("small")
    training.Precision.setPartialsType(torch.half)
    inference = poptorch.Options().syncPattern(poptorch.SyncPattern.SinglePipeline)
    explained(poptorch=(training, inference))()
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if "have no effect" in line] == [
        "Of training_options, these have no effect on ipu-standin: Precision.setPartialsType, "
        "logDir, modelName.",
        "Of inference_options, these have no effect on ipu-standin: syncPattern.",
    ]


def test_explain_is_silent_of_options_that_are_honoured(capsys):
    """Also of none: what is left at its default is not ignored."""
    honoured = poptorch.Options().randomSeed(3).showCompilationProgressBar(False)
    explained(poptorch=honoured)()
    assert "change nothing" not in capsys.readouterr().out


def test_of_the_sdk_nothing_is_said_to_be_ignored():
    class Sdk:
        __name__ = "poptorch"

    assert ignored_options(Sdk(), poptorch.Options().modelName("small")) == []
