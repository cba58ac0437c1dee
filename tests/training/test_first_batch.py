"""Modules and losses that can't take a batch: which layer or line, what it needs, what came."""

import inspect
import re

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from ipufit.core.batch import MicroBatch, Mode
from ipufit.core.train_config import Precision
from ipufit.errors import CaptureError, DataError, LossError, RecoverableDeviceError
from ipufit.losses import resolve_loss
from ipufit.training.sanity_check import FailureExplainer
from tests.engines import EAGER_OR_NOT, embedded_only, runs_eagerly
from tests.faulty import Net, Told, Watched, batches, compiled, fit, refused
from tests.told import message

X, Y = batches(1, 8)[0]
LABELS = torch.tensor([0, 1, 2, 0, 1, 2, 0, 1])
IMAGES = torch.randn(8, 1, 6, 6)
STEPS = torch.randn(8, 5, 4)


class Line(nn.Module):
    """Runs a function of itself and its input, which stands in a line of its own."""

    def __init__(self, function, **layers):
        super().__init__()
        self.function = function
        for name, layer in layers.items():
            setattr(self, name, layer)

    def forward(self, x):
        return self.function(self, x)


def last_step(net, x):
    return net.head(net.cell(x)[0][:, -1])


def attend(net, x):
    return net.head(net.attention(x, x, x)[0][:, -1])


def whole_result(net, x):
    return net.head(net.cell(x))


def twice(net, x):
    return net.head(x, x)


def whole_numbers(net, x):
    return net.head(x.long())


def converted(net, x):
    return net.head(x.long().to(torch.float32))


def classify(channels, **options):
    """A small net for images."""
    options = {"kernel_size": 3, "padding": 1, **options}
    pool = nn.AdaptiveAvgPool2d(1)
    return nn.Sequential(nn.Conv2d(channels, 4, **options), pool, nn.Flatten(), nn.Linear(4, 3))


def inner(layer, features=6):
    """A net with a layer between two others."""
    return nn.Sequential(nn.Linear(4, 6), layer, nn.Linear(features, 3))


class Unflat(nn.Module):
    """Forgets to flatten, or not."""

    def __init__(self, flat):
        super().__init__()
        self.flat, self.head = flat, nn.Linear(12, 3)

    def forward(self, x):
        return self.head(x.flatten(1) if self.flat else x)


def sequences(size, head=6):
    return Line(last_step, cell=nn.LSTM(size, 6, batch_first=True), head=nn.Linear(head, 3))


def attention(size):
    return Line(
        attend, attention=nn.MultiheadAttention(size, 2, batch_first=True), head=nn.Linear(size, 3)
    )


def words(count):
    return nn.Sequential(nn.Embedding(count, 6), nn.Flatten(), nn.Linear(12, 3))


IDS = torch.tensor([[0, 1], [2, 3], [4, 5], [0, 0], [1, 1], [2, 2], [3, 3], [4, 4]])

