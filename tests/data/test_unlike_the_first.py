"""Batches unlike the first one in dtype, weights or objects train as in a loop written by hand."""

import copy
import warnings

import pytest
import torch
from torch import nn

import ipufit
from tests.engines import EAGER_OR_NOT, runs_eagerly

GENERATOR = torch.Generator().manual_seed(0)
X = torch.randn(22, 4, generator=GENERATOR, dtype=torch.float64)
IDS = torch.randint(0, 20, (22, 5), generator=GENERATOR)
Y = torch.randint(0, 3, (22,), generator=GENERATOR)
W = torch.rand(22, generator=GENERATOR, dtype=torch.float64) + 0.5


class Words(nn.Module):
    """Takes ids of any whole dtype."""

    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(20, 4), nn.Linear(4, 3)
        self.double()

    def forward(self, ids):
        return self.head(self.embed(ids).mean(1))


class Net(nn.Module):
    """Two layers; what comes beside the rows is looked at, but for its value."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(4, 6), nn.Linear(6, 3)
        self.double()

    def forward(self, rows, names=None):
        if isinstance(rows, list):
            assert all(isinstance(row["file"], str) for row in rows)
            rows = torch.stack([row["x"] for row in rows])
        factor = 1 if names is None else len(names[0])
        return self.last(self.first(rows).tanh()) * factor


def cut(make):
    """Batches of four, the last one of two."""
    return [make(i, slice(4 * i, 4 * i + 4)) for i in range(6)]


def built(kind):
    """A module, and a copy of it."""
    torch.manual_seed(0)
    net = kind()
    return net, copy.deepcopy(net)


def fitted(net, data, compiling=(), **options):
    """A model that is trained on these batches, silently."""
    model = ipufit.Model(net)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.02)
    model.compile(optimizer, "cross_entropy", **dict(compiling))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.fit(data, **{"epochs": 2, "verbose": 0, **options})
    return model


def by_hand(net, loss_of, accumulation=1):
    """The loop: an update is a mean over its samples; returns the loss of each epoch."""
    optimizer, history = torch.optim.AdamW(net.parameters(), lr=0.02), []
    for _ in range(2):
        losses = []
        for start in range(0, 6, accumulation):
            update = range(start, min(start + accumulation, 6))
            sizes = [len(Y[4 * i : 4 * i + 4]) for i in update]
            optimizer.zero_grad()
            for i, size in zip(update, sizes):
                loss = loss_of(net, i, slice(4 * i, 4 * i + 4))
                (loss * (size / sum(sizes))).backward()
                losses.append(loss.item() * size)
            optimizer.step()
        history.append(sum(losses) / 22)
    return history


def assert_same(one, other, atol=1e-12):
    """All parameters agree."""
    for wanted, value in zip(other.parameters(), one.parameters()):
        torch.testing.assert_close(value, wanted, rtol=0, atol=atol)


@pytest.mark.parametrize("eager", EAGER_OR_NOT)
def test_a_dtype_unlike_the_first_is_another_recording(eager):
    """As a shape is: ids in two dtypes, and labels that the loss takes in one alone."""
    net, twin = built(Words)
    data = cut(lambda i, rows: (IDS[rows].int() if i % 2 else IDS[rows], Y[rows]))
    model = fitted(net, data, {"run_eagerly": True} if eager else {})
    losses = by_hand(
        twin, lambda net, i, rows: nn.functional.cross_entropy(net(IDS[rows]), Y[rows])
    )
    assert_same(net, twin)
    assert model.history.history["loss"] == pytest.approx(losses, rel=1e-12)
    assert (model.history.params["recordings"] > 1) is not eager


@pytest.mark.parametrize("eager", [False, pytest.param(True, marks=runs_eagerly)])
def test_what_is_converted_of_a_later_batch_is_said_once(eager, capsys):
    """As it is for the first one: inputs in float32 and labels in int32 beside others."""
    net, twin = built(Net)
    data = cut(lambda i, rows: (X[rows], Y[rows].int() if i % 2 else Y[rows]))
    data[3] = (X[12:16].float(), Y[12:16])
    model = ipufit.Model(net)
    options = {"run_eagerly": True} if eager else {}
    model.compile(torch.optim.AdamW(net.parameters(), lr=0.02), "cross_entropy", **options)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model.fit(data, epochs=2, verbose=0)
    begin = "training data has other dtypes than module and loss compute in, so every batch is "
    begin += "converted: "
    end = ". Convert the data once beforehand to save that work."
    assert [str(each.message) for each in caught] == [
        f"{begin}target from int32 to int64{end}",
        f"{begin}input [0] from float32 to float64{end}",
    ]

    def loss_of(net, i, rows):
        inputs = X[rows].float().double() if i == 3 else X[rows]
        return nn.functional.cross_entropy(net(inputs), Y[rows])

    by_hand(twin, loss_of)
    assert_same(net, twin)


@runs_eagerly
@pytest.mark.parametrize("options", [{}, {"device_iterations": 3}, {"seed": 1}], ids=str)
@pytest.mark.parametrize("accumulation", [1, 4])
def test_updates_may_mix_dtypes(accumulation, options):
    """With accumulation, recorded and eagerly; the bits depend on no division."""
    results = []
    for compiling in ({"jit": "graph"}, {"run_eagerly": True}):
        net, twin = built(Words)
        data = cut(lambda i, rows: (IDS[rows].int() if i % 3 else IDS[rows], Y[rows]))
        fitted(net, data, compiling, gradient_accumulation=accumulation, **options)
        results.append(net)
    by_hand(
        twin,
        lambda net, i, rows: nn.functional.cross_entropy(net(IDS[rows]), Y[rows]),
        accumulation,
    )
    assert_same(results[0], twin)
    assert_same(results[0], results[1], atol=0)


@pytest.mark.parametrize(
    ("first", "reduction"),
    [
        (0, "sum_over_batch_size"),
        (1, "sum_over_batch_size"),
        # Beginning with a batch that has none: tests/data/test_sample_weights_data.py.
        (0, "mean_with_sample_weight"),
    ],
)
def test_samples_of_a_batch_without_weights_count_once(first, reduction):
    """As in Keras, whichever batches have them; a sum of weights is known from the first on."""
    net, twin = built(Net)
    data = cut(
        lambda i, rows: (X[rows], Y[rows]) if (i + first) % 2 else (X[rows], Y[rows], W[rows])
    )
    options = {"reduction": ipufit.Reduction(sample_weights=reduction)}
    model = fitted(net, data, options)

    def weights_of(i, rows):
        return torch.ones_like(W[rows]) if (i + first) % 2 else W[rows]

    def loss_of(net, i, rows):
        losses = nn.functional.cross_entropy(net(X[rows]), Y[rows], reduction="none")
        weights = weights_of(i, rows)
        whole = weights.sum() if reduction == "mean_with_sample_weight" else len(weights)
        return (losses * weights).sum() / whole

    losses = by_hand(twin, loss_of)
    assert_same(net, twin)
    if reduction == "sum_over_batch_size":
        assert model.history.history["loss"] == pytest.approx(losses, rel=1e-12)


@runs_eagerly
@pytest.mark.parametrize("compiling", [{"run_eagerly": True}, {}], ids=["eager", "auto"])
def test_texts_reach_the_module_itself(compiling, tmp_path):
    """Inside lists of dicts, and as a list; a run that goes on has the same bits."""

    def rows_of(i, rows):
        parts = [{"x": x, "file": f"{i}.png", "number": i} for x in X[rows]]
        return ((parts,), Y[rows]) if i % 2 else ((X[rows], ["ab"] * len(Y[rows])), Y[rows])

    def loss_of(net, i, rows):
        outputs = net(X[rows]) * (1 if i % 2 else 2)
        return nn.functional.cross_entropy(outputs, Y[rows])

    net, twin = built(Net)
    data = cut(rows_of)
    model = fitted(net, data, compiling, gradient_accumulation=2)
    losses = by_hand(twin, loss_of, 2)
    assert_same(net, twin)
    assert model.history.history["loss"] == pytest.approx(losses, rel=1e-12)
    assert model.predict(data, verbose=0).shape == (22, 3)
    again, _ = built(Net)
    fitted(again, data, compiling, gradient_accumulation=2, epochs=1, checkpoint=tmp_path)
    other, _ = built(Net)
    goes_on = ipufit.Checkpoint(tmp_path, resume="auto")
    fitted(other, data, compiling, gradient_accumulation=2, checkpoint=goes_on)
    assert_same(net, other, atol=0)


@runs_eagerly
def test_texts_alone_are_counted():
    """A batch of texts has a sample for each."""

    class Letters(nn.Module):
        def __init__(self):
            super().__init__()
            self.head = nn.Linear(1, 3)

        def forward(self, texts):
            return self.head(torch.tensor([[float(len(text))] for text in texts]))

    net = Letters()
    model = ipufit.Model(net)
    model.compile("sgd", "cross_entropy", run_eagerly=True)
    data = [((["a", "bcd", "ef"],), Y[:3]), ((["g"],), Y[3:4])]
    model.fit(data, verbose=0)
    rows = model.predict(data, verbose=0)
    torch.testing.assert_close(rows, net(["a", "bcd", "ef", "g"]))
