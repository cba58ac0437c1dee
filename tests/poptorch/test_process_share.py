"""How several processes part a dataset: every sample in one of them, the same order in all."""

import random

import pytest
import torch

from ipufit.poptorch import Error
from ipufit.poptorch._dataloader import ProcessShare, ShuffledShare, share_bounds
from tests.poptorch.loading import Numbers


def samples(share):
    """The samples of a share as numbers, asked for as a loader asks."""
    return [int(share[index]) for index in ShuffledShare(share)]


def test_blocks_are_contiguous_and_never_meet():
    rng = random.Random(0)
    for _ in range(200):
        step, processes, n = rng.randint(1, 9), rng.randint(1, 6), rng.randint(0, 300)
        for drop_last in (True, False):
            blocks = [share_bounds(n, processes, p, step, drop_last) for p in range(processes)]
            ends = [begin + size for begin, size in blocks]
            assert [begin for begin, _ in blocks] == [0, *ends[:-1]]
            if drop_last:
                assert {size for _, size in blocks} == {n // (step * processes) * step}
            else:
                assert ends[-1] == n
                assert [size for _, size in blocks] == [
                    n // processes + (p < n % processes) for p in range(processes)
                ]


def test_plain_indices_are_those_of_the_share():
    share = ProcessShare(Numbers(10), 3, 1, 1, drop_last=False)
    assert [int(sample) for sample in share] == [4, 5, 6]
    assert int(share[-1]) == 6
    with pytest.raises(IndexError) as caught:
        share[3]
    assert str(caught.value) == (
        "index 3 is not in the share of this process, which has 3 samples of the dataset."
    )


def test_shuffled_shares_are_blocks_of_one_permutation_shifted_in_odd_epochs():
    """Of the n samples the first epoch leaves the first ones of the permutation out."""
    n, processes, step = 23, 2, 5
    generator = torch.Generator()
    generator.manual_seed(7)
    permutations = [torch.randperm(n, generator=generator).tolist() for _ in range(4)]
    for process in range(processes):
        share = ProcessShare(Numbers(n), processes, process, step, True, 7)
        for epoch, permutation in enumerate(permutations, 1):
            share.set_epoch(epoch)
            begin = process * 10 + (3 if epoch % 2 else 0)
            assert samples(share) == permutation[begin : begin + 10]
            assert [int(sample) for sample in share] == samples(share)


def test_an_epoch_has_its_order_whenever_it_is_asked_for():
    share = ProcessShare(Numbers(30), 3, 1, 2, True, 1)
    share.set_epoch(1)
    order = {1: samples(share)}
    for epoch in (2, 3):
        share.set_epoch(epoch)
        order[epoch] = samples(share)
    for epoch in (2, 2, 1, 3):
        share.set_epoch(epoch)
        assert samples(share) == order[epoch]


def test_an_iterator_keeps_its_order_when_the_next_epoch_begins():
    share = ProcessShare(Numbers(12), 2, 0, 2, True, 0)
    share.set_epoch(1)
    expected = samples(share)
    iterator = iter(ShuffledShare(share))
    first = int(share[next(iterator)])
    share.set_epoch(2)
    assert [first] + [int(share[index]) for index in iterator] == expected


def test_without_drop_last_every_sample_is_in_one_process_in_every_epoch():
    rng = random.Random(3)
    for _ in range(30):
        n, processes = rng.randint(1, 40), rng.randint(1, 5)
        shares = [ProcessShare(Numbers(n), processes, p, 4, False, n) for p in range(processes)]
        for epoch in (1, 2, 3):
            seen = []
            for share in shares:
                share.set_epoch(epoch)
                seen += samples(share)
            assert sorted(seen) == list(range(n))


def test_with_drop_last_processes_never_read_the_same_sample():
    rng = random.Random(4)
    for _ in range(30):
        step, processes = rng.randint(1, 4), rng.randint(1, 4)
        n = rng.randint(step * processes, 60)
        shares = [ProcessShare(Numbers(n), processes, p, step, True, n) for p in range(processes)]
        for epoch in (1, 2):
            seen = []
            for share in shares:
                share.set_epoch(epoch)
                seen += samples(share)
            assert len(set(seen)) == len(seen) == n // (step * processes) * step * processes


def test_several_samples_are_asked_for_at_once_where_the_dataset_can():
    class Batched(Numbers):
        def __getitems__(self, indices):
            return [100 + index for index in indices]

    assert ProcessShare(Batched(8), 2, 1, 1, False).__getitems__([0, 2]) == [104, 106]
    assert ProcessShare(Numbers(8), 2, 1, 1, False).__getitems__([0, 2]) == [4, 6]


def test_too_few_samples_for_all_processes_are_refused():
    with pytest.raises(Error) as caught:
        ProcessShare(Numbers(11), 3, 0, 4, drop_last=True)
    assert caught.value.message == (
        "With drop_last=True 3 processes need at least 3 combined batches of 4 samples (12), and "
        "the dataset has 11. Use smaller combined batches, or fewer processes."
    )
