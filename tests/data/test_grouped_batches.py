"""Batches of a DataLoader are read together, and nobody can tell but by the time."""

import gc
import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, Sampler, Subset, get_worker_info

import ipufit
from ipufit.callbacks import LambdaCallback
from ipufit.core.batch import Mode
from ipufit.core.plan import Plan
from ipufit.data import LengthBuckets, loader_reader
from ipufit.data.fields import BatchForm
from ipufit.data.in_memory import ReadAhead, RowBlock
from ipufit.data.pipeline import BatchPipeline, JobSpec
from ipufit.data.source import DataAdapter
from ipufit.errors import DataError
from ipufit.utils.random_streams import DataStream
from ipufit.utils.state import generator_states, set_generators

pytestmark = [
    pytest.mark.both_engines,
    # On a machine with fewer processors.
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),
]

SAMPLES = 83


@pytest.fixture(autouse=True)
def _any_time_is_short(monkeypatch):
    """How many batches make a message must not depend on the machine."""
    monkeypatch.setattr(loader_reader, "_SECONDS", 1e9)
    yield
    # Workers that stay end with their loader.
    gc.collect()


class Noisy(Dataset):
    """Draws from every generator that torch starts in a worker."""

    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        drawn = [torch.rand(()).item(), random.random(), np.random.rand()]
        return torch.tensor([index, *drawn], dtype=torch.float64), index


class Fields(Noisy):
    def __getitem__(self, index):
        x, y = super().__getitem__(index)
        return {"y": y, "x": x, "more": [x[:1], (float(y), np.float32(y))]}


class Named(Noisy):
    def __getitem__(self, index):
        x, y = super().__getitem__(index)
        return x, y, f"{index}.png"


class Lengths(Noisy):
    def __getitem__(self, index):
        return torch.arange(1 + index % 7), index


class Together(Noisy):
    """Draws once a batch, as an augmentation that mixes samples does."""

    def __getitems__(self, indices):
        share = torch.rand(())
        return [(torch.stack([share, torch.tensor(float(i))]), i) for i in indices]


def drawing_collate(samples):
    x = torch.stack([x for x, _ in samples])
    return [x + torch.rand(x.shape), torch.tensor([y for _, y in samples]), None]


def odd_collate(samples):
    """Tensors that are not what their bytes are, and of several sizes."""
    x = torch.stack([x for x, _ in samples])
    return x.t().contiguous().t(), torch.tensor(len(samples)), x[:2].expand(3, 2, 4)


BUCKETS = LengthBuckets(Lengths(), 4, [1 + i % 7 for i in range(SAMPLES)], max_recordings=3)
CASES = {
    "plain": lambda **options: DataLoader(Noisy(), 4, **options),
    "shuffled": lambda **options: DataLoader(Noisy(), 4, shuffle=True, **options),
    "drop_last": lambda **options: DataLoader(Noisy(), 4, drop_last=True, **options),
    "fields": lambda **options: DataLoader(Fields(), 4, shuffle=True, **options),
    "texts": lambda **options: DataLoader(Named(), 4, **options),
    "together": lambda **options: DataLoader(Together(), 4, shuffle=True, **options),
    "collate": lambda **options: DataLoader(Noisy(), 4, collate_fn=drawing_collate, **options),
    "odd": lambda **options: DataLoader(Noisy(), 4, collate_fn=odd_collate, **options),
    "lengths": lambda **options: DataLoader(
        Lengths(), batch_sampler=BUCKETS, collate_fn=BUCKETS.pad, **options
    ),
    "few": lambda **options: DataLoader(Noisy(), 64, shuffle=True, **options),
}


def batches_of(source, stream, horizon=5):
    """The batches of a pass, one by one."""
    for raw in source.epoch(stream, horizon=ReadAhead(horizon)):
        yield from raw.batches() if isinstance(raw, RowBlock) else [raw]


def assert_same(own, wanted):
    assert type(own) is type(wanted)
    if isinstance(own, dict):
        assert [*own] == [*wanted]
        own, wanted = [*own.values()], [*wanted.values()]
    if isinstance(own, (list, tuple)):
        assert len(own) == len(wanted)
        for one, other in zip(own, wanted):
            assert_same(one, other)
    elif isinstance(own, torch.Tensor):
        assert own.numpy().tobytes() == wanted.numpy().tobytes()
        assert (own.dtype, own.stride()) == (wanted.dtype, wanted.stride())
    else:
        assert own == wanted


