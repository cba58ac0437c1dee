"""Layers that compute in parts give what the whole layers give, and can be put together again."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.utils import prune

import ipufit
from ipufit.engines.ipu.engine import IpuEngine
from ipufit.errors import ConfigurationError, OptimizerError, UnknownNameError
from ipufit.partition import Serialization, serialize, to_dense
from ipufit.partition.cut_layers import ipus_of
from ipufit.partition.serialization import (
    SerializedEmbedding,
    SerializedLinear,
    SplitProjection,
)
from ipufit.poptorch._precision import keep_float64
from tests.fitting import assert_close, unmeasured
from tests.ipu_calls import Recorder
from tests.partition.test_recomputation import measured, recorded
from tests.told import refused

pytestmark = pytest.mark.both_engines

TOKENS = torch.randint(0, 12, (10, 6), generator=torch.Generator().manual_seed(3))
TARGETS = TOKENS.roll(1, 1)


class Language(nn.Module):
    """Predicts a token for each token."""

    def __init__(self, tied=False, bias=True):
        super().__init__()
        self.embed = nn.Embedding(12, 8, padding_idx=7)
        self.body = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
        self.head = nn.Linear(8, 12, bias=bias)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, x):
        return self.head(self.body(self.embed(x))).flatten(0, 1)


def language(**options):
    torch.manual_seed(1)
    return Language(**options).double()


def outputs_and_gradients(net):
    """What comes out, and the gradients by the names of the dense module."""
    out = net(TOKENS)
    parameters = dict(net.named_parameters())
    found = torch.autograd.grad(out.square().sum(), list(parameters.values()))
    by_name = dict(zip(parameters, found))
    whole = {name: g for name, g in by_name.items() if ".weight_" not in name}
    for name in {name.rpartition("_")[0] for name in by_name if ".weight_" in name}:
        layer = net.get_submodule(name.rpartition(".")[0])
        pieces = [by_name[f"{name}_{part}"] for part in range(layer.parts.count)]
        whole[name] = torch.cat(pieces, layer.dim)
    return out, whole


WAYS = {
    "embedding": {"embed": 4},
    "embedding over IPUs": {"embed": [3, 1]},
    "linear": {"head": 3},
    "linear over IPUs": {"head": [0, 1, 2]},
    "columns": {"head": Serialization(factor=4, mode="reducing_dim")},
    "columns over IPUs": {"head": Serialization(splits_per_ipu=[1, 1], mode="reducing_dim")},
    "rows of the input": {"head": Serialization(factor=5, mode="input_channels")},
    "all": {"embed": 2, "body.0": 4, "head": [2, 2]},
    "every row": {"embed": 12, "head": 12},
}


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("layers", WAYS.values(), ids=list(WAYS))
def test_parts_give_what_the_whole_gives(layers, tied, bias):
    """Outputs and gradients, within the rounding of sums in another order."""
    net, dense = language(tied=tied, bias=bias), language(tied=tied, bias=bias)
    if tied and "embed" in layers and "head" in layers and layers != WAYS["every row"]:
        layers = {"embed": layers["embed"]}
    if tied and isinstance(layers.get("head"), Serialization) and layers["head"].splits_per_ipu:
        layers = {"head": 2}
    assert serialize(net, layers) is net
    out, found = outputs_and_gradients(net)
    expected, wanted = outputs_and_gradients(dense)
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-12)
    assert sorted(found) == sorted(wanted)
    for name, gradient in wanted.items():
        torch.testing.assert_close(found[name], gradient, rtol=0, atol=1e-12)
    if not tied:
        # Padding takes part in the forward pass only.
        assert not found["embed.weight"][7].any()


def test_classes_are_those_of_the_kind():
    net = serialize(language(), {"embed": 2, "body.0": 2, "head": [1, 1]})
    kinds = [type(layer) for layer in (net.embed, net.body[0], net.head)]
    assert kinds == [SerializedEmbedding, SerializedLinear, SplitProjection]
    assert isinstance(net.embed, nn.Embedding)
    assert isinstance(net.head, nn.Linear)
    assert str(net.embed) == "SerializedEmbedding(12, 8, padding_idx=7, factor=2)"
    text = "SplitProjection(in_features=8, out_features=12, bias=True, splits_per_ipu=[1, 1])"
    assert str(net.head) == text
    assert ipus_of(net) == 2
    assert ipus_of(language()) == 0


def test_what_is_not_finite_stays_in_its_own_row():
    """A mask that multiplies would spread NaN to every token: 0 times NaN is NaN."""
    net, dense = language(), language()
    for each in (net, dense):
        with torch.no_grad():
            each.embed.weight[0] = float("nan")
    serialize(net, {"embed": 4})
    tokens = torch.arange(1, 12)
    torch.testing.assert_close(net.embed(tokens), dense.embed(tokens), rtol=0, atol=0)
    assert net.embed(torch.tensor([0])).isnan().all()


@pytest.mark.parametrize("tied", [False, True])
def test_state_has_the_names_and_values_of_the_dense_module(tied):
    """Files are exchanged with people who never serialise anything."""
    net, dense = language(tied=tied), language(tied=tied)
    serialize(net, {"embed": 3, "body.0": 2})
    state, expected = net.state_dict(), dense.state_dict()
    assert list(state) == list(expected)
    assert all(torch.equal(state[name], expected[name]) for name in expected)
    other = {name: torch.randn_like(value) for name, value in expected.items()}
    if tied:
        other["head.weight"] = other["embed.weight"]
    assert str(net.load_state_dict(other)) == "<All keys matched successfully>"
    dense.load_state_dict(other)
    torch.testing.assert_close(net(TOKENS), dense(TOKENS), rtol=0, atol=1e-12)
    assert torch.equal(net.embed.weight, dense.embed.weight)


def test_weights_files_are_those_of_the_dense_module(tmp_path):
    net, dense = language(), language()
    model = ipufit.Model(serialize(net, {"embed": 3, "head": [1, 2]}))
    with torch.no_grad():
        net.head.weight_1.add_(1.0)
    model.save_weights(tmp_path / "a.safetensors")
    ipufit.Model(dense).load_weights(tmp_path / "a.safetensors")
    assert torch.equal(dense.head.weight, net.head.weight)
    with torch.no_grad():
        dense.embed.weight.mul_(2.0)
    ipufit.Model(dense).save_weights(tmp_path / "b.safetensors")
    model.load_weights(tmp_path / "b.safetensors")
    assert_close(net, dense, atol=0)


def test_a_state_that_does_not_fit_is_told_by_the_dense_name():
    net = serialize(language(), {"embed": 3})
    state = net.state_dict()
    short = dict(state, **{"embed.weight": torch.zeros(9, 8)})
    with pytest.raises(RuntimeError) as caught:
        net.load_state_dict(short)
    text = "size mismatch for embed.weight: the state has (9, 8), the module (12, 8)."
    assert text in str(caught.value)
    missing = {name: value for name, value in state.items() if name != "embed.weight"}
    found = net.load_state_dict({**missing, "embed.other": torch.zeros(1)}, strict=False)
    assert found.missing_keys == ["embed.weight"]
    assert found.unexpected_keys == ["embed.other"]


@pytest.mark.parametrize("tied", [False, True])
def test_to_dense_restores_the_module_and_its_parameters(tied):
    """An optimizer that was made before goes on with the very same parameters."""
    net = language(tied=tied)
    before = dict(net.named_parameters())
    text, state = str(net), copy.deepcopy(net.state_dict())
    serialize(net, {"embed": 4, "body.0": 2})
    assert set(map(id, net.parameters())) != set(map(id, before.values()))
    assert to_dense(net) is net
    after = dict(net.named_parameters())
    assert {n: id(p) for n, p in after.items()} == {n: id(p) for n, p in before.items()}
    assert list(after) == list(before)
    assert str(net) == text
    assert all(torch.equal(value, state[name]) for name, value in net.state_dict().items())
    assert (net.head.weight is net.embed.weight) == tied
    serialize(net, {"embed": 2})
    net.embed.weight_0.requires_grad_(False)
    net.embed.weight_1.requires_grad_(False)
    to_dense(net.float())
    assert net.embed.weight.dtype == torch.float32
    assert not net.embed.weight.requires_grad


def test_memory_of_the_whole_weight_is_let_go_of():
    net = language()
    dense = net.embed.weight
    serialize(net, {"embed": 4})
    assert dense.numel() == 0
    assert net.embed.weight.shape == (12, 8)


def test_a_copy_is_a_module_of_its_own():
    net = serialize(language(tied=True), {"embed": 4})
    other = copy.deepcopy(net)
    assert other.head.weight_0 is other.embed.weight_0
    to_dense(other)
    assert other.head.weight is other.embed.weight
    assert isinstance(net.embed, SerializedEmbedding)
    torch.testing.assert_close(net(TOKENS), other(TOKENS), rtol=0, atol=1e-12)


def test_a_layer_is_cut_anew():
    net, dense = language(tied=True), language(tied=True)
    serialize(net, {"embed": 4})
    serialize(net, {"head": [1, 2]})
    assert net.embed.parts == net.head.parts
    assert net.embed.weight_0.shape == (4, 8)
    assert_close(net, dense, atol=0)
    serialize(net, {"embed": 1})
    assert type(net.embed) is nn.Embedding
    assert net.head.weight is net.embed.weight


# Indices, memory


@pytest.mark.parametrize("cut", [{}, {"embed": 4}, {"embed": [1]}, {"embed": 12}])
@pytest.mark.parametrize("index", [-1, 12, 100])
def test_an_index_that_no_row_has_is_refused_as_by_torch(cut, index):
    """Zeros in its place would train on without a word."""
    net = serialize(language(), cut)
    with pytest.raises(IndexError, match="index out of range"):
        net.embed(torch.tensor([3, index]))
    inference = serialize(language(), {}, cut).eval()
    with pytest.raises(IndexError, match="index out of range"):
        inference.embed(torch.tensor([3, index]))


@pytest.mark.long
@pytest.mark.parametrize("engine", ["embedded", "ipu-standin"])
def test_fit_refuses_such_an_index_too(engine):
    model = ipufit.Model(language().float(), engine=engine)
    model.compile("sgd", Flat(), memory=ipufit.Memory(serialize={"embed": 4}))
    with pytest.raises(Exception, match="index out of range"):
        model.fit(TOKENS + 1, TARGETS, batch_size=2, verbose=0)
    model.close()


def peak(layers, tokens):
    """Most bytes that a step of a language model with 1024 tokens holds, counted in its run."""
    net = nn.Sequential(nn.Embedding(1024, 16), nn.Linear(16, 1024))
    return measured(*recorded(serialize(net, layers), [], tokens))[1]


def test_on_one_host_parts_need_as_much_memory_as_the_whole():
    """What docs/memory.md says of the embedded engine, with few tokens and with many."""
    columns = {"1": Serialization(4, mode="reducing_dim")}
    for count, most in ((4, 1.01), (2048, 1.01)):
        tokens = torch.arange(count) % 1024
        whole = peak({}, tokens)
        for layers in ({"0": 4}, {"1": 4}, {"1": [4]}, columns):
            assert 0.99 * whole < peak(layers, tokens) < most * whole
    few = torch.arange(4)
    rows = {"1": Serialization(4, mode="input_channels")}
    assert peak(rows, few) > 1.3 * peak({}, few)


# Training


class Flat(nn.Module):
    """Cross entropy of the tokens, whose targets come in rows."""

    def forward(self, prediction, target):
        return nn.functional.cross_entropy(prediction, target.flatten())


@pytest.mark.long
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("engine", ["embedded", "ipu-standin"])
def test_fit_gives_what_the_dense_module_gives(engine, tied):
    """Training, tails, state on a device and prediction included."""

    def run(layers, **divided):
        module = language(tied=tied)
        model = ipufit.Model(module, engine=engine)
        with keep_float64():
            memory = ipufit.Memory(serialize=layers)
            model.compile("adam", Flat(), memory=memory, **divided, **unmeasured(engine))
            history = model.fit(
                TOKENS,
                TARGETS,
                batch_size=2,
                epochs=2,
                gradient_accumulation=2,
                shuffle=False,
                seed=3,
                verbose=0,
            )
            model.close()
        return module, history.history["loss"]

    if tied:
        net, losses = run({"embed": 4, "body.0": 2})
    else:
        layers = {"embed": 4, "body.0": 2, "head": [1, 2]}
        net, losses = run(layers, parallel=ipufit.Parallel(ipus_per_replica=2, strategy="sharded"))
    dense, expected = run(None)
    assert losses == pytest.approx(expected, abs=1e-12)
    assert_close(net, dense, atol=1e-11)
    assert isinstance(net.embed, SerializedEmbedding)
    to_dense(net)
    assert_close(net, dense, atol=1e-11)


@pytest.mark.long
def test_poptorch_is_told_of_parts_and_their_places():
    """A product in parts is an operator of PopTorch's; each IPU gets a block of its own."""
    recorder = Recorder()
    recorder_calls = []

    class Sdk:
        def __getattr__(self, name):
            return getattr(recorder, name)

        def serializedMatMul(self, lhs, rhs, mode, factor):  # noqa: N802
            recorder_calls.append(("serializedMatMul", mode.name, factor))
            return recorder.serializedMatMul(lhs, rhs, mode, factor)

        class Block:
            @staticmethod
            def start(user_id, ipu_id):
                recorder_calls.append((user_id, ipu_id))
                recorder.Block.start(user_id, ipu_id=ipu_id)

    sdk = Sdk()
    sdk.__name__ = "ipufit.poptorch"
    net = language()
    model = ipufit.Model(net, engine=lambda: IpuEngine(sdk, "ipu-standin"))
    layers = {
        "embed": [2, 1],
        "body.0": Serialization(factor=4, mode="reducing_dim"),
        "head": [0, 2],
    }
    with keep_float64():
        model.compile(
            "sgd",
            Flat(),
            memory=ipufit.Memory(serialize=layers),
            parallel=ipufit.Parallel(ipus_per_replica=2),
        )
        model.fit(TOKENS, TARGETS, batch_size=2, gradient_accumulation=5, verbose=0)
        model.close()
    assert recorder_calls[:4] == [
        ("ipufit embed/0", 0),
        ("ipufit embed/2", 1),
        ("serializedMatMul", "ReducingDim", 4),
        ("ipufit head/0", 1),
    ]


