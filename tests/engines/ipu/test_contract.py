"""The IPU engine speaks PopTorch's published API and nothing else, in an order that it allows."""

import collections

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import ipufit
from ipufit.engines.ipu.engine import IpuEngine
from ipufit.partition.partition import STRATEGIES
from ipufit.poptorch._precision import keep_float64
from tests.ipu_calls import SURFACE, Recorder, signature_of
from tests.nets import MLP, data

pytestmark = pytest.mark.both_engines

EXECUTOR = "poptorch.PoplarExecutor"
OPTIONS = ("poptorch.Options", "poptorch.options._TrainingOptions")
MODELS = ("trainingModel", "inferenceModel")


@pytest.fixture(scope="module")
def calls():
    """What the life of models makes: fits with tails, a validation, a schedule, options.

    The first model has all of a life, the others what their options change in it.
    """
    recorder = Recorder()
    x, y = data(23)
    loader = DataLoader(TensorDataset(x, y), batch_size=3)
    without_a_tail = DataLoader(TensorDataset(x[:12], y[:12]), batch_size=3)
    with keep_float64(), recorder.watching():
        for whole, name, more in (
            (
                True,
                "adam",
                {
                    "clip": ipufit.Clip(global_norm=1.0),
                    "precision": ipufit.Precision(loss_scale=8.0),
                },
            ),
            (
                False,
                "lamb",
                {
                    "reduction": ipufit.Reduction(gradients="sum"),
                    "precision": ipufit.Precision(accumulation_dtype=torch.float32),
                },
            ),
            (False, "sgd", {"lr_scheduler": lambda optimizer: _halving(optimizer)}),
            (False, "rmsprop", {"poptorch": ipufit.poptorch.Options().modelName("life")}),
            (
                False,
                "sgd",
                {
                    "memory": ipufit.Memory(
                        serialize={"layers.0": 4, "layers.2": [5]}, recompute="layers"
                    )
                },
            ),
        ):
            net = MLP().double()
            model = ipufit.Model(net, engine=lambda: IpuEngine(recorder, "ipu-standin"))
            model.compile(name, "cross_entropy", metrics=["accuracy"], **more)
            model.fit(
                loader if whole else without_a_tail,
                epochs=2,
                ipus=2,
                device_iterations=2,
                validation_data=loader if whole else None,
                callbacks=[_Touch(net)],
                verbose=0,
            )
            assert type(net) is MLP
            assert type(next(net.parameters())) is nn.Parameter
            if whole:
                model.fit(loader, verbose=0)
                model.evaluate(loader, verbose=0)
                model.predict(x, verbose=0)
            model.close()
        for strategy in STRATEGIES:
            _divided(recorder, strategy)
    return recorder.calls


def _divided(recorder, strategy):
    """A model over two IPUs, with an update that does not fill the pipeline."""
    net = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3))).double()
    model = ipufit.Model(net, engine=lambda: IpuEngine(recorder, "ipu-standin"))
    model.compile("sgd", "mse", parallel=ipufit.Parallel(layers_per_ipu=[1, 2], strategy=strategy))
    x = torch.zeros(14, 4, dtype=torch.float64)
    model.fit(x, x, batch_size=2, gradient_accumulation=3, verbose=0)
    model.close()


def _halving(optimizer):
    return torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)


class _Touch(ipufit.callbacks.Callback):
    """Changes weights, learning rate and optimizer state in the middle of fit."""

    def __init__(self, net):
        super().__init__()
        self._net = net

    def on_epoch_begin(self, epoch, logs=None):
        with torch.no_grad():
            next(self._net.parameters()).mul_(0.5)
        if self.model.optimizer.state:
            self.model.optimizer.state.clear()


@pytest.mark.long
def test_every_call_is_in_the_published_surface(calls):
    """Names, and that the arguments bind to the published parameters."""
    made = collections.Counter()
    for call in calls:
        if call.args is None:
            assert call.name in SURFACE["namespaces"]["poptorch"], call
            continue
        found = signature_of(call.owner, call.name)
        assert found is not None, f"{call.owner}.{call.name}"
        found.bind(*call.args, **call.kwargs)
        made[call.name] += 1
    for name in ("trainingModel", "inferenceModel", "compile", "__call__", "setOptimizer"):
        assert made[name], name
    for name in ("start", "setExecutionStrategy"):
        assert made[name], name
    for name in ("attachToDevice", "detachFromDevice", "copyWeightsToDevice", "destroy"):
        assert made[name], name


def test_options_do_not_change_once_a_model_has_them(calls):
    given = []
    for call in calls:
        if call.name in MODELS:
            given.append(call.kwargs["options"])
            continue
        sets = call.args is not None and call.name not in ("__init__", "exists", "clone")
        if call.owner in OPTIONS and sets:
            groups = [options.Training for options in given]
            assert not any(call.target is each for each in [*given, *groups]), call.name
    assert given


def test_executors_live_in_the_order_that_a_device_allows(calls):
    """Compiled first, one attached at a time, called while attached, destroyed at the end."""
    states = {}
    for call in calls:
        if call.owner != EXECUTOR or call.args is None:
            continue
        name, state = call.name, states.get(id(call.target), "new")
        if name == "__init__":
            continue
        attached = [key for key, value in states.items() if value == "attached"]
        if name == "compile":
            assert (state, attached) == ("new", [])
            state = "attached"
        elif name == "attachToDevice":
            assert (state, attached) == ("detached", [])
            state = "attached"
        elif name == "detachFromDevice":
            assert state == "attached"
            state = "detached"
        elif name in ("__call__", "copyWeightsToDevice", "setOptimizer"):
            assert state == "attached", name
        elif name == "destroy":
            assert state in ("attached", "detached")
            state = "destroyed"
        else:
            assert state != "destroyed"
        states[id(call.target)] = state
    assert states
    assert set(states.values()) == {"destroyed"}