def seed():
    random.seed(1)
    np.random.seed(1)


@pytest.mark.parametrize(
    ("case", "workers"),
    [*((case, count) for case in CASES for count in (0, 2)), ("fields", 1), ("shuffled", 3)],
)
def test_batches_are_those_of_torch(case, workers):
    """With the numbers that are drawn for them in each worker; as many are drawn here."""
    source, stream = DataAdapter(CASES[case](num_workers=workers), "data"), DataStream(0, "data", 7)
    seed()
    own = list(batches_of(source, stream))
    seed()
    with stream.active():
        after = torch.rand(())
    with stream.again().active():
        wanted = list(CASES[case](num_workers=workers))
        assert torch.rand(()) == after
    assert_same(own, wanted)


COLUMNS = {
    "numbers": [*range(SAMPLES)],
    "rows": [[float(i), i / 7] for i in range(SAMPLES)],
    "ragged": [[*range(1 + i % 3)] for i in range(SAMPLES)],
    "gaps": [None if i == 50 else i for i in range(SAMPLES)],
    "gaps in rows": [[i, None if i == 50 else 1] for i in range(SAMPLES)],
    "texts": [str(i) for i in range(SAMPLES)],
    "parts": [{"a": i, "b": [i, 1]} for i in range(SAMPLES)],
}


def table_of(*names):
    datasets = pytest.importorskip("datasets")
    columns = {name: COLUMNS[name] for name in names}
    return datasets.Dataset.from_dict(columns).with_format("torch")


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("name", COLUMNS)
def test_rows_of_a_table_are_those_of_torch(name, workers):
    """Whatever a column has that other batches of it have not; also of a subset of the table."""
    part = Subset(table_of("numbers", name), [*range(SAMPLES - 1, 20, -1)])
    # Without shuffling, the number that is missing is the 32nd.
    loader = DataLoader(part, 1 if name == "ragged" else 4, num_workers=workers)
    assert_same([*batches_of(DataAdapter(loader, "data"), DataStream(0, "data", 0))], [*loader])


def test_rows_of_a_table_are_taken_together(monkeypatch):
    """Once for the batches that an execution wants."""
    table, taken = table_of("numbers", "rows"), []
    take = type(table).__getitem__

    def taking(self, rows):
        taken.append(len(rows))
        return take(self, rows)

    monkeypatch.setattr(type(table), "__getitem__", taking)
    source = DataAdapter(DataLoader(table, 4), "data")
    list(batches_of(source, DataStream(0, "data", 0)))
    assert taken == [20, 20, 20, 20, 3]


def test_workers_that_stay_go_on_with_their_numbers():
    """In a second epoch, and in a second fit; the user's generator is drawn from as torch does."""
    found = []
    for by_torch in (False, True):
        generator = torch.Generator().manual_seed(3)
        options = {"num_workers": 2, "persistent_workers": True, "generator": generator}
        loader = DataLoader(Noisy(), 4, shuffle=True, **options)
        passes = []
        for epoch in range(3):
            source = DataAdapter(loader, "data")
            stream = DataStream(0, "data", epoch)
            passes += loader if by_torch else batches_of(source, stream)
        found.append((passes, generator.get_state()))
        del loader, source
    assert_same(*(passes for passes, _ in found))
    assert torch.equal(*(state for _, state in found))


class Calls(Dataset):
    """A sample tells which worker has made it, and after how many calls."""

    def __init__(self):
        self.calls = self.collated = self.started = 0

    def __len__(self):
        return 64

    def __getitem__(self, index):
        self.calls += 1
        return torch.tensor([index, get_worker_info().id, self.calls])

    def collate(self, samples):
        self.collated += 1
        return torch.stack(samples), torch.tensor([[self.collated, self.started]] * len(samples))


def start(worker):
    info = get_worker_info()
    assert (worker, info.num_workers) == (info.id, 2)
    info.dataset.started += 1


