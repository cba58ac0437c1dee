"""Every form of data that Keras takes gives the numbers of Keras; what else is taken or refused."""

import contextlib
import warnings

import numpy
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import ipufit
from ipufit.errors import IpufitError
from tests.against_keras.twins import WEIGHTS, XV, YV, X, Y, copy_weights, from_keras, keras, pair

pandas = pytest.importorskip("pandas")
polars = pytest.importorskip("polars")
sparse = pytest.importorskip("scipy.sparse")

pytestmark = from_keras

# float32 in another order of summation.
TOLERANCE = 1e-6
SIZE = 10
FIT = {"batch_size": SIZE, "epochs": 2, "shuffle": False, "verbose": 0}
SMALL = (abs(X) * 20).astype("uint8")


class Batches(keras.utils.PyDataset):
    """The data, in the order of a list that its hook changes."""

    def __init__(self, weighted=False):
        super().__init__()
        self.order, self.weighted, self.begun = list(range(6)), weighted, 0

    def __len__(self):
        return len(self.order)

    def __getitem__(self, index):
        part = slice(SIZE * self.order[index], SIZE * self.order[index] + SIZE)
        return (X[part], Y[part], WEIGHTS[part]) if self.weighted else (X[part], Y[part])

    def on_epoch_begin(self):
        self.begun += 1

    def on_epoch_end(self):
        self.order.reverse()


class Ordered(Batches):
    """Keras looks at a first batch between two calls of the hooks; here that changes nothing."""

    def on_epoch_end(self):
        pass


def generated(convert=lambda part: part):
    """A generator of the batches of an epoch, each part converted."""
    for begin in range(0, 60, SIZE):
        part = slice(begin, begin + SIZE)
        yield convert(X[part]), convert(Y[part])


def loader(*arrays):
    return DataLoader(TensorDataset(*map(torch.tensor, arrays)), SIZE)


def read_only(array):
    return numpy.frombuffer(array.tobytes(), array.dtype).reshape(array.shape)


