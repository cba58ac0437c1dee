"""Layers that are computed again in the backward pass: the same bits with less memory."""

import copy
import math
import weakref

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import ipufit
from ipufit.engines.embedded.engine import EmbeddedEngine
from ipufit.engines.ipu.engine import IpuEngine
from ipufit.errors import ConfigurationError, UnknownNameError
from ipufit.poptorch._precision import keep_float64
from ipufit.tracing.capture import capture
from ipufit.tracing.graph_analysis import peak_bytes
from ipufit.tracing.recompute import recompute_layers
from ipufit.tracing.recording import mark_backward_pass, mark_layers
from tests.fitting import assert_equal
from tests.nets import CNN, MLP, Running, Transformer, data
from tests.told import refused

pytestmark = pytest.mark.both_engines


class Residual(nn.Module):
    """Convolutions, BatchNorm, dropout, and changes in place as ResNets have them."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.drop, self.relu = nn.Dropout(0.3), nn.ReLU(inplace=True)
        self.second, self.last = nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4)

    def forward(self, x):
        y = self.drop(self.relu(self.norm(self.conv(x))))
        y = self.last(self.second(y))
        y += x
        return self.relu(y)


class Pictures(nn.Module):
    """Residual blocks over a picture."""

    def __init__(self, blocks=4):
        super().__init__()
        self.stem = nn.Conv2d(1, 4, 1)
        self.blocks = nn.ModuleList([Residual() for _ in range(blocks)])
        self.head = nn.Linear(4, 5)

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean((2, 3)))


class Sequences(nn.Module):
    """An encoder and a decoder over the rows of the picture."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(4, 8)
        encoder = nn.TransformerEncoderLayer(8, 2, 32, dropout=0.2, batch_first=True)
        decoder = nn.TransformerDecoderLayer(8, 2, 32, dropout=0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(encoder, 2, enable_nested_tensor=False)
        self.decoder = nn.TransformerDecoder(decoder, 2)
        self.head = nn.Linear(8, 5)

    def forward(self, x):
        x = self.embed(x.squeeze(1))
        return self.head(self.decoder(x, self.encoder(x)).mean(1))


class Recurrent(nn.Module):
    """An LSTM, twice the same layer, and one that returns several values."""

    def __init__(self):
        super().__init__()
        self.rnn = nn.LSTM(4, 6, batch_first=True)
        self.again = nn.Sequential(nn.Linear(6, 6), nn.GELU(), nn.LayerNorm(6))
        self.head = nn.Linear(6, 5)

    def forward(self, x):
        rows, (hidden, _) = self.rnn(x.squeeze(1))
        rows = self.again(self.again(rows))
        return self.head(rows.mean(1) + hidden[0])


class Several(nn.Module):
    """A layer that returns two values, one of which needs no gradient."""

    def __init__(self):
        super().__init__()
        self.pair, self.head = _Pair(), nn.Linear(8, 5)

    def forward(self, x):
        found = self.pair(x.flatten(1))
        return self.head(found["both"][0] * found["both"][1])


class _Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(12, 8)

    def forward(self, x):
        x = self.layer(x)
        return {"both": (x.tanh(), x.detach().sign()), "name": "pair"}


class Frozen(nn.Module):
    """A BatchNorm that normalises with its running statistics while the rest trains."""

    def __init__(self):
        super().__init__()
        self.block = nn.Sequential(nn.Linear(12, 12), nn.BatchNorm1d(12), nn.Tanh())
        self.head = nn.Linear(12, 5)

    def forward(self, x):
        self.block[1].eval()
        return self.head(self.block(x.flatten(1)))


class Changing(nn.Module):
    """Layers that change in place what was made outside, and what others read later."""

    def __init__(self):
        super().__init__()
        self.first, self.block, self.head = nn.Linear(12, 6), _Inside(), nn.Linear(6, 5)

    def forward(self, x):
        x = self.first(x.flatten(1)) * 2
        y = self.block(x)
        x.mul_(3)
        return self.head(x + y)


class _Inside(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.1, 1.0, 6))
        self.register_buffer("calls", torch.zeros(6))

    def forward(self, x):
        x += 1
        left, right = (x + self.weight).sin().chunk(2, 1)
        noise = torch.empty_like(left).uniform_()
        early = noise * 2
        noise.add_(1)
        self.calls += 1
        both = torch.cat([left * noise.exp(), (right * early).tanh()], 1)
        view = both[:, :3]
        view.mul_(2)
        return (both * self.calls).cos()


