"""Tensors and arrays that can't be trained on: refused as fit starts, with the part by name."""

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from ipufit.errors import DataError
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


KNOWN = "Turn it into numbers first, such as class indices."
CASES = {
    "lengths": (
        (X, Y[:5]),
        "all parts must have the same number of samples, but x has 8 and y has 5. Pass one row for "
        "each sample in every part.",
    ),
    "inputs": (
        ({"a": X, "b": X[:3]}, Y),
        "all parts must have the same number of samples, but x['a'] has 8 and x['b'] has 3. Pass "
        "one row for each sample in every part.",
    ),
    "weights": (
        (X, Y, torch.ones(7)),
        "all parts must have the same number of samples, but x has 8 and sample_weight has 7. Pass "
        "one row for each sample in every part.",
    ),
    "empty": ((X[:0], Y[:0]), "x has no samples. Pass at least one."),
    "scalar": (
        (X, torch.tensor(1.0)),
        "y must have the samples along its first dimension, got a scalar. Give one row per sample.",
    ),
    "grad": (
        (X.clone().requires_grad_(), Y),
        "x must not require grad, but it does: gradients stop at the program's inputs. Pass "
        "x.detach().",
    ),
    "numbers": (
        (X, [0, 1, 2, 0, 1, 2, 0, 1]),
        "y[0] must be a tensor or an array with one row per sample, got the number 0. Make one "
        "tensor of the list: torch.tensor(y).",
    ),
    "rows": (
        ([[1.0, 2.0], [3.0, 4.0]], Y),
        "x[0][0] must be a tensor or an array with one row per sample, got the number 1.0. Make "
        "one tensor of the list: torch.tensor(x).",
    ),
    "frame": (
        ({"x": Frame()}, Y),
        "x['x'] must be a tensor or a NumPy array, got Frame. Pass its numbers, such as "
        ".to_numpy(), or torch.tensor(...) of them.",
    ),
    "masked": (
        (np.ma.masked_array(X.numpy(), X.numpy() > 0), Y),
        "x must have a value everywhere, got a masked array, whose hidden values would be trained "
        "on. Pass x.filled(value), or leave such rows out.",
    ),
    "sparse": (
        ({"a": X.to_sparse()}, Y),
        "x['a'] must be dense, got a tensor of layout torch.sparse_coo. Pass x['a'].to_dense(), or "
        "a DataLoader that makes dense batches of it.",
    ),
    "table": (
        (Table(), Y),
        "x must be a tensor or a NumPy array, got Table. Pass its numbers, such as .to_numpy(), or "
        "torch.tensor(...) of them.",
    ),
    "table of targets": (
        (X, Table()),
        "y must be a tensor or a NumPy array, got Table. Pass its numbers, such as .to_numpy(), or "
        "torch.tensor(...) of them.",
    ),
    "sparse matrix": (
        (Sparse(), Y),
        "x must be a tensor or a NumPy array, got Sparse. Pass its numbers, such as .toarray().",
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


@pytest.mark.parametrize(
    "array",
    [
        np.array(["a"] * 8),
        np.array([object()] * 8),
        np.array([[1], [1, 2]] * 4, dtype=object),
        np.array(["2020-01-01"] * 8, dtype="datetime64[D]"),
    ],
    ids=["strings", "objects", "ragged", "dates"],
)
def test_dtypes_that_are_no_numbers_are_refused(array):
    """torch's own text says nothing about which array it was."""
    model = compiled()
    text = f"training data: y must have a dtype that torch knows, got {array.dtype}: "
    with refused(model, DataError, text, part=True) as caught:
        model.fit(X, array, seed=7, verbose=0)
    assert str(caught.value).endswith(KNOWN)
    swapped = Y.numpy().astype(">f4")
    with refused(
        model, DataError, "y must have a dtype that torch knows, got >f4: ", part=True
    ) as (caught):
        model.fit(X, swapped, seed=7, verbose=0)
    assert str(caught.value).endswith(
        "Turn it into numbers of one dtype, such as array.astype('float32')."
    )


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
        "training data: the dataset Unsized must have __len__, so that its samples can be picked "
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
    with refused(model, DataError, "prediction data must say what each part is", part=True):
        model.predict((X, Y), verbose=0)
    assert model.predict({"x": X}, verbose=0).shape == (8, 3)
    assert model.predict(X.numpy(), batch_size=3, verbose=0).shape == (8, 3)
