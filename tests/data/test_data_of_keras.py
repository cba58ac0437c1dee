"""Data that Keras takes is taken: other forms, dtypes and shapes than those of module and loss."""

import contextlib
import re
import tracemalloc
import warnings

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import ipufit
from ipufit.errors import ConfigurationError, DataError, NotCompiledError
from tests.engines import EAGER_OR_NOT, embedded_only

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
    model.compile("sgd", loss, metrics=metrics, **options)
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


@pytest.mark.long
def test_validation_data_may_be_a_list():
    """Keras' own examples write both; a list of batches is still one."""
    plain = trained(X, Y, validation_data=(X, Y))
    assert "val_loss" in plain[0]
    assert_equal(trained(X, Y, validation_data=[X, Y]), plain)
    weighted = trained(X, Y, validation_data=(X, Y, np.ones(24, "float32")))
    assert_equal(trained(X, Y, validation_data=[X, Y, np.ones(24, "float32")]), weighted)
    halves = [(X[:8], Y[:8]), (X[8:16], Y[8:16]), (X[16:], Y[16:])]
    assert_equal(trained(X, Y, validation_data=halves), plain)


@pytest.mark.long
def test_several_inputs_and_targets_in_lists_are_validated_on():
    """A list inside of the list is several inputs."""
    parts, target = [X[:, :3], X[:, 3:]], Y % 2
    model = compiled(module=Two())
    model.fit(parts, target, validation_data=[parts, target], **QUIET)
    expected = model.evaluate(tuple(parts), target, verbose=0)
    assert model.history.history["val_loss"][-1] == pytest.approx(expected["loss"])


@pytest.mark.long("ipu-standin")
@pytest.mark.few
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


@pytest.mark.long("ipu-standin")
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


@pytest.mark.long
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


@pytest.mark.long("ipu-standin")
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


NUMBERED = (
    "Number it, all data alike, with numbers = {text: i for i, text in "
    "enumerate(sorted(set(values)))} and [numbers[text] for text in values]; or leave the column "
    "out."
)
MISSING = (
    "must have a number in every row, but 1 of 2 are missing. Fill them, for example with "
    ".{}(0), or leave those rows out{}."
)
TAKES_NAN = "; for a module that takes NaN, pass .to_numpy()"
DATES = "Convert it to numbers first: numpy.asarray(values).astype('int64')."
BAD = {
    "text": (
        lambda pandas: pandas.Series(["a", "b"], dtype=object),
        "text such as 'a' (object)",
        NUMBERED,
    ),
    "category": (
        lambda pandas: pandas.Series(["a", "b"]).astype("category"),
        "text such as 'a' (category)",
        NUMBERED,
    ),
    "numbers as objects": (
        lambda pandas: pandas.Series([1, 2], dtype=object),
        "object",
        "Convert it to one dtype: numpy.asarray(values).astype('float32').",
    ),
    "date": (lambda pandas: pandas.Series(DAYS), "datetime64[ms]", DATES),
    "missing": (lambda pandas: pandas.Series([1, None], dtype="Int64"), None, "fillna"),
    "nan": (lambda pandas: pandas.Series([1.0, None]), None, "fillna"),
}
BAD_IN_POLARS = {
    "text": (lambda polars: polars.Series(["a", "b"]), "text such as 'a' (String)", NUMBERED),
    "category": (
        lambda polars: polars.Series(["a", "b"]).cast(polars.Categorical),
        "text such as 'a' (Categorical)",
        NUMBERED,
    ),
    "date": (lambda polars: polars.Series(DAYS), "Datetime(time_unit='ms', time_zone=None)", DATES),
    "missing": (lambda polars: polars.Series([1, None]), None, "fill_null"),
    "missing bool": (lambda polars: polars.Series([True, None]), None, "fill_null"),
    "nan": (lambda polars: polars.Series([1.0, float("nan")]), None, "fill_null"),
}
DAYS = np.array(["2020-01-01", "2020-01-02"], dtype="datetime64[ms]")


