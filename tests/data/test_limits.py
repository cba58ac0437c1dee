"""Steps, limits, fractions and dry runs: exact counts, in the data, the history and explain."""

import itertools

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import ipufit
from ipufit.callbacks import Callback
from ipufit.core.batch import Mode
from ipufit.core.plan import Plan
from ipufit.data.fields import BatchForm
from ipufit.data.in_memory import EpochOrder
from ipufit.data.pipeline import BatchPipeline, JobSpec
from ipufit.data.source import DataAdapter
from ipufit.errors import ConfigurationError, DataError
from ipufit.testing import RecordingEngine
from ipufit.training.fit_data import resolve_limit
from ipufit.utils.random_streams import stream_key
from tests.faulty import Batches, Stream, assert_same_bits, batches, compiled, fit, state
from tests.told import message

TEN = torch.arange(10.0)[:, None]
PAIRS = TensorDataset(TEN, TEN)


class Hooks(Callback):
    """Index of the last update of each execution, per epoch, and which validations ran."""

    def __init__(self):
        super().__init__()
        self.ends = []
        self.validated = []

    def on_epoch_begin(self, epoch, logs=None):
        self.ends.append([])

    def on_train_batch_end(self, batch, logs=None):
        self.ends[-1].append(batch)

    def on_test_begin(self, logs=None):
        self.validated.append(len(self.ends) - 1)


def recording():
    """A model that computes nothing and remembers everything."""
    engine = RecordingEngine()
    model = ipufit.Model(nn.Linear(1, 1), engine=lambda: engine)
    model.compile("sgd", "mse")
    return model, engine


def fed(program):
    """The samples of each micro-batch that a recorded program was given."""
    batches = [b for e in program.executions for b in e.micro_batches]
    return [b.leaves[0].flatten().long().tolist() for b in batches]


def programs(engine):
    """Those that ran."""
    return [program for program in engine.programs if program.executions]


# ---- steps_per_epoch ----------------------------------------------------------------------------


def endless(start=0):
    """Batches of one sample, numbered."""
    for number in itertools.count(start):
        yield torch.full((1, 1), float(number)), torch.zeros(1, 1)


@pytest.mark.parametrize("make", [endless, lambda: Batches(endless())], ids=["itself", "iterable"])
def test_a_stream_keeps_its_position_across_epochs(make):
    """No sample is lost or repeated where an epoch ends, and none is read ahead of its epoch."""
    model, engine = recording()
    hooks = Hooks()
    stream = make()
    work = {"device_iterations": 2, "gradient_accumulation": 2}
    history = model.fit(stream, epochs=3, steps_per_epoch=3, callbacks=hooks, verbose=0, **work)
    assert fed(engine.programs[0]) == [[n] for n in range(18)]
    assert hooks.ends == [[1, 2]] * 3
    assert history.params["updates"] == 3
    assert history.params["steps_per_epoch"] == 3
    assert history.params["samples"] is None
    assert next(iter(stream))[0].item() == 18


