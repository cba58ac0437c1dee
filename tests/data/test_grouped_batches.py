"""Workers send small batches together, and nobody can tell but by the time."""

import gc
import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, Sampler, get_worker_info

import ipufit
from ipufit.callbacks import LambdaCallback
from ipufit.core.batch import Mode
from ipufit.core.plan import Plan
from ipufit.data import LengthBuckets, sharding
from ipufit.data.fields import BatchForm
from ipufit.data.in_memory import ReadAhead, RowBlock
from ipufit.data.pipeline import BatchPipeline, JobSpec
from ipufit.data.source import DataAdapter
from ipufit.errors import DataError
from ipufit.utils.random_streams import DataStream

pytestmark = [
    pytest.mark.both_engines,
    # On a machine with fewer processors.
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),
]

SAMPLES = 83


@pytest.fixture(autouse=True)
def _any_time_is_short(monkeypatch):
    """How many batches make a message must not depend on the machine."""
    monkeypatch.setattr(sharding, "_SECONDS", 1e9)
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
        assert torch.equal(own, wanted)
        assert (own.dtype, own.stride()) == (wanted.dtype, wanted.stride())
    else:
        assert own == wanted


@pytest.mark.parametrize(
    ("case", "workers"), [*((case, 2) for case in CASES), ("fields", 1), ("shuffled", 3)]
)
def test_batches_are_those_of_torch(case, workers):
    """With the numbers that are drawn for them in each worker; as many are drawn here."""
    source, stream = DataAdapter(CASES[case](num_workers=workers), "data"), DataStream(0, "data", 7)
    own = list(batches_of(source, stream))
    with stream.active():
        after = torch.rand(())
    with stream.again().active():
        wanted = list(CASES[case](num_workers=workers))
        assert torch.rand(()) == after
    assert_same(own, wanted)


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
    adapt = sharding.LoaderReader.adapt

    def counting(self, received):
        counts.append([each.packed + len(each.rest) for each in received])
        adapt(self, received)

    monkeypatch.setattr(sharding.LoaderReader, "adapt", counting)
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
    monkeypatch.setattr(sharding, "_BYTES", 6 * 320)
    counts = messages(small(), monkeypatch)
    assert counts == [*[[1, 1]] * 3, *[[4, 4]] * 24, [1, 1]]
    monkeypatch.setattr(sharding, "_BYTES", 6 * 32)
    assert messages(small(), monkeypatch) == [[1, 1]] * 100


def test_a_message_of_batches_that_take_long_has_one(monkeypatch):
    monkeypatch.setattr(sharding, "_SECONDS", 1e-9)
    assert messages(small(), monkeypatch) == [[1, 1]] * 100


def test_batches_of_several_shapes_come_one_by_one(monkeypatch):
    loader = CASES["lengths"](num_workers=2)
    counts = messages(loader, monkeypatch)
    assert sum(map(sum, counts)) == len(loader)
    assert all(count == [1, 1] for count in counts[4:-1])


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
        {"timeout": 60},
        {"sampler": OwnSampler()},
        {"batch_sampler": [[0, 1], [2]], "batch_size": 1},
        {"batch_size": None},
        {"num_workers": 0},
    ],
    ids=["timeout", "sampler", "batches", "no batches", "no workers"],
)
def test_what_somebody_could_tell_is_left_to_torch(options):
    options = {"num_workers": 1, "batch_size": 4, **options}
    assert not sharding.sends_groups(DataLoader(Noisy(), **options))


def test_a_class_of_the_users_is_left_to_torch():
    class Own(DataLoader):
        pass

    assert not sharding.sends_groups(Own(Noisy(), 4, num_workers=1))
    assert sharding.sends_groups(DataLoader(Noisy(), 4, num_workers=1))


class Breaks(Noisy):
    def __init__(self, error):
        self.error = error

    def __getitem__(self, index):
        if index == 61:
            raise self.error
        return torch.ones(2), torch.tensor([float(index)])


@pytest.mark.parametrize("error", [ValueError("broken"), StopIteration("broken")])
def test_batches_before_an_error_are_trained_on(error):
    """Although they are in the message that has the error."""
    updates = []
    model = ipufit.Model(nn.Linear(2, 1), engine="embedded")
    model.compile("sgd", "mse")
    look = LambdaCallback(on_train_batch_end=lambda batch, logs: updates.append(batch))
    with pytest.raises(DataError) as caught:
        model.fit(DataLoader(Breaks(error), 4, num_workers=2), verbose=0, callbacks=look)
    assert updates == [*range(15)]
    assert str(caught.value).startswith(
        f"training data, batch 15: sample 61 of Breaks could not be read: {type(error).__name__}: "
        "broken. "
    )


def executions(device_iterations):
    loader = DataLoader(Noisy(), 4, shuffle=True, num_workers=2)
    source = DataAdapter(loader, "data")
    pipeline = BatchPipeline(
        JobSpec(source, plan(device_iterations), Mode.TRAIN, 0, "train"), BatchForm(own_loss=True)
    )
    pipeline.tells_place = True
    return pipeline


def plan(device_iterations):
    return Plan(4, 1, 1, device_iterations, 1, 1)


def read(pipeline, device_iterations):
    """The leaves of all micro-batches, and the positions after the executions."""
    leaves, places, sizes = [], [], []
    for batch in pipeline.executions(0, plan(device_iterations)):
        leaves += [micro.leaves for micro in batch.micro_batches]
        sizes.append(len(batch.micro_batches))
        places.append(batch.place)
    return leaves, places, sizes


@pytest.mark.parametrize("device_iterations", [1, 4, 50])
def test_any_number_of_device_iterations_has_the_same_batches(device_iterations):
    wanted, _, _ = read(executions(1), 1)
    own, places, sizes = read(executions(device_iterations), device_iterations)
    assert [place.batches for place in places] == [
        *range(device_iterations, 21, device_iterations),
        21,
    ]
    full, rest = divmod(21, device_iterations)
    assert sizes == [device_iterations] * full + [rest] * bool(rest)
    assert_same(own, wanted)


def test_an_epoch_goes_on_in_its_middle():
    """From within a message, with the numbers that its workers would have drawn."""
    wanted, places, _ = read(executions(2), 2)
    for place in places[:-1]:
        later = executions(2)
        later.seek(place, place.batches, place.batches)
        own, _, _ = read(later, 2)
        assert_same(own, wanted[place.batches :])