def cured(values, advice):
    """The values, with what an error has advised."""
    if advice == NUMBERED:
        numbers = {text: i for i, text in enumerate(sorted(set(values)))}
        return [numbers[text] for text in values]
    if advice == DATES:
        return np.asarray(values).astype("int64")
    if advice.endswith("('float32')."):
        return np.asarray(values).astype("float32")
    filled = values.fill_nan(None) if "fill_null" in advice and values.dtype.is_float() else values
    return getattr(filled, advice)(0)


@pytest.mark.long("ipu-standin")
@pytest.mark.parametrize(
    ("library", "name"),
    [*(("pandas", name) for name in BAD), *(("polars", name) for name in BAD_IN_POLARS)],
)
def test_what_is_no_number_is_refused_by_its_column(library, name):
    """With what to do, which then works."""
    frames = pytest.importorskip(library)
    make, dtype, advice = (BAD if library == "pandas" else BAD_IN_POLARS)[name]
    takes_nan = TAKES_NAN if name == "nan" else ""
    text = f"must hold numbers, got {dtype}. {advice}"
    text = MISSING.format(advice, takes_nan) if dtype is None else text
    model = compiled("mse", module=nn.Linear(2, 1))
    table = frames.DataFrame({"good": [0.5, 1.5], "bad": make(frames)})
    with pytest.raises(DataError) as caught:
        model.fit(table, Y[:2], verbose=0)
    assert str(caught.value) == f"training data: x: column 'bad' {text}"
    with pytest.raises(DataError) as caught:
        model.evaluate(X[:2, :2], make(frames), verbose=0)
    assert str(caught.value) == f"evaluation data: y {text}"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.predict(X[:2, :2], verbose=0)
        model.evaluate(X[:2, :2], cured(make(frames), advice), verbose=0)
        if takes_nan:
            outputs = model.predict(table.to_numpy().astype("float32"), verbose=0)
            assert outputs.isnan().any()


@pytest.mark.long("ipu-standin")
def test_frames_of_polars_are_arrays():
    """As those of pandas: also in batches, as weights, and with columns of several dtypes."""
    polars = pytest.importorskip("polars")
    x, y, weight = polars.DataFrame(X), polars.Series(Y), np.linspace(0, 1, 24).astype("float32")
    assert_equal(trained(x, y, validation_split=0.25), trained(X, Y, validation_split=0.25))
    model = compiled()
    expected = model.evaluate(X, Y, sample_weight=weight, verbose=0)
    for labels in (y, polars.DataFrame(y)):
        weighted = model.evaluate(x, labels, sample_weight=polars.Series(weight), verbose=0)
        assert weighted == expected
    chunks = [(x[i : i + 8], y[i : i + 8]) for i in (0, 8, 16)]
    assert model.evaluate(chunks, verbose=0) == model.evaluate(X, Y, batch_size=8, verbose=0)
    columns = {"a": X[:, 0], "b": Y.astype("int8"), "c": Y > 1}
    columns.update(d=X[:, 1], e=X[:, 2].astype("float64"), f=Y.astype("uint16"))
    plain = np.stack([np.asarray(column, "float64") for column in columns.values()], 1)
    with only_warned(said("prediction data", INPUT.format("float64"))):
        outputs = model.predict(polars.DataFrame(columns), verbose=0)
        assert torch.equal(outputs, model.predict(plain, verbose=0))


# ---- lists, sparse matrices, other arrays --------------------------------------------------------


