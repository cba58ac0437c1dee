"""What a configuration says beside arguments of compile and blocks of the module's own."""

import pytest
import torch
from torch import nn

import ipufit
from ipufit import IPUConfig, poptorch
from ipufit.errors import PartitionError
from tests.fitting import unmeasured
from tests.told import message as fault

EVERY = pytest.mark.both_engines
X = torch.arange(96.0).reshape(24, 4).sin()
Y = torch.arange(24) % 3


class Stack(nn.Module):
    """Two layers and a head; a block may begin with the second layer, or inside of forward."""

    def __init__(self, blocks=None):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(2))
        self.head = nn.Linear(4, 3)
        self.inside = blocks if isinstance(blocks, tuple) else None
        if blocks == "begun":
            poptorch.BeginBlock(self.layers[1], ipu_id=1)
        if blocks == "held":
            self.block = poptorch.Block(ipu_id=1)
        if blocks == "called":
            self.act = poptorch.BeginBlock(torch.clone, ipu_id=1)

    def forward(self, x):
        x = self.layers[0](x)
        if hasattr(self, "block"):
            with self.block:
                return self.head(self.layers[1](x))
        if hasattr(self, "act"):
            x = self.act(x)
        if self.inside is not None:
            poptorch.Block.start(*self.inside)
        return self.head(self.layers[1](x))


def compiled(net, engine="embedded", optimizer="sgd", **options):
    model = ipufit.Model(net, engine=engine)
    model.compile(optimizer, "cross_entropy", **options, **unmeasured(engine))
    return model


def ran(model, **work):
    """An epoch, and predictions."""
    loss = model.fit(X, Y, batch_size=2, seed=1, verbose=0, **work).history["loss"]
    return loss, model.predict(X, batch_size=2, verbose=0)


# Blocks of the module's own

OWN = {"ipus_per_replica": 2, "gradient_accumulation_steps": 3}


@pytest.mark.long
@EVERY
@pytest.mark.parametrize(
    ("blocks", "options"),
    [
        ("begun", {}),
        ("begun", {"parallel": ipufit.Parallel(ipus_per_replica=2)}),
        ("called", {"parallel": ipufit.Parallel(ipus_per_replica=2)}),
        (("B", 1), {"parallel": ipufit.Parallel(ipus_per_replica=2)}),
    ],
)
def test_a_module_with_blocks_of_its_own_is_left_to_them(blocks, options, engine):
    """In training and in inference; those that can be seen need no argument of compile."""
    net = Stack(blocks)
    loss, outputs = ran(compiled(net, engine, config=IPUConfig(**OWN), **options))
    wanted, expected = ran(compiled(Stack(), engine, outputs="final"), gradient_accumulation=3)
    assert loss == wanted
    assert torch.equal(outputs, expected)


def test_blocks_are_seen_where_a_module_holds_them():
    """Hooks of BeginBlock, wrapped callables and Block objects."""
    for blocks in ("begun", "held"):
        model = compiled(Stack(blocks), config=IPUConfig(**OWN))
        assert model._session.divided.partitions.training.begins == ()
        assert model._session.divided.partitions.inference.begins == ()
    assert compiled(Stack(), config=IPUConfig(**OWN))._session.divided.partitions.training.begins


@pytest.mark.long
@EVERY
@pytest.mark.parametrize(
    ("blocks", "said"),
    [(("B", 1), "blocks, such as 'B', and"), ((None, 1), "blocks, such as '0', and")],
)
def test_blocks_that_only_forward_begins_need_the_number_of_ipus(blocks, said, engine):
    """The error says so, and a name is shown if there is one."""
    model = compiled(Stack(blocks), engine, config=IPUConfig(**OWN))
    assert fault(ran, model) == (
        "a module is divided either by its own blocks or by arguments of compile, but it has "
        f"{said} also stages or layers_per_ipu. Remove its blocks with "
        "poptorch.removeBlocks(module), or leave the arguments out; with layers_per_ipu=[-1] in "
        "a config, pass ipus_per_replica=2."
    )
    ran(
        compiled(
            Stack(blocks),
            engine,
            config=IPUConfig(**OWN),
            parallel=ipufit.Parallel(ipus_per_replica=2),
        )
    )


def test_blocks_of_its_own_are_on_the_same_ipus_in_inference():
    config = IPUConfig(**OWN, inference_ipus_per_replica=1)
    assert fault(compiled, Stack("begun"), config=config) == (
        "a module with its own blocks is on the same IPUs in training and in inference, but "
        "IPUConfig.ipus_per_replica is 2 and IPUConfig.inference_ipus_per_replica 1. Set both to "
        "the number of its IPUs."
    )


# One IPU


