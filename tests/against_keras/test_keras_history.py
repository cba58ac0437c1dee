"""The History of Keras and of ipufit: the same keys, the same values, from every form of data."""

import numpy
import pytest
import torch
from torch import nn

import ipufit
from tests.against_keras.twins import (
    WEIGHTS,
    XV,
    YV,
    X,
    Y,
    copy_weights,
    from_keras,
    keras,
    pair,
    same_values,
)

pytestmark = from_keras


def compare(both, **options):
    """Train both; their histories and weights must agree."""
    theirs, ours = both.fit(**options)
    assert ours.epoch == theirs.epoch
    same_values(ours.history, theirs.history)
    both.same_weights()
    return ours.history


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"validated": True},
        {"validated": True, "epochs": 4, "validation_freq": 2},
        {"batch_size": 16},
        {"batch_size": None},
        {"batch_size": 100},
        {"validated": True, "validation_batch_size": 7},
        {"validated": True, "validation_steps": 2},
        {"initial_epoch": 1},
        {"steps_per_epoch": 2},
        {"class_weight": {0: 0.5, 1: 2.0, 2: 1.5}},
        {"sample_weight": WEIGHTS},
        {"sample_weight": WEIGHTS, "validation_split": 0.3},
        {"sample_weight": WEIGHTS, "batch_size": 16},
        {"validation_data": (XV, YV, WEIGHTS[:30])},
    ],
    ids=lambda options: "-".join(options) or "plain",
)
def test_fit(options):
    compare(pair(), **options)


@pytest.mark.parametrize(
    ("samples", "split"), [(7, 0.3), (7, 0.5), (10, 0.1), (10, 0.3), (33, 0.15), (60, 0.7)]
)
def test_validation_split_holds_out_the_same_samples(samples, split):
    """The number of samples is rounded, so every member shows in the loss of one epoch."""
    both = pair()
    compare(both, x=X[:samples], y=Y[:samples], validation_split=split, epochs=1, batch_size=4)


@pytest.mark.parametrize(
    ("metrics", "weighted", "names"),
    [
        ((), (), {"loss"}),
        ((), ["accuracy"], {"loss", "accuracy"}),
        (("accuracy",), ["accuracy"], {"loss", "accuracy", "weighted_accuracy"}),
        (("acc",), (), {"loss", "acc"}),
    ],
)
def test_weighted_metrics(metrics, weighted, names):
    both = pair(metrics=metrics, weighted_metrics=weighted)
    history = compare(both, sample_weight=WEIGHTS, validation_split=0.5)
    assert history.keys() == names | {f"val_{name}" for name in names}


def batches(endless=False, weighted=False):
    """A generator of the data."""
    while True:
        for start in range(0, 60, 10):
            part = slice(start, start + 10)
            yield (X[part], Y[part], WEIGHTS[part]) if weighted else (X[part], Y[part])
        if not endless:
            return


def fit_each(both, make, **options):
    """Train both, each with data of its own, since a generator is used up by who reads it."""
    # Keras warns unless it is told that it can't shuffle; ipufit has nothing to be told.
    theirs = both.theirs.fit(make(), shuffle=False, verbose=0, **options)
    ours = both.ours.fit(make(), verbose=0, **options)
    same_values(ours.history, theirs.history)
    both.same_weights()


def test_an_endless_generator():
    """With 4 steps the epochs begin at batches 0, 4 and 2."""
    fit_each(pair(), lambda: batches(endless=True), epochs=3, steps_per_epoch=4)


@pytest.mark.filterwarnings("ignore:Your input ran out of data:UserWarning")
def test_a_generator_with_weights():
    """Of which Keras says at its end that it has one."""
    both = pair(weighted_metrics=["accuracy"], metrics=())
    fit_each(both, lambda: batches(weighted=True), epochs=1)


def test_a_data_loader():
    dataset = torch.utils.data.TensorDataset(torch.tensor(X), torch.tensor(Y))
    loader = torch.utils.data.DataLoader(dataset, batch_size=16)
    fit_each(pair(), lambda: loader, epochs=3, validation_data=loader)


def test_a_generator_that_ends_early_is_an_error():
    """Keras warns and trains on; ipufit keeps what was learned and raises, as its pages say."""
    both = pair()
    given = {"epochs": 1, "steps_per_epoch": 9, "verbose": 0}
    with pytest.warns(UserWarning, match="ran out of data"):
        both.theirs.fit(batches(), shuffle=False, **given)
    with pytest.raises(ipufit.errors.DataError, match="ended after 6 of epoch 1"):
        both.ours.fit(batches(), **given)
    both.same_weights()


def test_fit_again_goes_on():
    both = pair()
    compare(both, epochs=2)
    compare(both, epochs=4, initial_epoch=2)


# ---- several outputs ----------------------------------------------------------------------------


class TwoHeads(nn.Module):
    """Returns its outputs by name or by position."""

    def __init__(self, named):
        super().__init__()
        self.kind, self.size = nn.Linear(6, 3), nn.Linear(6, 1)
        self.named = named

    def forward(self, x):
        kind, size = self.kind(x), self.size(x)
        return {"kind": kind, "size": size} if self.named else (kind, size)