def test_who_is_called_and_how_often():
    """The dataset for each sample, collate_fn for each batch, in the worker that torch asks."""
    calls = Calls()

    class Collates:
        def __call__(self, samples):
            return get_worker_info().dataset.collate(samples)

    loader = DataLoader(calls, 4, num_workers=2, collate_fn=Collates(), worker_init_fn=start)
    for number, (samples, collated) in enumerate(
        batches_of(DataAdapter(loader, "data"), DataStream(0, "data", 0))
    ):
        turn, worker = divmod(number, 2)
        assert samples.tolist() == [[4 * number + i, worker, 4 * turn + i + 1] for i in range(4)]
        assert collated.tolist() == [[turn + 1, 1]] * 4
    assert number == 15


def messages(loader, monkeypatch, horizon=5):
    """Batches of each message."""
    counts = []
    adapt = loader_reader.LoaderReader.adapt

    def counting(self, received):
        counts.append([len(each.batches) for each in received])
        adapt(self, received)

    monkeypatch.setattr(loader_reader.LoaderReader, "adapt", counting)
    list(batches_of(DataAdapter(loader, "data"), DataStream(0, "data", 0), horizon))
    return counts


def small(**options):
    return DataLoader(TwoHundred(), 1, **{"num_workers": 2, **options})


class TwoHundred(Noisy):
    def __len__(self):
        return 200


def test_a_message_has_many_small_batches(monkeypatch):
    """The first ones come one by one, as torch has asked for them before any is read."""
    assert messages(small(), monkeypatch) == [*[[1, 1]] * 3, *[[32, 32]] * 3, [1, 1]]


def test_a_message_of_large_batches_has_as_many_as_fit(monkeypatch):
    # Seven places, each for two messages; a batch takes 64 bytes for each of its tensors.
    monkeypatch.setattr(loader_reader, "_BYTES", 7 * 2 * 8 * 128)
    counts = messages(small(), monkeypatch)
    assert counts == [*[[1, 1]] * 3, *[[8, 8]] * 12, [1, 1]]
    monkeypatch.setattr(loader_reader, "_BYTES", 7 * 2 * 128)
    assert messages(small(), monkeypatch) == [[1, 1]] * 100


def is_shared(source, batch):
    """Say whether a batch lies in the memory that workers write to."""
    memory = source._reader.memory
    begin, end = memory[0].data_ptr(), memory[-1].data_ptr() + len(memory[-1])
    return begin <= batch[0].data_ptr() < end


@pytest.mark.parametrize("persistent", [False, True])
def test_batches_stay_in_the_memory_of_workers_while_they_are_held(persistent, monkeypatch):
    """Four turns at most; those that come later are copied, and none is ever overwritten."""
    monkeypatch.setattr(loader_reader, "_BYTES", 7 * 2 * 4 * 128)
    loader = small(persistent_workers=persistent)
    wanted = torch.arange(200).tolist()
    source = DataAdapter(loader, "data")
    for number in range(2):
        passed = []
        for batch in batches_of(source, DataStream(0, "data", number)):
            passed.append(is_shared(source, batch))
            del batch
        # The first ones of a form may be examples for all others.
        assert passed == [bool(number)] * 2 + [True] * 198
    held = [*batches_of(source, DataStream(0, "data", 0))]
    assert [is_shared(source, batch) for batch in held] == [True] * 32 + [False] * 168
    # So many places are left that a pass can begin.
    again = [*batches_of(source, DataStream(0, "data", 0))]
    assert not any(is_shared(source, batch) for batch in again)
    del source, loader
    gc.collect()
    for batches in (held, again):
        assert [int(x[0, 0]) for x, _ in batches] == [int(y) for _, y in batches] == wanted


def test_a_second_fit_does_not_hold_memory_of_workers_that_stay():
    loader = small(persistent_workers=True)
    for _ in range(2):
        source = DataAdapter(loader, "data")
        first = next(batches_of(source, DataStream(0, "data", 0)))
        assert not is_shared(source, first)


def test_a_message_of_batches_that_take_long_has_one(monkeypatch):
    monkeypatch.setattr(loader_reader, "_SECONDS", 1e-9)
    assert messages(small(), monkeypatch) == [[1, 1]] * 100


def test_a_message_has_one_batch_where_torch_waits_for_it_so_long_at_most(monkeypatch):
    assert messages(small(timeout=60), monkeypatch) == [[1, 1]] * 100