NETS = {
    "mlp": (MLP, ["layers"]),
    "cnn": (CNN, ["conv", "norm", "drop", "head"]),
    "transformer": (Transformer, ["encoder"]),
    "parts": (Transformer, ["embed", "encoder.self_attn", "encoder.norm1", "encoder.dropout2"]),
    "buffer": (Running, ["head"]),
    "residual": (Pictures, True),
    "some": (Pictures, ["blocks.1", "blocks.3"]),
    "encoder and decoder": (Sequences, True),
    "as a whole": (Sequences, ["encoder", "decoder"]),
    "recurrent": (Recurrent, ["rnn", "again"]),
    "several": (Several, ["pair"]),
    "frozen": (Frozen, ["block"]),
    "changing": (Changing, ["block"]),
    "all of it": (Changing, ["first", "block", "head"]),
}


def made(kind):
    torch.manual_seed(2)
    return kind().double()


def fitted(net, recompute, engine=None, **options):
    """Trained on two replicas, the last update on one."""
    engine = engine or EmbeddedEngine()
    model = ipufit.Model(net, engine=lambda: engine)
    # What is not recomputed is merged otherwise, which sums up in another order.
    model.compile(
        "adam", "cross_entropy", memory=ipufit.Memory(recompute=recompute), jit="graph", **options
    )
    x, y = data(12)
    x = x.to(next(net.parameters()).dtype)
    history = model.fit(
        x, y, batch_size=4, epochs=2, seed=5, ipus=2, gradient_accumulation=1, verbose=0
    )
    return net, history.history["loss"], engine


@pytest.mark.grid
@pytest.mark.parametrize(("kind", "recompute"), NETS.values(), ids=list(NETS))
def test_the_bits_are_those_without(kind, recompute):
    """Weights, BatchNorm's statistics, buffers and losses; masks of dropout are drawn once."""
    base = made(kind)
    plain, losses, _ = fitted(copy.deepcopy(base), False)
    again, same, engine = fitted(copy.deepcopy(base), recompute)
    assert same == losses
    assert all(math.isfinite(loss) for loss in losses)
    assert_equal(again, plain)
    assert engine.recomputed is not None


@pytest.mark.long
@pytest.mark.parametrize(
    "options",
    [
        {"precision": "mixed_bfloat16"},
        {"precision": ipufit.Precision(loss_scale=8.0), "clip": ipufit.Clip(global_norm=0.1)},
        {"ema": ipufit.EMA(), "outputs": "final", "metrics": ["accuracy"]},
    ],
    ids=str,
)
def test_it_goes_with_the_other_options(options):
    base = made(lambda: Pictures(2))
    base = base.float() if "precision" in options else base
    plain, losses, _ = fitted(copy.deepcopy(base), False, **options)
    again, same, engine = fitted(copy.deepcopy(base), True, **options)
    assert same == losses
    assert_equal(again, plain)
    assert engine.recomputed[0] > 0


# Memory


class Counting(TorchDispatchMode):
    """The most bytes that tensors made in the block hold at one time."""

    def __init__(self, given):
        super().__init__()
        self.holders, self.now, self.most = {}, 0, 0
        self.given = {tensor.untyped_storage()._cdata for tensor in given}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for value in result if isinstance(result, (list, tuple)) else [result]:
            if isinstance(value, torch.Tensor):
                self._note(value)
        return result

    def _note(self, tensor):
        key, size = tensor.untyped_storage()._cdata, tensor.untyped_storage().nbytes()
        if key in self.given:
            return
        if not self.holders.get(key):
            self.holders[key] = 0
            self.now += size
            self.most = max(self.most, self.now)
        self.holders[key] += 1
        weakref.finalize(tensor, self._drop, key, size)

    def _drop(self, key, size):
        self.holders[key] -= 1
        if not self.holders[key]:
            self.now -= size


def recorded(net, names, x):
    """Forward and backward of a sum of squares as a graph, its arguments, and peak bytes."""
    weights = [p.detach() for p in net.parameters()]
    buffers = [b.detach() for b in net.buffers()]
    keys = [*dict(net.named_parameters()), *dict(net.named_buffers())]

    def step(*tensors):
        leaves = [t.detach().requires_grad_() for t in tensors[: len(weights)]]
        state = dict(zip(keys, [*leaves, *tensors[len(weights) : -1]]))
        with mark_layers(net, names):
            loss = torch.func.functional_call(net, state, (tensors[-1],)).square().sum()
        with mark_backward_pass():
            return list(torch.autograd.grad(loss, leaves))

    arguments = [*weights, *buffers, x]
    graph = capture(step, arguments)
    if names:
        recompute_layers(graph)
    return graph, arguments


