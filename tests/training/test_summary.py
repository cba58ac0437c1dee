"""summary: what it says of the layers, and that looking changes nothing."""

import copy

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import ipufit
from ipufit.errors import ConfigurationError, DataError
from tests.nets import CNN, Running, data
from tests.told import message


class Net(nn.Module):
    """Shared weights and modules, a nested output, a layer that nobody calls, a frozen one."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(6))
        self.embed = nn.Embedding(50, 6)
        self.mixer = nn.Sequential(nn.Linear(6, 6), nn.Sequential(nn.Tanh(), nn.Linear(6, 6)))
        self.norm = nn.BatchNorm1d(6)
        self.heads = nn.ModuleList([nn.Linear(6, 3), nn.Linear(6, 5)])
        self.out = nn.Linear(6, 50, bias=False)
        self.out.weight = self.embed.weight
        self.act = nn.ReLU()
        self.again = self.act
        self.spare = nn.Linear(2, 2)
        self.direct = nn.Linear(6, 6)
        self.norm.weight.requires_grad_(False)

    def forward(self, ids):
        h = self.act(self.mixer(self.embed(ids))) * self.scale
        h = self.act(self.norm(h.mean(1))) @ self.direct.weight
        return {"a": self.heads[0](h), "b": (self.heads[1](h), None, self.out(h), 3)}


IDS = torch.arange(28).reshape(4, 7)

WHOLE = """\
layer         class        output shape                                parameters  trainable  notes
------------------------------------------------------------------------------------------------------------------------
(model)       Net          {a: (4, 3), b: [(4, 5), None, (4, 50), int]}          6          6
embed         Embedding    (4, 7, 6)                                           300        300
mixer         Sequential   (4, 7, 6)                                             -          -
  mixer.0     Linear       (4, 7, 6)                                            42         42
  mixer.1     Sequential   (4, 7, 6)                                             -          -
    mixer.1.0 Tanh         (4, 7, 6)                                             -          -
    mixer.1.1 Linear       (4, 7, 6)                                            42         42
norm          BatchNorm1d  (4, 6)                                               12          6
heads         ModuleList   -                                                     -          -
  heads.0     Linear       (4, 3)                                               21         21
  heads.1     Linear       (4, 5)                                               35         35
out           Linear       (4, 50)                                               -          -  weight is shared with embed.weight
act           ReLU         (4, 7, 6) / (4, 6)                                    -          -  called 2 times
again         ReLU         (4, 7, 6) / (4, 6)                                    -          -  the same module as act
spare         Linear       -                                                     6          6  not called
direct        Linear       -                                                    42         42  used without a call
Parameters: 506 (0.0019 MiB), 500 trainable, 6 frozen.
Buffers: 13 values (5.3e-05 MiB)."""  # noqa: E501


def words(text):
    """The lines as words; rules left out."""
    return [line.split() for line in text.splitlines() if line.strip("- ")]


def text_of(model, *args, **kwargs):
    """What summary says."""
    said = []
    assert model.summary(*args, print_fn=said.append, **kwargs) is None
    assert len(said) == 1
    return said[0]


@pytest.mark.long("ipu-standin")
def test_every_layer_is_described():
    """Shapes from one call without values; parameters at their first owner."""
    assert words(text_of(ipufit.Model(Net()), IDS)) == words(WHOLE)


@pytest.mark.long("ipu-standin")
def test_it_is_printed(capsys):
    ipufit.Model(Net()).summary(IDS)
    assert words(capsys.readouterr().out) == words(WHOLE)


def test_columns_stand_under_their_heads():
    lines = text_of(ipufit.Model(Net()), IDS).splitlines()
    head = lines[0]
    assert lines[1] == "-" * max(len(line) for line in lines[:19])
    for line in lines[2:18]:
        at = head.index("output shape")
        assert line[at - 1] == " "
        assert line[at] != " "
        end = head.index("parameters") + len("parameters")
        assert line[end - 1].isdigit() or line[end - 1] == "-"
    assert lines[5].startswith("  mixer.0 ")
    assert lines[7].startswith("    mixer.1.0 ")


@pytest.mark.long("ipu-standin")
def test_counts_agree_with_torch():
    """The column adds up to the total, shared parameters once."""
    for net, sample in ((Net(), IDS), (CNN(), data(2)[0].float()), (Running(), None)):
        text = text_of(ipufit.Model(net), sample)
        total = sum(p.numel() for p in net.parameters())
        trainable = sum(p.numel() for p in net.parameters() if p.requires_grad)
        assert f"\nParameters: {total:,} (" in text
        assert f" {trainable:,} trainable, {total - trainable:,} frozen." in text
        assert f"\nBuffers: {sum(b.numel() for b in net.buffers()):,} values (" in text


@pytest.mark.parametrize("training", [True, False])
def test_looking_changes_nothing(training):
    """Neither buffers, nor weights, modes, random numbers or attributes."""

    class Watching(CNN):
        def forward(self, x):
            self.calls = getattr(self, "calls", 0) + 1
            self.seen.append(x)
            self.latest["x"] = x
            return super().forward(x)

    net = Watching().train(training)
    net.seen, net.latest = [], {"x": None}
    net.norm.eval()
    before, modes = copy.deepcopy(net.state_dict()), [m.training for m in net.modules()]
    random = torch.get_rng_state()
    text = text_of(ipufit.Model(net), data(4)[0].float())
    assert "(4, 4, 2, 3)" in text
    assert torch.equal(torch.get_rng_state(), random)
    assert [m.training for m in net.modules()] == modes
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
    assert (net.seen, net.latest, hasattr(net, "calls")) == ([], {"x": None}, False)
    assert not any(m._forward_hooks for m in net.modules())
    assert all(p.grad is None for p in net.parameters())


def test_no_value_is_computed():
    """A batch that would need a terabyte is as good as any other."""
    net = nn.Sequential(nn.Linear(8, 4))
    sample = torch.empty(1, 8).expand(2**38, 8)
    assert f"({2**38}, 4)" in text_of(ipufit.Model(net), sample)


def test_without_a_sample_shapes_are_unknown():
    text = text_of(ipufit.Model(CNN()))
    assert ["(model)", "CNN", "?", "-", "-"] in words(text)
    assert "\nOutput shapes need a batch: summary(x), or an earlier fit.\n" in text
    assert "not called" not in text


class Branching(nn.Module):
    """Needs a value half-way."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(3, 4)
        self.last = nn.Linear(4, 2)

    def forward(self, x):
        h = self.first(x)
        return self.last(-h if h.sum() > 0 else h)