def test_a_message_has_batches_of_several_shapes(monkeypatch):
    loader = DataLoader(Lengths(), batch_sampler=BUCKETS, collate_fn=BUCKETS.pad, num_workers=2)
    assert messages(loader, monkeypatch) == [*[[1, 1]] * 3, [8, 7]]


def test_a_message_has_one_batch_with_texts(monkeypatch):
    counts = messages(CASES["texts"](num_workers=2), monkeypatch)
    assert counts == [*[[1, 1]] * 10, [1]]


class OwnSampler(Sampler):
    def __init__(self):
        pass

    def __iter__(self):
        return iter(range(SAMPLES))

    def __len__(self):
        return SAMPLES


@pytest.mark.parametrize(
    "options",
    [
        {"sampler": OwnSampler()},
        {"batch_sampler": [[0, 1], [2]], "batch_size": 1},
        {"batch_size": None},
        {"num_workers": 0},
    ],
    ids=["sampler", "batches", "no batches", "no workers"],
)
def test_what_somebody_could_tell_is_left_to_torch(options):
    options = {"num_workers": 1, "batch_size": 4, **options}
    assert not loader_reader.sends_groups(DataLoader(Noisy(), **options))


def test_a_class_of_the_users_is_left_to_torch():
    class Own(DataLoader):
        pass

    assert not loader_reader.sends_groups(Own(Noisy(), 4, num_workers=1))
    assert loader_reader.sends_groups(DataLoader(Noisy(), 4, num_workers=1))


class Breaks(Noisy):
    def __init__(self, error):
        self.error = error

    def __getitem__(self, index):
        if index == 61:
            raise self.error
        return torch.ones(2), torch.tensor([float(index)])


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("error", [ValueError("broken"), StopIteration("broken")])
def test_batches_before_an_error_are_trained_on(error, workers):
    """Although they are read together with the error."""
    updates = []
    model = ipufit.Model(nn.Linear(2, 1), engine="embedded")
    model.compile("sgd", "mse")
    look = LambdaCallback(on_train_batch_end=lambda batch, logs: updates.append(batch))
    with pytest.raises(DataError) as caught:
        model.fit(DataLoader(Breaks(error), 4, num_workers=workers), verbose=0, callbacks=look)
    assert updates == [*range(15)]
    assert str(caught.value).startswith(
        f"training data, batch 15: sample 61 of Breaks could not be read: {type(error).__name__}: "
        "broken. "
    )


def executions(device_iterations, workers=2):
    loader = DataLoader(Noisy(), 4, shuffle=True, num_workers=workers)
    source = DataAdapter(loader, "data")
    pipeline = BatchPipeline(
        JobSpec(source, plan(device_iterations), Mode.TRAIN, 0, "train"), BatchForm(own_loss=True)
    )
    pipeline.tells_place = True
    return pipeline


def plan(device_iterations):
    return Plan(4, 1, 1, device_iterations, 1, 1)


def read(pipeline, device_iterations):
    """All micro-batches, their number and position, and states, after each execution."""
    leaves, places, sizes, states = [], [], [], []
    for batch in pipeline.executions(0, plan(device_iterations)):
        leaves += [micro.leaves for micro in batch.micro_batches]
        sizes.append(len(batch.micro_batches))
        places.append(batch.place)
        states.append(generator_states())
    return leaves, places, sizes, states


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("device_iterations", [1, 4, 50])
def test_any_number_of_device_iterations_has_the_same_batches(device_iterations, workers):
    seed()
    wanted, _, _, _ = read(executions(1, workers), 1)
    seed()
    own, places, sizes, _ = read(executions(device_iterations, workers), device_iterations)
    assert [place.batches for place in places] == [
        *range(device_iterations, 21, device_iterations),
        21,
    ]
    full, rest = divmod(21, device_iterations)
    assert sizes == [device_iterations] * full + [rest] * bool(rest)
    assert_same(own, wanted)


@pytest.mark.parametrize("workers", [0, 2])
def test_an_epoch_goes_on_in_its_middle(workers):
    """From within what is read together, with the numbers that would have been drawn."""
    wanted, places, _, states = read(executions(2, workers), 2)
    for place, state in list(zip(places, states))[:-1:3]:
        set_generators(state)
        later = executions(5, workers)
        later.seek(place, place.batches, place.batches)
        own, _, _, _ = read(later, 5)
        assert_same(own, wanted[place.batches :])