# Arguments of fit, made anew for each library; those of FIT but for what a form has no use for.
ONE_EPOCH = {"epochs": 1, "batch_size": None}
FORMS = {
    "arrays": lambda: {"x": X, "y": Y},
    "tensors": lambda: {"x": torch.tensor(X), "y": torch.tensor(Y)},
    "float64 tensors": lambda: {"x": torch.tensor(X).double(), "y": torch.tensor(Y).int()},
    "bfloat16 tensors": lambda: {"x": torch.tensor(X).bfloat16(), "y": torch.tensor(Y)},
    "read-only": lambda: {"x": read_only(X), "y": read_only(Y)},
    "Fortran's order": lambda: {"x": numpy.asfortranarray(X), "y": Y},
    "backwards": lambda: {"x": X[::-1], "y": Y[::-1]},
    "broadcast": lambda: {"x": numpy.broadcast_to(X[:1], X.shape), "y": Y},
    **{
        f"{dtype} inputs": lambda dtype=dtype: {"x": SMALL.astype(dtype), "y": Y}
        for dtype in ("bool", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64")
    },
    **{
        f"{dtype} inputs": lambda dtype=dtype: {"x": X.astype(dtype), "y": Y}
        for dtype in ("float16", "float64")
    },
    **{
        f"{dtype} labels": lambda dtype=dtype: {"x": X, "y": Y.astype(dtype)}
        for dtype in ("bool", "int8", "uint8", "int16", "uint16", "int32", "uint32")
    },
    "a column of labels": lambda: {"x": X, "y": Y[:, None]},
    "lists of one": lambda: {"x": [X], "y": [Y]},
    "frames of pandas": lambda: {"x": pandas.DataFrame(X), "y": pandas.Series(Y)},
    "a frame of labels": lambda: {"x": pandas.DataFrame(X), "y": pandas.DataFrame(Y)},
    "an index of pandas": lambda: {"x": X, "y": pandas.Index(Y)},
    "an array of pandas": lambda: {"x": X, "y": pandas.array(Y)},
    "frames of polars": lambda: {"x": polars.DataFrame(X), "y": polars.Series(Y)},
    "a sparse matrix": lambda: {"x": sparse.csr_matrix(X), "y": Y},
    "a loader": lambda: {"x": loader(X, Y), "batch_size": None},
    "a generator": lambda: {"x": generated(), **ONE_EPOCH},
    "a generator of lists of one": lambda: {"x": generated(lambda part: [part]), **ONE_EPOCH},
    "a generator of frames": lambda: {"x": generated(pandas.DataFrame), **ONE_EPOCH},
    "a PyDataset": lambda: {"x": Ordered(), "batch_size": None},
    "a PyDataset with weights": lambda: {"x": Ordered(weighted=True), "batch_size": None},
    "a PyDataset and class_weight": lambda: {
        "x": Ordered(),
        "class_weight": {0: 0.5, 2: 2.0},
        "batch_size": None,
    },
    "weights": lambda: {"x": X, "y": Y, "sample_weight": WEIGHTS},
    "float64 weights": lambda: {"x": X, "y": Y, "sample_weight": WEIGHTS.astype("float64")},
    "whole weights": lambda: {"x": X, "y": Y, "sample_weight": (WEIGHTS * 3).astype(int)},
    "a column of weights": lambda: {"x": X, "y": Y, "sample_weight": WEIGHTS[:, None]},
    "a Series of weights": lambda: {"x": X, "y": Y, "sample_weight": pandas.Series(WEIGHTS)},
    "zeros among weights": lambda: {"x": X, "y": Y, "sample_weight": WEIGHTS * (WEIGHTS > 0.8)},
    "class_weight": lambda: {"x": X, "y": Y, "class_weight": {0: 0.5, 1: 2.0, 2: 1.5}},
    "class_weight of some": lambda: {"x": X, "y": Y, "class_weight": {1: 3.0}},
    "a list held out": lambda: {"x": X, "y": Y, "validation_data": [XV, YV]},
    "weights held out": lambda: {"x": X, "y": Y, "validation_data": (XV, YV, WEIGHTS[:30])},
    "a list with weights held out": lambda: {
        "x": X,
        "y": Y,
        "validation_data": [XV, YV, WEIGHTS[:30]],
    },
    "frames held out": lambda: {
        "x": X,
        "y": Y,
        "validation_data": (polars.DataFrame(XV), pandas.Series(YV)),
    },
    "a loader held out": lambda: {"x": X, "y": Y, "validation_data": loader(XV, YV)},
    "a generator held out": lambda: {"x": X, "y": Y, "epochs": 1, "validation_data": generated()},
    "a PyDataset held out": lambda: {"x": X, "y": Y, "validation_data": Ordered()},
    "a part held out": lambda: {"x": X, "y": Y, "validation_split": 0.25},
    "a part with weights held out": lambda: {
        "x": X,
        "y": Y,
        "sample_weight": WEIGHTS,
        "validation_split": 0.25,
    },
    "a part of frames held out": lambda: {
        "x": polars.DataFrame(X),
        "y": polars.Series(Y),
        "validation_split": 0.25,
    },
}


@contextlib.contextmanager
def quiet():
    """What either library says of a form is not compared."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def assert_close(ours, theirs):
    """Two dicts of values, or of lists of them."""
    assert set(ours) == set(theirs)
    for name, values in theirs.items():
        assert ours[name] == pytest.approx(values, rel=TOLERANCE, abs=TOLERANCE), name


def own_arguments(arguments):
    """Without what would be said twice here: a loader and a generator have their own order."""
    is_ordered = isinstance(arguments["x"], DataLoader) or hasattr(arguments["x"], "send")
    return {name: value for name, value in arguments.items() if name != "shuffle" or not is_ordered}


@pytest.mark.parametrize("form", FORMS)
def test_a_form_of_data_trains_to_the_numbers_of_keras(form):
    """History, weights, and what evaluate and predict make of the same data afterwards."""
    both = pair(lr=0.01, metrics=("accuracy",), weighted_metrics=("accuracy",))
    make = FORMS[form]
    with quiet():
        theirs = both.theirs.fit(**{**FIT, **make()}).history
        ours = both.ours.fit(**own_arguments({**FIT, **make()})).history
        assert_close(ours, theirs)
        both.same_weights()
        looked_at = [
            {name: value for name, value in make().items() if name in ("x", "y", "sample_weight")}
            for _ in range(2)
        ]
        theirs = both.theirs.evaluate(**looked_at[0], return_dict=True, verbose=0)
        assert_close(both.ours.evaluate(**looked_at[1], verbose=0), theirs)
        inputs = [make()["x"] for _ in range(2)]
        expected = both.theirs.predict(inputs[0], verbose=0)
        predicted = both.ours.predict(inputs[1], verbose=0)
    numpy.testing.assert_allclose(predicted.numpy(), expected, rtol=TOLERANCE, atol=TOLERANCE)


BATCHES = {
    "arrays": lambda: (X, Y),
    "weights": lambda: (X, Y, WEIGHTS),
    "class_weight": lambda: (X, Y, None, {0: 0.5, 2: 3.0}),
    "other dtypes": lambda: (X.astype("float64"), Y.astype("int32")[:, None]),
    "tensors": lambda: (torch.tensor(X), torch.tensor(Y)),
}


@pytest.mark.parametrize("form", BATCHES)
def test_single_batches_have_the_numbers_of_keras(form):
    """By position, as Keras takes them."""
    both = pair(lr=0.1, metrics=("accuracy",), weighted_metrics=("accuracy",))
    arguments = BATCHES[form]()
    with quiet():
        for _ in range(2):
            ours = both.ours.train_on_batch(*arguments, return_dict=True)
            assert_close(ours, both.theirs.train_on_batch(*arguments, return_dict=True))
        ours = both.ours.test_on_batch(*arguments[:3], return_dict=True)
        assert_close(ours, both.theirs.test_on_batch(*arguments[:3], return_dict=True))
        predicted = both.ours.predict_on_batch(arguments[0]).numpy()
        expected = both.theirs.predict_on_batch(arguments[0])
    both.same_weights()
    numpy.testing.assert_allclose(predicted, expected, rtol=TOLERANCE, atol=TOLERANCE)


def test_arguments_by_position_mean_what_they_mean_in_keras():
    """All that both methods take so."""
    both = pair(lr=0.1)
    fit = (X, Y, SIZE, 2, 0, None, 0.25, None, False, None, WEIGHTS)
    assert_close(both.ours.fit(*fit).history, both.theirs.fit(*fit).history)
    fit = (X, Y, SIZE, 2, 0, [], 0.0, (XV, YV), False, {0: 2.0}, None)
    assert_close(both.ours.fit(*fit).history, both.theirs.fit(*fit).history)
    evaluate = (X, Y, SIZE, 0, WEIGHTS, 3, None, True)
    assert_close(both.ours.evaluate(*evaluate), both.theirs.evaluate(*evaluate))
    predict = (X, SIZE, 0, 3, None)
    expected = both.theirs.predict(*predict)
    numpy.testing.assert_allclose(both.ours.predict(*predict).numpy(), expected, atol=TOLERANCE)


def test_a_py_dataset_is_read_between_its_hooks():
    """What it changes at the end of an epoch holds for the next.

    Keras calls the hook before the first epoch too, and looks at a batch before a model's first
    fit, hooks included.
    """
    pair().theirs.fit(X, Y, verbose=0)
    both = pair(lr=0.1)
    theirs, ours = Batches(), Batches()
    ours.on_epoch_end()
    both.theirs.fit(theirs, epochs=3, shuffle=False, verbose=0)
    both.ours.fit(ours, epochs=3, shuffle=False, verbose=0)
    both.same_weights()
    assert (theirs.begun, theirs.order) == (ours.begun, ours.order) == (3, list(range(6)))


# ---- losses of elements --------------------------------------------------------------------------


class Steps(nn.Module):
    """A value, or a class, for each of five steps."""

    def __init__(self, classes):
        super().__init__()
        self.dense, self.classes = nn.Linear(6, 5 * (classes or 1)), classes

    def forward(self, x):
        out = self.dense(x)
        return out.view(-1, 5, self.classes).transpose(1, 2) if self.classes else out


GENERATOR = torch.Generator().manual_seed(4)
VALUES = torch.randn(60, 5, generator=GENERATOR).numpy()
KINDS = torch.randint(0, 3, (60, 5), generator=GENERATOR).numpy()
STEP_WEIGHTS = torch.rand(60, 5, generator=GENERATOR).numpy()
PADDED = numpy.where(STEP_WEIGHTS < 0.3, -1, KINDS)


def of_steps(classes, loss, metrics=None, weighted=None):
    """The same layer on both sides; classes are the last dimension in Keras."""
    torch.manual_seed(0)
    module = Steps(classes)
    layers = [keras.Input((6,)), keras.layers.Dense(5 * (classes or 1))]
    layers += [keras.layers.Reshape((5, classes))] if classes else []
    theirs = keras.Sequential(layers)
    copy_weights([(theirs.layers[0], module.dense)])
    options = {"metrics": metrics, "weighted_metrics": weighted}
    theirs.compile(keras.optimizers.SGD(0.1), loss, **options)
    ours = ipufit.Model(module)
    name = "cross_entropy" if classes else loss
    ours.compile(torch.optim.SGD(module.parameters(), 0.1), name, **options)
    return theirs, ours


@pytest.mark.parametrize("loss", ["mse", "mae"])
@pytest.mark.parametrize(
    "weights",
    [None, WEIGHTS, WEIGHTS * (WEIGHTS > 0.8)],
    ids=["none", "of samples", "with zeros"],
)
def test_values_of_steps_have_the_numbers_of_keras(loss, weights):
    """Loss, metrics and weighted metrics of several values a sample, with a smaller last batch."""
    theirs, ours = of_steps(None, loss, ["mae"], ["mse"])
    arguments = {**FIT, "batch_size": 16, "sample_weight": weights}
    expected = theirs.fit(X, VALUES, **arguments).history
    assert_close(ours.fit(X, VALUES, **arguments).history, expected)


@pytest.mark.parametrize("weights", [None, WEIGHTS, STEP_WEIGHTS], ids=["none", "samples", "steps"])
def test_classes_of_steps_have_the_numbers_of_keras(weights):
    """Weights of samples or of steps; Keras has the classes last, torch second."""
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    theirs, ours = of_steps(3, loss)
    arguments = {**FIT, "batch_size": 16, "sample_weight": weights}
    if weights is WEIGHTS:
        arguments["sample_weight"] = weights[:, None]
    expected = theirs.fit(X, KINDS, **arguments).history
    assert_close(ours.fit(X, KINDS, **arguments).history, expected)


def test_labels_that_are_left_out_have_the_numbers_of_keras():
    """Keras' ignore_class is torch's ignore_index; each step that counts, counts the same."""
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, ignore_class=-1)
    theirs, ours = of_steps(3, loss)
    ours.compile(
        torch.optim.SGD(ours.module.parameters(), 0.1),
        nn.CrossEntropyLoss(ignore_index=-1),
        reduction=ipufit.Reduction(normalize="tokens"),
    )
    for begin in range(0, 60, 16):
        part = slice(begin, begin + 16)
        expected = theirs.train_on_batch(X[part], PADDED[part])
        value = ours.train_on_batch(X[part], PADDED[part], return_dict=True)["loss"]
        assert value == pytest.approx(expected, rel=TOLERANCE)


REFUSED = {
    "texts": lambda: (X, numpy.array(["a", "b", "c"] * 20)),
    "objects": lambda: (X.astype(object), Y),
    "dates": lambda: (numpy.zeros((60, 6), "datetime64[s]"), Y),
    "categories": lambda: (X, pandas.Series(["a", "b", "c"] * 20).astype("category")),
    "a column of texts": lambda: (polars.DataFrame(X).with_columns(city=polars.lit("a")), Y),
    "longdouble": lambda: (X.astype("longdouble"), Y),
    "lengths": lambda: (X, Y[:50]),
    "samples in a list": lambda: (list(X), Y),
    "missing labels": lambda: (X, numpy.where(Y > 1, numpy.nan, Y)),
    "labels out of range": lambda: (X, Y + 3),
    "both weights": lambda: (X, Y, WEIGHTS, {0: 1.0}),
}


@pytest.mark.parametrize("data", REFUSED)
def test_what_keras_refuses_is_refused(data):
    """Keras in the middle of a batch, at times; here before anything is trained."""
    both = pair(lr=0.1)
    names = ("x", "y", "sample_weight", "class_weight")
    arguments = {**FIT, **dict(zip(names, REFUSED[data]()))}
    before = [value.clone() for value in both.ours.module.state_dict().values()]
    with quiet(), pytest.raises(Exception):  # noqa: B017, PT011 Keras has errors of many kinds
        both.theirs.fit(**arguments)
    with quiet(), pytest.raises(IpufitError):
        both.ours.fit(**arguments)
    for value, now in zip(before, both.ours.module.state_dict().values()):
        assert torch.equal(value, now)


TAKEN = {
    "lists": lambda: (X.tolist(), Y.tolist()),
    "another byte order": lambda: (X.astype(X.dtype.newbyteorder()), Y),
    "uint64": lambda: (SMALL.astype("uint64"), Y.astype("uint64")),
}


@pytest.mark.parametrize("data", TAKEN)
def test_what_keras_refuses_is_taken(data):
    """docs/coming-from-keras.md says so; the numbers are those of plain arrays."""
    both = pair(lr=0.01)
    x, y = TAKEN[data]()
    with quiet():
        with pytest.raises(ValueError, match=r"Unrecognized|byte order|Unsupported"):
            both.theirs.fit(x, y, **FIT)
        plain = {"x": SMALL if data == "uint64" else X, "y": Y}
        expected = both.theirs.fit(**plain, **FIT).history
        assert_close(both.ours.fit(x, y, **FIT).history, expected)


def test_what_is_refused_though_keras_takes_it():
    """Each has a row in docs/coming-from-keras.md: nothing good comes of it."""
    both = pair(lr=0.1)
    missing = pandas.DataFrame(X).where(lambda values: values > 0)
    with quiet():
        for arguments in (
            {"x": missing, "y": Y},
            {"x": X[:0], "y": Y[:0]},
            {"x": X, "y": Y, "sample_weight": -WEIGHTS},
            {"x": X, "y": Y.astype("float32")},
            {"x": generated(), "batch_size": 5, "shuffle": None},
        ):
            with pytest.raises(IpufitError):
                both.ours.fit(**{**FIT, **arguments})
        assert numpy.isnan(both.theirs.fit(missing, Y, **FIT).history["loss"][-1])
