"""Data that Keras takes is taken: other forms, dtypes and shapes than those of module and loss."""

import numpy as np
import pytest
import torch
from torch import nn

import ipufit
from ipufit.errors import DataError, NotCompiledError

GENERATOR = np.random.default_rng(0)
X = GENERATOR.standard_normal((24, 6)).astype("float32")
Y = GENERATOR.integers(0, 3, 24)
VALUES = GENERATOR.standard_normal((24, 1)).astype("float32")
QUIET = {"batch_size": 8, "seed": 0, "verbose": 0}


class Two(nn.Module):
    """Two inputs by position."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(6, 2)

    def forward(self, left, right):
        return self.head(torch.cat([left, right], 1))


def net(outputs=3):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, outputs))


def compiled(loss="cross_entropy", metrics=None, module=None, outputs=3, **options):
    model = ipufit.Model(net(outputs) if module is None else module)
    model.compile("sgd", loss, metrics, **options)
    return model


def trained(x, y, *args, **options):
    """History and weights after two epochs."""
    fitted = {
        name: options.pop(name)
        for name in ("validation_data", "validation_split")
        if name in options
    }
    model = compiled(*args, **options)
    model.fit(x, y, epochs=2, **fitted, **QUIET)
    return model.history.history, model.module.state_dict()


def assert_equal(first, second):
    """To the last bit."""
    assert first[0] == second[0]
    assert all(torch.equal(value, second[1][name]) for name, value in first[1].items())


# ---- forms --------------------------------------------------------------------------------------


def test_validation_data_may_be_a_list():
    """Keras' own examples write both; a list of batches is still one."""
    plain = trained(X, Y, validation_data=(X, Y))
    assert "val_loss" in plain[0]
    assert_equal(trained(X, Y, validation_data=[X, Y]), plain)
    weighted = trained(X, Y, validation_data=(X, Y, np.ones(24, "float32")))
    assert_equal(trained(X, Y, validation_data=[X, Y, np.ones(24, "float32")]), weighted)
    halves = [(X[:8], Y[:8]), (X[8:16], Y[8:16]), (X[16:], Y[16:])]
    assert_equal(trained(X, Y, validation_data=halves), plain)


def test_several_inputs_and_targets_in_lists_are_validated_on():
    """A list inside of the list is several inputs."""
    parts, target = [X[:, :3], X[:, 3:]], Y % 2
    model = compiled(module=Two())
    model.fit(parts, target, validation_data=[parts, target], **QUIET)
    expected = model.evaluate(tuple(parts), target, verbose=0)
    assert model.history.history["val_loss"][-1] == pytest.approx(expected["loss"])


@pytest.mark.parametrize("method", ["predict", "predict_iter"])
@pytest.mark.parametrize("kind", [tuple, list])
def test_several_inputs_are_predicted_by_position(method, kind):
    """As fit takes them; a module that takes one input has no use for two."""
    model = compiled(module=Two())
    parts = kind([torch.from_numpy(X[:, :3]), X[:, 3:]])
    outputs = getattr(model, method)(parts, batch_size=8)
    outputs = outputs if method == "predict" else torch.cat(list(outputs))
    assert torch.equal(outputs, model.predict({"left": X[:, :3], "right": X[:, 3:]}, verbose=0))
    batches = compiled().predict([torch.from_numpy(X[:12]), torch.from_numpy(X[12:])], verbose=0)
    assert torch.equal(batches, compiled().predict(X, verbose=0))


def test_predict_needs_no_compile():
    """Outputs depend on neither optimizer nor loss."""
    model = ipufit.Model(net())
    outputs = model.predict(X, verbose=0)
    assert torch.equal(outputs, compiled().predict(X, verbose=0))
    assert torch.equal(torch.cat(list(model.predict_iter(X, batch_size=8))), outputs)
    assert torch.equal(model.predict_on_batch(X), outputs)
    # Nothing is compiled by that: what needs a loss still says so.
    for method in ("evaluate", "fit", "test_on_batch", "train_on_batch"):
        with pytest.raises(NotCompiledError):
            getattr(model, method)(X, Y)
    with torch.no_grad():
        model.module[0].weight.zero_()
    assert not torch.equal(model.predict(X, verbose=0), outputs)
    model.compile("sgd", "cross_entropy")
    model.fit(X, Y, **QUIET)
    assert model.predict(X, verbose=0).shape == (24, 3)
    model.close()
    assert model.predict(X, verbose=0).shape == (24, 3)