SIZES = X.sum(1, keepdims=True)


def two_heads(named):
    torch.manual_seed(0)
    module = TwoHeads(named)
    x = keras.Input((6,))
    kind, size = keras.layers.Dense(3, name="kind"), keras.layers.Dense(1, name="size")
    outputs = {"kind": kind(x), "size": size(x)} if named else [kind(x), size(x)]
    theirs = keras.Model(x, outputs)
    copy_weights([(kind, module.kind), (size, module.size)])
    return theirs, ipufit.Model(module)


def fit_two_heads(named, loss_weights, metrics):
    """The histories of both, with two losses."""
    theirs, ours = two_heads(named)
    cross_entropy = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    form = (lambda a, b: {"kind": a, "size": b}) if named else (lambda a, b: [a, b])
    weights = form(*loss_weights) if loss_weights else None
    measured = form(*metrics) if metrics else None
    theirs.compile(
        keras.optimizers.SGD(0.05),
        form(cross_entropy, "mse"),
        loss_weights=weights,
        metrics=measured,
    )
    ours.compile(
        torch.optim.SGD(ours.module.parameters(), 0.05),
        form("cross_entropy", "mse"),
        loss_weights=weights,
        metrics=measured,
    )
    given = {"epochs": 3, "batch_size": 16, "shuffle": False, "verbose": 0}
    given["validation_split"] = 0.3
    expected = theirs.fit(X, form(Y, SIZES), **given).history
    return ours.fit(X, form(Y, SIZES), **given).history, expected


@pytest.mark.parametrize("loss_weights", [None, (0.3, 2.0)])
@pytest.mark.parametrize("metrics", [None, (["accuracy"], ["mae"])])
def test_two_outputs_by_name(loss_weights, metrics):
    came, expected = fit_two_heads(True, loss_weights, metrics)
    same_values(came, expected)
    assert {"loss", "kind_loss", "size_loss", "val_kind_loss"} < came.keys()


def test_two_outputs_by_position_are_named_by_their_place():
    """Keras takes the names of the layers; an output of a torch module has none."""
    came, expected = fit_two_heads(False, (0.3, 2.0), (["accuracy"], ["mae"]))
    places = {"kind": "output_0", "size": "output_1"}
    for layer, place in places.items():
        expected = {name.replace(layer, place): values for name, values in expected.items()}
    same_values(came, expected)


def test_a_loss_of_an_epoch_counts_every_sample_alike():
    """60 samples in batches of 16: the last batch has 12, and Keras weighs it with 12 too."""
    both = pair(lr=0.0)
    history = compare(both, batch_size=16, epochs=1)
    with torch.no_grad():
        outputs = both.ours.module(torch.tensor(X))
        whole = nn.functional.cross_entropy(outputs, torch.tensor(Y))
    assert history["loss"][0] == pytest.approx(float(whole), abs=1e-6)


def test_predict_keeps_the_order():
    both = pair()
    expected = both.theirs.predict(X, batch_size=16, verbose=0)
    came = both.ours.predict(X, batch_size=16, verbose=0)
    numpy.testing.assert_allclose(came.numpy(), expected, atol=1e-6)


SMALL = (abs(X) * 20).astype("uint8")


@pytest.mark.filterwarnings("ignore:.* data has other dtypes:UserWarning")
@pytest.mark.parametrize(
    "data",
    [
        {"x": X.astype("float64")},
        {"x": X.astype("float16")},
        {"x": SMALL, "validation_data": [SMALL[:20], Y[:20]]},
        {"x": SMALL.astype("int64")},
        {"y": Y.astype("int32")},
        {"y": Y.astype("uint8")[:, None]},
        {"validation_data": [XV.astype("float64"), YV.astype("int32")[:, None]]},
    ],
    ids=["float64", "float16", "uint8", "int64", "int32 labels", "columns", "validation"],
)
def test_data_in_other_dtypes(data):
    compare(pair(lr=0.01), **data)


def test_frames():
    pandas = pytest.importorskip("pandas")
    frame, labels = pandas.DataFrame(X), pandas.Series(Y)
    compare(pair(), x=frame, y=labels, validation_split=0.25)


def test_targets_without_the_last_dimension_of_the_outputs():
    """Of one value per sample both libraries take vectors and columns."""
    values = X @ numpy.linspace(-1, 1, 6).astype("float32")
    for target in (values, values[:, None]):
        torch.manual_seed(0)
        module = nn.Linear(6, 1)
        theirs = keras.Sequential([keras.Input((6,)), keras.layers.Dense(1)])
        copy_weights([(theirs.layers[0], module)])
        theirs.compile(keras.optimizers.SGD(0.01), "mse", metrics=["mae"])
        ours = ipufit.Model(module)
        ours.compile(torch.optim.SGD(module.parameters(), 0.01), "mse", metrics=["mae"])
        arguments = {"batch_size": 10, "epochs": 2, "shuffle": False, "verbose": 0}
        expected = theirs.fit(X, target, **arguments).history
        same_values(ours.fit(X, target, **arguments).history, expected)