def measured(graph, arguments):
    """Results of a run on copies, and the most bytes that were held in it."""
    given = [argument.clone() for argument in arguments]
    torch.manual_seed(0)
    counting = Counting(given)
    with torch.no_grad(), counting:
        results = graph(*given)
    return results, counting.most


@pytest.mark.parametrize(
    ("kind", "names", "less"),
    [
        (Pictures, [f"blocks.{i}" for i in range(4)], 0.7),
        pytest.param(
            Sequences,
            [f"{n}.layers.{i}" for n in ("encoder", "decoder") for i in range(2)],
            0.7,
            marks=pytest.mark.long,
        ),
    ],
    ids=["residual", "sequences"],
)
def test_less_memory_is_held(kind, names, less):
    """Counted as tensors come and go in a run of the very graph, not estimated."""
    net, (x, _) = made(kind), data(16)
    plain, arguments = recorded(net, [], x)
    again, _ = recorded(net, names, x)
    expected, before = measured(plain, arguments)
    found, after = measured(again, arguments)
    assert all(torch.equal(one, other) for one, other in zip(found, expected))
    assert after < less * before


@pytest.mark.long
@pytest.mark.parametrize("names", [[], ["blocks.0", "blocks.2"]], ids=["plain", "again"])
def test_the_peak_that_is_told_is_the_one_that_is_measured(names):
    """Up to what lives within one operator, which a graph does not show."""
    net, (x, _) = made(Pictures), data(16)
    graph, arguments = recorded(net, names, x)
    _, most = measured(graph, arguments)
    assert peak_bytes(graph) == pytest.approx(most, rel=0.05)


@pytest.mark.long
def test_explain_tells_what_it_brings():
    net, (x, y) = made(Pictures), data(16)
    model = ipufit.Model(net, engine="embedded")
    model.compile("sgd", "cross_entropy", memory=ipufit.Memory(recompute=["blocks.1", "blocks.2"]))
    assert model._session.explain().count("\n") == 1
    model.fit(x, y, batch_size=16, verbose=0)
    repeated, before, after = model._session.engine.recomputed
    assert 0 < after < before
    assert model._session.explain().splitlines()[1:] == [
        "Compiled with recompute=['blocks.1', 'blocks.2'].",
        f"The backward pass computes {repeated} operators of 2 layers again: values of a "
        f"micro-batch take {after / 2**20:.3g} MiB at most, {before / 2**20:.3g} MiB without.",
    ]


@pytest.mark.long
def test_inference_is_left_as_it_is():
    """There is no backward pass for which to keep anything."""
    net, _, engine = fitted(made(CNN), ["conv"])
    x, y = data(8)
    engine.recomputed = None
    model = ipufit.Model(net, engine=lambda: engine)
    model.compile("sgd", "cross_entropy", memory=ipufit.Memory(recompute=["conv"]))
    model.evaluate(x, y, verbose=0)
    model.predict(x, verbose=0)
    assert engine.recomputed is None


# On an IPU


