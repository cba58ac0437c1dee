"""Which layers a configuration cuts, in training and in inference, and what is said of it."""

import pytest
import torch
from torch import nn

import ipufit
from ipufit import IPUConfig
from ipufit.partition import Serialization, serialize
from tests.fitting import unmeasured
from tests.told import refused

pytestmark = pytest.mark.both_engines

FACTORS = {"embedding_serialization_factor": 2, "projection_serialization_factor": 3}
TOKENS = torch.arange(60).view(12, 5) % 12


class Language(nn.Module):
    """Blocks whose layers have more outputs than the head, and a pooler beside it."""

    def __init__(self, tied=False):
        super().__init__()
        torch.manual_seed(0)
        self.position, self.embed = nn.Embedding(4, 6), nn.Embedding(12, 6)
        blocks = [
            nn.TransformerEncoderLayer(6, 2, 48, dropout=0.0, batch_first=True) for _ in range(2)
        ]
        self.body = nn.ModuleList(blocks)
        self.pooler = nn.Linear(6, 18)
        self.head = nn.Linear(6, 12)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, x):
        hidden = self.embed(x) + self.position(x % 4)
        for block in self.body:
            hidden = block(hidden)
        return self.head(hidden.mean(1)) + self.pooler(hidden[:, 0])[:, :12]


def small():
    """The same with blocks that are quickly recorded."""
    made = Language()
    made.body = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(2))
    return made


def cut_by(given, module=None, **memory):
    """By layer, how a configuration cuts it in training and in inference."""
    module = module or Language()
    arguments = {"config": IPUConfig(**given), "memory": ipufit.Memory(**memory)}
    ipufit.Model(module).compile("sgd", "cross_entropy", **arguments)
    layers = {n: m for n, m in module.named_modules() if hasattr(m, "parts")}
    return {n: (m.parts.describe(), m.inference_parts.describe()) for n, m in layers.items()}


@pytest.mark.parametrize(
    ("given", "cuts"),
    [
        ({"embedding_serialization_factor": 2}, {"embed": ("factor=2", "factor=1")}),
        ({"inference_embedding_serialization_factor": 2}, {"embed": ("factor=1", "factor=2")}),
        ({"projection_serialization_factor": 3}, {"pooler": ("factor=3", "factor=1")}),
        ({"inference_projection_serialization_factor": 3}, {"pooler": ("factor=1", "factor=3")}),
        (
            {"inference_serialized_embedding_splits_per_ipu": [4], **FACTORS},
            {"embed": ("factor=2", "splits_per_ipu=[4]"), "pooler": ("factor=3", "factor=1")},
        ),
        (
            {"inference_serialized_projection_splits_per_ipu": [2]},
            {"pooler": ("factor=1", "splits_per_ipu=[2]")},
        ),
        ({}, {}),
    ],
)
def test_training_and_inference_are_cut_by_their_own_numbers(given, cuts):
    assert cut_by(given) == cuts


def test_the_projection_is_the_layer_that_is_tied_to_the_embedding():
    """Else the one with most outputs; never one of the repeated layers, which are wider here."""
    factor = {"projection_serialization_factor": 3}
    assert cut_by(factor, Language(tied=True)) == {"head": ("factor=3", "factor=1")}
    assert cut_by(factor) == {"pooler": ("factor=3", "factor=1")}


def test_arguments_say_which_layers_are_meant():
    """With the number of the configuration, or with none of it."""
    layers = {"position": 2, "head": Serialization(3, mode="reducing_dim"), "pooler": 2}
    module = Language()
    found = cut_by(FACTORS, module, serialize=layers)
    assert found == {
        "position": ("factor=2", "factor=1"),
        "head": ("factor=3", "factor=1"),
        "pooler": ("factor=2", "factor=2"),
    }
    assert module.head.parts.mode == "reducing_dim"
    given = {"inference_embedding_serialization_factor": 2}
    found = cut_by(given, serialize={"position": 4})
    assert found == {"position": ("factor=4", "factor=2")}
    found = cut_by(given, inference_serialize={"position": 2, "head": 4})
    assert found == {"position": ("factor=1", "factor=2"), "head": ("factor=1", "factor=4")}
    found = cut_by(FACTORS, inference_serialize={"head": 4})
    assert found == {"embed": ("factor=2", "factor=1"), "head": ("factor=3", "factor=4")}


def test_arguments_and_the_configuration_may_not_disagree():
    refused(
        lambda: cut_by(FACTORS, serialize={"embed": 3, "head": [3]}),
        "Memory.serialize must agree with IPUConfig.embedding_serialization_factor, which says 2, "
        "got 3 for 'embed'. Leave one out.\n"
        "Memory.serialize must agree with IPUConfig.projection_serialization_factor, which says "
        "3, got [3] for 'head'. Leave one out.",
    )
    refused(
        lambda: cut_by(
            {"inference_serialized_embedding_splits_per_ipu": [2]},
            inference_serialize={"embed": 2},
        ),
        "Memory.inference_serialize must agree with "
        "IPUConfig.inference_serialized_embedding_splits_per_ipu, which says [2], got 2 for "
        "'embed'. Leave one out.",
    )
    refused(
        lambda: cut_by(FACTORS, serialize={"embed": 2, "position": 2}),
        "IPUConfig.embedding_serialization_factor must mean one embedding, got 'embed' and "
        "'position' from Memory.serialize. Leave it out of the config, and set all of them in "
        "Memory.serialize.",
    )


