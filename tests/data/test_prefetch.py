"""A thread prepares executions ahead: the same bits, no thread left behind, errors as they are."""

import contextlib
import os
import signal
import sqlite3
import tempfile
import threading
import traceback
import weakref

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    RandomSampler,
    Sampler,
    TensorDataset,
)

import ipufit
from ipufit.callbacks import Callback
from ipufit.core.batch import CombinedBatch
from ipufit.data.pipeline import fetch_ahead
from ipufit.data.source import DataAdapter
from ipufit.engines.embedded.engine import EmbeddedEngine
from ipufit.errors import DataError
from ipufit.testing import RecordingEngine
from ipufit.utils.random_streams import LOCK, DataStream
from tests.engines import ragged
from tests.faulty import (
    Batches,
    Samples,
    Stream,
    Told,
    Watched,
    assert_clean,
    assert_same_bits,
    batches,
    compiled,
    fit,
    state,
)
from tests.nets import CNN, data

X, Y = data(45)


@pytest.fixture(autouse=True)
def _no_thread_is_left():
    """Whatever happens, the thread ends with its epoch."""
    yield
    # Threads of torch's workers end in their own time.
    assert [t.name for t in threading.enumerate() if t.name.startswith("ipufit")] == []


class Augmented(Dataset):
    """Adds noise, and knows the epoch that a callback tells it."""

    def __init__(self):
        self.epoch = 0
        self.threads = set()

    def __len__(self):
        return len(X)

    def __getitem__(self, index):
        self.threads.add(threading.current_thread())
        return X[index] + 0.1 * torch.rand(X[index].shape).double() + self.epoch, Y[index]


class SetEpoch(Callback):
    """Tells a dataset the epoch, as samplers of distributed training want it."""

    def __init__(self, dataset):
        super().__init__()
        self.dataset = dataset

    def on_epoch_begin(self, epoch, logs=None):
        self.dataset.epoch = epoch


def trained(prefetch, dataset, **options):
    """All that a fit of a net with dropout changes."""
    torch.manual_seed(0)
    model = ipufit.Model(CNN().double())
    model.compile("adam", "cross_entropy", metrics=["accuracy"])
    history = model.fit(
        DataLoader(dataset, 4, shuffle=True),
        epochs=3,
        seed=7,
        loading=ipufit.Loading(prefetch=prefetch),
        validation_data=(X, Y),
        callbacks=SetEpoch(dataset),
        verbose=0,
        **options,
    )
    return {**state(model), **history.history}


@pytest.mark.long
@pytest.mark.parametrize(
    "work",
    [
        {},
        {"device_iterations": 3},
        pytest.param({"device_iterations": 3, "ipus": 2}, marks=ragged),
        {"steps_per_epoch": 7},
    ],
)
def test_results_have_the_same_bits_with_and_without(work):
    """Order of reads, augmentation, dropout and set_epoch are those of a run without a thread."""
    expected = trained(0, Augmented(), **work)
    for depth in (1, 3):
        dataset = Augmented()
        assert_same_bits(trained(depth, dataset, **work), expected)
        assert len(dataset.threads) > 1


@pytest.mark.long
def test_inference_has_the_same_results_with_and_without():
    """evaluate and predict prepare ahead as well."""
    model = ipufit.Model(CNN().double())
    model.compile("adam", "cross_entropy", metrics=["accuracy"])
    for method in (model.evaluate, model.predict):
        results = []
        for prefetch in (0, 2):
            dataset = Augmented()
            results.append(method(DataLoader(dataset, 4), prefetch=prefetch, verbose=0))
            assert len(dataset.threads) == 1 + bool(prefetch)
        if isinstance(results[0], dict):
            assert results[0] == results[1]
        else:
            assert torch.equal(*results)


@pytest.mark.long("ipu-standin")
@pytest.mark.few
@pytest.mark.parametrize("depth", [1, 2, 5])
def test_so_many_executions_are_prepared_and_no_more(depth):
    """The queue is bounded: a fast reader must not fill the memory."""
    begun = threading.Semaphore(0)
    count = [0]

    def items():
        for number in range(10):
            count[0] += 1
            begun.release()
            yield number

    ahead = fetch_ahead(items(), depth)
    assert next(ahead) == 0
    for _ in range(depth + 1):
        assert begun.acquire(timeout=30)
    assert not begun.acquire(timeout=0.1)
    assert count[0] == depth + 1
    assert list(ahead) == list(range(1, 10))