# Bad input


def test_factor_must_divide():
    net = language()
    refused(
        lambda: serialize(net, {"embed": 5}),
        "num_embeddings of 'embed' (12) must be a multiple of its parts, got factor=5. Try 4 or 6 "
        "parts.",
    )
    refused(
        lambda: serialize(net, {"head": [3, 2]}),
        "out_features of 'head' (12) must be a multiple of its parts, got splits_per_ipu=[3, 2]. "
        "Try 4 or 6 parts.",
    )
    refused(
        lambda: serialize(net, {"head": Serialization(3, mode="reducing_dim")}),
        "in_features of 'head' (8) must be a multiple of its parts, got factor=3. Try 2 or 4 "
        "parts.",
    )


def test_factor_and_splits_are_two_answers_to_one_question():
    net = language()
    refused(
        lambda: serialize(net, {"embed": Serialization(factor=4, splits_per_ipu=[2, 2])}),
        "either factor or splits_per_ipu sets the number of parts of 'embed', got factor=4 and "
        "splits_per_ipu=[2, 2]. Pass factor to keep all parts on one IPU, splits_per_ipu to spread "
        "them over IPUs.",
    )
    refused(
        lambda: serialize(net, {"embed": Serialization()}),
        "either factor or splits_per_ipu sets the number of parts of 'embed', got neither. Pass "
        "factor to keep all parts on one IPU, splits_per_ipu to spread them over IPUs.",
    )