@pytest.mark.long("ipu-standin")
def test_lists_of_numbers_are_arrays():
    """Rows written out, however deep, in every place where an array may stand."""
    x, y, weight = X.tolist(), Y.tolist(), np.linspace(0.5, 1, 24, dtype=np.float32).tolist()
    plain = trained(X, Y, validation_data=(X, Y))
    # Nobody has chosen a dtype, so there is nothing to warn of.
    with only_warned():
        assert_equal(trained(x, tuple(y), validation_data=[x, y]), plain)
    with only_warned():
        split = {"validation_split": 0.25}
        assert_equal(trained(x, list(Y), **split), trained(X, Y, **split))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model, options = compiled(), {"verbose": 0}
        weighted = model.evaluate(x, y, sample_weight=weight, **options)
        assert weighted == model.evaluate(X, Y, sample_weight=np.array(weight), **options)
        assert torch.equal(model.predict(x, **options), model.predict(X, **options))
        assert torch.equal(model.predict_on_batch(x), model.predict_on_batch(X))
        assert model.test_on_batch(x, y, weight) == model.test_on_batch(X, Y, np.array(weight))
        assert model.train_on_batch(x, y) == compiled().train_on_batch(X, Y)
        batches = [(x[:12], y[:12]), [x[12:], y[12:]]]
        assert model.evaluate(batches, **options) == model.evaluate(
            [(X[:12], Y[:12]), (X[12:], Y[12:])], **options
        )
        two = compiled(module=Two())
        left, right = X[:, :3], X[:, 3:]
        parts = {"left": left.tolist(), "right": right}
        two.fit(parts, Y % 2, **QUIET)
        expected = two.predict((left, right), **options)
        assert torch.equal(two.predict(parts, **options), expected)


@pytest.mark.parametrize("default", [torch.float32, torch.float64])
def test_a_list_of_numbers_has_the_dtype_that_torch_gives_it(default):
    """That of ``torch.tensor``, of which a module in another dtype is told."""
    try:
        torch.set_default_dtype(default)
        with only_warned(
            *[said("prediction data", INPUT.format("float64"))] * (default is torch.float64)
        ):
            compiled(module=nn.Linear(6, 1, dtype=torch.float32)).predict(X.tolist(), verbose=0)
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.long("ipu-standin")
def test_a_list_of_one_array_is_the_array():
    """As models of one input and one output take it in Keras; also in batches."""
    plain = trained(X, Y, validation_data=(X, Y))
    assert_equal(trained([X], [Y], validation_data=([X], [Y])), plain)
    model = compiled(metrics=["accuracy"])
    expected = model.evaluate(X, Y, batch_size=12, verbose=0)
    assert model.evaluate([([X[:12]], [Y[:12]]), (X[12:], (Y[12:],))], verbose=0) == expected
    # A loss of the user's gets its target as it is.
    own = compiled(lambda prediction, target: nn.functional.cross_entropy(prediction, target[0]))
    assert own.evaluate([X], [Y], batch_size=12, verbose=0)["loss"] == expected["loss"]


@pytest.mark.long("ipu-standin")
@pytest.mark.few
@pytest.mark.parametrize("form", ["csr_matrix", "coo_matrix", "csc_array"])
def test_sparse_matrices_are_made_dense_a_batch_at_a_time(form):
    """As vectorizers of texts make them: dense, they may not fit."""
    sparse = getattr(pytest.importorskip("scipy.sparse"), form)
    x = np.where(X > 0, X, 0)
    assert_equal(trained(sparse(x), Y, validation_split=0.25), trained(x, Y, validation_split=0.25))
    model = compiled()
    assert torch.equal(model.predict(sparse(x), verbose=0), model.predict(x, verbose=0))
    batch = sparse(x[:8])
    assert model.evaluate([(batch, Y[:8])], verbose=0) == model.evaluate(x[:8], Y[:8], verbose=0)
    wide = sparse((24, 200_000), dtype="float32")
    wide_model = compiled(module=nn.Linear(200_000, 3))
    wide_model.predict_on_batch(wide)
    tracemalloc.start()
    try:
        wide_model.predict(wide, batch_size=4, verbose=0)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    # Four rows are 3.2 MB, all of them 19.2 MB.
    assert peak < 12e6


ARRAYS = {
    "read-only": lambda array: np.frombuffer(array.tobytes(), array.dtype).reshape(array.shape),
    "other byte order": lambda array: array.astype(array.dtype.newbyteorder()),
    "Fortran's order": np.asfortranarray,
    "backwards": lambda array: array[::-1].copy()[::-1],
    "matrix": lambda array: array.view(np.matrix) if array.ndim == 2 else array,
}


