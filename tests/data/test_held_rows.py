"""Loaders over tensors are read without making samples, and nobody can tell but by the time."""

import dataclasses

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    RandomSampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from ipufit.core.batch import Mode
from ipufit.core.plan import Plan
from ipufit.data.fields import BatchForm
from ipufit.data.in_memory import ArrayLoader, EpochOrder, array_loader, rows_in_memory
from ipufit.data.pipeline import BatchPipeline, JobSpec, fetch_ahead
from ipufit.data.source import DataAdapter
from ipufit.utils import tree
from ipufit.utils.random_streams import DataStream

pytestmark = pytest.mark.both_engines

X = torch.arange(37 * 3, dtype=torch.float32).reshape(37, 3)
Y = torch.arange(37)
FLAGS = torch.arange(37) % 3 == 0
WHOLE = TensorDataset(X, Y, FLAGS)
PART = Subset(Subset(WHOLE, range(5, 36)), [4, 0, 30, 7, 7, 9])


def drawn_alike(one, other):
    """Whether two ways to read leave torch's generator alike; what they read."""
    found = []
    for read in (one, other):
        torch.manual_seed(3)
        batches = [[tensor.clone() for tensor in batch] for batch in read]
        found.append((batches, torch.rand(4)))
    (first, after), (second, after_second) = found
    assert torch.equal(after, after_second)
    return first, second


@pytest.mark.parametrize(
    "options",
    [
        {"batch_size": 4},
        {"batch_size": 4, "drop_last": True},
        {"batch_size": 4, "shuffle": True},
        {"batch_size": 5, "shuffle": True, "drop_last": True},
        {"batch_size": 64, "shuffle": True},
    ],
    ids=str,
)
@pytest.mark.parametrize("dataset", [WHOLE, PART, TensorDataset(Y)], ids=["whole", "part", "one"])
def test_the_same_samples_in_the_same_order(dataset, options):
    """With torch's draws; dtypes, strides and containers as torch's collate makes them."""
    loader = DataLoader(dataset, **options)
    rows = rows_in_memory(loader)
    own, wanted = drawn_alike(rows, loader)
    assert len(own) == len(wanted) == len(loader)
    for batch, expected in zip(own, wanted):
        for tensor, other in zip(batch, expected):
            assert torch.equal(tensor, other)
            assert (tensor.dtype, tensor.stride()) == (other.dtype, other.stride())
    assert [type(batch) for batch in rows] == [type(batch) for batch in loader]


@pytest.mark.parametrize(
    "sampler",
    [
        WeightedRandomSampler(FLAGS + 0.5, 50),
        WeightedRandomSampler(FLAGS + 0.5, 9, replacement=False),
        WeightedRandomSampler(FLAGS + 0.5, 9, generator=torch.Generator().manual_seed(5)),
        RandomSampler(WHOLE, replacement=True),
        RandomSampler(WHOLE, replacement=True, num_samples=80),
        RandomSampler(WHOLE, num_samples=74),
        SubsetRandomSampler([4, 0, 30, 7, 7, 9]),
    ],
)
def test_some_samples_or_some_more_than_once(sampler):
    loader = DataLoader(WHOLE, batch_size=4, sampler=sampler)
    states = [] if sampler.generator is None else [sampler.generator.get_state()]

    def read(batches):
        for state in states:
            sampler.generator.set_state(state)
        yield from batches

    rows = rows_in_memory(loader)
    own, wanted = drawn_alike(read(rows), read(loader))
    assert len(own) == len(wanted) == len(loader) == len(rows)
    for batch, expected in zip(own, wanted):
        assert all(map(torch.equal, batch, expected))


@pytest.mark.parametrize("persistent", [False, True])
def test_no_workers_are_started_for_rows(persistent, monkeypatch):
    """Two passes have what workers send, and draw as many numbers."""
    loader = DataLoader(
        WHOLE, batch_size=4, shuffle=True, num_workers=2, persistent_workers=persistent
    )
    first, again = DataStream(0, "data", 0), DataStream(0, "data", 1)
    source = DataAdapter(loader, "data")
    with monkeypatch.context() as patch:
        patch.setattr(DataLoader, "__iter__", None)
        own = [list(source.epoch(stream.again())) for stream in (first, again)]
    batches = [batch for blocks in own for block in blocks for batch in block.batches()]
    wanted = []
    for stream in (first, again):
        fresh = DataLoader(WHOLE, batch_size=4, shuffle=True, num_workers=2)
        with stream.active():
            wanted += [*fresh]
    assert len(batches) == len(wanted) == 2 * len(loader)
    for batch, expected in zip(batches, wanted):
        assert all(map(torch.equal, batch, expected))


