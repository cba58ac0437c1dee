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
    model.compile(lambda p: torch.optim.AdamW(p, lr=0.01), layers_per_ipu=layers, jit="graph")
    plan = {"ipus": ipus, "gradient_accumulation": 2 * ipus - 1}
    history = model.fit(batch, batch_size=2, epochs=2, shuffle=False, verbose=0, **plan)
    # AdamW makes much of tiny gradients; GPT-2's loss is computed in float32.
    near = 1e-6 if name == "gpt2" else 1e-8
    torch.testing.assert_close(history.history["loss"], losses, rtol=0, atol=near)
    model.explain(batch, batch_size=2, **plan)
    text = capsys.readouterr().out
    for number, beginning in enumerate(begins):
        assert f"stage {number} from {beginning}" in text


def test_a_weight_on_two_ipus_is_refused():
    """With the line that gives each use its own copy."""
    net, batch = net_of("gpt2"), batch_of("gpt2")
    model = ipufit.Model(net)
    model.compile("sgd", layers_per_ipu=[1, 1])
    with pytest.raises(ipufit.errors.PartitionError, match="a parameter must be on one IPU"):
        model.fit(batch, batch_size=1, gradient_accumulation=3, ipus=2, verbose=0)


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
