"""Layers may be cut in one way in training and in another in inference, with one set of weights."""

import copy
import dataclasses

import pytest
import torch
from torch import nn

import ipufit
from ipufit.engines.ipu.engine import IpuEngine
from ipufit.errors import ConfigurationError
from ipufit.partition import Serialization, serialize, to_dense
from ipufit.partition.serialization import (
    SerializedEmbedding,
    SerializedLinear,
    SerializedLookup,
    SplitProjection,
)
from ipufit.poptorch._precision import keep_float64
from tests.fitting import assert_close
from tests.ipu_calls import Recorder
from tests.partition.test_serialized_layers import TARGETS, TOKENS, Flat, Language, language
from tests.told import refused

pytestmark = pytest.mark.both_engines


class Rows(Language):
    """The same with an output for each sample."""

    def forward(self, x):
        return self.head(self.body(self.embed(x)))


class OfRows(nn.Module):
    """Cross entropy of all tokens."""

    def forward(self, prediction, target):
        return nn.functional.cross_entropy(prediction.flatten(0, 1), target.flatten())


def rows():
    torch.manual_seed(1)
    return Rows().double()


COLUMNS, INPUTS = "reducing_dim", "input_channels"

# Training, inference, and the classes of embedding and projection.
WAYS = {
    "put together": ({"embed": 4, "head": [2, 2]}, {}, SerializedEmbedding, SplitProjection),
    "fewer": (
        {"embed": 6, "head": [6]},
        {"embed": 2, "head": 3},
        SerializedEmbedding,
        SplitProjection,
    ),
    "more": (
        {"embed": 2, "head": [2]},
        {"embed": 6, "head": [4]},
        SerializedEmbedding,
        SplitProjection,
    ),
    "neither divides": (
        {"embed": 4, "head": [4]},
        {"embed": 3, "head": [3, 3]},
        SerializedEmbedding,
        SplitProjection,
    ),
    "inference alone": ({}, {"embed": 4, "head": 3}, SerializedLookup, SerializedLinear),
    "inference alone, placed": (
        {},
        {"embed": [4], "head": [3]},
        SerializedLookup,
        SerializedLinear,
    ),
    "a product otherwise": (
        {"head": 3},
        {"head": Serialization(4, mode=COLUMNS)},
        nn.Embedding,
        SerializedLinear,
    ),
    "columns of rows": (
        {"head": [3]},
        {"head": Serialization(4, mode=COLUMNS)},
        nn.Embedding,
        SplitProjection,
    ),
    "rows of columns": (
        {"head": Serialization(splits_per_ipu=[4], mode=COLUMNS)},
        {"head": 3},
        nn.Embedding,
        SplitProjection,
    ),
    "rows of the input": (
        {"head": [3]},
        {"head": Serialization(5, mode=INPUTS)},
        nn.Embedding,
        SplitProjection,
    ),
}


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("way", WAYS.values(), ids=list(WAYS))
def test_both_give_what_the_whole_gives(way, bias):
    """In either mode, with the parameters and the state of training."""
    layers, inference, embedding, projection = way
    net, dense = language(bias=bias), language(bias=bias)
    trained = serialize(language(bias=bias), layers)
    assert serialize(net, layers, inference) is net
    assert (type(net.embed), type(net.head)) == (embedding, projection)
    for each in (net.train(), net.eval()):
        torch.testing.assert_close(each(TOKENS), dense(TOKENS), rtol=0, atol=1e-12)
    shapes = [(n, p.shape) for n, p in trained.named_parameters()]
    assert [(n, p.shape) for n, p in net.named_parameters()] == shapes
    assert list(net.state_dict()) == list(dense.state_dict())
    to_dense(net)
    assert str(net) == str(dense)
    assert_close(net, dense, atol=0)


class Counted(torch.overrides.TorchFunctionMode):
    """Counts calls of embeddings and linear layers."""

    def __init__(self):
        super().__init__()
        self.shapes = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func in (nn.functional.embedding, nn.functional.linear, torch.Tensor.addmm):
            weight = {nn.functional.embedding: 1, nn.functional.linear: 1}.get(func, 2)
            self.shapes.append(tuple(args[weight].shape))
        return func(*args, **(kwargs or {}))


def products(layer, x):
    with Counted() as counted:
        layer(x)
    return counted.shapes


def test_the_mode_of_the_module_chooses():
    net = serialize(language(), {"embed": 4, "head": [2]}, {"embed": 2, "head": [6]})
    x = torch.zeros(3, 8).double()
    assert products(net.train().embed, TOKENS) == [(3, 8)] * 4
    assert products(net.head, x) == [(6, 8)] * 2
    assert products(net.eval().embed, TOKENS) == [(6, 8)] * 2
    assert products(net.head, x) == [(2, 8)] * 6
    serialize(net, {"head": 1}, {"head": Serialization(4, mode=COLUMNS)})
    assert products(net.head, x) == [(12, 2)] + [(2, 12)] * 3
    assert products(net.train().head, x) == [(12, 8)]
    text = (
        "SerializedLinear(in_features=8, out_features=12, bias=True, factor=1, inference factor=4)"
    )
    assert str(net.head) == text