# ---- pandas -------------------------------------------------------------------------------------


def frame(**columns):
    return pytest.importorskip("pandas").DataFrame(columns)


def test_frames_and_series_are_arrays():
    """The index is no data, whatever it is."""
    pandas = pytest.importorskip("pandas")
    x = pandas.DataFrame(X, columns=list("abcdef"), index=range(100, 124))
    y = pandas.Series(Y, index=range(24, 0, -1))
    weight = pandas.Series(np.linspace(0, 1, 24).astype("float32"))
    plain = trained(X, Y, validation_split=0.25)
    assert_equal(trained(x, y, validation_split=0.25), plain)
    assert_equal(trained(x, y, validation_data=(x, y)), trained(X, Y, validation_data=(X, Y)))
    model = compiled()
    for value in (x, {"input": x}):
        assert torch.equal(model.predict(value, verbose=0), model.predict(X, verbose=0))
    weights = {"sample_weight": weight}, {"sample_weight": weight.to_numpy()}
    assert model.evaluate(x, y, **weights[0], verbose=0) == model.evaluate(
        X, Y, **weights[1], verbose=0
    )
    assert model.test_on_batch(x, y, weight) == model.test_on_batch(X, Y, weight.to_numpy())
    chunks = [(x[i : i + 8], y[i : i + 8]) for i in (0, 8, 16)]
    assert model.evaluate(chunks, verbose=0) == model.evaluate(X, Y, batch_size=8, verbose=0)


def test_columns_of_several_dtypes_become_one():
    """pandas would make an array of objects of some of them."""
    pandas = pytest.importorskip("pandas")
    columns = {
        "a": X[:, 0],
        "b": Y.astype("int8"),
        "c": Y > 1,
        "d": pandas.array(Y, dtype="Int16"),
        "e": pandas.array(X[:, 1], dtype="Float32"),
        "f": pandas.array(Y > 0, dtype="boolean"),
    }
    plain = np.stack([np.asarray(column, dtype="float32") for column in columns.values()], 1)
    assert torch.equal(
        compiled().predict(pandas.DataFrame(columns), verbose=0),
        compiled().predict(plain, verbose=0),
    )


BAD = {
    "text": (
        lambda pandas: pandas.Series(["a", "b"], dtype=object),
        "must hold numbers, got object. Turn it into numbers first, such as "
        ".astype('category').cat.codes, or leave it out.",
    ),
    "category": (
        lambda pandas: pandas.Series(["a", "b"]).astype("category"),
        "must hold numbers, got category. Turn it into numbers first, such as "
        ".astype('category').cat.codes, or leave it out.",
    ),
    "missing": (
        lambda pandas: pandas.Series([1, None], dtype="Int64"),
        "must have a number in every row, but 1 of 2 are missing. Fill them, such as .fillna(0), "
        "or leave such rows out.",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_what_is_no_number_is_refused_by_its_column(name):
    """With what to do, which then works."""
    pandas = pytest.importorskip("pandas")
    make, text = BAD[name]
    model = compiled(module=nn.Linear(2, 3))
    table = pandas.DataFrame({"good": [0.5, 1.5], "bad": make(pandas)})
    with pytest.raises(DataError) as caught:
        model.fit(table, Y[:2], verbose=0)
    assert str(caught.value) == f"training data: x: column 'bad' {text}"
    with pytest.raises(DataError) as caught:
        model.evaluate(X[:2, :2], make(pandas), verbose=0)
    assert str(caught.value) == f"evaluation data: y {text}"
    bad = table["bad"]
    mended = bad.fillna(0) if name == "missing" else bad.astype("category").cat.codes
    model.fit(table.assign(bad=mended).astype("float32"), Y[:2], verbose=0)
    model.fit(table.drop(columns="bad").assign(more=1.0).astype("float32"), Y[:2], verbose=0)


def test_a_frame_without_columns_is_refused():
    """Its shape alone would be a riddle for the module."""
    pandas = pytest.importorskip("pandas")
    with pytest.raises(DataError) as caught:
        compiled().predict(pandas.DataFrame(index=range(3)), verbose=0)
    assert str(caught.value) == (
        "prediction data: x must have a column, got a frame without any. Pass at least one."
    )
