"""One call of fit for tests of how an update is made, in every way the engine can run it."""

import contextlib
import copy
import dataclasses

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import ipufit
from ipufit.engines.embedded.engine import EmbeddedEngine
from ipufit.errors import ConfigurationError, OptimizerError
from tests.tape import Tapes


@dataclasses.dataclass(frozen=True)
class Plan:
    """Micro-batch size, device iterations, gradient accumulation, replicas."""

    mb: int = 4
    di: int = 1
    ga: int = 1
    replicas: int = 1

    @property
    def by_hand(self):
        """For tests.reference.train."""
        return {"mb": self.mb, "ga": self.ga, "replicas": self.replicas}


# Each leaves a tail of 23 samples: in a micro-batch, an update, an execution.
PLANS = [Plan(), Plan(4, 3), Plan(5, 2, 2), Plan(3, 2, 3, 2), Plan(2, 4, 1, 4)]
# Recorded, on the engine of --engine; through the module itself; with results looked at after an
# execution, as on a GPU; executions captured whole and replayed, as CUDA graphs are.
WAYS = ["recorded", "eager", "late", "captured"]


@contextlib.contextmanager
def skipping_refusals():
    """Skip what an IPU refuses, with its own words as the reason; elsewhere they are pinned."""
    try:
        yield
    except (ConfigurationError, OptimizerError) as error:
        if "an IPU" not in str(error):
            raise
        pytest.skip(f"embedded only: {error}")


def compiled(net, optimizer, loss="cross_entropy", way="recorded", metrics=None, **options):
    """A compiled model and its engine; the optimizer is made of a copy of the network."""
    engine = EmbeddedEngine()
    engine.as_device = way in ("late", "captured")
    engine.tape = Tapes() if way == "captured" else None
    net = copy.deepcopy(net)
    model = ipufit.Model(net, engine="auto" if way == "recorded" else lambda: engine)
    made = optimizer(net.parameters()) if callable(optimizer) else optimizer
    with skipping_refusals():
        model.compile(made, loss, metrics=metrics, run_eagerly=way == "eager", **options)
    return model, model._session.engine


def fit(model, x, y, plan=None, epochs=2, seed=5, **options):
    """Fit without a word; the history."""
    plan = plan or Plan()
    with skipping_refusals():
        return model.fit(
            DataLoader(TensorDataset(x, y), batch_size=plan.mb),
            epochs=epochs,
            ipus=plan.replicas,
            device_iterations=plan.di,
            gradient_accumulation=plan.ga,
            seed=seed,
            verbose=0,
            **options,
        )


def unmeasured(engine, **options):
    """An option of compile for an engine: no measurements choose among kernels; an IPU makes none.

    Args:
        engine: by its name.
        options: others of compile; what runs eagerly measures nothing.
    """
    return {"jit": "graph"} if engine == "embedded" and not options.get("run_eagerly") else {}


def state_of(model):
    """The state of the torch optimizer, by parameter and name."""
    state = model.optimizer.state
    return {
        (name, key): torch.as_tensor(value)
        for name, parameter in model.module.named_parameters()
        for key, value in state[parameter].items()
        if value is not None
    }


def assert_close(net, other, atol=1e-11):
    """Parameters and buffers of two networks agree."""
    expected = other.state_dict()
    for name, value in net.state_dict().items():
        torch.testing.assert_close(
            value, expected[name], rtol=0, atol=atol, msg=lambda m, n=name: f"{n}: {m}"
        )


def assert_equal(net, other):
    """Every bit of parameters and buffers of two networks agrees."""
    expected = other.state_dict()
    for name, value in net.state_dict().items():
        assert torch.equal(value, expected[name]), name