@pytest.mark.long
def test_no_thread_is_used_where_it_would_wait_for_its_reader():
    """Data code that predicts with another model holds the lock of the random numbers."""
    threads = []

    def items():
        threads.append(threading.current_thread())
        yield 1

    with LOCK:
        assert list(fetch_ahead(items(), 1)) == [1]
    assert threads == [threading.current_thread()]
    other = ipufit.Model(nn.Linear(4, 4))
    other.compile(None, "mse")

    def collate(samples):
        x = torch.stack([x for x, _ in samples])
        features = other.predict(x, prefetch=1, verbose=0)
        return features, torch.stack([y for _, y in samples])

    x, y = batches(1, 12)[0]
    assert fit(
        compiled(),
        DataLoader(TensorDataset(x, y), 4, collate_fn=collate),
        loading=ipufit.Loading(prefetch=1),
    ).epoch == [0]


class Noisy(DataLoader):
    """Changes its batches in the process that reads it."""

    def __iter__(self):
        for x, y in super().__iter__():
            yield x + torch.rand(x.shape), y


class Drawing(Sampler):
    """Draws the samples one by one."""

    def __init__(self, count):
        self.count = count

    def __iter__(self):
        return (int(torch.randint(self.count, ())) for _ in range(self.count))

    def __len__(self):
        return self.count


@pytest.mark.few
@pytest.mark.long("ipu-standin")
@pytest.mark.parametrize("prefetch", [0, None, 2])
@pytest.mark.parametrize("kind", ["sampler in a batch_sampler", "loader"])
def test_what_the_users_code_draws_depends_on_seed_and_epoch_alone(kind, prefetch):
    """Code in a subclass or a nested sampler draws too; a callback's draws must not matter."""
    pairs = TensorDataset(*batches(1, 12)[0])

    def final(noise, prefetch):
        if kind == "loader":
            data = Noisy(pairs, 4)
        else:
            data = DataLoader(pairs, batch_sampler=BatchSampler(Drawing(12), 4, False))
        torch.manual_seed(0)
        model = compiled()
        torch.manual_seed(noise)
        fit(model, data, epochs=2, loading=ipufit.Loading(prefetch=prefetch))
        return state(model)

    assert_same_bits(final(1, prefetch), final(2, 0))


def mapped(array):
    """The same numbers in a file."""
    with tempfile.TemporaryFile() as file:
        found = np.memmap(file, array.dtype, "w+", shape=array.shape)
    found[:] = array
    return found


# Rows of what is in memory: read ahead where the device computes, not this computer's cores.
HELD = "held"

DEFAULTS = {
    "tensors": (lambda pairs: pairs.tensors, HELD),
    "plain": (lambda pairs: (DataLoader(pairs, 4),), HELD),
    "part": (lambda pairs: (DataLoader(torch.utils.data.Subset(pairs, range(8)), 4),), HELD),
    "arrays": (lambda pairs: [part.numpy() for part in pairs.tensors], HELD),
    "mapped": (lambda pairs: [mapped(part.numpy()) for part in pairs.tensors], 1),
    "workers": (lambda pairs: (DataLoader(Samples(list(pairs)), 4, num_workers=1),), 1),
    "own dataset": (lambda pairs: (DataLoader(Samples(list(pairs)), 4),), 0),
    "own collate": (lambda pairs: (DataLoader(pairs, 4, collate_fn=lambda s: s[0]),), 0),
    "own sampler": (lambda pairs: (DataLoader(pairs, 4, sampler=[0, 1]),), 0),
    "own sampler in a batch_sampler": (
        lambda pairs: (DataLoader(pairs, batch_sampler=BatchSampler([0, 1], 4, False)),),
        0,
    ),
    "torch's sampler in a batch_sampler": (
        lambda pairs: (
            DataLoader(pairs, batch_sampler=BatchSampler(RandomSampler(pairs), 4, False)),
        ),
        HELD,
    ),
    "own loader": (lambda pairs: (Noisy(pairs, 4),), 0),
    "stream": (lambda pairs: (DataLoader(Stream(list(pairs)), 4),), 0),
    "list": (lambda pairs: ([pairs[:4]],), 0),
}


@pytest.mark.long
@pytest.mark.parametrize("name", DEFAULTS)
def test_the_default_leaves_code_of_the_user_in_its_thread(name, engine):
    """A connection to a database belongs to the thread that made it."""
    make, expected = DEFAULTS[name]
    if expected == HELD:
        expected = int(engine != "embedded")
    model = compiled()
    arguments = make(TensorDataset(*batches(1, 12)[0]))
    try:
        history = fit(model, *arguments[:1], **({"y": arguments[1]} if arguments[1:] else {}))
    except DataError:
        assert name == "own collate"  # makes single samples; only the default matters
        assert not DataAdapter(arguments[0], "data").reads_alone
        return
    assert history.params["prefetch"] == expected