@pytest.mark.long
@EVERY
@pytest.mark.parametrize(
    ("given", "ipus"),
    [
        (
            {
                "layers_per_ipu": [2, -1],
                "ipus_per_replica": 1,
                "inference_ipus_per_replica": 1,
            },
            (1, 1),
        ),
        ({"layers_per_ipu": [1, -1], "inference_ipus_per_replica": 1}, (2, 1)),
        ({"layers_per_ipu": [1, 1], "inference_layers_per_ipu": [2]}, (2, 1)),
        ({"inference_layers_per_ipu": [7]}, (1, 1)),
    ],
)
def test_on_one_ipu_a_list_of_layers_says_nothing(given, ipus, engine, capsys):
    """In training, and in inference alone."""
    config = IPUConfig(gradient_accumulation_steps=3, **given)
    model = compiled(Stack(), engine, config=config)
    partitions = model._session.divided.partitions
    found = [1 if p is None else p.ipus for p in (partitions.training, partitions.inference)]
    assert tuple(found) == ipus
    ran(model)
    capsys.readouterr()
    model.explain()
    assert "over 1 stage" not in capsys.readouterr().out


# What disagrees


@pytest.mark.parametrize(
    ("given", "options", "text"),
    [
        (
            {},
            {"reduction": ipufit.Reduction(gradients="sum")},
            "Reduction.gradients must agree with config, where gradients are reduced by the mean, "
            "as in optimum-graphcore, got 'sum'. Leave one out.",
        ),
        (
            {},
            {"parallel": ipufit.Parallel(auto_round_ipus=False)},
            "Parallel.auto_round_ipus must agree with config, where IPUs are rounded up to a power "
            "of two, as in optimum-graphcore, got False. Leave one out.",
        ),
        *(
            (
                {"recompute_checkpoint_every_layer": True},
                {"memory": ipufit.Memory(recompute=none)},
                "Memory.recompute must agree with IPUConfig.recompute_checkpoint_every_layer, "
                f"which is True, got {none!r}. Leave it out.",
            )
            for none in (False, [])
        ),
        *(
            (
                {},
                {"memory": ipufit.Memory(recompute=some)},
                "Memory.recompute must agree with IPUConfig.recompute_checkpoint_every_layer, "
                f"which is False, got {some!r}. Leave it out, or set that to True and name layers "
                "in recompute.",
            )
            for some in (True, ["layers.1"], "layers.*")
        ),
    ],
)
def test_an_argument_that_disagrees_is_refused(given, options, text):
    assert fault(compiled, Stack(), config=IPUConfig(**given), **options) == text


@pytest.mark.parametrize(
    ("said", "asked", "names"),
    [
        (True, None, ("layers.0", "layers.1")),
        (True, True, ("layers.0", "layers.1")),
        (True, ["layers.1"], ("layers.1",)),
        (True, "head", ("head",)),
        (False, None, ()),
        (False, False, ()),
        (False, [], ()),
    ],
)
def test_recompute_may_say_which_layers_a_configuration_means(said, asked, names):
    config = IPUConfig(recompute_checkpoint_every_layer=said)
    model = compiled(Stack(), config=config, memory=ipufit.Memory(recompute=asked))
    assert model._session.config.recompute == names


@pytest.mark.long
def test_a_module_without_repeated_layers_follows_the_advice():
    """Nearly every file of optimum-graphcore recomputes."""
    net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
    config = IPUConfig(recompute_checkpoint_every_layer=True)
    text = fault(compiled, net, config=config)
    assert text.endswith("Name the layers: recompute=['encoder', 'decoder'].")
    model = compiled(net, config=config, memory=ipufit.Memory(recompute=["1"]))
    assert model._session.config.recompute == ("1",)
    ran(model)


def test_what_agrees_is_fine():
    model = compiled(
        Stack(),
        config=IPUConfig(replication_factor=3),
        reduction=ipufit.Reduction(gradients="mean"),
        parallel=ipufit.Parallel(auto_round_ipus=True),
    )
    assert model._session.config.gradient_reduction == "mean"
    assert model._session.divided.auto_round_ipus is True
    assert compiled(Stack(), config=IPUConfig())._session.divided.auto_round_ipus is True
    assert compiled(Stack())._session.divided.auto_round_ipus is False


def test_ipus_that_stages_contradict_are_said_by_the_configuration():
    """Its name, where no argument of compile said the number."""
    text = fault(
        compiled,
        Stack(),
        config=IPUConfig(ipus_per_replica=4),
        parallel=ipufit.Parallel(stages={"layers.1": 1}),
    )
    assert text.splitlines()[0] == (
        "IPUConfig.ipus_per_replica must be the number of IPUs that the pipelined stages need, 2, "
        "got 4. Set it to 2."
    )
    with pytest.raises(PartitionError, match="Leave it out"):
        compiled(Stack(), parallel=ipufit.Parallel(stages={"layers.1": 1}, ipus_per_replica=4))


@pytest.mark.long
@EVERY
def test_stages_beside_a_configuration_hold_for_inference_too(engine):
    """As they do without one; also where there are no repeated layers to count."""
    net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
    model = compiled(
        net, engine, config=IPUConfig(**OWN), parallel=ipufit.Parallel(stages={"2": 1})
    )
    partitions = model._session.divided.partitions
    assert partitions.training.begins == partitions.inference.begins == (("2", 1),)
    assert partitions.inference.strategy == "sharded"
    ran(model)
    config = IPUConfig(**OWN, inference_ipus_per_replica=1)
    model = compiled(net, engine, config=config, parallel=ipufit.Parallel(stages={"2": 1}))
    assert model._session.divided.partitions.inference is None
    ran(model)
