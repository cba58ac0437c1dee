"""IPUs without a repeated layer: parts of serialised layers, and what runs after the last layer."""

import functools

import pytest
import torch
from torch import nn

import ipufit
from ipufit import IPUConfig
from ipufit.errors import ConfigurationError, PartitionError, UnknownNameError
from tests.fitting import unmeasured

EVERY = pytest.mark.both_engines
GENERATOR = torch.Generator().manual_seed(0)
X = torch.randint(0, 20, (60, 3), generator=GENERATOR)
Y = torch.randint(0, 20, (60,), generator=GENERATOR)


class Net(nn.Module):
    """Embeddings, layers, a norm and a projection."""

    def __init__(self, layers=4):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.position = nn.Embedding(20, 6), nn.Embedding(3, 6)
        blocks = (nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(layers))
        self.layers = nn.ModuleList(blocks)
        self.norm = nn.LayerNorm(6)
        self.head = nn.Linear(6, 20)

    def forward(self, x):
        x = self.embed(x) + self.position(torch.arange(x.shape[1]))
        for layer in self.layers:
            x = x + layer(x)
        return self.head(self.norm(x).mean(1))


# The two shapes that tests and files of optimum-graphcore have.
FOUR = {
    "layers_per_ipu": [0, 0, 4, 0],
    "serialized_embedding_splits_per_ipu": [2, 2, 0, 0],
    "gradient_accumulation_steps": 7,
}
EIGHT = {
    "layers_per_ipu": [0, 1, 2, 2, 5, 6, 0, 0],
    "serialized_embedding_splits_per_ipu": [2, 2, 0, 0, 0, 0, 0, 0],
    "serialized_projection_splits_per_ipu": [0, 0, 0, 0, 0, 0, 2, 2],
    "gradient_accumulation_steps": 15,
}


def fitted(engine, layers, work, rows=24, **options):
    """The model, its history and what it predicts."""
    model = ipufit.Model(Net(layers), engine=engine)
    model.compile("sgd", "cross_entropy", **options, **unmeasured(engine))
    history = model.fit(X[:rows], Y[:rows], batch_size=2, seed=1, verbose=0, **work).history
    return model, history["loss"], model.predict(X[:16], batch_size=2, verbose=0)


@pytest.fixture(scope="module")
def on_parts():
    """By engine and IPUs: one of the configurations, what fitted returns, and what it took."""

    @functools.lru_cache(maxsize=None)
    def made(engine, ipus):
        given, layers = (FOUR, 4) if ipus == 4 else (EIGHT, 16)
        rows = 2 * 2 * given["gradient_accumulation_steps"]
        return given, layers, rows, fitted(engine, layers, {}, rows, config=IPUConfig(**given))

    return made


@pytest.mark.long
@EVERY
@pytest.mark.parametrize("ipus", [4, 8])
def test_configurations_with_ipus_of_parts_train_as_the_whole_module(on_parts, ipus, engine):
    """Within the rounding of a projection that is a sum or a row of parts."""
    given, layers, rows, (model, losses, outputs) = on_parts(engine, ipus)
    work = {"gradient_accumulation": given["gradient_accumulation_steps"]}
    whole, wanted, expected = fitted(engine, layers, work, rows, outputs="final")
    assert losses == pytest.approx(wanted, rel=1e-6)
    torch.testing.assert_close(outputs, expected, rtol=1e-5, atol=1e-6)
    own = model.module.state_dict()
    for name, value in whole.module.state_dict().items():
        torch.testing.assert_close(own[name], value, rtol=1e-5, atol=1e-6)
    assert model._session.divided.partitions.training.ipus == len(given["layers_per_ipu"]) == ipus


@pytest.mark.long
def test_explain_and_plan_say_where_every_stage_begins(on_parts, capsys):
    model, other = (on_parts("embedded", ipus)[-1][0] for ipus in (4, 8))
    capsys.readouterr()
    model.explain()
    assert (
        "Training: pipelined over 4 stages: stage 2 from layers.0; stage 3 after layers.3; "
        "stage 1 from parts of serialised layers.\n"
    ) in capsys.readouterr().out
    plan = model.plan((X[:2], Y[:2]))
    assert [cost.name for cost in plan.costs] == [
        "embed/0",
        "embed/2",
        "layers.0",
        "after layers.3",
    ]
    # Half of the table each, and the positions with the second half; norm and head.
    assert [cost.parameters for cost in plan.costs] == [60, 78, 168, 12 + 140]
    assert plan.stages == {"layers.0": 2, "after layers.3": 3}
    other.explain()
    assert "stages 6, 7 from parts of serialised layers." in capsys.readouterr().out
    names = [cost.name for cost in other.plan((X[:2], Y[:2])).costs]
    assert names[:2] + names[-2:] == ["embed/0", "embed/2", "head/0", "head/2"]