def test_a_module_that_needs_values_says_so():
    """Layers before that have shapes, and none is called unused."""
    text = text_of(ipufit.Model(Branching()), torch.rand(5, 3))
    assert ["first", "Linear", "(5,", "4)", "16", "16"] in words(text)
    assert ["last", "Linear", "?", "10", "10"] in words(text)
    assert (
        "\nOutput shapes marked ? are unknown: forward can't run without values: it reads the "
        "value of a tensor.\n"
    ) in text
    assert "not called" not in text


def test_a_module_that_fails_says_why():
    text = text_of(ipufit.Model(nn.Linear(3, 4)), torch.rand(5, 2))
    assert (
        "Output shapes marked ? are unknown: forward can't run without values: RuntimeError: "
        in (text)
    )
    assert ["(model)", "Linear", "?", "16", "16"] in words(text)


@pytest.mark.parametrize(
    ("net", "shape"),
    [
        (lambda: nn.LSTM(6, 4, batch_first=True), "[(2, 5, 4), [(1, 2, 4), (1, 2, 4)]]"),
        (
            lambda: nn.TransformerEncoder(
                nn.TransformerEncoderLayer(6, 2, 8, batch_first=True), 1, enable_nested_tensor=False
            ),
            "(2, 5, 6)",
        ),
    ],
)
def test_layers_with_fused_kernels_are_followed(net, shape):
    text = text_of(ipufit.Model(net()), torch.rand(2, 5, 6))
    assert shape in text
    assert "not called" not in text
    assert "unknown" not in text


X = torch.rand(10, 3)
Y = torch.zeros(10, dtype=torch.int64)


@pytest.mark.parametrize(
    "sample",
    [
        X[:4],
        (X[:4], Y[:4]),
        {"input": X[:4]},
        DataLoader(TensorDataset(X, Y), batch_size=4, shuffle=True),
        [(X[:4], Y[:4]), (X[4:8], Y[4:8])],
        X[:4].numpy(),
    ],
    ids=["tensor", "tuple", "dict", "loader", "list", "numpy"],
)
def test_a_sample_may_come_in_many_forms(sample):
    """As predict takes it, or as fit does."""
    model = ipufit.Model(nn.Linear(3, 2))
    random = torch.get_rng_state()
    assert "(4, 2)" in text_of(model, sample)
    assert torch.equal(torch.get_rng_state(), random)


def test_a_module_with_a_loss_of_its_own_gets_the_target_too():
    class Own(nn.Linear):
        def forward(self, x, y):
            out = super().forward(x)
            return out, nn.functional.cross_entropy(out, y)

    model = ipufit.Model(Own(3, 2))
    model.compile("sgd")
    assert "[(4, 2), ()]" in text_of(model, (X[:4], Y[:4]))


def test_a_sample_that_can_be_read_once_is_refused():
    model = ipufit.Model(nn.Linear(3, 2))
    batches = iter([(X, Y)])
    with pytest.raises(ConfigurationError) as caught:
        model.summary(batches)
    assert str(caught.value) == (
        "summary needs a batch, or a loader that can be read again, got list_iterator, whose first "
        "batch would be lost. Pass one batch."
    )
    assert next(batches) is not None
    assert message(model.summary, []) == "summary needs a batch, but the loader has none. Pass one."
    with pytest.raises(DataError):
        model.summary(3)


