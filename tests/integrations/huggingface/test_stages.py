"""Models of the transformers library over several IPUs, by their structure."""

import pytest
import torch
from torch import nn

pytest.importorskip("transformers")

import ipufit
from tests.integrations.tiny_models import batch_of, by_hand, net_of

# Layers on each IPU, and what begins the stages.
STAGES = {
    "bert": ([1, 1], ["bert.encoder.layer.0", "bert.encoder.layer.1"]),
    "vit": ([1, 1], ["vit.layers.0", "vit.layers.1"]),
    "gpt2": ([1, 1], ["transformer.h.0", "transformer.h.1"]),
    "t5": (
        [1, 1, 1, 1],
        ["encoder.block.0", "encoder.block.1", "decoder.block.0", "decoder.block.1"],
    ),
    "whisper": (
        [1, 1, 1, 1],
        [
            *("model.encoder.layers.0", "model.encoder.layers.1"),
            *("model.decoder.layers.0", "model.decoder.layers.1"),
        ],
    ),
}
TIED = ("gpt2", "t5", "whisper")
NAMES = [
    name if name in ("bert", "gpt2") else pytest.param(name, marks=pytest.mark.long)
    for name in STAGES
]


def untied(net):
    """Give each use of a shared weight its own copy, since an IPU can't read another's memory."""
    seen = set()
    for part in net.modules():
        for name, parameter in list(part.named_parameters(recurse=False)):
            if parameter in seen:
                setattr(part, name, nn.Parameter(parameter.detach().clone()))
            seen.add(parameter)
    net.config.tie_word_embeddings = False
    return net


@pytest.mark.parametrize("name", NAMES)
def test_layers_are_found_and_the_numbers_stay(name, capsys):
    """Stages say where things are, and change no number; layers count encoder and decoder."""
    layers, begins = STAGES[name]
    net, batch = net_of(name), batch_of(name)
    if name in TIED:
        untied(net)
    ipus = len(layers)
    # Seven micro-batches make an update of a pipeline of four; of two it is three.
    updates = [(0, 10, 2)] if ipus == 4 else [(0, 6, 2), (6, 10, 2)]
    _, losses = by_hand(net, batch, updates)
    model = ipufit.Model(net)
    model.compile(
        lambda p: torch.optim.AdamW(p, lr=0.01),
        parallel=ipufit.Parallel(layers_per_ipu=layers),
        jit="graph",
    )
    plan = {"ipus": ipus, "gradient_accumulation": 2 * ipus - 1}
    history = model.fit(batch, batch_size=2, epochs=2, shuffle=False, verbose=0, **plan)
    # AdamW makes much of tiny gradients; GPT-2's loss is computed in float32.
    near = 1e-6 if name == "gpt2" else 1e-8
    torch.testing.assert_close(history.history["loss"], losses, rtol=0, atol=near)
    model.explain(batch, batch_size=2, **plan)
    text = capsys.readouterr().out
    for number, beginning in enumerate(begins):
        assert f"stage {number} from {beginning}" in text


def trained(name, accumulation, engine, **options):
    """A model after two updates of micro-batches of one row, its batch, and its loss."""
    kind = torch.float64 if engine == "embedded" else torch.float32
    net = net_of(name).to(kind)
    for part in net.modules():
        if hasattr(getattr(part, "config", None), "use_cache"):
            part.config.use_cache = False
    batch = batch_of(name, 2 * accumulation)
    batch = {key: v.to(kind) if v.is_floating_point() else v for key, v in batch.items()}
    jit = {"jit": "graph"} if engine == "embedded" else {}
    model = ipufit.Model(net, engine=engine)
    model.compile(lambda p: torch.optim.AdamW(p, lr=0.01), **options, **jit)
    plan = {"gradient_accumulation": accumulation, "shuffle": False, "verbose": 0}
    history = model.fit(batch, batch_size=1, **plan)
    return model, batch, history.history["loss"]


