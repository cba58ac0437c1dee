"""Combined batches: which samples are in them, which are left out, and what the loader refuses."""

import itertools
import logging
import random

import pytest
import torch
from torch.utils.data import BatchSampler, SequentialSampler, Subset, SubsetRandomSampler

from ipufit.poptorch import DataLoader, DataLoaderMode, Error, _dataloader
from ipufit.poptorch._parsers import registerCustomArgParser
from tests.poptorch.loading import (
    Numbers,
    Opts,
    Pair,
    PairParser,
    SizedStream,
    Stream,
    epoch,
    reader,
    refused,
    values,
)

ASYNC, REBATCHED = DataLoaderMode.Async, DataLoaderMode.AsyncRebatched


class Recorded:
    """Stands for the accessor: keeps what it was asked for, and starts no process."""

    def __init__(self, dataset, rebatched_size=None, **options):
        self.dataset, self.rebatched_size, self.options = dataset, rebatched_size, options
        self.is_terminated = False

    def terminate(self):
        self.is_terminated = True

    def __len__(self):
        return 77


@pytest.fixture
def recorded(monkeypatch):
    monkeypatch.setattr(_dataloader, "AsynchronousDataAccessor", Recorded)


# Sizes and order.


@pytest.mark.parametrize(
    ("opts", "combined"),
    [
        (Opts(), 2),
        (Opts(iterations=3), 6),
        (Opts(accumulation=5), 10),
        (Opts(replicas=4), 8),
        (Opts(replicas=4, group=2), 4),
        (Opts(iterations=3, accumulation=5, replicas=4, group=4), 30),
    ],
)
def test_a_combined_batch_is_what_one_run_takes(opts, combined):
    loader = DataLoader(opts, Numbers(100), batch_size=2)
    assert loader.combinedBatchSize == combined
    assert len(loader) == 100 // combined
    assert values(loader) == list(range(100 // combined * combined))
    assert loader.options is opts
    assert opts.is_frozen


@pytest.mark.few
@pytest.mark.parametrize("drop_last", [True, False])
@pytest.mark.parametrize("shuffle", [True, False, None])
def test_every_sample_comes_once_or_is_one_of_the_rest(shuffle, drop_last):
    rng = random.Random(2)
    for _ in range(30):
        n, size, iterations = rng.randint(1, 50), rng.randint(1, 4), rng.randint(1, 4)
        opts = Opts(iterations=iterations)
        loader = DataLoader(opts, Numbers(n), size, shuffle=shuffle, drop_last=drop_last)
        whole, rest = divmod(n, size * iterations)
        for _ in range(2):
            batches = epoch(loader)
            assert [len(batch) for batch in batches] == (
                [size * iterations] * whole + ([rest] if rest and not drop_last else [])
            )
            seen = values(batches)
            assert len(set(seen)) == len(seen)
            assert not shuffle or set(seen) <= set(range(n))
            assert shuffle or seen == list(range(len(seen)))
            assert len(loader) == len(batches)


def test_shuffling_follows_torchs_random_numbers():
    orders = []
    for _ in range(2):
        torch.manual_seed(1)
        orders.append(values(DataLoader(Opts(), Numbers(30), 4, shuffle=True)))
    assert orders[0] == orders[1] != sorted(orders[0])


@pytest.mark.long
def test_workers_give_the_same_batches():
    loader = DataLoader(Opts(iterations=2), Numbers(11), 2, num_workers=2, drop_last=False)
    assert loader.persistent_workers
    for _ in range(2):
        assert values(loader) == list(range(11))


@pytest.mark.parametrize("keep", [True, False])
def test_workers_persist_unless_told_otherwise(keep):
    assert DataLoader(Opts(), Numbers(4), num_workers=1).persistent_workers
    loader = DataLoader(Opts(), Numbers(4), num_workers=1, persistent_workers=keep)
    assert loader.persistent_workers is keep
    assert not DataLoader(Opts(), Numbers(4)).persistent_workers


def test_torchs_own_arguments_reach_torch():
    loader = DataLoader(Opts(), Numbers(4), 2, collate_fn=sum, sampler=[3, 1])
    assert [int(batch) for batch in loader] == [4]


def test_a_subset_s_sampler_says_what_is_left_out(caplog):
    caplog.set_level(logging.DEBUG, "poptorch::python")
    loader = DataLoader(Opts(), Numbers(9), 2, sampler=SubsetRandomSampler([1, 2, 3]))
    assert len(loader) == 1
    assert [record.args for record in caplog.records] == [(1, 3, 2)]


def test_without_a_batch_size_elements_come_as_they_are():
    loader = DataLoader(Opts(iterations=3), Numbers(4), batch_size=None, drop_last=False)
    assert loader.combinedBatchSize is None
    assert [int(element) for element in loader] == [0, 1, 2, 3]
    with pytest.raises(AttributeError):
        loader.options  # noqa: B018  # as PopTorch leaves it


@pytest.mark.long
def test_streams_are_read_by_each_worker():
    loader = DataLoader(Opts(iterations=2), Stream(10), 2, num_workers=2, worker_init_fn=int)
    assert sorted(values(loader)) == [0, 1, 2, 3, 4, 5, 6, 7]  # each leaves one out
    assert len(DataLoader(Opts(iterations=2), SizedStream(10), 2)) == 2
    with pytest.raises(TypeError, match=r"'Stream' has no len\(\)"):
        len(DataLoader(Opts(), Stream(10), 2))


# Batch samplers.


def sampler(n, size, drop_last=False):
    return BatchSampler(SequentialSampler(range(n)), size, drop_last)


@pytest.mark.parametrize("drop_last", [True, False])
def test_batches_of_a_sampler_are_joined_in_order(drop_last):
    rng = random.Random(5)
    for _ in range(30):
        n, size, factor = rng.randint(1, 40), rng.randint(1, 4), rng.randint(1, 4)
        loader = DataLoader(
            Opts(accumulation=factor),
            Numbers(n),
            batch_sampler=sampler(n, size),
            drop_last=drop_last,
        )
        assert loader.combinedBatchSize == size * factor
        batches, left_over = divmod(-(-n // size), factor)
        for _ in range(2):
            joined = epoch(loader)
            kept = n if not (left_over and drop_last) else batches * factor * size
            assert len(joined) == batches + bool(left_over and not drop_last)
            assert values(joined) == list(range(kept))
        assert len(loader) == -(-n // size)  # the sampler's


def test_a_plain_list_of_lists_is_a_batch_sampler():
    loader = DataLoader(Opts(iterations=2), Numbers(9), batch_sampler=[[4], [1], [8], [0]])
    assert [batch.tolist() for batch in loader] == [[4, 1], [8, 0]]


def pairs(samples):
    numbers = torch.stack(samples)
    return {"x": [Pair(numbers, numbers + 1)], "y": numbers * 2, "name": "same"}


def test_structures_are_joined_tensor_by_tensor():
    registerCustomArgParser(Pair, PairParser())
    try:
        loader = DataLoader(
            Opts(iterations=2), Numbers(4), batch_sampler=sampler(4, 2), collate_fn=pairs
        )
        (batch,) = loader
    finally:
        registerCustomArgParser(Pair, None)
    assert batch["x"][0].second.tolist() == [1, 2, 3, 4]
    assert batch["y"].tolist() == [0, 2, 4, 6]
    assert (batch["name"], batch["x"][0].label) == ("same", "label")


@pytest.mark.parametrize(
    "collate",
    [
        lambda samples: (torch.stack(samples), str(samples)),
        lambda samples: [torch.stack(samples)] * (1 + int(samples[0]) // 2),
        lambda samples: {str(int(samples[0])): torch.stack(samples)},
        lambda samples: (torch.stack(samples), torch.stack(samples).numpy()),
    ],
)
def test_what_is_no_tensor_has_to_be_the_same_in_all(collate):
    """Of several values PopTorch keeps one and loses the others."""
    loader = DataLoader(
        Opts(iterations=2), Numbers(4), batch_sampler=sampler(4, 2), collate_fn=collate
    )
    refused(
        Error,
        "the batches of one combined batch differ in something that is no tensor (a number, a "
        "string, a key, a length), and only tensors can be joined. Make it a tensor in the dataset "
        "or in collate_fn, or leave it out.",
        list,
        loader,
    )


@pytest.mark.parametrize("change", [{"batch_size": 2}, {"batch_size": None}, {"shuffle": True}])
def test_a_batch_sampler_excludes_what_it_decides(change):
    refused(
        Error,
        "`batch_sampler` option is mutually exclusive with batch_size, shuffle. It says which "
        "samples are in a batch: leave the others out.",
        DataLoader,
        Opts(),
        Numbers(4),
        batch_sampler=[[0]],
        **change,
    )


def test_a_batch_sampler_is_each_process_s_own():
    opts = Opts(processes=(1, 2))
    refused(
        Error,
        "`batch_sampler` option is mutually exclusive with auto_distributed_partitioning=True. Let "
        "the sampler choose the samples of each process, and pass "
        "auto_distributed_partitioning=False.",
        DataLoader,
        opts,
        Numbers(4),
        batch_sampler=[[0]],
    )
    loader = DataLoader(opts, Numbers(4), batch_sampler=[[2]], auto_distributed_partitioning=False)
    assert values(loader) == [2]


# Several processes.


def share(process, processes, n=22, **arguments):
    opts = Opts(iterations=2, processes=(process, processes)).seeded(3)
    return DataLoader(opts, Numbers(n), 2, **arguments)


def test_processes_read_blocks():
    assert [values(share(p, 2)) for p in (0, 1)] == [list(range(8)), list(range(8, 16))]
    assert [values(share(p, 2, drop_last=False)) for p in (0, 1)] == [
        list(range(11)),
        list(range(11, 22)),
    ]
    assert values(share(1, 2, auto_distributed_partitioning=False)) == list(range(20))
    assert len(share(0, 2).dataset) == 8


@pytest.mark.few
@pytest.mark.parametrize("workers", [0, 2])
def test_processes_shuffle_alike_epoch_by_epoch(workers):
    """With torch's workers too, which live on, and have copies of the dataset."""
    generator = torch.Generator()
    generator.manual_seed(3)
    loaders = [share(p, 2, shuffle=True, num_workers=workers) for p in (0, 1)]
    for number in range(3):
        permutation = torch.randperm(22, generator=generator).tolist()
        begin = 0 if number % 2 else 22 % 8
        seen = [value for loader in loaders for value in values(loader)]
        assert seen == permutation[begin : begin + 16]


def test_two_iterators_at_once_have_an_epoch_each():
    loader = share(0, 1, shuffle=True, drop_last=False)
    pairs = list(itertools.zip_longest(loader, loader))
    for column in zip(*pairs):
        assert sorted(values(column)) == list(range(22))


def test_processes_agree_also_where_one_had_loaded_more_of_an_epoch_given_up():
    """What is loaded ahead depends on the clock; the order of the next epoch must not."""
    plain = share(0, 2, shuffle=True)
    orders = [values(plain) for _ in range(3)]
    for slots in (1, 9):
        with reader(share(0, 2, shuffle=True), slots=slots) as r:
            assert values(epoch(r)) == orders[0]
            r.begin()
            assert values([r.next()]) == orders[1][:4]
            assert values(epoch(r)) == orders[2]


def test_a_sampler_of_one_s_own_chooses_from_the_share():
    assert values(share(1, 2, drop_last=False, sampler=[0, 5])) == [11, 16]
    with pytest.raises(ValueError, match="mutually exclusive"):
        share(1, 2, shuffle=True, sampler=[0, 5])


def test_shuffling_for_several_processes_needs_a_seed():
    refused(
        AssertionError,
        "When using auto_distributed_partitioning you must set poptorch.Options.randomSeed() to "
        "shuffle, to the same number in all processes, so that they part the dataset in the same "
        "order.",
        DataLoader,
        Opts(processes=(0, 2)),
        Numbers(9),
        shuffle=True,
    )


def test_parting_needs_combined_batches():
    refused(
        AssertionError,
        "batch_size=None not allowed when using auto_distributed_partitioning. Pass a batch_size, "
        "or part the dataset yourself with auto_distributed_partitioning=False.",
        DataLoader,
        Opts(processes=(0, 2)),
        Numbers(9),
        batch_size=None,
        drop_last=False,
    )


def test_streams_are_not_parted():
    opts = Opts(processes=(0, 2))
    refused(
        AssertionError,
        "auto_distributed_partitioning not supported for IterableDataset, and there are 2 "
        "processes. Let the dataset give each process its own part, and pass "
        "auto_distributed_partitioning=False.",
        DataLoader,
        opts,
        Stream(9),
    )
    assert values(DataLoader(opts, Stream(3), auto_distributed_partitioning=False)) == [0, 1, 2]


# Asynchronous modes, without their process.


@pytest.mark.usefixtures("recorded")
@pytest.mark.parametrize(
    ("mode", "drop_last", "size", "rebatched", "loaded", "torch_drops"),
    [
        (ASYNC, True, 2, None, 6, True),
        (ASYNC, False, 2, 6, 6, False),
        (REBATCHED, True, 2, 6, 6, False),
        (REBATCHED, False, 2, 6, 6, False),
        (ASYNC, False, None, None, None, False),
    ],
)
def test_what_the_accessor_rebatches(mode, drop_last, size, rebatched, loaded, torch_drops):
    loader = DataLoader(Opts(iterations=3), Numbers(20), size, drop_last=drop_last, mode=mode)
    accessor = loader._accessor
    assert accessor.rebatched_size == rebatched
    assert accessor.options == {}
    assert (loader.batch_size, loader.drop_last) == (loaded, torch_drops)
    assert getattr(loader, "rebatched_drop_last", None) == (drop_last if rebatched else None)
    assert accessor.dataset is not loader
    assert accessor.dataset._accessor is None


@pytest.mark.usefixtures("recorded")
def test_one_sample_is_not_rebatched_in_async_mode():
    assert DataLoader(Opts(), Numbers(3), mode=ASYNC, drop_last=False)._accessor.options == {}
    loader = DataLoader(Opts(), Numbers(3), mode=ASYNC, drop_last=False)
    assert loader._accessor.rebatched_size is None


@pytest.mark.usefixtures("recorded")
def test_async_options_and_worker_size_go_where_they_belong():
    loader = DataLoader(
        Opts(iterations=3),
        Numbers(20),
        2,
        mode=REBATCHED,
        async_options={"buffer_size": 5},
        rebatched_worker_size=4,
    )
    assert loader._accessor.options == {"buffer_size": 5}
    assert (loader.batch_size, loader._accessor.rebatched_size) == (4, 6)
    assert len(loader) == 77
    loader.terminate()
    assert loader._accessor.is_terminated


@pytest.mark.usefixtures("recorded")
def test_a_batch_sampler_s_batches_are_dropped_where_they_are_joined():
    for mode, drop_last, rebatched in [
        (ASYNC, True, None),
        (ASYNC, False, 6),
        (REBATCHED, True, 6),
    ]:
        loader = DataLoader(
            Opts(iterations=3),
            Numbers(20),
            batch_sampler=sampler(20, 2),
            mode=mode,
            drop_last=drop_last,
        )
        assert loader._accessor.rebatched_size == rebatched
        assert loader.batch_sampler_drop_last is drop_last


@pytest.mark.usefixtures("recorded")
@pytest.mark.parametrize("mode", [REBATCHED, ASYNC])
def test_workers_load_no_more_than_a_combined_batch(mode):
    refused(
        AssertionError,
        "The rebatched_worker_size (7) must be <= to the combined batch size (6). Use a smaller "
        "one, or leave it out.",
        DataLoader,
        Opts(iterations=3),
        Numbers(20),
        2,
        mode=mode,
        drop_last=False,
        rebatched_worker_size=7,
    )


@pytest.mark.usefixtures("recorded")
@pytest.mark.parametrize("mode", [REBATCHED, ASYNC])
def test_the_size_to_rebatch_to_is_the_loader_s(mode):
    refused(
        AssertionError,
        "async_options can't hold rebatched_size: a DataLoader rebatches to its combined batch "
        "size. Leave it out, and use mode=DataLoaderMode.AsyncRebatched.",
        DataLoader,
        Opts(),
        Numbers(20),
        2,
        mode=mode,
        async_options={"rebatched_size": 4},
    )


def test_terminate_has_no_effect_in_sync_mode():
    loader = DataLoader(Opts(), Numbers(3))
    loader.terminate()
    assert values(loader) == [0, 1, 2]


@pytest.mark.parametrize("drop_last", [True, False])
def test_a_loader_in_a_worker_loses_what_it_says_and_nothing_else(drop_last):
    """All modes, with the worker in a thread, over random sizes."""
    rng = random.Random(9)
    for _ in range(25):
        n, size, iterations = rng.randint(2, 40), rng.randint(1, 3), rng.randint(2, 4)
        total = size * iterations
        kept = n // total * total if drop_last else n
        if not kept:
            continue
        opts, data = Opts(iterations=iterations), rng.choice([Numbers, Stream])(n)
        loader = DataLoader(opts, data, rng.randint(1, total), drop_last=False)
        rows = {"rows": total, "keeps_rest": not drop_last, "slots": rng.randint(1, 3)}
        with reader(loader, **rows) as r:
            for _ in range(2):
                assert values(epoch(r)) == list(range(kept))


# What the options have to be, and what the log says.


def test_options_come_first():
    refused(
        AssertionError,
        "The first argument of DataLoader must be poptorch.Options, got Numbers. Pass "
        "DataLoader(options, dataset, ...).",
        DataLoader,
        Numbers(3),
        Opts(),
    )


def messages(caplog, *arguments, **named):
    caplog.set_level(logging.DEBUG, "poptorch::python")
    caplog.clear()
    DataLoader(*arguments, **named)
    return [(record.levelname, record.getMessage()) for record in caplog.records]


@pytest.mark.usefixtures("recorded")
def test_the_log_says_once_what_becomes_of_the_rest(caplog):
    opts = Opts(iterations=2)
    assert messages(caplog, opts, Numbers(8), 2) == []
    assert messages(caplog, opts, Numbers(8), 2, drop_last=False) == []
    assert messages(caplog, opts, Numbers(10), 2) == [
        (
            "DEBUG",
            "2 of 10 samples don't fill a combined batch of 4 and are left out of every epoch "
            "(drop_last=True).",
        )
    ]
    assert messages(caplog, opts, Numbers(3), 2) == [
        (
            "WARNING",
            "The dataset has 3 samples, fewer than a combined batch (4), and drop_last=True: an "
            "epoch is empty. Use a smaller batch.",
        )
    ]
    assert messages(caplog, opts, Numbers(10), 2, drop_last=False) == [
        (
            "WARNING",
            "The number of elements in the dataset (10) is not divisible by the number of elements "
            "processed per step (4) and drop_last=False: the last batch has 2, which a compiled "
            "model refuses. Pad it, or use drop_last=True.",
        )
    ]


def test_the_log_counts_what_all_processes_leave_out(caplog):
    opts = Opts(iterations=2, processes=(0, 2))
    assert [text for _, text in messages(caplog, opts, Numbers(22), 2)] == [
        "6 of 22 samples don't fill a combined batch of 8 and are left out of every epoch "
        "(drop_last=True)."
    ]


class Endless:
    """A sampler that doesn't know its length."""

    batch_size = 1

    def __init__(self, problem):
        self.problem = problem

    def __iter__(self):
        yield [0]

    def __len__(self):
        raise self.problem


def test_the_log_says_that_a_sampler_may_not_fill_the_last_batch(caplog):
    opts = Opts(iterations=2)
    unknown = (
        "WARNING",
        "The batch_sampler has no length and drop_last=False: the last combined batch may be of "
        "fewer than 2 batches, which a compiled model refuses. Pad it, or use drop_last=True.",
    )
    for endless in (Endless(NotImplementedError()), Endless(TypeError()), ([0] for _ in "a")):
        known = messages(caplog, opts, Numbers(9), batch_sampler=endless, drop_last=False)
        assert known == [unknown]
    assert messages(caplog, opts, Numbers(9), batch_sampler=Endless(TypeError())) == []
    odd = sampler(9, 3)
    assert messages(caplog, opts, Numbers(9), batch_sampler=odd) == []
    assert messages(caplog, opts, Numbers(9), batch_sampler=odd, drop_last=False) == [
        (
            "WARNING",
            "The number of batches of the batch_sampler (3) is not divisible by the number of "
            "batches processed per step (2) and drop_last=False: the last combined batch is of 1 "
            "(3 samples), which a compiled model refuses. Pad it, or use drop_last=True.",
        )
    ]
    assert messages(caplog, opts, Numbers(8), batch_sampler=sampler(8, 2), drop_last=False) == []


@pytest.mark.usefixtures("recorded")
def test_the_log_says_that_batches_of_unknown_size_are_cut_anew(caplog):
    opts, indices = Opts(iterations=2), [[0, 1], [2, 3]]
    text = (
        "The batch_sampler has no batch_size, which counts as 1: its batches are joined and cut "
        "into combined batches of 2 samples. Give it a batch_size, or use DataLoaderMode.Async and "
        "drop_last=True, to keep them whole."
    )
    for arguments in ({"mode": REBATCHED}, {"mode": ASYNC, "drop_last": False}):
        told = messages(caplog, opts, Numbers(4), batch_sampler=indices, **arguments)
        assert told == [("WARNING", text)]
    assert messages(caplog, opts, Numbers(4), batch_sampler=indices, mode=ASYNC) == []
    assert messages(caplog, opts, Numbers(4), batch_sampler=sampler(4, 2), mode=REBATCHED) == []


@pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")
def test_the_log_says_that_workers_read_a_stream_each_for_itself(caplog):
    assert messages(caplog, Opts(), Stream(4), num_workers=3) == [
        (
            "WARNING",
            "An IterableDataset is read by num_workers=3 workers without a worker_init_fn: unless "
            "the dataset asks torch.utils.data.get_worker_info() for its part, each of its "
            "elements comes 3 times.",
        )
    ]
    assert messages(caplog, Opts(), Stream(4), num_workers=3, worker_init_fn=int) == []
    assert messages(caplog, Opts(), Stream(4), num_workers=1) == []


@pytest.mark.usefixtures("recorded")
def test_the_log_names_arguments_without_effect(caplog):
    arguments = {"async_options": {"buffer_size": 2}, "rebatched_worker_size": 1}
    assert messages(caplog, Opts(), Numbers(4), 2, **arguments) == [
        ("WARNING", "async_options have no effect with mode=DataLoaderMode.Sync."),
        (
            "WARNING",
            "rebatched_worker_size has no effect with mode=DataLoaderMode.Sync: use "
            "AsyncRebatched.",
        ),
    ]
    assert [
        text for _, text in messages(caplog, Opts(), Numbers(4), 2, mode=ASYNC, **arguments)
    ] == ["rebatched_worker_size has no effect with mode=DataLoaderMode.Async: use AsyncRebatched."]
    assert messages(caplog, Opts(), Numbers(4), 2, mode=REBATCHED, **arguments) == []


def test_subsets_are_datasets_like_others():
    assert values(DataLoader(Opts(), Subset(Numbers(9), [5, 3]), 2)) == [5, 3]