@pytest.mark.long
def test_rows_in_memory_are_read_ahead_for_a_device():
    """Which computes while this process copies; the host itself has nothing to gain."""
    engine = EmbeddedEngine()
    engine.as_device = True
    x, y = batches(1, 12)[0]
    history = fit(compiled(engine=lambda: engine), x, y=y)
    assert history.params["prefetch"] == 1


@pytest.fixture
def connection():
    with contextlib.closing(sqlite3.connect(":memory:")) as opened:
        yield opened


@pytest.mark.long
def test_a_dataset_may_belong_to_the_main_thread(connection):
    """sqlite3 refuses every other thread."""
    connection.execute("create table t (x real)")
    connection.executemany("insert into t values (?)", [(float(n),) for n in range(12)])

    class Rows(Dataset):
        def __len__(self):
            return 12

        def __getitem__(self, index):
            (value,) = connection.execute(f"select x from t where rowid = {index + 1}").fetchone()
            return torch.full((4,), value), torch.zeros(3)

    loader = DataLoader(Rows(), 4)
    assert fit(compiled(), loader).epoch == [0]
    with pytest.raises(DataError, match=r"sample 4 of Rows could not be read: ProgrammingError"):
        fit(compiled(), loader, loading=ipufit.Loading(prefetch=1))


class MineError(Exception):
    """An error that ipufit has never heard of."""


class Breaks(Samples):
    """Fails at one sample."""

    def __init__(self, samples, error):
        super().__init__(samples)
        self.error = error

    def __getitem__(self, index):
        if index == 13:
            raise self.error
        return super().__getitem__(index)


SAMPLES = [(x, y) for batch in batches(5) for x, y in zip(*batch)]


@pytest.mark.long
@pytest.mark.parametrize("di", [1, 2])
def test_an_error_surfaces_in_its_place_with_its_own_traceback(di):
    """What came before it is trained on, and its line is shown."""
    told = Told()
    engine = Watched()
    model, twin = compiled(engine=lambda: engine), compiled()
    twin.module.load_state_dict(model.module.state_dict())
    loader = DataLoader(Breaks(SAMPLES, MineError("disk full")), batch_size=4)
    with pytest.raises(DataError) as caught:
        fit(
            model,
            loader,
            device_iterations=di,
            callbacks=[told],
            loading=ipufit.Loading(prefetch=2),
        )
    assert str(caught.value).startswith("training data, batch 3: sample 13 of Breaks could not be ")
    cause = caught.value.__cause__
    assert type(cause) is MineError
    assert traceback.extract_tb(cause.__traceback__)[-1].line == "raise self.error"
    fit(twin, batches(5)[: 3 // di * di])
    assert_same_bits(state(model), state(twin))
    assert told.hooks[-1] == "on_train_end"
    assert engine.built == engine.closed == 1
    assert_clean(model)


@pytest.mark.long
@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, GeneratorExit])
def test_what_is_no_exception_passes_untouched(error):
    """Ctrl-C in a dataset is no fault of the dataset."""
    for prefetch in (0, 1):
        mine = error()
        loader = DataLoader(Breaks(SAMPLES, mine), batch_size=4)
        with pytest.raises(error) as caught:
            fit(compiled(), loader, loading=ipufit.Loading(prefetch=prefetch))
        assert caught.value is mine


class Waits(Samples):
    """Reads the third batch only when it may."""

    def __init__(self, samples):
        super().__init__(samples)
        self.may = threading.Event()

    def __getitem__(self, index):
        if index >= 8:
            assert self.may.wait(30)
        return super().__getitem__(index)


@pytest.mark.long
@pytest.mark.parametrize("moment", ["start", "join"])
def test_an_interrupt_as_the_thread_begins_or_ends_leaves_none(moment, monkeypatch):
    """Python waits there, so that is where Ctrl-C comes; the interrupt itself must come out."""
    data = Waits([(x, y) for batch in batches(3) for x, y in zip(*batch)])
    model, original = compiled(), getattr(threading.Thread, moment)
    release = threading.Timer(0.3, data.may.set)
    interrupts = []

    def interrupted(thread, *args):
        first = thread.name == "ipufit-prefetch" and not interrupts
        if moment == "start":
            original(thread, *args)
        if first:
            interrupts.append(signal.SIGINT)
            release.start()
            os.kill(os.getpid(), signal.SIGINT)
        if moment == "join":
            original(thread, *args)

    monkeypatch.setattr(threading.Thread, moment, interrupted)
    with pytest.raises(KeyboardInterrupt):
        fit(
            model, DataLoader(data, 4), loading=ipufit.Loading(prefetch=1), callbacks=StopAt("stop")
        )
    release.join()
    assert interrupts
    assert_clean(model)
    fit(model, loading=ipufit.Loading(prefetch=0))