# By name: module, input, layer, what it needs, what came (None: the input's shape and dtype), what
# to do, and the module and the input after that was done.
FAULTS = {
    "linear": (
        lambda: inner(nn.ReLU(), 7),
        X,
        "2",
        "7 features in the last dimension",
        "shape (8, 6), dtype float32",
        "Build it with in_features=6, or give it 7 features.",
        lambda: (inner(nn.ReLU(), 6), X),
    ),
    "flatten": (
        lambda: Unflat(False),
        torch.randn(8, 3, 4),
        "head",
        "12 features in the last dimension",
        "shape (8, 3, 4), dtype float32",
        "Flatten its input: x.flatten(1), or nn.Flatten() before the layer.",
        lambda: (Unflat(True), torch.randn(8, 3, 4)),
    ),
    "channels": (
        lambda: classify(3),
        IMAGES,
        "0",
        "3 channels in dimension 1",
        "shape (8, 1, 6, 6), dtype float32",
        "Build it with in_channels=1, or give it 3 channels.",
        lambda: (classify(1), IMAGES),
    ),
    "channels last": (
        lambda: classify(3),
        torch.randn(8, 6, 6, 3),
        "0",
        "3 channels in dimension 1",
        "shape (8, 6, 6, 3), dtype float32",
        "Put the channels first: x.movedim(-1, 1) has 3 channels.",
        lambda: (classify(3), torch.randn(8, 6, 6, 3).movedim(-1, 1)),
    ),
    "no channel": (
        lambda: classify(1),
        IMAGES.squeeze(1),
        "0",
        "4 dimensions, (batch, channels, height, width)",
        "shape (8, 6, 6), dtype float32",
        "Give its input the dimension of the channel: x.unsqueeze(1).",
        lambda: (classify(1), IMAGES.squeeze(1).unsqueeze(1)),
    ),
    "flat image": (
        lambda: classify(1),
        IMAGES.flatten(1),
        "0",
        "4 dimensions, (batch, channels, height, width)",
        "shape (8, 36), dtype float32",
        "Reshape its input to (batch, channels, height, width).",
        lambda: (classify(1), IMAGES),
    ),
    "kernel": (
        lambda: classify(1, kernel_size=7, padding=0),
        IMAGES,
        "0",
        "at least 7 values along each dimension of its kernel",
        "shape (8, 1, 6, 6), dtype float32",
        "Use a smaller kernel_size, more padding, or larger inputs.",
        lambda: (classify(1, kernel_size=7, padding=3), IMAGES),
    ),
    "batch norm": (
        lambda: inner(nn.BatchNorm1d(5)),
        X,
        "1",
        "5 features in dimension 1",
        "shape (8, 6), dtype float32",
        "Build it with num_features=6, or give it 5.",
        lambda: (inner(nn.BatchNorm1d(6)), X),
    ),
    "batch norm of images": (
        lambda: inner(nn.BatchNorm2d(6)),
        X,
        "1",
        "4 dimensions",
        "shape (8, 6), dtype float32",
        "Use nn.BatchNorm1d.",
        lambda: (inner(nn.BatchNorm1d(6)), X),
    ),
    "one row": (
        lambda: inner(nn.BatchNorm1d(6)),
        X[:1],
        "1",
        "more than one value per feature while it trains",
        "shape (1, 6), dtype float32",
        "Choose a batch_size of at least 2 that does not leave a single sample at the end, or "
        "drop_last=True in the loader.",
        lambda: (inner(nn.BatchNorm1d(6)), X[:2]),
    ),
    "layer norm": (
        lambda: inner(nn.LayerNorm(5)),
        X,
        "1",
        "the shape (5,) in its last dimensions",
        "shape (8, 6), dtype float32",
        "Build it with normalized_shape=(6,), or give it the other shape.",
        lambda: (inner(nn.LayerNorm((6,))), X),
    ),
    "group norm": (
        lambda: inner(nn.GroupNorm(2, 8)),
        X,
        "1",
        "8 channels in dimension 1",
        "shape (8, 6), dtype float32",
        "Build it with num_channels=6, or give it 8.",
        lambda: (inner(nn.GroupNorm(2, 6)), X),
    ),
    "recurrent": (
        lambda: sequences(5),
        STEPS,
        "cell",
        "5 features in the last dimension",
        "shape (8, 5, 4), dtype float32",
        "Build it with input_size=4, or give it 5 features.",
        lambda: (sequences(4), STEPS),
    ),
    "attention": (
        lambda: attention(6),
        STEPS,
        "attention",
        "a query with 6 features in the last dimension",
        "shape (8, 5, 4), dtype float32",
        "Build it with embed_dim=4, or give it 6 features.",
        lambda: (attention(4), STEPS),
    ),
    "embedding": (
        lambda: words(5),
        IDS,
        "0",
        "indices from 0 to 4",
        "5 at (2, 1) of its input",
        "Build it with num_embeddings=6, or map rare values to one index.",
        lambda: (words(6), IDS),
    ),
    "negative index": (
        lambda: words(6),
        IDS - 1,
        "0",
        "indices from 0 to 5",
        "-1 at (0, 0) of its input",
        "Give padding its own index, such as padding_idx=0.",
        lambda: (words(6), IDS),
    ),
    "fractions": (
        lambda: words(6),
        IDS.float(),
        "0",
        "indices, of dtype int64",
        "shape (8, 2), dtype float32",
        "Convert them with .long() if they are whole.",
        lambda: (words(6), IDS.float().long()),
    ),
    "integers": (
        lambda: Line(whole_numbers, head=nn.Linear(4, 3)),
        X,
        "head",
        "an input of float32, like its weights",
        "shape (8, 4), dtype int64",
        "Convert it before the layer: x.to(torch.float32).",
        lambda: (Line(converted, head=nn.Linear(4, 3)), X),
    ),
    "several": (
        lambda: Line(whole_result, cell=nn.GRU(4, 6, batch_first=True), head=nn.Linear(6, 3)),
        STEPS,
        "head",
        "one tensor",
        "tuple of 2, the last a tensor of shape (1, 8, 6), dtype float32",
        "Pass only the one that it needs; recurrent and attention layers return (output, state).",
        lambda: (sequences(4), STEPS),
    ),
    "arguments": (
        lambda: Line(twice, head=nn.Linear(4, 3)),
        X,
        "head",
        "the arguments (input)",
        "2 of them",
        "Call it with these arguments; arguments for several layers need several calls.",
        lambda: (nn.Linear(4, 3), X),
    ),
}