def test_without_inference_layers_both_are_the_same():
    net = serialize(language(), {"embed": 4})
    assert net.embed.parts == net.embed.inference_parts
    assert str(net.embed) == "SerializedEmbedding(12, 8, padding_idx=7, factor=4)"


def test_layers_that_share_a_weight_follow():
    """Also where inference alone cuts it, and the weight is one parameter."""
    net = serialize(language(tied=True), {"embed": 4}, {"embed": 2})
    assert net.head.inference_parts.count == net.embed.inference_parts.count == 2
    assert net.head.weight_3 is net.embed.weight_3
    net = serialize(language(tied=True), {}, {"embed": 4})
    assert net.head.weight is net.embed.weight
    assert (net.head.parts.count, net.head.inference_parts.count) == (1, 4)
    dense = language(tied=True)
    torch.testing.assert_close(net.eval()(TOKENS), dense(TOKENS), rtol=0, atol=1e-12)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    to_dense(net)
    assert optimizer.param_groups[0]["params"] == list(net.parameters())


def test_inference_can_be_cut_later():
    """Without a word on training, its parts stay, and so do ties."""
    net = serialize(language(tied=True), {"embed": 4, "body.0": 2})
    model = ipufit.Model(net)
    model.compile("sgd", Flat(), memory=ipufit.Memory(inference_serialize={"embed": 2}))
    assert (
        str(net.embed) == "SerializedEmbedding(12, 8, padding_idx=7, factor=4, inference factor=2)"
    )
    assert net.head.weight_0 is net.embed.weight_0
    assert str(net.body[0]).endswith("bias=True, factor=2)")
    dense = language(tied=True)
    torch.testing.assert_close(net(TOKENS), dense(TOKENS), rtol=0, atol=1e-12)
    torch.testing.assert_close(net.eval()(TOKENS), dense(TOKENS), rtol=0, atol=1e-12)


@pytest.mark.long
@pytest.mark.parametrize("engine", ["embedded", "ipu-standin"])
def test_fit_evaluate_and_predict_give_what_the_dense_module_gives(engine):
    def run(**cuts):
        module = rows()
        model = ipufit.Model(module, engine=engine)
        options = {"batch_size": 2, "verbose": 0}
        with keep_float64():
            model.compile("adam", OfRows(), **cuts)
            history = model.fit(
                TOKENS, TARGETS, shuffle=False, seed=3, validation_data=(TOKENS, TARGETS), **options
            )
            found = model.predict(TOKENS, **options)
            model.close()
        return module, history.history, found

    net, history, found = run(
        memory=ipufit.Memory(
            serialize={"embed": 4, "head": [2]},
            inference_serialize={"embed": 3, "body.0": 2, "head": [6]},
        ),
    )
    dense, expected, wanted = run()
    for name in ("loss", "val_loss"):
        assert history[name] == pytest.approx(expected[name], abs=1e-12)
    torch.testing.assert_close(torch.as_tensor(found), torch.as_tensor(wanted), rtol=0, atol=1e-11)
    assert_close(net, dense, atol=1e-11)


def test_poptorch_is_told_of_the_parts_of_each_mode():
    """Two IPUs in training and one in inference: blocks here, products in parts there."""
    calls, recorder = [], Recorder()

    class Sdk:
        __name__ = "ipufit.poptorch"

        def __getattr__(self, name):
            return getattr(recorder, name)

        def serializedMatMul(self, lhs, rhs, mode, factor):  # noqa: N802
            calls.append((mode.name, factor))
            return recorder.serializedMatMul(lhs, rhs, mode, factor)

        class Block:
            @staticmethod
            def start(user_id, ipu_id):
                calls.append((user_id, ipu_id))
                recorder.Block.start(user_id, ipu_id=ipu_id)

    model = ipufit.Model(rows(), engine=lambda: IpuEngine(Sdk(), "ipu-standin"))
    with keep_float64():
        model.compile(
            "sgd",
            OfRows(),
            parallel=ipufit.Parallel(
                layers_per_ipu=[-1, -1],
                layers="body",
                inference=ipufit.Parallel(layers_per_ipu=[-1]),
            ),
            memory=ipufit.Memory(
                serialize={"embed": [2, 0]},
                inference_serialize={"embed": 4, "head": 3, "body.0": [2]},
            ),
        )
        model.fit(TOKENS, TARGETS, batch_size=2, gradient_accumulation=5, verbose=0)
        assert ("ipufit embed/0", 0) in calls
        assert ("OutputChannels", 3) not in calls
        calls.clear()
        model.predict(TOKENS, batch_size=2, verbose=0)
        model.close()
    assert calls[:2] == [("ipufit body.0/0", 0), ("OutputChannels", 3)]


