"""Data that is no loader, or yields nothing: refused before a program is built."""

import pytest
from torch.utils.data import DataLoader, TensorDataset

import ipufit
from ipufit import poptorch
from ipufit.errors import DataError
from tests.faulty import (
    EMPTY,
    Batches,
    Stream,
    Told,
    Watched,
    assert_clean,
    assert_same_bits,
    batches,
    compiled,
    fit,
    loader,
    refused,
    state,
)

X, Y = batches(1, 8)[0]
AGAIN = "Pass an object whose __iter__ starts again, such as a DataLoader or a list of batches."
LOADER = (
    "training data must be tensors, arrays, a dataset, a DataLoader or an iterable of batches, got "
)


# ---- what is no loader --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("x", "text"),
    [
        *(
            (
                pair,
                "training data must say what each part is, got a tuple of 2 tensors or arrays. "
                "Pass the target as y, and several inputs as x=(first, second) or, by name, "
                "x={'first': first, 'second': second}.",
            )
            for pair in ((X, Y), (X.numpy(), Y.numpy()))
        ),
        *(
            (value, f"{LOADER}{came}. Pass for example DataLoader(dataset, batch_size=...).")
            for value, came in (
                ("data.csv", "str"),
                (None, "NoneType"),
                (3, "int"),
                (DataLoader, "the class DataLoader"),
                (loader, "function"),
            )
        ),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_has_no_batches_is_refused(x, text):
    """A tensor is iterable: its rows would be trained on as if they were batches."""
    engine = Watched()
    model = compiled(engine=lambda: engine)
    with refused(model, DataError, text):
        model.fit(x, seed=7, verbose=0)
    with refused(model, DataError, text.replace("training", "evaluation")):
        model.evaluate(x, verbose=0)
    if not isinstance(x, tuple):
        with refused(model, DataError, text.replace("training", "prediction")):
            model.predict(x, verbose=0)
    if x is not None and not isinstance(x, tuple):
        with refused(model, DataError, text.replace("training", "validation")):
            fit(model, validation_data=x)
    assert engine.built == 0


# ---- no batches ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (list, EMPTY),
        (lambda: DataLoader(TensorDataset(X[:0], Y[:0]), batch_size=4), EMPTY),
        (lambda: DataLoader(Stream([]), batch_size=4), EMPTY),
        (lambda: Batches([]), EMPTY),
        (
            lambda: loader(samples=5, size=8, drop_last=True),
            "yields no batch: its dataset has 5 samples, batch_size is 8 and drop_last=True. Use "
            "drop_last=False, or a batch_size of at most 5.",
        ),
        (
            lambda: iter([]),
            "must yield at least one batch, but it is empty. An iterator can be read only once. "
            f"{AGAIN}",
        ),
    ],
    ids=["list", "dataset", "stream", "iterable", "drop_last", "iterator"],
)
def test_a_loader_without_batches_is_refused(make, text):
    """Zero updates would look like a finished training."""
    engine = Watched()
    model = compiled(engine=lambda: engine)
    with refused(model, DataError, f"training data {text}"):
        fit(model, make())
    with refused(model, DataError, f"evaluation data {text}"):
        model.evaluate(make(), verbose=0)
    with refused(model, DataError, f"prediction data {text}"):
        model.predict(make(), verbose=0)
    assert engine.built == 0


@pytest.mark.long("ipu-standin")
@pytest.mark.few
@pytest.mark.parametrize(
    ("make", "kind"),
    [
        (lambda: (batch for batch in batches(2)), "generator"),
        (lambda: zip(*map(list, zip(*batches(2)))), "zip"),
        (lambda: iter(batches(2)), "list_iterator"),
        (lambda: iter(loader()), "_SingleProcessDataLoaderIter"),
    ],
    ids=["generator", "zip", "list", "loader"],
)
def test_an_iterator_is_refused_for_several_epochs(make, kind):
    """It is certain to fail in the second epoch, which may be hours away."""
    model = compiled()
    text = (
        f"data must be readable in each of the 3 epochs, got a {kind}, which can be read only once."
    )
    data = make()
    with refused(model, DataError, f"training {text} {AGAIN}"):
        fit(model, data, epochs=3)
    with refused(model, DataError, f"validation {text} {AGAIN}"):
        fit(model, validation_data=data, epochs=range(1, 4))
    assert fit(model, data, epochs=range(3, 4)).epoch == [3]


class Once:
    """Looks like a loader and can be read once."""

    def __init__(self, items):
        self.rest = iter(items)

    def __iter__(self):
        return self

    def __next__(self):
        return next(self.rest)