def line_of(net):
    """How a message names the line of a net that has one."""
    if isinstance(net, nn.Sequential):
        return ""
    function = net.function if isinstance(net, Line) else type(net).forward
    lines, first = inspect.getsourcelines(function)
    line, source = next((i, t.strip()) for i, t in enumerate(lines) if "return" in t)
    return f", at {__file__}:{first + line} in {function.__name__}: `{source}`"


# Eagerly torch fails in the layer itself, and the reason is looked for in the same way.
@pytest.mark.few(
    "linear-traced",
    "linear-eager",
    "flatten-traced",
    "channels last-traced",
    "no channel-eager",
    "kernel-traced",
    "batch norm of images-traced",
    "one row-traced",
    "group norm-traced",
    "recurrent-eager",
    "attention-traced",
    "embedding-traced",
    "negative index-traced",
    "fractions-eager",
    "several-traced",
    "arguments-traced",
)
@pytest.mark.long("ipu-standin")
@pytest.mark.parametrize(
    ("name", "run_eagerly"),
    [
        pytest.param(
            name,
            eager,
            id=f"{name}-{'eager' if eager else 'traced'}",
            marks=[*(runs_eagerly,) * eager, *(pytest.mark.long,) * (eager and place % 4 > 0)],
        )
        for place, name in enumerate(FAULTS)
        for eager in (False, True)
    ],
)
def test_a_layer_that_cannot_take_its_input_is_named(name, run_eagerly):
    """Torch's texts name no layer, differ by version, and speak of operators."""
    make, x, layer, needs, came, cure, mend = FAULTS[name]
    net = make()
    model = compiled(net, run_eagerly=run_eagerly)
    shown = repr(net.get_submodule(layer))
    shown = shown if "\n" not in shown else "MultiheadAttention"
    shown = shown if len(shown) <= 100 else type(net.get_submodule(layer)).__name__
    what = f"layer {layer!r}, {shown}, needs {needs}, got {came}{line_of(net)}"
    text = f"training data, batch 0: {what}. {cure} torch says: "
    with refused(model, DataError, text, part=True) as caught:
        fit(model, [(x, Y[: len(x)])])
    assert str(caught.value).startswith(text)
    assert re.search(r"torch says: \w+Error: \S.*\.$", str(caught.value))
    assert not isinstance(caught.value.__cause__, DataError)
    net, x = mend()
    assert fit(compiled(net, run_eagerly=run_eagerly), [(x, Y[: len(x)])]).epoch == [0]


MIXED = {
    "layer": (
        lambda: inner(nn.Linear(6, 6).double()),
        X,
        "an input of float64, like its weights",
        "shape (8, 6), dtype float32",
        "Use one dtype for all layers, such as module.float(), or convert before the layer.",
        lambda: inner(nn.Linear(6, 6).double()).float(),
    ),
    "norm": (
        lambda: inner(nn.BatchNorm1d(6).double()),
        X,
        "an input of float64, like its weights",
        "shape (8, 6), dtype float32",
        "Use one dtype for all layers, such as module.float(), or convert before the layer.",
        lambda: inner(nn.BatchNorm1d(6).double()).float(),
    ),
}