@pytest.mark.parametrize(
    ("name", "layers", "begins"),
    [
        ("gpt2", [1, 1], ["transformer.h.0", "transformer.h.1", "lm_head on IPU 0"]),
        *(
            pytest.param(*case, marks=pytest.mark.long)
            for case in [
                (
                    "opt",
                    [1, 1],
                    [*(f"model.decoder.layers.{i}" for i in (0, 1)), "lm_head on IPU 0"],
                ),
                (
                    "bert_masked",
                    [1, 1],
                    [
                        *("bert.encoder.layer.0", "bert.encoder.layer.1"),
                        "cls.predictions.decoder on IPU 0",
                    ],
                ),
                ("t5", [2, 2], ["encoder.block.0", "decoder.block.0", "lm_head on IPU 0"]),
                (
                    "t5",
                    [1, 1, 1, 1],
                    [
                        *("encoder.block.0", "encoder.block.1", "decoder.embed_tokens on IPU 0"),
                        *("decoder.block.0 on IPU 2", "decoder.block.1 on IPU 3"),
                        "lm_head on IPU 0",
                    ],
                ),
                (
                    "bart",
                    [2, 2],
                    [
                        *("model.encoder.layers.0", "model.decoder.layers.0"),
                        "lm_head on IPU 0",
                    ],
                ),
                ("whisper", [2, 2], ["model.encoder.layers.0", "model.decoder.embed_tokens"]),
                (
                    "whisper",
                    [1, 1, 1, 1],
                    [
                        *("model.encoder.layers.0", "model.encoder.layers.1"),
                        *("model.decoder.embed_tokens", "model.decoder.layers.1"),
                        "proj_out on IPU 2",
                    ],
                ),
            ]
        ),
    ],
)
@pytest.mark.parametrize(
    "engine", ["embedded", pytest.param("ipu-standin", marks=pytest.mark.long)]
)
def test_tied_models_are_divided_as_they_are(name, layers, begins, engine, capsys):
    """What reads the embedding's weight again is back on its IPU, as optimum-graphcore has it."""
    count = 2 * len(begins) - 1
    model, batch, found = trained(
        name, count, engine, parallel=ipufit.Parallel(layers_per_ipu=layers)
    )
    whole, _, expected = trained(name, count, engine)
    assert found == expected
    for (key, value), wanted in zip(model.module.named_parameters(), whole.module.parameters()):
        assert torch.equal(value, wanted), key
    updates = [(0, count, 1), (count, 2 * count, 1)]
    _, losses = by_hand(net_of(name).to(model.module.dtype), batch, updates, 1)
    # AdamW makes much of tiny gradients; decoders compute their loss in float32.
    near = 1e-6 if name in ("gpt2", "opt") else 1e-8
    near = near if engine == "embedded" else 1e-4
    torch.testing.assert_close(found, losses, rtol=0, atol=near)
    with pytest.raises(ipufit.errors.PlanError, match=f"at least {count} to fill"):
        model.fit(batch, batch_size=1, gradient_accumulation=count - 1, verbose=0)
    tied = model.module.get_output_embeddings().weight
    assert tied is model.module.get_input_embeddings().weight
    model.explain()
    text = capsys.readouterr().out
    told = "; ".join(f"stage {number} from {name}" for number, name in enumerate(begins))
    assert f": {told}." in text


def test_a_configuration_divides_a_tied_model():
    """The stages are those of its layers_per_ipu, and one more; it has two IPUs."""
    net, batch = net_of("gpt2"), batch_of("gpt2")
    config = ipufit.IPUConfig(
        ipus_per_replica=2, layers_per_ipu=[1, 1], gradient_accumulation_steps=5
    )
    model = ipufit.Model(net)
    model.compile("sgd", config=config)
    model.fit(batch, batch_size=2, verbose=0)
    assert model.history.params["ipus"] == 2
    assert model.plan().planned.places == (0, 1, 0)


def test_auto_divides_a_tied_model():
    net, batch = net_of("gpt2"), batch_of("gpt2")
    model = ipufit.Model(net)
    model.compile("sgd", parallel=ipufit.Parallel(stages="auto", ipus_per_replica=2))
    model.fit(batch, batch_size=2, gradient_accumulation=5, verbose=0)
    assert model.plan().stages == {
        **{"transformer.wte": (0, 0), "transformer.h.1": (1, 1)},
        "lm_head": (2, 0),
    }


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.long) for name in STAGES])
def test_the_stand_in_for_an_ipu_trains_them(name):
    """Without caches, which begin as tensors of no size."""
    net, batch = net_of(name), batch_of(name)
    for part in net.modules():
        if hasattr(getattr(part, "config", None), "use_cache"):
            part.config.use_cache = False
    batch = {key: v.float() if v.is_floating_point() else v for key, v in batch.items()}
    _, losses = by_hand(net.float(), batch, [(0, 4, 4), (4, 8, 4), (8, 10, 4)], 1)
    model = ipufit.Model(net, engine="ipu-standin")
    model.compile(lambda p: torch.optim.AdamW(p, lr=0.01))
    history = model.fit(batch, batch_size=4, shuffle=False, verbose=0)
    torch.testing.assert_close(history.history["loss"], losses, rtol=0, atol=1e-4)