class StopAt(Callback):
    """Ends training early, one way or another."""

    def __init__(self, how):
        super().__init__()
        self.how = how

    def on_train_batch_end(self, batch, logs=None):
        if self.how == "stop":
            self.model.stop_training = True
        else:
            raise self.how


@pytest.mark.long("ipu-standin")
@pytest.mark.few
@pytest.mark.parametrize("how", ["stop", MineError("mine"), KeyboardInterrupt()])
def test_an_early_end_closes_what_was_being_read(how):
    """A generator's finally runs before fit returns, not at some later time."""
    closed = []

    class Closing:
        def __iter__(self):
            try:
                yield from batches(50)
            finally:
                closed.append(threading.current_thread())

    model = compiled()
    if how == "stop":
        fit(model, Closing(), callbacks=StopAt(how), loading=ipufit.Loading(prefetch=2))
    else:
        with pytest.raises(type(how)):
            fit(model, Closing(), callbacks=StopAt(how), loading=ipufit.Loading(prefetch=2))
    assert len(closed) == 1
    assert model._session.updates == 1
    assert_clean(model)


def test_a_change_of_the_data_in_a_callback_is_seen_late():
    """The documented price: so many executions are prepared already."""

    class Late(Callback):
        def on_train_batch_begin(self, batch, logs=None):
            if batch == 0:
                # The next execution is begun as soon as this one was taken.
                ready.acquire(timeout=30)
                dataset.value = 5.0

    class Constant(Samples):
        value = 0.0

        def __getitem__(self, index):
            if index == 1:
                ready.release()
            return torch.full((4,), self.value), torch.zeros(3)

    for prefetch, expected in ((0, [0.0, 5.0, 5.0]), (1, [0.0, 0.0, 5.0])):
        ready = threading.Semaphore(0 if prefetch else 1)
        dataset = Constant(range(3))
        engine = RecordingEngine()
        model = ipufit.Model(nn.Linear(4, 3), engine=lambda engine=engine: engine)
        model.compile("sgd", "mse")
        model.fit(
            DataLoader(dataset, 1),
            callbacks=Late(),
            loading=ipufit.Loading(prefetch=prefetch),
            verbose=0,
        )
        executions = engine.programs[0].executions
        assert [e.micro_batches[0].leaves[0][0, 0].item() for e in executions] == expected


@pytest.mark.long
@pytest.mark.parametrize("reuses", [True, False])
def test_buffers_that_the_user_still_has_are_not_read_late(reuses):
    """A loader that writes every batch into one buffer gives the same as one that does not."""

    def items():
        x, y = torch.empty(4, 4), torch.empty(4, 3)
        for a, b in batches(9):
            if reuses:
                yield x.copy_(a), y.copy_(b)
            else:
                yield a, b

    model, twin = compiled(), compiled()
    twin.module.load_state_dict(model.module.state_dict())
    fit(model, items(), loading=ipufit.Loading(prefetch=3), device_iterations=2)
    fit(twin, batches(9), loading=ipufit.Loading(prefetch=0))
    assert_same_bits(state(model), state(twin))


@pytest.mark.long("ipu-standin")
def test_the_thread_sees_torch_as_the_caller_does():
    """Grad mode and inference mode belong to a thread."""
    seen = []

    class Looks(Samples):
        def __getitem__(self, index):
            seen.append((torch.is_grad_enabled(), torch.is_inference_mode_enabled()))
            return super().__getitem__(index)

    model = compiled()
    loader = DataLoader(Looks(SAMPLES), 4)
    with torch.no_grad():
        model.evaluate(loader, prefetch=1, verbose=0)
    assert set(seen) == {(False, False)}
    seen.clear()
    with torch.inference_mode():
        model.evaluate(loader, prefetch=1, verbose=0)
    assert set(seen) == {(False, True)}