@pytest.mark.parametrize(
    ("splits", "text"),
    [
        (
            [3, 0, 1],
            "the splits per IPU of 'embed' must be on neighbouring IPUs, without a zero between "
            "them, got [3, 0, 1]. Move them together, such as [3, 1, 0].",
        ),
        (
            [0, 0],
            "the splits per IPU of 'embed' must have at least one part on some IPU, got [0, 0]. "
            "Leave the layer out to keep it whole.",
        ),
        (
            [2, -1],
            "the splits per IPU of 'embed' must be a list of numbers of at least 0, one for each "
            "IPU, got [2, -1]. Pass for example [2, 2].",
        ),
    ],
)
def test_splits_must_make_sense(splits, text):
    refused(lambda: serialize(language(), {"embed": splits}), text)


@pytest.mark.parametrize("factor", [0, True, 2.0, "4", None])
def test_factor_must_be_a_count(factor):
    with pytest.raises(ConfigurationError) as caught:
        serialize(language(), {"embed": factor})
    expected = (
        f"the number of parts of 'embed' must be an integer of at least 1 or a list of splits per "
        f"IPU, got {factor!r}. Pass for example 4, or [2, 2]."
    )
    if factor is not None:
        assert str(caught.value) == expected


def test_modes_belong_to_linear_layers():
    net = language()
    refused(
        lambda: serialize(net, {"embed": Serialization(2, mode="reducing_dim")}),
        "mode='reducing_dim' is for linear layers, but 'embed' is an embedding, which is cut by "
        "its rows. Leave the mode out.",
    )
    refused(
        lambda: serialize(net, {"head": Serialization(2, mode="columns")}),
        "the mode of 'head' must be one of 'output_channels', 'reducing_dim', 'input_channels', "
        "got 'columns'.",
    )
    given = Serialization(splits_per_ipu=[1, 1], mode="input_channels")
    refused(
        lambda: serialize(net, {"head": given}),
        "splits_per_ipu of 'head' places parts of the weight, but mode='input_channels' cuts the "
        "input and leaves the weight whole. Pass a factor, or another mode.",
    )