def test_data_that_runs_out_is_read_anew():
    """A pass may end in the middle of an update; its short batch stays where it is."""
    model, engine = recording()
    loader = DataLoader(PAIRS, 4)
    model.fit(loader, epochs=3, steps_per_epoch=2, gradient_accumulation=2, verbose=0)
    passed = [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert fed(engine.programs[0]) == passed * 4
    assert model.history.params["updates"] == 2
    assert model.history.params["samples"] is None


def test_every_pass_has_an_order_of_its_own():
    """The order of a pass depends on the seed and the number of the pass."""
    model, engine = recording()
    model.fit(TEN, TEN, batch_size=2, epochs=2, steps_per_epoch=5, seed=3, verbose=0)
    first, second = fed(engine.programs[0])[:5], fed(engine.programs[0])[5:]
    for number, order in enumerate((first, second)):
        expected = list(EpochOrder(10, stream_key(3, "train", "order", number)))
        assert list(itertools.chain(*order)) == expected
    assert model.history.params["samples"] == 10


def test_a_later_first_epoch_starts_where_the_earlier_ones_would_have_ended():
    """A run that is resumed sees the data that it would have seen."""
    model, engine = recording()
    for first in (0, 2):
        model.fit(
            *(TEN, TEN),
            batch_size=3,
            epochs=range(first, 3),
            steps_per_epoch=3,
            seed=1,
            verbose=0,
        )
    through, resumed = map(fed, engine.programs)
    assert resumed == through[-3:]


@pytest.mark.long("ipu-standin")
def test_a_generator_that_ends_early_says_how_far_it_came():
    """What it gave is trained on, and kept."""
    items = batches(5)
    model, twin = compiled(), compiled()
    twin.module.load_state_dict(model.module.state_dict())
    with pytest.raises(DataError) as caught:
        fit(model, (b for b in items), epochs=2, steps_per_epoch=3, device_iterations=2)
    assert str(caught.value) == (
        "training data must last for steps_per_epoch=3 updates, but ended after 2 of epoch 2, "
        "and can't be read again. The training so far is kept. Pass data that yields more, or a "
        "smaller steps_per_epoch."
    )
    assert model.history.epoch == [0]
    fit(twin, items, device_iterations=3)
    assert_same_bits(state(model), state(twin))


@pytest.mark.long
def test_steps_per_epoch_is_cut_like_any_epoch():
    """The weights do not depend on device_iterations, whose last execution is smaller."""
    results = []
    for di in (1, 2, 5):
        model = compiled()
        torch.manual_seed(0)
        for p in model.module.parameters():
            torch.nn.init.normal_(p)
        fit(model, batches(4), epochs=2, steps_per_epoch=7, device_iterations=di)
        results.append(state(model))
    assert_same_bits(results[1], results[0])
    assert_same_bits(results[2], results[0])


@pytest.mark.long
def test_a_smaller_batch_between_two_passes_is_prepared_for():
    """A module that can't take it fails before the first update."""
    model = ipufit.Model(nn.Sequential(nn.Linear(1, 2), nn.BatchNorm1d(2)))
    model.compile("sgd", "mse")
    nine = TEN[:9]
    with pytest.raises(DataError, match="fails with the last one of an epoch, which is smaller"):
        model.fit(nine, nine.expand(9, 2), batch_size=4, steps_per_epoch=2, verbose=0)


def test_explain_and_the_plan_know_the_steps(capsys):
    """What is printed is what happens."""
    model, _ = recording()
    model.explain(Batches([]), steps_per_epoch=5, device_iterations=2)
    text = capsys.readouterr().out
    assert "One epoch = 5 updates in 3 executions." in text
    assert "steps_per_epoch ends the epoch; the next one continues with the data after it." in text
    model.explain(TEN, batch_size=5, steps_per_epoch=5, device_iterations=2)
    assert "One epoch = 25 samples = 5 updates in 3 executions." in capsys.readouterr().out
    model.fit(TEN, TEN, batch_size=5, steps_per_epoch=4, verbose=0)
    model.explain()
    assert "One epoch = 20 samples = 4 updates in 4 executions." in capsys.readouterr().out
    plan = Plan.make(micro_batch_size=2, device_iterations=2, ipus=2, fixed_updates=5)
    counts = plan.micro_batches_per_epoch, plan.updates_per_epoch, plan.executions_per_epoch
    assert counts == (10, 5, 3)
    model.explain(TEN, batch_size=4, loading=ipufit.Loading(limit_train_batches=2))
    assert "One epoch = 8 samples = 2 updates in 2 executions." in capsys.readouterr().out


@pytest.mark.parametrize("name", ["batch_size", "steps_per_epoch", "loading"])
def test_explain_of_the_last_fit_takes_no_limits(name):
    """They would be ignored."""
    model, _ = recording()
    model.fit(TEN, TEN, verbose=0)
    assert message(model.explain, **{name: ipufit.Loading() if name == "loading" else 2}) == (
        "explain needs data for batch_size, steps_per_epoch and loading, got none. Pass explain(x, "
        "...), or leave them out to explain the last fit."
    )


# ---- steps of inference -------------------------------------------------------------------------


def test_steps_of_evaluate_and_predict_are_device_iterations_from_the_start():
    """Each call starts anew; not a batch more is read than is used."""
    model, engine = recording()
    for _ in range(2):
        model.evaluate(TEN, TEN, batch_size=2, steps=3, device_iterations=2, verbose=0)
        assert model.predict(TEN, batch_size=2, steps=2, verbose=0).flatten().tolist() == [
            0,
            1,
            2,
            3,
        ]
    assert fed(programs(engine)[0]) == fed(programs(engine)[2]) == [[0, 1], [2, 3], [4, 5]]
    stream = endless()
    model.evaluate(stream, steps=3, ipus=2, verbose=0)
    assert next(stream)[0].item() == 6
    with pytest.raises(DataError) as caught:
        model.evaluate((b for b in batches(2, 1)), steps=3, verbose=0)
    assert "evaluation data must last for steps=3 device iterations, but ended after 2" in str(
        caught.value
    )


def test_validation_steps_start_anew_every_time():
    """The same samples are looked at after every epoch."""
    model, engine = recording()
    held = {"validation_data": ipufit.Validation((TEN, TEN), batch_size=2, steps=2)}
    model.fit(TEN, TEN, epochs=2, verbose=0, **held)
    assert [fed(p) for p in programs(engine)[1:]] == [[[0, 1], [2, 3]]] * 2


def test_a_run_in_several_fits_is_validated_by_the_epochs_of_all():
    """Epochs count from the first fit; a part without a validation is no mistake."""
    model, _ = recording()
    held = ipufit.Validation((TEN, TEN), freq=3)
    assert [
        "val_loss" in model.fit(TEN, TEN, epochs=part, validation_data=held, verbose=0).history
        for part in (range(2, 3), range(3, 5), range(5, 6))
    ] == [True, False, True]


@pytest.mark.parametrize(
    ("freq", "epochs"), [(1, [0, 1, 2, 3]), (2, [1, 3]), (3, [2]), ([1, 4], [0, 3]), ({2}, [1])]
)
def test_validation_freq_is_keras(freq, epochs):
    """Every so many epochs, or those of a collection counted from 1."""
    model, _ = recording()
    hooks = Hooks()
    held = {"validation_data": ipufit.Validation((TEN, TEN), freq=freq)}
    history = model.fit(TEN, TEN, epochs=4, callbacks=hooks, verbose=0, **held)
    assert hooks.validated == epochs
    assert len(history.history["val_loss"]) == len(epochs)
    assert len(history.history["loss"]) == 4


# ---- limits -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("limit", "count"), [(1, 1), (3, 3), (0.5, 2), (1.0, 5), (99, 5)])
def test_limit_train_batches_starts_every_epoch_anew(limit, count):
    """A count of the loader's batches, or a fraction of them, rounded down."""
    model, engine = recording()
    model.fit(
        DataLoader(PAIRS, 2), epochs=2, loading=ipufit.Loading(limit_train_batches=limit), verbose=0
    )
    assert fed(engine.programs[0]) == [[2 * i, 2 * i + 1] for i in range(count)] * 2
    params = model.history.params
    assert (params["samples"], params["updates"]) == (2 * count, count)
    assert params["limit_train_batches"] == (limit if limit == 99 else count)


def test_a_limit_takes_part_of_each_shuffled_epoch():
    """The order is that of the whole epoch."""
    model, engine = recording()
    model.fit(
        TEN,
        TEN,
        batch_size=2,
        epochs=2,
        loading=ipufit.Loading(limit_train_batches=2),
        seed=1,
        verbose=0,
    )
    for epoch in range(2):
        order = list(EpochOrder(10, stream_key(1, "train", "order", epoch)))[:4]
        part = fed(engine.programs[0])[2 * epoch : 2 * epoch + 2]
        assert list(itertools.chain(*part)) == order


def test_a_limit_reads_no_batch_more_of_a_stream():
    """Reading one more could block for ever."""
    model, _ = recording()
    stream = endless()
    model.fit(stream, loading=ipufit.Loading(limit_train_batches=4), verbose=0)
    assert next(stream)[0].item() == 4


@pytest.mark.parametrize(("limit", "count"), [(1, 1), (0.5, 2), (0, 0)])
def test_limit_val_batches(limit, count):
    """0 switches validation off."""
    model, engine = recording()
    held = {
        "validation_data": DataLoader(PAIRS, 2),
        "loading": ipufit.Loading(limit_val_batches=limit),
    }
    history = model.fit(TEN, TEN, epochs=2, verbose=0, **held)
    assert [fed(p) for p in programs(engine)[1:]] == ([[[0, 1], [2, 3]][:count]] * 2)[: 2 * count]
    assert ("val_loss" in history.history) == bool(count)
    assert history.params["limit_val_batches"] == count


@pytest.mark.parametrize(
    "make",
    [
        lambda: ((TEN, TEN), {"batch_size": 2}),
        lambda: ((DataLoader(PAIRS, 2, shuffle=True),), {}),
        lambda: ((Stream(list(PAIRS)),), {"batch_size": 2}),
        lambda: (((b for b in [(TEN[i : i + 2],) * 2 for i in range(0, 10, 2)]),), {}),
    ],
    ids=["tensors", "shuffled loader", "stream", "generator"],
)
def test_overfit_batches_has_the_same_batches_in_every_epoch_and_in_validation(make):
    """Unshuffled, from whatever comes; validation looks at what is learned."""
    model, engine = recording()
    args, options = make()
    held = {"validation_data": (TEN + 100, TEN)}
    model.fit(
        *args, epochs=3, loading=ipufit.Loading(overfit_batches=2), verbose=0, **options, **held
    )
    two = [[0, 1], [2, 3]]
    assert fed(engine.programs[0]) == two * 3
    assert [fed(p) for p in programs(engine)[1:]] == [two] * 3
    assert model.history.params["overfit_batches"] == 2
    assert model.history.params["updates"] in (2, None)
    model.fit(
        DataLoader(PAIRS, 2), loading=ipufit.Loading(overfit_batches=0.6), epochs=2, verbose=0
    )
    assert fed(programs(engine)[-1]) == [[0, 1], [2, 3], [4, 5]] * 2


class Doubled(DataLoader):
    """Its batches are not those of the dataset, in value and size."""

    def __iter__(self):
        for x, y in super().__iter__():
            yield torch.cat([x, x + 100]), torch.cat([y, y])


@pytest.mark.parametrize("options", [{}, {"loading": ipufit.Loading(overfit_batches=5)}])
def test_a_loader_that_makes_its_own_batches_is_read_through_them(options):
    """Sizes, order and the look at validation data must not go past a subclass's __iter__."""
    model, engine = recording()
    loader = Doubled(PAIRS, 2, shuffle=True)
    history = model.fit(loader, validation_data=loader, seed=1, verbose=0, **options)
    for program in programs(engine):
        rows = [row for batch in fed(program) for row in batch]
        assert sorted(rows) == [*range(10), *range(100, 110)]
        assert [len(batch) for batch in fed(program)] == [4] * 5
    assert history.params["micro_batch_size"] == 4


class Writer(Callback):
    """Says that it writes files."""

    writes_files = True

    def on_train_begin(self, logs=None):
        raise AssertionError("must be left out")


@pytest.mark.parametrize(("run", "count"), [(True, 1), (2, 2)])
@pytest.mark.parametrize("steps", [None, 1, 50])
def test_fast_dev_run_tries_everything_once(run, count, steps, capsys):
    """One epoch of so many executions, and nothing is written."""
    model, engine = recording()
    hooks = Hooks()
    held = {"validation_data": ipufit.Validation((TEN, TEN), batch_size=1, freq=3)}
    work = {"batch_size": 2, "device_iterations": 2, "epochs": 9, "steps_per_epoch": steps}
    history = model.fit(
        *(TEN, TEN),
        loading=ipufit.Loading(fast_dev_run=run),
        callbacks=[Writer(), hooks],
        verbose=2,
        **work,
        **held,
    )
    updates = min(2 * count, steps or 99)
    assert len(fed(engine.programs[0])) == updates
    assert len(fed(programs(engine)[1])) == 2 * count
    assert history.epoch == [0]
    assert history.params["updates"] == updates
    assert history.params["epochs"] == 1
    assert history.params["fast_dev_run"] == count
    assert history.params["left_out_callbacks"] == ["Writer"]
    text = f"fast_dev_run: 1 epoch of {count} execution{'s' if count > 1 else ''}, also of "
    assert text + "validation; without callbacks Writer" in capsys.readouterr().err
    model.fit(TEN, TEN, loading=ipufit.Loading(fast_dev_run=True), verbose=0)
    assert capsys.readouterr().err == ""
    with pytest.raises(AssertionError, match="must be left out"):
        model.fit(
            TEN, TEN, loading=ipufit.Loading(fast_dev_run=False), callbacks=Writer(), verbose=0
        )


# ---- executions that end where a callback needs it ----------------------------------------------


@pytest.mark.parametrize(
    ("cut_every", "sizes"),
    [
        ((), [4, 3, 4, 3]),
        ((3,), [3, 3, 1, 2, 3, 2]),
        ((2, 5), [2, 2, 1, 1, 1, 1, 2, 2, 2]),
        ((100,), [4, 3, 4, 3]),
    ],
)
@pytest.mark.parametrize("prefetch", [0, 2])
def test_executions_end_at_every_kth_update_of_the_fit(cut_every, sizes, prefetch):
    """Counted over epochs; the micro-batches are the same in the same order."""
    source = DataAdapter(
        [(TEN[i : i + 1], TEN[i : i + 1]) for i in [*range(10), *range(4)]], "data"
    )
    plan = Plan.make(micro_batch_size=1, device_iterations=4, gradient_accumulation=2)
    job = JobSpec(source, plan, Mode.TRAIN, 0, "train", cut_every=cut_every, prefetch=prefetch)
    feed = BatchPipeline(job, BatchForm())
    executions = [e for epoch in range(2) for e in feed.executions(epoch, plan)]
    assert [len(e.micro_batches) // 2 for e in executions] == sizes
    order = [b.leaves[0].item() for e in executions for b in e.micro_batches]
    assert order == [*range(10), *range(4)] * 2


# ---- what is refused ----------------------------------------------------------------------------

NUMBER = "must be a number of batches, an integer of at least"
FRACTION = "or a fraction of the epoch, a float above 0 and up to 1.0, got"
REFUSED = [
    ({"batch_size": 0}, "batch_size must be an integer of at least 1 or None, got 0."),
    ({"batch_size": 2.5}, "batch_size must be an integer of at least 1 or None, got 2.5."),
    ({"shuffle": "batch"}, "shuffle must be True, False or None, got 'batch'."),
    ({"steps_per_epoch": 0}, "steps_per_epoch must be an integer of at least 1 or None, got 0."),
    (
        {"loading": ipufit.Loading(limit_train_batches=0.1), "batch_size": 2},
        "limit_train_batches=0.1 must leave at least one batch, but leaves none of the 5 batches "
        "of the training data. Use a larger fraction, or a number of batches.",
    ),
    (
        {"validation_split": 1.0},
        "validation_split must be a fraction of at least 0.0 and less than 1.0, got 1.0. Try 0.2.",
    ),
    (
        {"validation_split": -0.1},
        "validation_split must be a fraction of at least 0.0 and less than 1.0, got -0.1. Try 0.2.",
    ),
    (
        {"validation_split": 0.95},
        "validation_split=0.95 must leave samples for both parts, but with 10 samples it leaves "
        "0 for training and 10 for validation. Choose another fraction, or pass validation_data.",
    ),
    (
        {"validation_split": 0.5, "validation_data": (TEN, TEN)},
        "validation_split and validation_data both say what to evaluate. Pass one of them.",
    ),
    (
        {"validation_data": (TEN,)},
        "validation_data as a tuple must be (x, y) or (x, y, sample_weight), got a tuple of 1. "
        "Pass batches as a list or a DataLoader.",
    ),
    (
        {"validation_data": ipufit.Validation(steps=2), "validation_split": 0.5},
        "steps of Validation must be at most 1, the number of device iterations in the validation "
        "data, got 2. Leave it out to use all.",
    ),
    (
        {"validation_data": ipufit.Validation([(TEN, TEN)], batch_size=2)},
        "batch_size of Validation is for tensors, arrays and datasets, but the validation data "
        "already comes in batches, from a list. Set it there.",
    ),
    (
        {"validation_data": ipufit.Validation(freq=[3]), "validation_split": 0.5},
        "freq of Validation must name an epoch from 1 to 1, counted from 1, got [3].",
    ),
    (
        {"validation_data": ipufit.Validation(freq=5), "validation_split": 0.5, "epochs": 3},
        "freq of Validation must be at most 3, the number of the last epoch, got 5.",
    ),
    (
        {"steps_per_epoch": 2, "loading": ipufit.Loading(limit_train_batches=2)},
        "steps_per_epoch and limit_train_batches all set how much of the data an epoch reads. "
        "Pass one of them.",
    ),
    (
        {"steps_per_epoch": 2, "loading": ipufit.Loading(overfit_batches=2)},
        "steps_per_epoch and overfit_batches all set how much of the data an epoch reads. Pass "
        "one of them.",
    ),
    (
        {
            "validation_split": 0.5,
            "validation_data": ipufit.Validation(steps=1),
            "loading": ipufit.Loading(limit_val_batches=1),
        },
        "steps of Validation and limit_val_batches all set how much of the data a validation "
        "reads. Pass one of them.",
    ),
    (
        {"loading": ipufit.Loading(overfit_batches=2), "shuffle": True},
        "overfit_batches reads the same batches in every epoch, but shuffle=True changes them. "
        "Leave one out.",
    ),
    *(
        (
            {"validation_data": ipufit.Validation(**{name: 2})},
            f"{name} of Validation set how validation_data is evaluated, but there is no "
            "validation_data. Pass Validation(data, ...) or validation_split, or leave them out.",
        )
        for name in ("steps", "batch_size", "freq")
    ),
    (
        {"loading": ipufit.Loading(limit_val_batches=2)},
        "limit_val_batches set how validation_data is evaluated, but there is no validation_data. "
        "Pass Validation(data, ...) or validation_split, or leave them out.",
    ),
    (
        {"validation_data": ipufit.Validation},
        "validation_data must be data or an object, got the class Validation. Pass "
        "Validation((x_val, y_val)).",
    ),
    (
        {"loading": 3},
        "loading must be an ipufit.Loading object or None, got 3. Write for example "
        "Loading(limit_train_batches=10).",
    ),
]
REFUSED_BY_THEMSELVES = [
    (
        ipufit.Loading,
        {"prefetch": -1},
        "prefetch must be an integer of at least 0 or None, got -1.",
    ),
    (
        ipufit.Loading,
        {"fast_dev_run": 0.5},
        "fast_dev_run must be an integer of at least 1 executions, True or False, got 0.5.",
    ),
    *(
        (ipufit.Loading, {name: value}, f"{name} {NUMBER} {least}, {FRACTION} {value!r}.")
        for name, value, least in [
            ("limit_train_batches", 0, 1),
            ("limit_train_batches", True, 1),
            ("limit_train_batches", 1.5, 1),
            ("overfit_batches", "2", 1),
            ("limit_val_batches", -1, 0),
        ]
    ),
    *(
        (
            ipufit.Loading,
            {name: 1, "overfit_batches": 2},
            f"{name} and overfit_batches all set how much of the data {what} reads. Pass one of "
            "them.",
        )
        for name, what in [
            ("limit_train_batches", "an epoch"),
            ("limit_val_batches", "a validation"),
        ]
    ),
    (
        ipufit.Validation,
        {"steps": 0},
        "steps of Validation must be an integer of at least 1 or None, got 0.",
    ),
    (
        ipufit.Validation,
        {"batch_size": 0},
        "batch_size of Validation must be an integer of at least 1 or None, got 0.",
    ),
    (
        ipufit.Validation,
        {"freq": 0},
        "freq of Validation must be an integer of at least 1 or a collection of epochs, got 0.",
    ),
    (
        ipufit.Validation,
        {"freq": [0]},
        "an epoch in freq of Validation must be an integer of at least 1, got 0.",
    ),
    (
        ipufit.Validation,
        {"steps": 0, "freq": "often"},
        "steps of Validation must be an integer of at least 1 or None, got 0.\nfreq of Validation "
        "must be an integer of at least 1 or a collection of epochs, got 'often'.",
    ),
]


@pytest.mark.parametrize(
    ("kind", "arguments", "text"), REFUSED_BY_THEMSELVES, ids=lambda a: str(a)[:40]
)
def test_settings_that_cannot_work_are_refused_where_they_are_written(kind, arguments, text):
    """The line that has the fault raises the error, with all faults of the object."""
    assert message(kind, **arguments) == text


def test_settings_show_what_was_set_and_stay_as_they_are():
    """A run's script can print them; nothing changes them between the check and the run."""
    assert repr(ipufit.Loading(prefetch=2)) == "Loading(prefetch=2)"
    validation = ipufit.Validation([1, 2], freq=2)
    assert repr(validation) == "Validation(data=[1, 2], freq=2)"
    assert len(repr(ipufit.Validation(torch.zeros(100, 100)))) < 60
    with pytest.raises(AttributeError):
        validation.freq = 1


@pytest.mark.parametrize(("arguments", "text"), REFUSED, ids=lambda a: str(a)[:40])
def test_an_argument_that_cannot_work_is_refused_before_any_work(arguments, text):
    """Each says what was expected, what came and what to do."""
    model, engine = recording()
    assert message(model.fit, TEN, TEN, verbose=0, **arguments) == text
    assert engine.programs == []


def test_all_of_them_are_reported_together():
    """A user corrects them in one go."""
    model, _ = recording()
    with pytest.raises(ConfigurationError) as caught:
        model.fit(
            *(TEN, TEN),
            batch_size=0,
            shuffle=3,
            epochs=0,
            steps_per_epoch=0,
            verbose=9,
            validation_data=ipufit.Validation(freq=2),
            loading=3,
            class_weight=1,
            sample_weight=TEN,
        )
    lines = str(caught.value).splitlines()
    names = ["epochs", "loading", "batch_size", "shuffle", "class_weight", "steps_per_epoch"]
    names += ["verbose", "freq"]
    assert [line.split()[0] for line in lines] == names
    for method in (model.evaluate, model.predict):
        with pytest.raises(ConfigurationError) as caught:
            method(TEN, batch_size=0, steps=0, prefetch=0.5, verbose=9)
        names = ["batch_size", "steps", "verbose", "prefetch"]
        found = [line.split()[0] for line in str(caught.value).splitlines()]
        assert [name for name in found if name != "the"] == names


@pytest.mark.parametrize(
    ("x", "arguments", "text"),
    [
        (
            DataLoader(PAIRS, 2),
            {"batch_size": 4},
            "batch_size is for tensors, arrays and datasets, but the training data already "
            "comes in batches, from a DataLoader. Set it there.",
        ),
        (
            DataLoader(PAIRS, 2),
            {"shuffle": False},
            "shuffle is for tensors, arrays and map-style datasets, but the order of the "
            "training data comes from a DataLoader. Set it there.",
        ),
        (
            Stream(list(PAIRS)),
            {"shuffle": True},
            "shuffle is for tensors, arrays and map-style datasets, but the order of the "
            "training data comes from a Stream. Set it there.",
        ),
        (
            DataLoader(PAIRS, 2),
            {"y": TEN},
            "y is for tensors and arrays, but the training data comes from a DataLoader, which "
            "yields all parts of a sample. Let it yield (inputs, target) or (inputs, target, "
            "sample_weight).",
        ),
        (
            PAIRS,
            {"y": TEN, "sample_weight": TEN},
            "y and sample_weight are for tensors and arrays, but the training data comes from a "
            "TensorDataset, which yields all parts of a sample. Let it yield (inputs, target) "
            "or (inputs, target, sample_weight).",
        ),
        (
            Batches([]),
            {"validation_split": 0.5},
            "validation_split is for tensors, arrays and map-style datasets, but the training "
            "data comes from a Batches. Pass validation_data.",
        ),
        (
            Batches([]),
            {"loading": ipufit.Loading(limit_train_batches=0.5)},
            "limit_train_batches=0.5 is a fraction of the batches of the training data, but their "
            "number is unknown. Pass a number of batches, an integer.",
        ),
        (
            Batches([]),
            {"loading": ipufit.Loading(limit_train_batches=1.0)},
            "limit_train_batches=1.0 means all batches of the training data, which is what happens "
            "without it. Leave it out, or write 1 for a single batch.",
        ),
        (
            TEN,
            {},
            "the training data needs a target for the loss, but y is None. Pass y= as well, or "
            "use compile(loss=None) if the module computes its own loss.",
        ),
    ],
    ids=lambda value: str(value)[:30] if isinstance(value, dict) else "",
)
def test_an_argument_that_goes_with_another_form_is_refused_by_name(x, arguments, text):
    """Ignoring it would train on something else than was asked for."""
    model, _ = recording()
    assert message(model.fit, x, verbose=0, **arguments) == text


def test_a_fraction_is_taken_as_it_is_written():
    """0.29 * 100 is 28.999999999999996 to a computer, and 29 batches to whoever wrote it."""
    source = DataAdapter([TEN] * 100, "training data")
    assert resolve_limit("limit_train_batches", 0.29, source) == 29