def test_poptorch_keeps_the_outputs_of_the_layers():
    """Between checkpoints PopTorch recomputes by itself; inference has none."""
    from ipufit import poptorch

    kept = []

    class Sdk:
        def __getattr__(self, name):
            return getattr(poptorch, name)

        def recomputationCheckpoint(self, tensor):  # noqa: N802
            kept.append(tuple(tensor.shape))
            return poptorch.recomputationCheckpoint(tensor)

    sdk = Sdk()
    sdk.__name__ = "ipufit.poptorch"
    x, y = data(12)
    base = made(Several)
    with keep_float64():
        net = copy.deepcopy(base)
        model = ipufit.Model(net, engine=lambda: IpuEngine(sdk, "ipu-standin"))
        model.compile("sgd", "cross_entropy", memory=ipufit.Memory(recompute=["pair", "head"]))
        model.fit(x, y, batch_size=4, seed=1, verbose=0)
        once = [(4, 8), (4, 8), (4, 5)]
        assert kept == once * (len(kept) // 3)
        assert kept
        count = len(kept)
        model.evaluate(x, y, batch_size=4, verbose=0)
        model.close()
    assert len(kept) == count
    plain = copy.deepcopy(base)
    model = ipufit.Model(plain, engine="embedded")
    model.compile("sgd", "cross_entropy")
    model.fit(x, y, batch_size=4, seed=1, verbose=0)
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(net.state_dict()[name], value, rtol=0, atol=1e-12)


# Bad input


def compiling(recompute, kind=Sequences, **options):
    return lambda: ipufit.Model(made(kind)).compile(
        "sgd", "cross_entropy", memory=ipufit.Memory(recompute=recompute), **options
    )


def test_layers_are_found_by_pattern_and_by_structure():
    def layers(recompute, kind=Sequences):
        model = ipufit.Model(made(kind))
        model.compile("sgd", "cross_entropy", memory=ipufit.Memory(recompute=recompute))
        return model._session.config.recompute

    encoder = tuple(f"encoder.layers.{i}" for i in range(2))
    decoder = tuple(f"decoder.layers.{i}" for i in range(2))
    assert layers(True) == (*encoder, *decoder)
    assert layers("*.layers.*") == (*encoder, *decoder)
    assert layers(["head", "encoder.layers.*"]) == (*encoder, "head")
    assert layers(None) == layers(False) == layers([]) == ()
    assert layers(True, Pictures) == tuple(f"blocks.{i}" for i in range(4))


def test_an_unknown_layer_is_told_with_the_nearest():
    with pytest.raises(UnknownNameError) as caught:
        compiling(["encodr"])()
    assert caught.value.nearest == "encoder"
    with pytest.raises(UnknownNameError) as caught:
        compiling("encoder.layer.*")()
    assert str(caught.value).startswith("unknown layer 'encoder.layer.*'. Did you mean '")


def test_nested_layers_are_refused():
    refused(
        compiling(["encoder", "encoder.layers.0"]),
        "layers to recompute must not contain each other, but 'encoder.layers.0' is inside "
        "'encoder', which is recomputed as a whole. Name only one of them.",
    )


def test_a_shelf_is_refused():
    refused(
        compiling("encoder.layers"),
        "layers to recompute must be called, but 'encoder.layers' is a ModuleList, which only "
        "contains layers. Write 'encoder.layers.*' for each of them.",
    )


class Stack(nn.ModuleList):
    """A ModuleList that is called."""

    def forward(self, x):
        for block in self:
            x = block(x)
        return x


def test_a_list_with_a_forward_of_its_own_is_a_layer():
    net = nn.Sequential(nn.Flatten(), Stack([nn.Linear(12, 12), nn.Tanh()])).double()
    plain, losses, _ = fitted(copy.deepcopy(net), False)
    again, same, engine = fitted(net, ["1"])
    assert same == losses
    assert_equal(again, plain)
    assert engine.recomputed is not None


def test_a_module_without_repeated_layers_is_refused():
    refused(
        compiling(True, MLP),
        "recompute=True means every repeated layer, the blocks of a ModuleList or Sequential of "
        "one class, but MLP has none. Name the layers: recompute=['encoder', 'decoder'].",
    )


@pytest.mark.parametrize("given", [3, [1], {"encoder": True}])
def test_anything_else_is_refused(given):
    refused(
        compiling(given),
        f"Memory.recompute must be True, False, or names of layers, got {given!r}. Write for "
        "example recompute=['encoder.layers.0', 'encoder.layers.1'] or 'encoder.layers.*'.",
    )


def test_a_run_without_a_program_is_refused():
    refused(
        compiling("encoder", run_eagerly=True),
        "recompute changes a recorded program, but run_eagerly=True records none, got both, with "
        "recompute='encoder'. Leave one of them out.",
    )


@pytest.mark.parametrize("engine", ["embedded", "ipu-standin"])
def test_a_layer_that_is_never_called_is_refused(engine):
    """Torch's attention computes with its projection without calling it."""
    model = ipufit.Model(made(Transformer).float(), engine=engine)
    model.compile(
        "sgd", "cross_entropy", memory=ipufit.Memory(recompute="encoder.self_attn.out_proj")
    )
    x, y = data(4)
    with pytest.raises(ConfigurationError) as caught:
        model.fit(x.float(), y, batch_size=2, verbose=0)
    assert str(caught.value) == (
        "layers to recompute must be called in forward, but 'encoder.self_attn.out_proj' was not. "
        "Name the layer around it."
    )