@pytest.mark.parametrize("shuffle", [False, True])
def test_a_generator_of_the_users_is_drawn_from_alike(shuffle):
    orders = []
    for read in (lambda loader: loader, rows_in_memory):
        generator = torch.Generator().manual_seed(5)
        loader = DataLoader(TensorDataset(Y), batch_size=4, shuffle=shuffle, generator=generator)
        epochs = [torch.cat([y for (y,) in read(loader)]) for _ in range(2)]
        orders.append((*epochs, torch.rand(3, generator=generator)))
    assert all(torch.equal(own, wanted) for own, wanted in zip(*orders))


def test_a_batch_sampler_of_torchs():
    loader = DataLoader(WHOLE, batch_sampler=BatchSampler(RandomSampler(WHOLE), 5, True))
    own, wanted = drawn_alike(rows_in_memory(loader), loader)
    assert [len(y) for _, y, _ in own] == [5] * 7
    assert torch.equal(torch.cat([y for _, y, _ in own]), torch.cat([y for _, y, _ in wanted]))


def test_our_own_order():
    loader = DataLoader(WHOLE, batch_size=4, sampler=EpochOrder(37, 11))
    own, wanted = drawn_alike(rows_in_memory(loader), loader)
    assert torch.equal(torch.cat([y for _, y, _ in own]), torch.cat([y for _, y, _ in wanted]))


def test_batches_are_copies():
    """What a callback writes into the data is seen by later batches, and by no earlier one."""
    x = torch.zeros(8, 1)
    batches = iter(rows_in_memory(DataLoader(TensorDataset(x), batch_size=4)))
    (first,) = next(batches)
    x += 1
    (second,) = next(batches)
    assert (first.unique().item(), second.unique().item()) == (0, 1)


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("shuffle", [False, True])
def test_rows_of_any_size_are_copied(shuffle, depth):
    """Beside the thread that trains in pieces, for which torch wakes no other threads."""
    wide, scalar = torch.arange(3.0 * 40000).view(3, 200, 200), torch.arange(3)
    empty = torch.zeros(3, 0)
    loader = DataLoader(TensorDataset(wide, scalar, empty), batch_size=2, shuffle=shuffle)
    own, wanted = drawn_alike(fetch_ahead(iter(rows_in_memory(loader)), depth), loader)
    assert len(own) == 2
    for batch, expected in zip(own, wanted):
        for tensor, other in zip(batch, expected):
            assert torch.equal(tensor, other)
            assert tensor.shape == other.shape


def test_strides_of_arrays_stay():
    pictures = torch.randn(5, 3, 4, 4).contiguous(memory_format=torch.channels_last)
    loader = array_loader((pictures, None), ["x"], 2, "data")
    for (batch, _), expected in zip(loader, pictures.split(2)):
        assert torch.equal(batch, expected)
        assert batch.stride() == expected.stride()


class Reads:
    """A tensor's rows, and where each reading begins and ends."""

    def __init__(self, samples):
        self.x = torch.arange(float(samples)).view(-1, 1)
        self.spans = []

    def rows(self, key):
        def leaves():
            return [self.x]

        structure = tree.flatten([self.x])[1]
        rows = ArrayLoader(leaves, structure, len(self.x), 2, lambda: None)
        return Watching(**vars(rows), spans=self.spans)


@dataclasses.dataclass(frozen=True)
class Watching(ArrayLoader):
    spans: list

    def picked(self, horizon, most=None):
        for picked in super().picked(horizon, most):
            self.spans.append([int(value) for value in picked.leaves[0].flatten().tolist()])
            yield picked