def test_an_unknown_layer_is_told_with_the_nearest():
    with pytest.raises(UnknownNameError) as caught:
        serialize(language(), {"embedd": 2})
    assert caught.value.nearest == "embed"
    assert str(caught.value) == (
        "unknown layer 'embedd'. Did you mean 'embed'? Known names: body.0, embed, head."
    )


class _OfMine(nn.Linear):
    pass


def test_a_layer_of_another_kind_is_refused():
    net = language()
    net.own = _OfMine(2, 2)
    for name, kind in (("body", "Sequential"), ("body.1", "Tanh"), ("own", "_OfMine")):
        refused(
            lambda name=name: serialize(net, {name: 2}),
            f"only nn.Embedding and nn.Linear can be serialised, but {name!r} is {kind}. Name the "
            "embedding or linear layer inside it.",
        )


@pytest.mark.parametrize("option", ["max_norm", "scale_grad_by_freq", "sparse"])
def test_an_embedding_that_needs_its_whole_table_is_refused(option):
    value = 1.0 if option == "max_norm" else True
    net = nn.Sequential(nn.Embedding(4, 2, **{option: value}))
    refused(
        lambda: serialize(net, {"0": 2}),
        f"an embedding with {option}={value} can't be serialised, as '0' has: it needs the whole "
        "table at once. Build it without that.",
    )