@pytest.mark.long
@embedded_only("an IPU has no float64, and says so before")
@pytest.mark.parametrize("run_eagerly", EAGER_OR_NOT)
@pytest.mark.parametrize("name", MIXED)
def test_layers_of_two_dtypes_are_named(name, run_eagerly):
    """It was said that the data is float64."""
    make, x, needs, came, cure, mend = MIXED[name]
    net = make()
    model = compiled(net, run_eagerly=run_eagerly)
    shown = repr(net[1])
    what = f"layer '1', {shown if len(shown) <= 100 else 'BatchNorm1d'}, needs {needs}, got {came}"
    text = f"training data, batch 0: {what}. {cure} torch says: RuntimeError: "
    with refused(model, DataError, text, part=True):
        fit(model, [(x, Y)])
    assert fit(compiled(mend(), run_eagerly=run_eagerly), [(x, Y)]).epoch == [0]


# ---- operators in a forward or a loss of one's own ----------------------------------------------


def reshaped(net, x):
    return net.head(x.view(8, 5))


def product(net, x):
    return net.head(x) @ net.head.weight.t()


def joined(net, x):
    return net.head(torch.cat([x, x[:3]], 1))


def constant(net, x):
    return net.head(x * torch.ones(4, device="meta"))


def close(prediction, target):
    return (prediction - target[:, :2]).square().mean()


SHAPES = "shapes that fit together"
MEND = "Fix the shapes on that line; with compile(run_eagerly=True) a debugger can stop there."
OPERATORS = {
    "view": (reshaped, "mse", "view in Line", SHAPES, "shape (8, 4), dtype float32", MEND),
    "product": (
        product,
        "mse",
        "matmul in Line",
        SHAPES,
        "shape (8, 3), dtype float32 and shape (4, 3), dtype float32",
        MEND,
    ),
    "cat": (
        joined,
        "mse",
        "cat in Line",
        SHAPES,
        "shape (8, 4), dtype float32 and shape (3, 4), dtype float32",
        MEND,
    ),
    "device": (
        constant,
        "mse",
        "mul in Line",
        "tensors on one device",
        "shape (8, 4), dtype float32 and shape (4,), dtype float32",
        "Create constants with device=x.device, or register them with register_buffer, so that "
        "they move with the module.",
    ),
    "loss": (
        lambda net, x: net.head(x),
        close,
        "sub in the loss",
        SHAPES,
        "shape (8, 3), dtype float32 and shape (8, 2), dtype float32",
        MEND,
    ),
}


@pytest.mark.few("view-False", "product-True", "device-False", "loss-False")
@pytest.mark.long("ipu-standin")
@pytest.mark.parametrize("run_eagerly", EAGER_OR_NOT)
@pytest.mark.parametrize("name", OPERATORS)
def test_an_operator_of_ones_own_is_named_with_its_line(name, run_eagerly):
    """A recording has other words for it than torch has eagerly."""
    function, loss, operator, needs, came, cure = OPERATORS[name]
    model = compiled(Line(function, head=nn.Linear(4, 3)), loss, run_eagerly=run_eagerly)
    lines, line = inspect.getsourcelines(close if name == "loss" else function)
    at = f", at {__file__}:{line + 1} in {(close if name == 'loss' else function).__name__}: "
    what = f"{operator} needs {needs}, got {came}{at}`{lines[1].strip()}`"
    text = f"training data, batch 0: {what}. {cure} torch says: RuntimeError: "
    with refused(model, DataError, text, part=True):
        fit(model, [(X, Y)])


# ---- losses -------------------------------------------------------------------------------------

INDICES = (
    "needs class indices of shape (8,) and dtype int64 for a prediction of shape (8, 3), got a "
    "target of"
)
TARGETS = {
    "one-hot": (
        nn.CrossEntropyLoss(),
        functional.one_hot(LABELS, 3),
        f"loss 'cross_entropy' {INDICES} shape (8, 3), dtype int64. For a one-hot target, pass "
        "target.argmax(1).",
        LABELS,
    ),
    "fractions": (
        lambda prediction, target: functional.cross_entropy(prediction, target),
        LABELS.float(),
        f"loss 'cross_entropy' {INDICES} shape (8,), dtype float32. Convert it to int64, with "
        ".long() or .astype('int64'); NaN is not a class, so leave those samples out first.",
        LABELS,
    ),
}