@pytest.mark.long("ipu-standin")
@pytest.mark.parametrize("kind", ARRAYS)
def test_arrays_of_any_layout_train_to_the_same_bits(kind, tmp_path):
    """Whole, in batches and mapped into memory; torch refuses some, and warns of others."""
    x, y = ARRAYS[kind](X), ARRAYS[kind](Y)
    plain = trained(X, Y)
    with only_warned():
        assert_equal(trained(x, y), plain)
        model = compiled()
        batches = [(x[i : i + 8], y[i : i + 8]) for i in (0, 8, 16)]
        assert model.evaluate(batches, verbose=0) == model.evaluate(X, Y, batch_size=8, verbose=0)
        np.save(tmp_path / "x.npy", np.asarray(x))
        assert_equal(trained(np.load(tmp_path / "x.npy", mmap_mode="r"), y), plain)


class Batches:
    """As a ``keras.utils.PyDataset``, with a record of the calls."""

    num_batches = 3

    def __init__(self):
        self.calls = []

    def __getitem__(self, index):
        self.calls.append(index)
        part = slice(8 * (index % 3), 8 * (index % 3) + 8)
        return X[part], Y[part]

    def on_epoch_begin(self):
        self.calls.append("begin")

    def on_epoch_end(self):
        self.calls.append("end")


@pytest.mark.long("ipu-standin")
def test_batches_by_number_are_read_as_keras_reads_them():
    """In an order of each epoch's own, and between the hooks that reshuffle what they hold."""
    data, again, model = Batches(), Batches(), compiled()
    model.fit(data, epochs=3, seed=0, verbose=0)
    epochs = [data.calls[i : i + 5] for i in (0, 5, 10)]
    assert len(data.calls) == 15
    assert all(calls[0] == "begin" and calls[-1] == "end" for calls in epochs)
    orders = [calls[1:-1] for calls in epochs]
    assert all(sorted(order) == [0, 1, 2] for order in orders)
    assert len(set(map(tuple, orders))) > 1
    compiled().fit(again, epochs=3, seed=0, verbose=0, device_iterations=3)
    assert again.calls == data.calls
    data, plain = Batches(), compiled()
    model = compiled()
    model.fit(data, epochs=2, shuffle=False, validation_data=Batches(), seed=0, verbose=0)
    assert data.calls == ["begin", 0, 1, 2, "end"] * 2
    plain.fit(X, Y, epochs=2, shuffle=False, validation_data=(X, Y), **QUIET)
    assert model.history.history == plain.history.history
    assert model.evaluate(Batches(), verbose=0) == model.evaluate(X, Y, batch_size=8, verbose=0)
    assert torch.equal(model.predict(Batches(), verbose=0), model.predict(X, verbose=0))
    weights = {0: 1.0, 1: 2.0, 2: 3.0}
    values = [
        compiled().fit(*given, shuffle=False, class_weight=weights, **options).history
        for given, options in (((Batches(),), {"seed": 0, "verbose": 0}), ((X, Y), QUIET))
    ]
    assert values[0] == values[1]


@pytest.mark.long("ipu-standin")
def test_batches_by_number_that_never_end_have_steps():
    """Their order is theirs."""
    data = Batches()
    data.num_batches = None
    compiled().fit(data, epochs=2, steps_per_epoch=2, verbose=0)
    assert data.calls == ["begin", 0, 1, 2, 3]


def test_batches_by_number_say_what_does_not_go_with_them():
    """And where they fail, with the line of the user's."""

    class Torn(Batches):
        def __getitem__(self, index):
            raise OSError("no such file")

    model, data = compiled(), Batches()
    with pytest.raises(ConfigurationError, match="batch_size is for tensors"):
        model.fit(data, batch_size=8)
    with pytest.raises(ConfigurationError, match="validation_split is for tensors"):
        model.fit(data, validation_split=0.5)
    assert data.calls == []
    with pytest.raises(DataError, match=r"training data, batch 0: .*OSError: no such file"):
        model.fit(Torn(), verbose=0)
    data.workers, data.use_multiprocessing = 2, True
    text = (
        "training data: the batches of Batches are made one after another in this process, "
        "without its workers=2; they are the same batches. To use worker processes, pass "
        "DataLoader(dataset, batch_size=None, num_workers=2)."
    )
    with only_warned(re.escape(text)):
        model.fit(data, verbose=0)