@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
def test_a_weight_that_is_computed_is_not_cut():
    """With a factor the layer takes it as it comes."""
    net, dense = language(), language()
    for each in (net, dense):
        nn.utils.weight_norm(each.head)
    text = (
        "the weight of a serialized layer must be a parameter, but 'head.weight' is computed from "
        "others, as by weight_norm, spectral_norm or pruning. Remove that first, for example with "
        "torch.nn.utils.remove_weight_norm(layer)."
    )
    refused(lambda: serialize(net, {"head": [2]}), text)
    refused(lambda: serialize(net, {"embed": 2, "head": [2]}), text)
    serialize(net, {"head": 2})
    torch.testing.assert_close(net(TOKENS), dense(TOKENS), rtol=0, atol=1e-12)
    nn.utils.remove_weight_norm(net.head)
    serialize(net, {"head": [2]})
    torch.testing.assert_close(net(TOKENS), dense(TOKENS), rtol=0, atol=1e-12)
    pruned = language()
    prune.random_unstructured(pruned.embed, "weight", 0.5)
    refused(lambda: serialize(pruned, {"embed": 2}), text.replace("head", "embed"))


def test_a_weight_that_is_cut_is_not_set_as_one():
    net = serialize(language(), {"embed": 3, "head": [2]})

    def tie():
        net.head.weight = net.embed.weight

    def replace():
        net.embed.weight = nn.Parameter(torch.zeros(12, 8))

    for call, layer, last in ((tie, "head", 1), (replace, "embed", 2)):
        refused(
            call,
            "the weight of a serialized layer must be set in its parts, 'weight_0' to "
            f"'weight_{last}', got one weight for {layer!r}. Call "
            "ipufit.partition.to_dense(module), set it, and serialise and compile again.",
        )
    net.head.weight_0 = nn.Parameter(torch.zeros(6, 8).double())
    assert not net.head.weight[:6].any()