@pytest.mark.long("ipu-standin")
@pytest.mark.parametrize("run_eagerly", EAGER_OR_NOT)
@pytest.mark.parametrize("name", TARGETS)
def test_a_target_that_torchs_loss_cannot_take_is_refused_like_that_of_a_named_loss(
    name, run_eagerly
):
    """Torch speaks of gather, of scalar types, of 0D or 1D."""
    loss, target, text, right = TARGETS[name]
    model = compiled(nn.Linear(4, 3), loss, run_eagerly=run_eagerly)
    with refused(model, LossError, text):
        fit(model, [(X, target)])
    assert fit(model, [(X, right)]).epoch == [0]


class Own(nn.Module):
    """Computes its own loss."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(4, 3)

    def forward(self, x, labels):
        outputs = self.head(x)
        return outputs, functional.cross_entropy(outputs, labels)


def outside(label, place=5):
    """Labels of which one is no class."""
    labels = LABELS.clone()
    labels[place] = label
    return labels


LOSSES = {
    "cross_entropy": ("cross_entropy", nn.Linear(4, 3)),
    "nll": ("nll", nn.Sequential(nn.Linear(4, 3), nn.LogSoftmax(1))),
    "CrossEntropyLoss": (nn.CrossEntropyLoss(), nn.Linear(4, 3)),
}
NEEDS = "needs labels from 0 to 2 for a prediction of 3 classes, got"


@pytest.mark.long("ipu-standin")
@pytest.mark.few("large-cross_entropy-False", "negative-nll-True", "from 1-cross_entropy-True")
@pytest.mark.parametrize("run_eagerly", EAGER_OR_NOT)
@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize(
    ("labels", "came", "cure"),
    [
        (
            outside(7),
            "7 in sample 5",
            "Let the module return 8 classes, or number labels from 0.",
        ),
        (
            outside(-1),
            "-1 in sample 5",
            "Classes count from 0; samples to ignore have the label -100.",
        ),
        (LABELS + 1, "3 in sample 2", "They seem to start at 1: subtract 1."),
    ],
    ids=["large", "negative", "from 1"],
)
def test_a_label_that_is_no_class_is_refused_before_training(name, labels, came, cure, run_eagerly):
    """On a GPU torch's own check ends the process's use of it, and an IPU has none."""
    loss, net = LOSSES[name]
    model = compiled(net, loss, run_eagerly=run_eagerly)
    told = Told()
    text = f"training data, batch 0: loss {name!r} {NEEDS} {came}. {cure}"
    with refused(model, DataError, text):
        fit(model, [(X, labels)], callbacks=[told])
    assert told.hooks == []
    mended = {"7": labels % 3, "-": labels.masked_fill(labels < 0, -100)}.get(came[0], labels - 1)
    assert fit(model, [(X, mended)]).epoch == [0]


@pytest.mark.long
@pytest.mark.parametrize(
    "make",
    [
        lambda: compiled(nn.Linear(4, 3), lambda p, t: functional.cross_entropy(p, t)),
        lambda: compiled(Own(), None),
    ],
    ids=["function", "module"],
)
def test_a_label_in_a_loss_of_ones_own_is_named(make):
    """Only a run shows what such a loss compares."""
    model = make()
    text = (
        f"training data, batch 0: loss 'cross_entropy' {NEEDS} 7 in sample 5. Let the module "
        "return 8 classes, or number labels from 0."
    )
    with refused(model, DataError, text):
        fit(model, [(X, outside(7))])
    assert fit(model, [(X, LABELS)]).epoch == [0]


@pytest.mark.long
def test_labels_that_a_loss_leaves_out_may_be_any():
    """An ignore_index of one's own is no class."""
    loss = nn.CrossEntropyLoss(ignore_index=-1)
    assert fit(compiled(nn.Linear(4, 3), loss), [(X, outside(-1))]).epoch == [0]
    assert fit(compiled(nn.Linear(4, 3), "cross_entropy"), [(X, outside(-100))]).epoch == [0]
    soft = torch.full((8, 3), 1 / 3)
    assert fit(compiled(nn.Linear(4, 3), "cross_entropy"), [(X, soft)]).epoch == [0]