def test_a_frame_without_columns_is_refused():
    """Its shape alone would be a riddle for the module."""
    pandas = pytest.importorskip("pandas")
    with pytest.raises(DataError) as caught:
        compiled().predict(pandas.DataFrame(index=range(3)), verbose=0)
    assert str(caught.value) == (
        "prediction data: x must have at least one column, got a frame without columns."
    )


# ---- dtypes -------------------------------------------------------------------------------------

START = "has other dtypes than module and loss compute in, so every batch is converted: "
END = ". Convert the data once beforehand to save that work."


def said(role, *changes):
    """The one sentence, as a pattern."""
    return "^" + re.escape(f"{role} {START}{', '.join(changes)}{END}") + "$"


@contextlib.contextmanager
def only_warned(*patterns):
    """Exactly these warnings, in this order."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        # Python's own since 3.12, of workers that are forked beside a thread; hidden by default.
        warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)
        yield
    texts = [str(warning.message) for warning in caught]
    assert len(texts) == len(patterns), texts
    for text, pattern in zip(texts, patterns):
        assert re.match(pattern, text), text
    # The user's line is shown, whatever lies between.
    assert {warning.filename for warning in caught} <= {__file__}


PIXELS = GENERATOR.integers(0, 256, (24, 6)).astype("uint8")
INPUT = "input [0] from {} to float32"
CASES = {
    "float64": (X.astype("float64"), Y, INPUT.format("float64"), X, Y),
    "float16": (X.astype("float16"), Y, INPUT.format("float16"), X.astype("float16"), Y),
    "uint8": (
        PIXELS,
        Y,
        INPUT.format("uint8") + " (the same values, not divided by 255)",
        PIXELS,
        Y,
    ),
    "int64": (PIXELS.astype("int64"), Y, INPUT.format("int64"), PIXELS, Y),
    "bool": (X > 0, Y, INPUT.format("bool"), X > 0, Y),
    "int32 labels": (X, Y.astype("int32"), "target from int32 to int64", X, Y),
    "uint8 labels": (X, Y.astype("uint8"), "target from uint8 to int64", X, Y),
    "bool labels": (X, Y > 0, "target from bool to int64", X, (Y > 0).astype(int)),
    "columns": (X, Y[:, None].astype("int16"), "target from int16 to int64", X, Y),
}
FORMS = {
    "arrays": lambda x, y: ((x, y), {"batch_size": 8, "shuffle": False}),
    "tensors": lambda x, y: (tensors(x, y), {"batch_size": 8, "shuffle": False}),
    "loader": lambda x, y: ((DataLoader(TensorDataset(*tensors(x, y)), 8),), {}),
    "workers": lambda x, y: ((DataLoader(TensorDataset(*tensors(x, y)), 8, num_workers=1),), {}),
    "batches": lambda x, y: (([(x[i : i + 8], y[i : i + 8]) for i in (0, 8, 16)],), {}),
}


def tensors(x, y):
    return torch.from_numpy(np.ascontiguousarray(x)), torch.from_numpy(y)


@pytest.mark.long
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("case", CASES)
def test_other_dtypes_train_to_the_bits_of_the_right_ones(case, form):
    """One sentence names what came and what it is now, but for bools that are targets."""
    x, y, change, plain_x, plain_y = CASES[case]
    data, options = FORMS[form](x, y)
    plain, _ = FORMS[form](plain_x.astype("float32"), plain_y)
    models = [compiled(metrics=["accuracy"]) for _ in range(2)]
    is_small = change.startswith("target from bool")
    with only_warned(*[said("training data", change)] * (not is_small)):
        models[0].fit(*data, epochs=2, **options, seed=0, verbose=0)
    models[1].fit(*plain, epochs=2, **options, seed=0, verbose=0)
    assert_equal(*((m.history.history, m.module.state_dict()) for m in models))
    options.pop("shuffle", None)
    with only_warned():
        values = models[0].evaluate(*data, **options, verbose=0)
    assert values == models[1].evaluate(*plain, **options, verbose=0)


@pytest.mark.long
@pytest.mark.parametrize("eagerly", EAGER_OR_NOT)
def test_all_ways_to_train_and_to_look_take_them(eagerly):
    """Also what is held out, single batches, and predictions, whose targets are left aside."""
    x, y = X.astype("float64"), Y.astype("int32")[:, None]
    change = INPUT.format("float64"), "target from int32 to int64"
    model, plain = (compiled(metrics=["acc"], run_eagerly=eagerly) for _ in range(2))
    with only_warned(said("training data", *change)):
        model.fit(x, y, validation_data=(x, y), epochs=2, **QUIET)
    plain.fit(X, Y, validation_data=(X, Y), epochs=2, **QUIET)
    assert model.history.history == plain.history.history
    model, plain = (compiled(metrics=["acc"], run_eagerly=eagerly) for _ in range(2))
    with only_warned(said("batch", *change)):
        found = [model.train_on_batch(x[:8], y[:8]) for _ in range(3)]
        found.append(model.test_on_batch(x, y))
    expected = [plain.train_on_batch(X[:8], Y[:8]) for _ in range(3)]
    assert found == [*expected, plain.test_on_batch(X, Y)]
    with only_warned(said("prediction data", change[0])):
        assert torch.equal(model.predict(x, verbose=0), plain.predict(X, verbose=0))
    with only_warned():
        assert torch.equal(torch.cat(list(model.predict_iter(x))), plain.predict(X, verbose=0))


@pytest.mark.long
@pytest.mark.parametrize(
    ("loss", "outputs"),
    [
        ("mse", 1),
        ("bce_with_logits", 1),
        (nn.L1Loss(), 1),
        (nn.functional.smooth_l1_loss, 1),
        (lambda prediction, target: (prediction - target).square().mean(), 1),
        ("cross_entropy", 3),
    ],
    ids=["mse", "bce", "module", "function", "callable", "probabilities"],
)
def test_float64_targets_come_in_float32(loss, outputs):
    """A loss in float64 would be another number than with the same data in float32."""
    target = GENERATOR.random((24, outputs))
    plain = trained(X, target.astype("float32"), loss, outputs=outputs)
    with only_warned(said("training data", "target from float64 to float32")):
        assert_equal(trained(X, target, loss, outputs=outputs), plain)


@pytest.mark.long
@pytest.mark.parametrize("dtype", ["int64", "uint8", "bool"])
@pytest.mark.parametrize("loss", ["mse", "bce_with_logits", nn.BCEWithLogitsLoss()], ids=repr)
def test_whole_targets_of_a_loss_over_values_become_floating_point(dtype, loss):
    """As labels of two classes come, of shape (samples,) beside outputs of shape (samples, 1)."""
    labels = (Y > 0).astype(dtype)
    plain = trained(X, labels.astype("float32")[:, None], loss, ["mae"], outputs=1)
    sentence = said("training data", f"target from {dtype} to float32")
    with only_warned(*[sentence] * (dtype != "bool")):
        assert_equal(trained(X, labels, loss, ["mae"], outputs=1), plain)


def test_a_conversion_is_said_once_for_a_model_and_of_bools_that_are_targets_never(capsys):
    """``y > 0`` is as small as a target can be; what else is converted is named without it."""
    model, x = compiled("bce_with_logits", outputs=1), X.astype("float64")
    with only_warned():
        model.fit(X, Y[:, None] > 0, **QUIET)
        model.evaluate(X, Y[:, None] > 0, verbose=0)
    model.explain()
    assert "Training data is converted: target from bool to float32." in capsys.readouterr().out
    with only_warned(said("training data", INPUT.format("float64"))):
        model.fit(x, Y[:, None] > 0, **QUIET)
        model.fit(x, Y[:, None] > 0, **QUIET)
    model.compile("sgd", "bce_with_logits")
    with only_warned(said("training data", INPUT.format("float64"))):
        model.fit(x, Y[:, None] > 0, **QUIET)


@pytest.mark.long
def test_each_of_several_losses_gets_what_it_takes():
    """By name and by position."""

    class Heads(nn.Module):
        def __init__(self, by_name):
            super().__init__()
            torch.manual_seed(0)
            self.kind, self.value = nn.Linear(6, 3), nn.Linear(6, 1)
            self.by_name = by_name

        def forward(self, x):
            outputs = self.kind(x), self.value(x)
            return dict(zip(("kind", "value"), outputs)) if self.by_name else outputs

    losses, targets = ("cross_entropy", "mse"), (Y.astype("int32"), Y % 2)
    plain = Y, (Y % 2).astype("float32")[:, None]
    for by_name, changes in (
        (True, ("target['kind'] from int32 to int64", "target['value'] from int64 to float32")),
        (False, ("target[0] from int32 to int64", "target[1] from int64 to float32")),
    ):

        def form(parts, by_name=by_name):
            return dict(zip(("kind", "value"), parts)) if by_name else list(parts)

        expected = trained(X, form(plain), form(losses), module=Heads(by_name))
        with only_warned(said("training data", *changes)):
            found = trained(X, form(targets), form(losses), module=Heads(by_name))
        assert_equal(found, expected)


class Embedded(nn.Module):
    """Takes indices."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.table, self.head = nn.Embedding(10, 4), nn.Linear(4, 3)

    def forward(self, x):
        return self.head(self.table(x).mean(1))