def test_layers_that_share_a_weight_are_cut_alike():
    net = language(tied=True)
    refused(
        lambda: serialize(net, {"embed": 4, "head": 3}),
        "'embed' and 'head' share a weight and must be cut in the same way, got factor=4 and "
        "factor=3. Name only one: the other follows.",
    )
    refused(
        lambda: serialize(net, {"embed": [2, 2], "head": [0, 4]}),
        "'embed' and 'head' share a weight, and each part of it is on one IPU, got "
        "splits_per_ipu=[2, 2] and splits_per_ipu=[0, 4]. Name only one: the other "
        "follows.\n'head' and 'embed' share a weight, and each part of it is on one IPU, got "
        "splits_per_ipu=[0, 4] and splits_per_ipu=[2, 2]. Name only one: the other follows.",
    )
    given = Serialization(splits_per_ipu=[1, 1], mode="reducing_dim")
    refused(
        lambda: serialize(net, {"head": given}),
        "'head' shares its weight with 'embed', a Embedding, which can't be cut in the same way "
        "(splits_per_ipu=[1, 1]). Leave the layer whole, or untie the two.",
    )
    assert type(net.embed) is nn.Embedding


def test_all_faults_are_told_at_once_and_nothing_is_changed():
    net = language()
    with pytest.raises(ConfigurationError) as caught:
        serialize(net, {"embed": 5, "head": [0], "body.0": 2})
    assert len(str(caught.value).splitlines()) == 2
    assert not any("Serialized" in type(layer).__name__ for layer in net.modules())
    refused(
        lambda: serialize(net, ["embed"]),
        "serialized layers must be a dict from names of layers to numbers of parts, got ['embed']. "
        "Write for example {'embed': 4}.",
    )


def test_a_compile_that_fails_leaves_the_module_as_it_was():
    net = serialize(language(tied=True), {"embed": [2, 2]})
    model = ipufit.Model(net)
    with pytest.raises(ConfigurationError):
        model.compile("adam", "no such loss", memory=ipufit.Memory(serialize={"embed": 3}))
    assert net.embed.parts == net.head.parts
    assert net.embed.parts.per_ipu == (2, 2)
    assert net.head.weight_3 is net.embed.weight_3
    dense = language()
    with pytest.raises(ConfigurationError):
        ipufit.Model(dense).compile(
            "adam", "mse", memory=ipufit.Memory(serialize={"embed": 3, "head": 5})
        )
    assert type(dense.embed) is nn.Embedding


def test_an_optimizer_of_the_dense_weights_is_refused():
    """It would leave the parts as they are."""
    net = language()
    made = torch.optim.SGD(net.parameters(), lr=0.1)
    with pytest.raises(OptimizerError):
        ipufit.Model(net).compile(made, "mse", memory=ipufit.Memory(serialize={"embed": 3}))
    assert type(net.embed) is nn.Embedding
    ipufit.Model(net).compile(made, "mse")
    serialize(net, {"embed": 3})
    made = torch.optim.SGD(net.parameters(), lr=0.1)
    ipufit.Model(net).compile(made, "mse", memory=ipufit.Memory(serialize={"body.0": 2}))