def test_one_weight_has_one_number():
    """Of which either layer may be told."""
    fields = "IPUConfig.{0}embedding_serialization_factor and IPUConfig.{0}projection_serialization"
    for prefix in ("", "inference_"):
        given = {prefix + name: value for name, value in FACTORS.items()}
        refused(
            lambda given=given: cut_by(given, Language(tied=True)),
            f"{fields.format(prefix)}_factor must give the same number of parts, because 'embed' "
            "and 'head' share a weight, got 2 and 3. Leave one out: the other layer follows.",
        )
    alike = dict(FACTORS, projection_serialization_factor=2)
    cut = ("factor=2", "factor=1")
    assert cut_by(alike, Language(tied=True)) == {"embed": cut, "head": cut}


def test_where_nothing_fits_the_layer_has_to_be_named():
    stack = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    given = {"projection_serialization_factor": 2}
    refused(
        lambda: cut_by(given, stack),
        "IPUConfig.projection_serialization_factor cuts the output projection, an nn.Linear "
        "outside of the repeated layers, but Sequential has linear layers only in the module "
        "itself. Name the right one, with the same number, such as "
        "memory=ipufit.Memory(serialize={'1': ...}).",
    )
    assert cut_by(given, stack, serialize={"1": 2}) == {"1": ("factor=2", "factor=1")}


def test_a_configuration_takes_back_what_an_earlier_one_cut():
    """Not what the user cut; and not if compile fails."""
    module = serialize(Language(), {"position": 2})
    dense = module.embed.weight
    mine = {"position": ("factor=2", "factor=2")}
    assert cut_by(FACTORS, module).keys() == {"position", "embed", "pooler"}
    with pytest.raises(ipufit.errors.ConfigurationError):
        cut_by({}, module, recompute="no such layer")
    assert hasattr(module.embed, "parts")
    ipufit.Model(module).compile("sgd", "cross_entropy")
    assert hasattr(module.embed, "parts")
    assert cut_by({"projection_serialization_factor": 2}, module) == {
        **mine,
        "pooler": ("factor=2", "factor=1"),
    }
    assert cut_by({}, module) == mine
    assert module.embed.weight is dense


@pytest.mark.long
def test_compile_and_explain_name_what_is_cut(capsys):
    model = ipufit.Model(small())
    model.compile("sgd", "cross_entropy", config=IPUConfig(**FACTORS))
    line = "Layers in parts: embed (factor=2, inference factor=1), pooler (factor=3, inference "
    assert capsys.readouterr().out.splitlines()[-1] == f"{line}factor=1)."
    model.fit(TOKENS, torch.arange(12), batch_size=2, verbose=0)
    model.explain()
    assert f"{line}factor=1)." in capsys.readouterr().out.splitlines()
    model.compile("sgd", "cross_entropy", config=IPUConfig())
    assert "Layers in parts" not in capsys.readouterr().out


@pytest.mark.long
@pytest.mark.parametrize("engine", ["embedded", "ipu-standin"])
def test_inference_on_fewer_ipus_has_the_layer_whole(engine):
    """Its splits would be for IPUs that it has not."""
    given = {
        "layers_per_ipu": [0, 2],
        "serialized_embedding_splits_per_ipu": [2, 2],
        "inference_layers_per_ipu": [-1],
        "inference_ipus_per_replica": 1,
        "gradient_accumulation_steps": 3,
    }
    module = small()
    model = ipufit.Model(module, engine=engine)
    model.compile("sgd", "cross_entropy", config=IPUConfig(**given), **unmeasured(engine))
    model.fit(TOKENS, torch.arange(12), batch_size=2, verbose=0)
    found = model.predict(TOKENS, batch_size=2, verbose=0)
    model.close()
    torch.testing.assert_close(torch.as_tensor(found), module.eval()(TOKENS).detach())


def test_splits_that_do_not_fit_are_told_by_the_parameter():
    given = {"layers_per_ipu": [1, 1], "inference_serialized_embedding_splits_per_ipu": [2, 2]}
    refused(
        lambda: cut_by(given),
        "a parameter must be on one IPU, but in inference 'embed' is cut by splits_per_ipu=[2, 2], "
        "which needs its 'weight' on IPUs 0, 1; the parameters are those of training, factor=1. "
        "Cut it into 4 parts in training too, by IPUConfig.serialized_embedding_splits_per_ipu or "
        "splits_per_ipu in Memory.serialize.",
    )


def test_splits_of_arguments_are_held_against_the_ipus_of_the_configuration():
    cuts = {"serialize": {"head": [2, 2]}}
    refused(
        lambda: cut_by({}, **cuts),
        "splits_per_ipu of serialised layers must have a number for each IPU of a replica, got 2 "
        "and a replica has 1. Set IPUConfig.ipus_per_replica=2.\nsplits_per_ipu of layers "
        "serialised in inference must have a number for each IPU of a replica, got 2 and a replica "
        "has 1 in inference. Set Memory.inference_serialize, or set "
        "IPUConfig.inference_ipus_per_replica=2.",
    )
    given = {"layers_per_ipu": [1, 1], "inference_layers_per_ipu": [-1]}
    refused(
        lambda: cut_by({**given, "inference_ipus_per_replica": 1}, **cuts),
        "splits_per_ipu of layers serialised in inference must have a number for each IPU of a "
        "replica, got 2 and a replica has 1 in inference. Set Memory.inference_serialize, or set "
        "IPUConfig.inference_ipus_per_replica=2.",
    )