@pytest.mark.long
def test_after_fit_shapes_and_plan_are_there(engine):
    """With what the last fit saw and did; explain says the same."""
    model = ipufit.Model(nn.Linear(3, 2))
    before = text_of(model, X[:4])
    model.compile("sgd", "cross_entropy")
    compiled = text_of(model, X[:4])
    how = f"Runs one recorded program on the {engine} engine, device cpu, with SGD"
    assert compiled.startswith(before + "\n" + how)
    loader = DataLoader(TensorDataset(X, Y), batch_size=4)
    model.fit(loader, ipus=2, verbose=0)
    text = text_of(model)
    assert "(4, 2)" in text
    assert text.startswith(before)
    said = []
    model.explain()
    assert "Plan for training\n" in text
    assert "\nOne update = 4 samples x 1 accumulation x 2 replicas = 8 samples.\n" in text
    assert how in text
    assert said == []
    assert "(7, 2)" in text_of(model, torch.rand(7, 3))


@pytest.mark.long
def test_summary_in_a_callback_leaves_training_alone():
    """The weights belong to the program meanwhile."""

    class Looking(ipufit.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            self.text = text_of(self.model)

    losses = []
    for callbacks in ([], [Looking()]):
        torch.manual_seed(0)
        model = ipufit.Model(CNN().double())
        model.compile("adam", "cross_entropy")
        loader = DataLoader(TensorDataset(*data(12)), batch_size=4)
        history = model.fit(loader, epochs=3, seed=1, callbacks=callbacks, verbose=0)
        losses.append(history.history["loss"])
    assert losses[0] == losses[1]
    assert "(4, 5)" in callbacks[0].text


@pytest.mark.parametrize(("options", "levels"), [({"depth": 1}, 1), ({"depth": 2}, 2)])
def test_depth_hides_levels_and_loses_no_parameter(options, levels):
    text = text_of(ipufit.Model(Net()), IDS, **options)
    names = [line[0] for line in words(text)]
    assert ("mixer.0" in names, "mixer.1.1" in names) == (levels > 1, False)
    held = {line[0]: line for line in words(text)}
    assert held["mixer" if levels == 1 else "mixer.1"][-1] == ("84" if levels == 1 else "42")
    assert held["heads"][-1] == ("56" if levels == 1 else "-")
    assert "Parameters: 506" in text


@pytest.mark.long("ipu-standin")
def test_expand_nested_false_shows_one_level():
    model = ipufit.Model(Net())
    assert text_of(model, IDS, expand_nested=False) == text_of(model, IDS, depth=1)
    assert text_of(model, IDS, expand_nested=True) == text_of(model, IDS)
    assert text_of(model, IDS, expand_nested=False, depth=1) == text_of(model, IDS, depth=1)


def test_sharing_inside_a_hidden_level_is_still_told():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Linear(3, 3)
            self.b = nn.Sequential(nn.Linear(3, 3))
            self.b[0].weight = self.a.weight

    assert "0: weight is shared with a.weight" in text_of(ipufit.Model(Tied()), depth=1)


@pytest.mark.parametrize("length", [60, 75, 100])
def test_line_length_is_honoured_and_nothing_is_lost(length):
    model = ipufit.Model(Net())
    model.compile("sgd", "mse")
    text, whole = text_of(model, IDS, line_length=length), text_of(model, IDS)
    assert max(len(line) for line in whole.splitlines()) > 100
    assert max(len(line) for line in text.splitlines()) <= length
    together = "".join(text.split())
    for word in ("weightissharedwithembed.weight", "BatchNorm1d", "Parameters:506", "notcalled"):
        assert word in together
    assert "notes" not in text.splitlines()[0]
    assert text_of(model, IDS, line_length=500) == whole


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (
            {"line_length": 59},
            "line_length must be an integer of at least 60 or None, got 59. Leave it out to show "
            "everything.",
        ),
        (
            {"line_length": 80.0},
            "line_length must be an integer of at least 60 or None, got 80.0. Leave it out to show "
            "everything.",
        ),
        (
            {"depth": 0},
            "depth must be an integer of at least 1 or None, got 0. Leave it out to show "
            "everything.",
        ),
        (
            {"depth": True},
            "depth must be an integer of at least 1 or None, got True. Leave it out to show "
            "everything.",
        ),
        (
            {"expand_nested": 1},
            "expand_nested must be True or False, got 1. Use depth=2 to show two levels.",
        ),
        (
            {"expand_nested": False, "depth": 2},
            "expand_nested=False shows one level, got depth=2 too. Leave one of them out.",
        ),
        (
            {"print_fn": "x"},
            "print_fn must be a function that takes the text, got 'x'. Leave it out to print.",
        ),
    ],
)
def test_options_that_mean_nothing_are_refused(options, text):
    assert message(ipufit.Model(Net()).summary, **options) == text