@pytest.mark.long
def test_explain_names_the_layers():
    model = ipufit.Model(language())
    model.compile("sgd", Flat(), memory=ipufit.Memory(serialize={"embed": 4, "head": [2]}))
    model.fit(TOKENS, TARGETS, batch_size=2, verbose=0)
    line = "Layers in parts: embed (factor=4), head (splits_per_ipu=[2])."
    assert line in model._session.explain().splitlines()
    model.compile("sgd", Flat(), memory=ipufit.Memory(inference_serialize={"embed": 2}))
    line = "Layers in parts: embed (factor=4, inference factor=2), head (splits_per_ipu=[2])."
    assert line in model._session.explain().splitlines()
    plain = ipufit.Model(language())
    plain.compile("sgd", Flat())
    assert "Layers in parts" not in plain._session.explain()


# Bad input


def test_faults_of_inference_are_told_with_those_of_training():
    net = language()
    refused(
        lambda: serialize(net, {"embed": 5}, {"head": 5, "body.1": 2}),
        "num_embeddings of 'embed' (12) must be a multiple of its parts, got factor=5. Try 4 or 6 "
        "parts.\nFor inference, out_features of 'head' (12) must be a multiple of its parts, got "
        "factor=5. Try 4 or 6 parts.\nFor inference, only nn.Embedding and nn.Linear can be "
        "serialised, but 'body.1' is Tanh. Name the embedding or linear layer inside it.",
    )
    refused(
        lambda: serialize(net, {}, 4),
        "For inference, serialized layers must be a dict from names of layers to numbers of parts, "
        "got 4. Write for example {'embed': 4}.",
    )
    assert str(net) == str(language())


def compile_with(**options):
    ipufit.Model(language()).compile("sgd", Flat(), **options)


def test_parts_in_inference_lie_on_the_ipus_of_inference():
    """They are told by their argument, and each parameter has one place."""
    parallel = ipufit.Parallel(layers_per_ipu=[1, 1], layers="body")
    apart = dataclasses.replace(parallel, inference=ipufit.Parallel(layers_per_ipu=[-1]))

    def in_inference(parts, training=None, parallel=parallel):
        memory = ipufit.Memory(serialize=training or {"embed": [2, 2]}, inference_serialize=parts)
        compile_with(parallel=parallel, memory=memory)

    refused(
        lambda: in_inference(None, parallel=apart),
        "splits_per_ipu of layers serialised in inference must have a number for each IPU of a "
        "replica, got 2 and a replica has 1 in inference. Set Memory.inference_serialize, or "
        "divide the module there as in training.",
    )
    in_inference({}, parallel=apart)
    in_inference({"embed": [1, 1]})
    refused(
        lambda: in_inference({"embed": [2]}),
        "splits_per_ipu of layers serialised in inference must have a number for each IPU of a "
        "replica, got 1 and a replica has 2 in inference. Set Memory.inference_serialize, or "
        "divide the module there as in training.",
    )
    refused(
        lambda: in_inference({"embed": [1, 2]}),
        "a parameter must be on one IPU, but in inference 'embed' is cut by splits_per_ipu=[1, 2], "
        "which needs its 'weight_1' on IPUs 0, 1; the parameters are those of training, "
        "splits_per_ipu=[2, 2]. Cut it into 3 parts in training too, by splits_per_ipu in "
        "Memory.serialize.",
    )
    columns = Serialization(splits_per_ipu=[1, 1], mode=COLUMNS)
    refused(
        lambda: in_inference({"head": columns}, training={"head": [1, 1]}),
        "a parameter must be on one IPU, but in inference 'head' is cut by splits_per_ipu=[1, 1], "
        "which needs its 'weight_0' on IPUs 0, 1; the parameters are those of training, "
        "splits_per_ipu=[1, 1]. Cut it into 2 parts in training too, by splits_per_ipu in "
        "Memory.serialize.",
    )


def test_a_compile_that_fails_leaves_both_as_they_were():
    net = serialize(language(tied=True), {"embed": 4}, {"embed": 2})
    before, text = copy.deepcopy(net.state_dict()), str(net)
    model = ipufit.Model(net)
    for given in (
        {"memory": ipufit.Memory(inference_serialize={})},
        {"memory": ipufit.Memory(serialize={"head": 2})},
    ):
        with pytest.raises(ConfigurationError):
            model.compile("adam", "no such loss", **given)
        assert str(net) == text
        assert net.head.weight_3 is net.embed.weight_3
        assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
