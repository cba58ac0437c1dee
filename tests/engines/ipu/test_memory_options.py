"""What PopTorch alone decides about memory reaches it as it was given."""

import pytest
import torch
from torch import nn

import ipufit
from ipufit import poptorch
from ipufit.engines.ipu.engine import IpuEngine

pytestmark = pytest.mark.both_engines

X, Y = torch.randn(8, 4, generator=torch.Generator().manual_seed(1)), torch.arange(8) % 3
OFF_CHIP = poptorch.TensorLocationSettings().useOnChipStorage(False)
SHARDED = poptorch.TensorLocationSettings().useReplicatedTensorSharding(True)

# By name: how the user sets it, and what PopTorch is given.
OPTIONS = {
    "optimizer state off chip": lambda o: o.TensorLocations.setOptimizerLocation(OFF_CHIP),
    "replicated tensor sharding": lambda o: o.TensorLocations.setOptimizerLocation(SHARDED),
    "weights off chip": lambda o: o.TensorLocations.setWeightLocation(OFF_CHIP),
    "activations off chip": lambda o: o.TensorLocations.setActivationLocation(OFF_CHIP),
    "accumulators off chip": lambda o: o.TensorLocations.setAccumulatorLocation(OFF_CHIP),
    "IO tiles": lambda o: o.TensorLocations.numIOTiles(32),
    "available memory": lambda o: o.setAvailableMemoryProportion({"IPU0": 0.3}),
    "half partials": lambda o: o.Precision.setPartialsType(torch.half),
    "stochastic rounding": lambda o: o.Precision.enableStochasticRounding(True),
    "recomputation": lambda o: o._Popart.set("autoRecomputation", 4),
}


class Sdk:
    """The stand-in, whose options for training are written down."""

    __name__ = "ipufit.poptorch"

    def __init__(self):
        self.options = []

    def __getattr__(self, name):
        return getattr(poptorch, name)

    def trainingModel(self, model, options, optimizer):  # noqa: N802
        self.options.append(options)
        return poptorch.trainingModel(model, options=options, optimizer=optimizer)


def told(set_option):
    """What PopTorch is told of everything, with this option."""
    sdk, options = Sdk(), poptorch.Options()
    set_option(options)
    model = ipufit.Model(nn.Linear(4, 3), engine=lambda: IpuEngine(sdk, "ipu-standin"))
    model.compile("sgd", "cross_entropy", poptorch=options)
    model.fit(X, Y, batch_size=4, seed=1, verbose=0)
    model.close()
    return everything(sdk.options[0])


def everything(options):
    return options.toDict(), str(options._Popart.options), str(options.TensorLocations)


@pytest.fixture(scope="module")
def untouched():
    return told(lambda options: None)


@pytest.mark.long
@pytest.mark.parametrize("name", OPTIONS)
def test_an_option_reaches_poptorch(name, untouched):
    found = told(OPTIONS[name])
    assert found != untouched
    alone = poptorch.Options()
    alone.outputMode(poptorch.OutputMode.All)
    before = everything(alone)
    OPTIONS[name](alone)
    wanted = everything(alone)
    changed = {key for key in wanted[0] if wanted[0][key] != before[0].get(key)}
    assert {key: found[0][key] for key in changed} == {key: wanted[0][key] for key in changed}
    assert found[1:] == wanted[1:]