@pytest.mark.few
@pytest.mark.long("ipu-standin")
@pytest.mark.parametrize("role", ["training", "validation"])
def test_a_loader_that_dries_up_loses_nothing(role):
    """What the first epoch has learned is in the module, and in the history."""
    told = Told()
    engine = Watched()
    model, twin = compiled(engine=lambda: engine), compiled()
    twin.module.load_state_dict(model.module.state_dict())
    items = batches(3)
    data = {"x": Once(items)} if role == "training" else {"validation_data": Once(items)}
    with pytest.raises(DataError) as caught:
        fit(model, epochs=3, callbacks=[told], **data)
    assert str(caught.value) == (
        f"{role} data must yield batches in every epoch, but it yielded none in epoch 2. An "
        f"iterator can be read only once. {AGAIN}"
    )
    assert engine.built == engine.closed
    assert told.hooks[-1] == "on_train_end"
    assert model.history.epoch == [0]
    assert len(model.history.history["loss"]) == 1
    if role == "training":
        fit(twin, items)
    else:
        fit(twin, epochs=2)
    assert_same_bits(state(model), state(twin))
    assert_clean(model)
    assert fit(model).epoch == [0]


# ---- lengths ------------------------------------------------------------------------------------


class Announced(Stream):
    """Says a length, whatever it has."""

    def __init__(self, samples, length):
        super().__init__(samples)
        self.length = length

    def __len__(self):
        return self.length


class Sized(Batches):
    """Says how many samples there are."""

    def __len__(self):
        return sum(len(x) for x, _ in self.items)


SAMPLES = list(zip(*batches(1, 12)[0]))


@pytest.mark.long("ipu-standin")
@pytest.mark.parametrize("length", [4, 20])
def test_a_length_that_is_not_that_of_the_batches_is_told_once(length):
    """A schedule of the learning rate would end too early or too late; all batches are used."""
    text = (
        f"data must have as many batches as its length says, {length // 4}, but 3 came. "
        "Learning-rate schedules and the progress bar go by the length: correct __len__ of the "
        "loader, its dataset or its sampler, or leave it out."
    )
    data = DataLoader(Announced(SAMPLES, length), batch_size=4)
    with pytest.warns(UserWarning, match="as many batches") as caught:
        history = fit(compiled(), data, epochs=3, validation_data=data)
    assert [str(each.message) for each in caught] == [f"training {text}", f"validation {text}"]
    assert history.params["updates_done"] == 9
    with pytest.warns(UserWarning, match="as many batches") as caught:
        assert len(compiled().predict(data, verbose=0)) == 12
    assert [str(each.message) for each in caught] == [f"prediction {text}"]


@pytest.mark.long("ipu-standin")
def test_a_length_in_samples_is_told_where_the_data_yields_batches():
    """The usual mistake in a loader of one's own."""
    with pytest.warns(UserWarning, match="length says, 12, but 3 came"):
        fit(compiled(), Sized(batches(3)))


@pytest.mark.parametrize(
    "options", [{"steps_per_epoch": 2}, {"loading": ipufit.Loading(limit_train_batches=3)}]
)
def test_a_length_that_nothing_goes_by_may_be_wrong(options):
    """Where the arguments say how long an epoch is."""
    fit(compiled(), DataLoader(Announced(SAMPLES, 20), batch_size=4), epochs=2, **options)


# ---- PopTorch's loaders -------------------------------------------------------------------------


def test_a_loader_that_has_combined_micro_batches_is_refused():
    """One update would take all that an execution of PopTorch does."""
    dataset = TensorDataset(X, Y)
    options = poptorch.Options().deviceIterations(2)
    options.Training.gradientAccumulation(2)
    engine = Watched()
    model = compiled(engine=lambda: engine)
    text = (
        "training data must come in micro-batches, because ipufit combines them itself, got a "
        "poptorch.DataLoader, which combines 4 in each batch of 8 samples. Pass torch's "
        "DataLoader with batch_size=2."
    )
    with refused(model, DataError, text):
        fit(model, poptorch.DataLoader(options, dataset, batch_size=2))


def test_a_loader_of_poptorch_s_that_combines_nothing_is_read_as_torch_s():
    dataset = TensorDataset(X, Y)
    one, other = compiled(), compiled()
    other.module.load_state_dict(one.module.state_dict())
    fit(one, poptorch.DataLoader(poptorch.Options(), dataset, batch_size=4))
    fit(other, DataLoader(dataset, batch_size=4))
    assert_same_bits(one.module.state_dict(), other.module.state_dict())