class Heads(nn.Module):
    """Two outputs by name."""

    def __init__(self):
        super().__init__()
        self.kind, self.size = nn.Linear(4, 3), nn.Linear(4, 1)

    def forward(self, x):
        return {"kind": self.kind(x), "size": self.size(x)}


@pytest.mark.long
def test_a_label_of_one_of_several_losses_is_named():
    """Each output has its own classes."""
    model = compiled(Heads(), {"kind": "cross_entropy", "size": "mse"})
    text = (
        f"training data, batch 0: loss 'cross_entropy' {NEEDS} 7 in sample 5. Let the module "
        "return 8 classes, or number labels from 0."
    )
    with refused(model, DataError, text):
        fit(model, [(X, {"kind": outside(7), "size": Y[:, :1]})])


PROBABILITIES = "Use loss='bce_with_logits', or end the module with nn.Sigmoid()."
TWO_CLASSES = "Classes are 0 and 1; for more, use an output for each and loss='cross_entropy'."


@pytest.mark.embedded_only("an IPU computes such a loss without a word")
def test_a_loss_of_probabilities_says_what_no_probability_is():
    """A missing sigmoid; torch's words name neither the loss nor what to do."""
    net, x = nn.Linear(2, 1), torch.tensor([[0.0, 0.0], [4.0, 4.0], [-4.0, 0.0]])
    nn.init.ones_(net.weight)
    nn.init.constant_(net.bias, 0.5)
    y = torch.tensor([0.0, 1.0, 0.0])
    text = (
        "training data, batch 0: loss '{}' needs probabilities from 0 to 1, got 8.5 in sample 1. "
    )
    for name, loss in (("bce", "bce"), ("BCELoss", nn.BCELoss())):
        with pytest.raises(DataError) as caught:
            fit(compiled(net, loss), [(x, y[:, None])])
        assert str(caught.value) == text.format(name) + PROBABILITIES
    fit(compiled(net, "bce_with_logits"), [(x, y[:, None])])
    fit(compiled(nn.Sequential(net, nn.Sigmoid()), "bce"), [(x, y[:, None])])


@pytest.mark.parametrize("loss", ["bce_with_logits", "bce"])
def test_a_label_beside_0_and_1_is_found_with_the_first_batch(loss):
    """torch takes any number there, and trains towards none."""
    net = nn.Sequential(nn.Linear(2, 1), *[nn.Sigmoid()] * (loss == "bce"))
    x, y = torch.randn(4, 2), torch.tensor([[0.0], [1.0], [2.0], [0.0]])
    assert message(fit, compiled(net, loss), [(x, y)], kind=DataError) == (
        f"training data, batch 0: loss {loss!r} needs labels from 0 to 1, got 2 in sample 2. "
        f"{TWO_CLASSES}"
    )
    fit(compiled(net, loss), [(x, y / 2)])
    if loss == "bce_with_logits":
        # What a weight of zero hides may be anything.
        fit(compiled(net, loss), [(x, y, torch.tensor([1.0, 1.0, 0.0, 1.0]))])


@pytest.mark.embedded_only("found while it is recorded, the same on an IPU")
def test_channels_that_no_layer_has_brought_last_are_named():
    """Of a convolution without pooling and flattening behind it; what is advised works."""

    class Pooled(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.head = nn.Conv2d(3, 8, 3), nn.Linear(8, 3)

        def forward(self, x):
            return self.head(self.body(x).flatten(2).mean(2))

    x, y = torch.randn(4, 3, 6, 6), torch.zeros(4, dtype=torch.int64)
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Linear(8, 3))
    with pytest.raises(DataError) as caught:
        fit(compiled(net, "cross_entropy"), [(x, y)])
    cure = "Its 8 channels are in dimension 1: x.flatten(2).mean(2) has them last."
    assert cure in str(caught.value)
    fit(compiled(Pooled(), "cross_entropy"), [(x, y)])