class Scaled(nn.Module):
    """Knows pictures of bytes from others, as torchvision's ToDtype does."""

    def __init__(self):
        super().__init__()
        self.head = net()

    def forward(self, x):
        return self.head(x.float() / 255 if x.dtype == torch.uint8 else x)


@pytest.mark.long("ipu-standin")
@pytest.mark.few
@pytest.mark.parametrize(
    ("module", "x"),
    [
        (Embedded, GENERATOR.integers(0, 10, (24, 5))),
        (Embedded, GENERATOR.integers(0, 10, (24, 5)).astype("int32")),
        (Scaled, PIXELS),
    ],
    ids=["int64", "int32", "uint8"],
)
def test_whole_numbers_that_forward_takes_stay(module, x):
    """A module that runs with them runs with nothing else, and nothing is said."""
    model = compiled(module=module())
    with only_warned():
        model.fit(x, Y, **QUIET)
        outputs = model.predict(x, verbose=0)
    with torch.no_grad():
        assert torch.allclose(outputs, model.module(torch.from_numpy(x)), atol=1e-6)


@pytest.mark.long
@embedded_only("a device computes in float32 at most")
def test_a_module_in_float64_keeps_float64():
    """And brings narrower inputs to it."""
    with only_warned():
        wide = trained(X.astype("float64"), Y, module=net().double())
    with only_warned(said("training data", "input [0] from float32 to float64")):
        assert_equal(trained(X, Y, module=net().double()), wide)
    assert wide[1]["0.weight"].dtype == torch.float64