@pytest.mark.long
def test_the_stages_of_a_plan_divide_the_module_alike(on_parts):
    """Also stages that parts begin, which have no name."""
    model = on_parts("embedded", 4)[-1][0]
    stages = model.plan((X[:2], Y[:2])).stages
    other = ipufit.Model(Net(4))
    other.compile(
        "sgd",
        "cross_entropy",
        parallel=ipufit.Parallel(stages=stages),
        memory=ipufit.Memory(serialize={"embed": [2, 2, 0, 0]}),
    )
    assert other._session.divided.partitions.training == model._session.divided.partitions.training


@pytest.mark.long
@EVERY
@pytest.mark.parametrize(
    "options",
    [
        {"parallel": ipufit.Parallel(layers_per_ipu=[4, 0])},
        {"parallel": ipufit.Parallel(stages={"layers.0": 0, "after layers.3": 1})},
    ],
)
def test_a_stage_begins_when_the_last_layer_has_returned(options, engine, capsys):
    """Before the norm and the head, whatever forward does between them."""
    divided, losses, outputs = fitted(engine, 4, {"gradient_accumulation": 3}, **options)
    whole, wanted, expected = fitted(engine, 4, {"gradient_accumulation": 3})
    assert losses == wanted
    assert torch.equal(outputs, expected)
    for name, value in whole.module.state_dict().items():
        assert torch.equal(divided.module.state_dict()[name], value)
    capsys.readouterr()
    divided.explain()
    assert "stage 0 from layers.0; stage 1 after layers.3.\n" in capsys.readouterr().out


def tried(net, **options):
    """Compile, and fit."""
    model = ipufit.Model(net or Net())
    model.compile("sgd", "cross_entropy", **options)
    model.fit(X, Y, batch_size=2, gradient_accumulation=5, verbose=0)


def fault(kind=PartitionError, net=None, **options):
    """The text of the error of compile, or of the first batch."""
    with pytest.raises(kind) as caught:
        tried(net, **options)
    return str(caught.value)


@pytest.mark.parametrize(
    ("counts", "ipu", "kept"),
    [([2, 0, 2], 1, [2, 2]), ([0, 0, 2, 2], 1, [0, 2, 2]), ([2, 2, 0, 0], 3, [2, 2])],
)
def test_an_ipu_with_nothing_is_refused_with_what_works(counts, ipu, kept):
    assert fault(parallel=ipufit.Parallel(layers_per_ipu=counts)) == (
        "layers_per_ipu must give every IPU at least one layer, except the first, one after the "
        f"last layer, and those with parts of a serialised layer, got 0 for IPU {ipu}. Use fewer "
        f"IPUs, with {kept}, or put other modules there with stages={{'name of a module': {ipu}}}."
    )
    ipufit.Model(Net()).compile(
        "sgd", "cross_entropy", parallel=ipufit.Parallel(layers_per_ipu=kept)
    )


def test_the_advice_beside_a_configuration_works_too():
    """There stages need a config that leaves the choice."""
    text = fault(ConfigurationError, config=IPUConfig(layers_per_ipu=[2, 0, 2]))
    assert text.splitlines()[0].endswith(
        "got 0 for IPU 1. Use fewer IPUs, with [2, 2], or put other modules there with "
        "stages={'name of a module': 1} of compile with layers_per_ipu=[-1] in the config."
    )
    stages = {"layers.1": 1, "layers.3": 2}
    config = IPUConfig(layers_per_ipu=[-1], ipus_per_replica=3)
    ipufit.Model(Net()).compile(
        "sgd", "cross_entropy", config=config, parallel=ipufit.Parallel(stages=stages)
    )


@pytest.mark.long
def test_a_return_is_checked_as_a_call_is():
    """The name, that it comes, and the order."""
    text = fault(UnknownNameError, parallel=ipufit.Parallel(stages={"after layers.4": 1}))
    assert "'after layers.4'" in text
    net = Net()
    net.spare = nn.Linear(2, 2)
    assert fault(net=net, parallel=ipufit.Parallel(stages={"after spare": 1})) == (
        "every module that begins a stage must be called by forward, but 'spare' was not. Name a "
        "module that is called as module(...), not one whose parameters are used from outside."
    )
    assert fault(
        parallel=ipufit.Parallel(auto_round_ipus=True, stages={"after layers.0": 2, "layers.2": 1})
    ) == (
        "stages must run in the order of their numbers, but 'layers.2' of stage 1 runs after "
        "'after layers.0' of stage 2. Give it stage 2 or later, or let forward call it earlier."
    )