def test_the_file_of_ipufit_is_no_place_where_batches_are_made():
    """Of tensors, ipufit itself cuts the batches."""
    x, y = torch.randn(12, 4), torch.arange(12) % 3
    y[9] = 7
    with pytest.raises(DataError) as caught:
        fit(compiled(nn.Linear(4, 3), "cross_entropy"), x, y=y, batch_size=4, shuffle=False)
    assert str(caught.value).startswith("training data, batch 2: loss 'cross_entropy' needs labels")
    assert "Batches are made" not in str(caught.value)


# ---- later batches, and other methods -----------------------------------------------------------


@pytest.mark.long("ipu-standin")
@pytest.mark.parametrize("di", [1, 4])
@pytest.mark.parametrize("run_eagerly", EAGER_OR_NOT)
def test_a_later_batch_is_named_by_its_number(run_eagerly, di):
    """Of an execution of many only torch's last words would be left."""
    pairs = [(IDS, Y)] * 6 + [(IDS + 1, Y)]
    model = compiled(words(6), run_eagerly=run_eagerly)
    assert message(fit, model, pairs, device_iterations=di, epochs=2, kind=DataError).startswith(
        "training data, batch 6: layer '0', Embedding(6, 6), needs indices from 0 to 5, got 6 at "
        "(2, 1) of its input. Build it with num_embeddings=7, or map rare values to one index. "
        "torch says: IndexError: "
    )
    assert fit(model, pairs[:6]).epoch == [0]


@pytest.mark.long
def test_evaluate_and_predict_name_their_data():
    """The model is the same, and the data is another."""
    model = compiled(words(6))
    needs = "layer '0', Embedding(6, 6), needs indices from 0 to 5, got 6 at (2, 1) of its input."
    for call, role in ((model.evaluate, "evaluation data"), (model.predict, "prediction data")):
        with pytest.raises(DataError) as caught:
            call([(IDS, Y), (IDS + 1, Y)], verbose=0)
        assert str(caught.value).startswith(f"{role}, batch 1: {needs}")


class Counting(Net):
    """Counts its calls in a buffer and in an attribute, and draws from the generator."""

    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))
        self.wide, self.count = nn.Linear(5, 3), 0

    def forward(self, x):
        self.calls += 1
        self.count += 1
        return self.wide(super().forward(x + torch.rand(())))


@pytest.mark.long
def test_looking_for_the_reason_leaves_nothing_behind():
    """The user looks at the module after the error, and may go on with it."""
    model = compiled(Counting())
    with refused(model, DataError, "layer 'wide', Linear(in_features=5", part=True):
        fit(model)
    assert model.module.count == 0
    assert model.module.calls == 0


@pytest.mark.long
def test_nobody_looks_for_a_reason_where_nothing_fails(monkeypatch):
    """It would cost a run of the module."""
    monkeypatch.setattr(FailureExplainer, "explain", None)
    assert fit(compiled(), validation_data=batches(2)).epoch == [0]


def test_no_reason_is_looked_for_where_a_device_or_the_memory_failed():
    """To run the module once more would fail in the same way, or take long."""
    explainer = FailureExplainer(
        Net(), resolve_loss("mse"), Mode.TRAIN, Precision(), "training data"
    )
    wide = [MicroBatch.of((torch.zeros(8, 5),), {}, Y, 8)]
    assert isinstance(explainer.explain(RuntimeError("unknown"), wide), DataError)
    reset = RecoverableDeviceError("the link is down", "LINK_RESET")
    for error in (reset, MemoryError(), RuntimeError("CUDA out of memory")):
        assert explainer.explain(error, wide) is None


@pytest.mark.long
@embedded_only("Poplar alone compiles an IPU's programs")
@pytest.mark.parametrize("jit", ["auto", "graph"])
def test_a_reason_is_told_however_the_program_runs(jit):
    """With other kernels the recorded operators are others."""
    model = compiled(words(5), jit=jit)
    assert (
        "layer '0', Embedding(5, 6), needs indices from 0 to 4, got 5 at (2, 1) of its input."
        in message(fit, model, [(IDS, Y)], kind=DataError)
    )


@pytest.mark.long
def test_a_validation_batch_says_what_its_layer_needs():
    """The data differs from that of training, and the layer that minds is named."""
    engine = Watched()
    model = compiled(engine=lambda: engine)
    text = (
        "the module must take the validation data like the training data, but it failed with "
        "layer 'body', Linear(in_features=4, out_features=6, bias=True), needs 4 features in the "
        "last dimension, got shape (4, 5), dtype float32"
    )
    wide = DataLoader(TensorDataset(torch.zeros(8, 5), torch.zeros(8, 3)), batch_size=4)
    with refused(model, DataError, text, part=True):
        fit(model, validation_data=wide)


