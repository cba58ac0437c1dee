"""Tensors and arrays that can't be trained on: refused as fit starts, with the part by name."""

import warnings

import numpy as np
import numpy.lib.recfunctions as rfn
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, TensorDataset

import ipufit
from ipufit.errors import ConfigurationError, DataError
from tests.faulty import Samples, Stream, Told, Watched, batches, compiled, fit, refused

X, Y = batches(1, 8)[0]


class Frame:
    """Neither a tensor nor an array."""


class Table:
    """As those of pandas: an iterable of column names."""

    def __iter__(self):
        return iter(["a", "b"])

    def to_numpy(self):
        return X.numpy()


class Sparse:
    """As those of SciPy: an iterable of rows."""

    def __iter__(self):
        return iter(X)

    def toarray(self):
        return X.numpy()


CASES = {
    "lengths": (
        (X, Y[:5]),
        "all parts must have the same number of samples, but x has 8 and y has 5. Every part "
        "needs one row for each sample.",
    ),
    "inputs": (
        ({"a": X, "b": X[:3]}, Y),
        "all parts must have the same number of samples, but x['a'] has 8 and x['b'] has 3. "
        "Every part needs one row for each sample.",
    ),
    "weights": (
        (X, Y, torch.ones(7)),
        "all parts must have the same number of samples, but x has 8 and sample_weight has 7. "
        "Every part needs one row for each sample.",
    ),
    "empty": ((X[:0], Y[:0]), "x has no samples. Pass at least one."),
    "scalar": (
        (X, torch.tensor(1.0)),
        "y must have the samples along its first dimension, got a scalar. Pass one row per "
        "sample; torch.stack turns a list of tensors into one tensor.",
    ),
    "grad": (
        (X.clone().requires_grad_(), Y),
        "x must not require grad, but it does: gradients stop at the program's inputs. Pass "
        "x.detach().",
    ),
    "number": (
        (X, 1),
        "y must be a tensor or an array with one row per sample, got int. Pass one value for each "
        "sample.",
    ),
    "scalars": (
        (X, list(Y[:, 0])),
        "y[0] must have the samples along its first dimension, got a scalar. Pass one row per "
        "sample; torch.stack turns a list of tensors into one tensor.",
    ),
    "samples": (
        (list(X), Y),
        "all parts must have the same number of samples, but x[0] has 4 and y has 8. A list holds "
        "one array per input; turn samples into one with numpy.stack.",
    ),
    "ragged rows": (
        ([[1.0, 2.0], [3.0]], Y[:2]),
        "x must have rows of equal length, got a list of rows of different lengths. Pad them, "
        "or pass batches whose rows have equal length.",
    ),
    "texts": (
        (X, ["cat", "dog"] * 4),
        "y must hold numbers, got text such as 'cat' (<U3). Number it, all data alike, with "
        "numbers = {text: i for i, text in enumerate(sorted(set(values)))} and [numbers[text] for "
        "text in values]; or leave the column out.",
    ),
    "rows of several lengths": (
        (X, np.array([[1.0, 2.0], *[[3.0]] * 7], dtype=object)),
        "y must hold numbers, got object. Give each sample a number, or as many as all others, in "
        "one array.",
    ),
    "bags and offsets": (
        ((torch.arange(20) % 4, torch.arange(0, 16, 2)), Y),
        "all parts must have the same number of samples, but x[0] has 20 and x[1] has 8. If x[1] "
        "are the offsets of an EmbeddingBag, pad the bags instead: nn.EmbeddingBag(..., "
        "padding_idx=0) takes indices of shape (batch, length).",
    ),
    "frame": (
        ({"x": Frame()}, Y),
        "x['x'] must be a tensor or an array with one row per sample, got Frame. Pass its numbers, "
        "such as numpy.asarray(...).",
    ),
    "masked": (
        (np.ma.masked_array(X.numpy(), X.numpy() > 0), Y),
        "x must have no masked values, got a masked array, whose hidden values would be used "
        "for training. Pass x.filled(value), or leave those rows out.",
    ),
    "sparse": (
        ({"a": X.to_sparse()}, Y),
        "x['a'] must be dense, got a tensor of layout torch.sparse_coo. Pass x['a'].to_dense(), "
        "or a DataLoader that makes dense batches.",
    ),
    "table": (
        (Table(), Y),
        "x must be a tensor or an array with one row per sample, got Table. Pass its numbers, such "
        "as .to_numpy().",
    ),
    "table of targets": (
        (X, Table()),
        "y must be a tensor or an array with one row per sample, got Table. Pass its numbers, such "
        "as .to_numpy().",
    ),
    "sparse matrix": (
        (Sparse(), Y),
        "x must be a tensor or an array with one row per sample, got Sparse. Pass its numbers, "
        "such as .toarray().",
    ),
    "nothing": (((), Y), "x holds no tensor or array. Pass at least one."),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("role", ["training", "evaluation", "validation"])
def test_arrays_that_cannot_be_fed_are_named(name, role):
    """Nothing is built, and nothing is different afterwards."""
    arrays, text = CASES[name]
    engine = Watched()
    model = compiled(engine=lambda: engine)
    told = Told()
    weight = dict(zip(["sample_weight"], arrays[2:]))
    with refused(model, DataError, f"{role} data: {text}"):
        if role == "training":
            model.fit(*arrays[:2], **weight, seed=7, callbacks=told, verbose=0)
        elif role == "validation":
            fit(model, validation_data=arrays, callbacks=told)
        else:
            model.evaluate(*arrays[:2], **weight, callbacks=told, verbose=0)
    assert engine.built == 0
    assert told.hooks == []


NAMES = np.array(["b", "a", "c", "a"] * 2)
DAYS = np.array(["2020-01-01", "2020-01-02"] * 4, dtype="datetime64[D]")
PAIRS = np.array([(1.0, 2.0)] * 8, dtype=[("a", "f4"), ("b", "f4")])


def numbered(values):
    """The values as an error advises to number them."""
    numbers = {text: i for i, text in enumerate(sorted(set(values)))}
    return [numbers[text] for text in values]


NUMBERED = (
    "Number it, all data alike, with numbers = {text: i for i, text in "
    "enumerate(sorted(set(values)))} and [numbers[text] for text in values]; or leave the column "
    "out.",
    numbered,
)
DTYPES = {
    "strings": (NAMES, "text such as 'b' (<U1)", *NUMBERED),
    "objects": (NAMES.astype(object), "text such as 'b' (object)", *NUMBERED),
    "numbers as objects": (
        Y[:, :1].numpy().astype(object),
        "object",
        "Convert it to one dtype: numpy.asarray(values).astype('float32').",
        lambda values: np.asarray(values).astype("float32"),
    ),
    "dates": (
        DAYS,
        "datetime64[D]",
        "Convert it to numbers first: numpy.asarray(values).astype('int64').",
        lambda values: np.asarray(values).astype("int64"),
    ),
    "structured": (
        PAIRS,
        "[('a', '<f4'), ('b', '<f4')]",
        "Pass numpy.lib.recfunctions.structured_to_unstructured(values).",
        lambda values: rfn.structured_to_unstructured(values),
    ),
}


@pytest.mark.parametrize("case", DTYPES)
def test_dtypes_that_are_no_numbers_are_refused(case):
    """With what helps, which then does."""
    array, dtype, cure, cured = DTYPES[case]
    model = compiled(torch.nn.Linear(4, 2 if case == "structured" else 1))
    text = f"y must hold numbers, got {dtype}. {cure}"
    with refused(model, DataError, f"training data: {text}"):
        model.fit(X, array, seed=7, verbose=0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.fit(X, cured(array), seed=7, verbose=0)


def test_a_dtype_that_torch_does_not_know_is_refused():
    """With one that it does."""
    if np.dtype("longdouble") == np.dtype("float64"):
        pytest.skip("longdouble is float64 here")
    model = compiled()
    text = "training data: x must have a dtype that torch knows, got float128: "
    with refused(model, DataError, text, part=True) as caught:
        model.fit(X.numpy().astype("longdouble"), Y, seed=7, verbose=0)
    assert str(caught.value).endswith("Convert it, for example with array.astype('float32').")


@pytest.mark.long("ipu-standin")
def test_complex_targets_are_refused_where_a_loss_cannot_take_them():
    """Found out before the first update."""
    engine = Watched()
    for loss in ("mse", "cross_entropy"):
        model = compiled(loss=loss, engine=lambda: engine)
        with pytest.raises(Exception, match="target") as caught:
            fit(model, X, y=Y.to(torch.complex64), batch_size=4)
        assert "complex64" in str(caught.value)
        assert model._session.updates == 0


class Unsized(Dataset):
    """A map-style dataset that does not say how long it is."""

    def __getitem__(self, index):
        return X[index], Y[index]


def test_a_dataset_without_a_length_is_refused():
    """There are no indices to pick."""
    model = compiled()
    text = (
        "training data: the dataset Unsized must have __len__, so that samples can be selected "
        "by index. Add it, or derive from torch.utils.data.IterableDataset."
    )
    with refused(model, DataError, text):
        fit(model, Unsized())


@pytest.mark.parametrize(
    "make",
    [
        lambda: Samples([]),
        lambda: Stream([]),
        lambda: DataLoader(Stream([]), batch_size=4),
    ],
    ids=["dataset", "stream", "loader"],
)
def test_datasets_without_samples_are_refused(make):
    """Zero updates would look like a finished training."""
    model = compiled()
    text = (
        "training data must yield at least one batch, but it is empty. Check the dataset's length "
        "and the sampler."
    )
    with refused(model, DataError, text):
        fit(model, make())


@pytest.mark.long("ipu-standin")
def test_predict_refuses_a_tuple_of_arrays():
    """It could be inputs and target, or two inputs."""
    model = compiled()
    text = (
        "prediction data must be one input, or all inputs that Net.forward takes (x), got a tuple "
        "of 2 tensors or arrays. Pass the input by itself and without a target, predict(x); "
        "batches as a list, predict([(first,), (second,)])."
    )
    with refused(model, DataError, text):
        model.predict((X, Y), verbose=0)
    with refused(model, ConfigurationError, "batch_size must be an integer", part=True):
        model.predict(X, Y, verbose=0)
    assert model.predict({"x": X}, verbose=0).shape == (8, 3)
    assert model.predict(X.numpy(), batch_size=3, verbose=0).shape == (8, 3)


@pytest.mark.parametrize(
    ("data", "kind"),
    [
        (torch.zeros(8, 4), "Tensor"),
        (np.zeros((8, 4)), "ndarray"),
        ([[0.0, 1.0], [1.0, 0.0]], "list"),
        ({"x": torch.zeros(8, 4)}, "dict"),
        (TensorDataset(torch.zeros(8, 4)), "TensorDataset"),
        ("runs/1", "str"),
    ],
)
@pytest.mark.both_engines
def test_sharded_refuses_what_each_process_reads_its_part_of(data, kind):
    """It would be cut twice: each process would train on its part of its part."""
    refused_text = (
        f"Sharded takes an iterable of this process's batches, such as a DataLoader, got {kind}. "
        "Pass tensors, arrays and datasets directly: each process reads its part of them."
    )
    with pytest.raises(DataError) as caught:
        ipufit.Sharded(data)
    assert str(caught.value) == refused_text


def test_sharded_batches_have_their_targets_within():
    """With y, a list would be one of arrays, which ipufit divides itself."""
    model = compiled()
    batches = [(torch.zeros(4, 4), torch.zeros(4, 3))]
    with pytest.raises(ConfigurationError) as caught:
        model.fit(ipufit.Sharded([torch.zeros(4, 4)]), torch.zeros(4, 3), verbose=0)
    assert str(caught.value) == (
        "y is for tensors and arrays, but the training data comes from a list, which yields all "
        "parts of a sample. Let it yield (inputs, target) or (inputs, target, sample_weight)."
    )
    assert model.fit(ipufit.Sharded(batches), verbose=0).epoch == [0]