@pytest.mark.long("ipu-standin")
def test_nothing_of_the_executions_is_kept(monkeypatch):
    """Memory does not grow with the epoch."""
    made, alive = [], []

    def remembered(micro_batches):
        batch = CombinedBatch(micro_batches)
        made.append(weakref.ref(batch))
        return batch

    class Counts(Callback):
        def on_train_batch_end(self, batch, logs=None):
            alive.append(sum(reference() is not None for reference in made))

    monkeypatch.setattr("ipufit.data.batches.CombinedBatch", remembered)
    x, y = batches(1, 80)[0]
    fit(compiled(), x, y=y, batch_size=4, loading=ipufit.Loading(prefetch=2), callbacks=Counts())
    assert len(made) == len(alive) == 20
    # The running one, two ahead, and what the loop still names.
    assert max(alive) <= 5


@pytest.mark.long
def test_workers_read_ahead_give_the_same():
    """Processes and a thread together."""
    expected = None
    for prefetch in (0, 2):
        torch.manual_seed(0)
        model = compiled()
        loader = DataLoader(Samples(SAMPLES), 4, shuffle=True, num_workers=2)
        fit(model, loader, epochs=2, loading=ipufit.Loading(prefetch=prefetch))
        expected = expected or state(model)
        assert_same_bits(state(model), expected)


@pytest.mark.long
@pytest.mark.parametrize("prefetch", [0, 2])
def test_workers_that_stay_give_the_order_of_those_that_do_not(prefetch):
    """torch draws their seed only once, which must not move the order of the later epochs."""
    pairs = TensorDataset(*batches(1, 24)[0])

    def final(cuts=(0, 3), **options):
        model, data = compiled(), DataLoader(pairs, 4, shuffle=True, **options)
        for first, last in zip(cuts, cuts[1:]):
            fit(model, data, epochs=range(first, last), loading=ipufit.Loading(prefetch=prefetch))
        return state(model)

    torch.manual_seed(0)
    expected = final()
    for cuts in ((0, 3), (0, 1, 3)):
        torch.manual_seed(0)
        assert_same_bits(final(cuts, num_workers=2, persistent_workers=True), expected)


@pytest.mark.long
@pytest.mark.parametrize("form", ["tensors", "loader", "workers"])
def test_a_callback_may_draw_while_batches_are_read(form, engine):
    """Nothing but the first batch of an epoch is read with another generator state."""

    class Draws(Callback):
        def on_train_batch_end(self, batch, logs=None):
            drawn.append(torch.rand(()).item())

    x, y = batches(1, 60)[0]
    dataset = Samples([*zip(x, y)]) if form == "workers" else TensorDataset(x, y)
    loader = DataLoader(dataset, 2, shuffle=True, num_workers=form == "workers")
    arguments = {"y": y, "batch_size": 2} if form == "tensors" else {}
    results = []
    is_ahead = form == "workers" or engine != "embedded"
    for prefetch in (0, None, 1):
        torch.manual_seed(0)
        drawn = []
        model = compiled()
        data = x if form == "tensors" else loader
        history = fit(
            model,
            data,
            epochs=2,
            loading=ipufit.Loading(prefetch=prefetch),
            callbacks=Draws(),
            **arguments,
        )
        assert history.params["prefetch"] == (is_ahead if prefetch is None else prefetch)
        results.append({**state(model), "drawn": drawn})
    assert_same_bits(*results[:2])
    assert_same_bits(*results[1:])
    # A new pass within an epoch draws; then the default is to read without a thread.
    history = fit(compiled(), x if form == "tensors" else loader, steps_per_epoch=3, **arguments)
    assert history.params["prefetch"] == (form == "tensors" and engine != "embedded")


def test_a_stream_starts_again_from_its_beginning():
    """To find the samples of a batch that failed elsewhere."""
    stream = DataStream(3, "train", 0)
    drawn = []
    for part in (stream, stream, stream.again()):
        with part.active():
            drawn.append(torch.rand(()).item())
    assert drawn[0] == drawn[2] != drawn[1]
    assert list(Batches([1])) == [1]


@pytest.mark.long
@pytest.mark.parametrize("shuffle", [True, False])
def test_a_dataset_that_a_callback_lengthens_is_read_to_its_end(shuffle):
    """Curricula do that; samples that came late must not be left out because of shuffling."""
    samples = [(x, y) for batch in batches(6) for x, y in zip(*batch)]
    seen = []

    class Sees(Callback):
        def on_train_batch_end(self, batch, logs=None):
            seen.append(logs["samples"])

        def on_epoch_end(self, epoch, logs=None):
            dataset.samples = samples[:11]

    dataset = Samples(samples[:5])
    fit(
        compiled(nn.Linear(4, 3)),
        dataset,
        batch_size=4,
        epochs=2,
        shuffle=shuffle,
        callbacks=Sees(),
    )
    assert seen == [4, 5, 4, 8, 11]