# ---- methods that look at a model without training it ------------------------------------------

# What is wrong with an index shows when it is looked up, and they need no values.
INSPECTED = [name for name in FAULTS if name not in ("embedding", "negative index")]
METHODS = ["check", "plan", "preflight"]


def in_turn(names, apart=1):
    """Each of them with each method.

    One method after the other stands for all of them, with every so many-th name.
    """
    return pytest.mark.parametrize(
        ("name", "method"),
        [
            pytest.param(
                name,
                method,
                id=f"{name}-{method}",
                marks=()
                if place % apart == 0 and method == METHODS[place % len(METHODS)]
                else pytest.mark.long,
            )
            for place, name in enumerate(names)
            for method in METHODS
        ],
    )


# What fit says of each of them is shown above.
@pytest.mark.few("linear-check", "channels-preflight", "layer norm-plan")
@pytest.mark.long("ipu-standin")
@in_turn(INSPECTED, apart=2)
def test_a_method_that_looks_at_a_model_names_the_layer_too(name, method):
    """They ended in torch's own text, whichever of fit's rules knew the layer."""
    make, x, layer, needs, came, cure, mend = FAULTS[name]
    model = compiled(make())
    model.module.eval()
    shown = repr(model.module.get_submodule(layer))
    shown = shown if "\n" not in shown else "MultiheadAttention"
    shown = shown if len(shown) <= 100 else type(model.module.get_submodule(layer)).__name__
    what = f"layer {layer!r}, {shown}, needs {needs}, got {came}{line_of(model.module)}"
    with refused(model, DataError, f"{method}: {what}. {cure} torch says: ", part=True) as caught:
        getattr(model, method)((x, Y[: len(x)]))
    assert str(caught.value).startswith(f"{method}: layer")
    net, x = mend()
    assert str(getattr(compiled(net), method)((x, Y[: len(x)])))


@pytest.mark.long
@in_turn(["view", "product", "cat", "loss"])
def test_a_method_that_looks_at_a_model_names_an_operator_of_ones_own(name, method):
    """The line is there without a debugger."""
    function, loss, operator, needs, came, cure = OPERATORS[name]
    model = compiled(Line(function, head=nn.Linear(4, 3)), loss)
    with pytest.raises(DataError) as caught:
        getattr(model, method)((X, Y))
    assert str(caught.value).startswith(f"{method}: {operator} needs {needs}, got {came}, at ")
    assert f". {cure} torch says: RuntimeError: " in str(caught.value)


@pytest.mark.long
@pytest.mark.parametrize("name", LOSSES)
def test_check_names_a_label_that_is_no_class(name):
    """It runs on values where fit does, and fit would refuse them."""
    loss, net = LOSSES[name]
    text = f"check: loss {name!r} {NEEDS} 7 in sample 5. Let the module return 8 classes, or "
    with refused(compiled(net, loss), DataError, text + "number labels from 0.") as caught:
        compiled(net, loss).check((X, outside(7)))
    assert caught.value.__cause__ is None
    assert str(compiled(net, loss).check((X, LABELS)))


# ---- what a device has nothing of ---------------------------------------------------------------


class Listed(nn.Module):
    """Keeps a layer in a plain list, or not."""

    def __init__(self, container):
        super().__init__()
        self.body, self.head = container([nn.Linear(4, 4)]), nn.Linear(4, 3)

    def forward(self, x):
        return self.head(self.body[0](x))


def test_a_layer_that_is_not_registered_is_named():
    """PopTorch speaks of a tensor that is not on the IPU."""
    model = compiled(Listed(list))
    with pytest.raises(CaptureError) as caught:
        fit(model)
    assert str(caught.value).startswith(
        "'body' of Listed holds layers in a plain list, where torch finds no parameters, "
    )
    assert "Write self.body = nn.ModuleList(self.body) in __init__." in str(caught.value)
    assert fit(compiled(Listed(nn.ModuleList))).epoch == [0]