@pytest.mark.long
def test_precision_says_in_what_dtype_inputs_come():
    """Who asks for a dtype need not be told of it."""
    with only_warned():
        found = trained(X.astype("float64"), Y, precision="float32")
    assert_equal(found, trained(X, Y))


@pytest.mark.long
@embedded_only("PopTorch has no module of several dtypes")
def test_a_module_of_several_dtypes_gets_its_data_as_it_is():
    """Nobody but forward knows which is meant."""

    class Mixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.wide, self.head = nn.Linear(6, 6).double(), nn.Linear(6, 3)

        def forward(self, x):
            assert x.dtype == torch.float64
            return self.head(self.wide(x).float())

    with only_warned():
        trained(X.astype("float64"), Y, module=Mixed())


@pytest.mark.long
def test_a_module_with_a_loss_of_its_own_takes_them_too():
    """Which of its inputs is a target, forward alone knows."""

    class Own(nn.Module):
        def __init__(self):
            super().__init__()
            self.head = net()

        def forward(self, x, labels):
            outputs = self.head(x)
            return outputs, nn.functional.cross_entropy(outputs, labels)

    for x, y, changes in (
        (X.astype("float64"), Y, ["input [0] from float64 to float32"]),
        (X, Y.astype("int32"), ["input [1] from int32 to int64"]),
        (
            PIXELS.astype("int64"),
            Y.astype("int32"),
            ["input [0] from int64 to float32", "input [1] from int32 to int64"],
        ),
    ):
        plain = trained(x.astype("float32"), Y, None, module=Own())
        with only_warned(said("training data", *changes)):
            assert_equal(trained(x, y, None, module=Own()), plain)