def feed(samples, cut_every=(), limit=None, mode=Mode.PREDICT):
    """A feed over so many numbers, two to a batch, and what is read at once."""
    reads = Reads(samples)
    source = DataAdapter(array_loader([reads.x], ["x"], 2, "data"), "data", reads.rows)
    if limit is not None:
        source.limit(limit)
    job = JobSpec(source, plan(1), mode, 0, "train", cut_every=cut_every)
    return BatchPipeline(job, BatchForm(own_loss=True)), reads.spans


def plan(device_iterations, fixed_updates=None):
    return Plan(2, 1, 1, device_iterations, 1, 1, fixed_updates=fixed_updates)


def read(own, epoch, plan):
    """The samples of each execution."""
    return [
        [int(v) for micro in batch.micro_batches for v in micro.leaves[0].flatten().tolist()]
        for batch in own.executions(epoch, plan)
    ]


def test_an_execution_is_read_at_once_and_none_ahead():
    """What callbacks write into the data between two executions must be seen by the second."""
    own, spans = feed(13)
    whole = plan(device_iterations=3)
    expected = [[0, 1, 2, 3, 4, 5], [6, 7, 8, 9, 10, 11], [12]]
    assert read(own, 0, whole) == expected == spans
    # The first batch of all is looked at before; what is left of its execution comes with it.
    spans.clear()
    own.peek(1, whole)
    assert spans == [[0, 1]]
    assert read(own, 1, whole) == expected
    assert spans == [[0, 1], [2, 3, 4, 5], *expected[1:]]


def test_cuts_and_limits_bound_what_is_read_at_once():
    own, spans = feed(24, cut_every=(2,), limit=5)
    expected = [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert read(own, 0, plan(device_iterations=3)) == expected == spans


def test_epochs_that_are_parts_of_passes():
    """Each begins where the one before has ended, a second process where it must."""
    work = plan(device_iterations=2, fixed_updates=3)
    expected = [[[0, 1, 2, 3], [4, 5]], [[6, 7, 8, 9], [0, 1]], [[2, 3, 4, 5], [6, 7]]]
    own, _ = feed(10, mode=Mode.TRAIN)
    assert [read(own, epoch, work) for epoch in range(3)] == expected
    for epoch in (1, 2):
        later, _ = feed(10, mode=Mode.TRAIN)
        assert read(later, epoch, work) == expected[epoch]


class Own(TensorDataset):
    """Somebody may have overridden anything."""


class OwnLoader(DataLoader):
    """Here too."""


NEGATIVE = Subset(WHOLE, [0, -1])


@pytest.mark.parametrize(
    "loader",
    [
        [1],
        DataLoader(Own(X, Y), batch_size=4),
        OwnLoader(WHOLE, batch_size=4),
        DataLoader(WHOLE, batch_size=4, collate_fn=list),
        DataLoader(WHOLE, batch_size=None),
        DataLoader(WHOLE, batch_size=4, num_workers=1, worker_init_fn=print),
        DataLoader(
            WHOLE,
            batch_size=4,
            num_workers=1,
            persistent_workers=True,
            generator=torch.Generator(),
        ),
        DataLoader(WHOLE, batch_size=4, sampler=SubsetRandomSampler([-1, 2])),
        DataLoader(
            WHOLE, batch_size=4, sampler=RandomSampler(WHOLE, True, None, torch.Generator())
        ),
        DataLoader(WHOLE, batch_size=4, sampler=WeightedRandomSampler(torch.ones(38), 5)),
        DataLoader(WHOLE, batch_size=4, pin_memory=True),
        DataLoader(WHOLE, batch_size=4, sampler=SequentialSampler(range(3))),
        DataLoader(WHOLE, batch_sampler=[[0, 1], [2]]),
        DataLoader(WHOLE, batch_size=4, sampler=SubsetRandomSampler(torch.arange(3))),
        DataLoader(NEGATIVE, batch_size=4),
        DataLoader(TensorDataset(X.t().contiguous().t()), batch_size=4),
        DataLoader(TensorDataset(X.clone().requires_grad_()), batch_size=4),
        DataLoader(TensorDataset(torch.nn.Parameter(X, requires_grad=False)), batch_size=4),
    ],
)
def test_anything_else_is_left_to_torch(loader):
    assert rows_in_memory(loader) is None
