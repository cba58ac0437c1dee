"""Loaders over tensors are read without making samples, and nobody can tell but by the time."""

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
)

from ipufit.data.arrays import EpochOrder
from ipufit.data.held import held_rows

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
    rows = held_rows(loader)
    own, wanted = drawn_alike(rows, loader)
    assert len(own) == len(wanted) == len(loader)
    for batch, expected in zip(own, wanted):
        for tensor, other in zip(batch, expected):
            assert torch.equal(tensor, other)
            assert (tensor.dtype, tensor.stride()) == (other.dtype, other.stride())
    assert [type(batch) for batch in rows] == [type(batch) for batch in loader]


@pytest.mark.parametrize("shuffle", [False, True])
def test_a_generator_of_the_users_is_drawn_from_alike(shuffle):
    orders = []
    for read in (lambda loader: loader, held_rows):
        generator = torch.Generator().manual_seed(5)
        loader = DataLoader(TensorDataset(Y), batch_size=4, shuffle=shuffle, generator=generator)
        epochs = [torch.cat([y for (y,) in read(loader)]) for _ in range(2)]
        orders.append((*epochs, torch.rand(3, generator=generator)))
    assert all(torch.equal(own, wanted) for own, wanted in zip(*orders))


def test_our_own_order():
    loader = DataLoader(WHOLE, batch_size=4, sampler=EpochOrder(37, 11))
    own, wanted = drawn_alike(held_rows(loader), loader)
    assert torch.equal(torch.cat([y for _, y, _ in own]), torch.cat([y for _, y, _ in wanted]))


def test_batches_are_copies():
    """What a callback writes into the data is seen by later batches, and by no earlier one."""
    x = torch.zeros(8, 1)
    batches = iter(held_rows(DataLoader(TensorDataset(x), batch_size=4)))
    (first,) = next(batches)
    x += 1
    (second,) = next(batches)
    assert (first.unique().item(), second.unique().item()) == (0, 1)


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
        DataLoader(WHOLE, batch_size=4, num_workers=1),
        DataLoader(WHOLE, batch_size=4, sampler=SubsetRandomSampler([-1, 2])),
        DataLoader(WHOLE, batch_size=4, sampler=RandomSampler(WHOLE, replacement=True)),
        DataLoader(WHOLE, batch_size=4, sampler=RandomSampler(WHOLE, num_samples=74)),
        DataLoader(WHOLE, batch_size=4, sampler=SequentialSampler(range(3))),
        DataLoader(WHOLE, batch_sampler=BatchSampler(SequentialSampler(WHOLE), 4, False)),
        DataLoader(NEGATIVE, batch_size=4),
        DataLoader(TensorDataset(X.t().contiguous().t()), batch_size=4),
        DataLoader(TensorDataset(X.clone().requires_grad_()), batch_size=4),
        DataLoader(TensorDataset(torch.nn.Parameter(X, requires_grad=False)), batch_size=4),
    ],
)
def test_anything_else_is_left_to_torch(loader):
    assert held_rows(loader) is None