@pytest.mark.long
def test_a_loss_of_the_users_gets_class_indices_that_torch_takes():
    """What it does with int32 nobody knows before it has failed."""

    def loss(prediction, target):
        return nn.functional.cross_entropy(prediction, target)

    with only_warned(said("training data", "target from int32 to int64")):
        assert_equal(trained(X, Y.astype("int32"), loss), trained(X, Y, loss))
    with only_warned():
        shifted = lambda prediction, target: loss(prediction, target.long())  # noqa: E731
        trained(X, Y.astype("int32"), shifted)


@pytest.mark.long("ipu-standin")
def test_a_fault_of_another_kind_is_told_as_it_was():
    """The second attempt is no reason to tell of what only it has seen."""

    class Narrow(nn.Module):
        def __init__(self):
            super().__init__()
            self.head = nn.Linear(5, 3)

        def forward(self, x):
            if x.is_floating_point():
                raise ValueError("forward got floating point")
            return self.head(x.float())

    with only_warned(), pytest.raises(Exception, match=r"shape|dim") as caught:
        trained(PIXELS, Y, module=Narrow())
    assert "floating point" not in str(caught.value)


@pytest.mark.long
def test_a_mapped_array_is_converted_a_batch_at_a_time(tmp_path):
    """As it is read: the whole in another dtype would not fit."""
    array = np.lib.format.open_memmap(
        tmp_path / "large.npy", mode="w+", dtype=np.float64, shape=(20000, 128)
    )
    array.flush()
    model = compiled("mse", module=nn.Linear(128, 1))
    target = np.zeros(20000)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.fit(array, target, batch_size=16, steps_per_epoch=2, verbose=0)
        tracemalloc.start()
        try:
            model.fit(array, target, batch_size=16, verbose=0)
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
    # 20 MB of data; NumPy tells tracemalloc of every array that it allocates.
    assert peak < 4e6


@pytest.mark.long
def test_what_looks_into_a_model_sees_the_dtypes_of_fit(capsys):
    """A warning of float64 would be about something that is not so."""
    model = compiled()
    x, y = X.astype("float64"), Y.astype("int32")
    assert not model.check((x, y))
    model.summary((x, y))
    assert "float64" not in capsys.readouterr().out


def test_explain_says_what_came_in_other_dtypes(capsys):
    """After the warnings have scrolled away; of each kind of data, what happened last."""
    model = compiled()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.fit(X.astype("float64"), Y.astype("int8"), validation_data=(X, Y > 1), **QUIET)
        model.predict(X.astype("float16"), verbose=0)
    model.explain()
    lines = [line for line in capsys.readouterr().out.splitlines() if "converted" in line]
    assert lines == [
        "Training data is converted: input [0] from float64 to float32, target from int8 to int64.",
        "Validation data is converted: target from bool to int64.",
        "Prediction data is converted: input [0] from float16 to float32.",
    ]
    model.fit(X, Y, **QUIET)
    model.explain()
    assert "Training data is converted" not in capsys.readouterr().out
