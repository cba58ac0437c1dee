"""Loading ahead: the ring buffer, epochs, rebatching and errors, with the worker in a thread."""

import logging
import multiprocessing
import random
import time

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader as TorchDataLoader

from ipufit.poptorch import Error, _data_worker
from ipufit.poptorch._data_worker import Command, DataWorker, WorkerEvent
from ipufit.poptorch._parsers import registerCustomArgParser
from ipufit.poptorch._ring_buffer import RingBufferReader, RingBufferWriter
from tests.poptorch.loading import (
    Numbers,
    Pair,
    PairParser,
    Stream,
    epoch,
    reader,
    settings,
    values,
    worker,
)


class Counted:
    """An iterable that counts how often it was begun and how many batches it gave."""

    def __init__(self, length):
        self.length = length
        self.begun = 0
        self.given = 0

    def __iter__(self):
        self.begun += 1
        for i in range(self.length):
            self.given += 1
            yield torch.tensor([float(i)])


def received(events, number):
    """That many events of a worker."""
    return [events.recv() for _ in range(number)]


@pytest.mark.parametrize("loads_on", [True, False])
@pytest.mark.parametrize("loads_first", [True, False])
@pytest.mark.parametrize("slots", [1, 2, 5])
def test_every_batch_of_every_epoch_comes_once_and_in_order(slots, loads_first, loads_on):
    for length in (1, 2, 7):
        with reader(Numbers(length), slots=slots, loads_first=loads_first, loads_on=loads_on) as r:
            for _ in range(3):
                assert values(epoch(r)) == list(range(length))


@pytest.mark.long
def test_an_epoch_that_is_given_up_costs_nothing_of_the_next_one():
    """Wherever the reader and the worker stand at that moment, also beyond the epoch's end."""
    rng = random.Random(0)
    for _ in range(30):
        length, slots = rng.randint(1, 6), rng.randint(1, 4)
        changes = {"loads_on": rng.random() < 0.5, "loads_first": rng.random() < 0.5}
        with reader(Numbers(length), slots=slots, **changes) as r:
            for _ in range(4):
                r.begin()
                for i in range(rng.randint(0, length)):
                    assert r.next() == i
                if rng.random() < 0.5:
                    time.sleep(0.001)
                if r._is_used:
                    assert values(epoch(r)) == list(range(length))


def test_beginning_twice_without_reading_is_beginning_once():
    data = Counted(3)
    with reader(data, loads_on=False) as r:
        r.begin()
        r.begin()
        assert values(epoch(r)) == [0, 1, 2]
        r.begin()
        assert values(epoch(r)) == [0, 1, 2]
    assert data.begun == 2


def test_reading_begins_by_itself_and_stays_at_the_end():
    with reader(Numbers(2)) as r:
        assert [int(r.next()), int(r.next())] == [0, 1]
        for _ in range(2):
            with pytest.raises(StopIteration):
                r.next()


def test_a_batch_stays_until_the_next_one_is_asked_for():
    with reader(Numbers(3), slots=1) as r:
        first = r.next()
        time.sleep(0.01)
        assert first == 0
        assert r.next() == 1
        assert first == 1  # the same memory: PopTorch's contract


def test_the_first_batch_is_loaded_at_once_and_no_other():
    data = Counted(9)
    with worker(data, loads_first=False) as (commands, events, thread):
        (_, (_, _, ready)), (event, _) = received(events, 2)
        commands.send((Command.STOP, 0))
        thread.join()
        assert event is WorkerEvent.ITEM
        assert ready.tolist() == [True, False, False]
        assert data.given == 1


def test_an_early_preload_fills_the_buffer():
    data = Counted(9)
    with worker(data, loads_first=True) as (_, events, _):
        (_, (_, _, ready)), *items = received(events, 4)
        assert [event for event, _ in items] == [WorkerEvent.ITEM] * 3
        assert ready.tolist() == [True, True, True]
        assert data.given <= 4


def test_the_next_epoch_is_loaded_before_it_is_begun():
    data = Counted(2)
    with worker(data, loads_on=True) as (commands, events, _):
        commands.send((Command.BEGIN, 1))
        told = [event for event, _ in received(events, 5)]
        assert told == [
            WorkerEvent.READY,
            WorkerEvent.ITEM,
            WorkerEvent.ITEM,
            WorkerEvent.END,
            WorkerEvent.ITEM,
        ]
        assert data.begun == 2


def test_without_load_indefinitely_it_waits():
    data = Counted(2)
    with worker(data, loads_on=False) as (commands, events, thread):
        commands.send((Command.BEGIN, 1))
        assert received(events, 4)[-1][0] is WorkerEvent.END
        commands.send((Command.STOP, 0))
        thread.join()
        assert data.begun == 1


def test_a_dataset_that_is_empty_the_second_time_ends_at_once_and_is_not_asked_again():
    class Once(Counted):
        def __iter__(self):
            self.begun += 1
            yield from [torch.zeros(1)] if self.begun == 1 else []

    data = Once(1)
    with reader(data) as r:
        assert len(epoch(r)) == 1
        assert epoch(r) == []
        assert epoch(r) == []
        assert data.begun <= 4


@pytest.mark.parametrize(("pause", "expected"), [(0.25, [0.25, 0.25]), (0.0, [])])
def test_between_two_looks_at_a_full_buffer_there_is_a_pause(pause, expected, monkeypatch):
    """It looks when a slot may have become free, and not more often than that."""
    slept, looks = [], iter([False, False, True])
    monkeypatch.setattr(_data_worker.time, "sleep", slept.append)
    listening, commands = multiprocessing.Pipe(duplex=False)
    with listening, commands:
        for _ in range(2):
            commands.send((Command.RELEASED, 1))
        DataWorker([], settings(), listening, None)._wait(lambda: next(looks), pause)
    assert slept == expected


def test_a_reader_that_is_gone_ends_the_worker():
    with worker(Numbers(2)) as (commands, _, thread):
        commands.close()
        thread.join()
        assert not thread.is_alive()


# Rebatching.


class Pieces:
    """Batches of the rows 0, 1, 2, ..., of given sizes."""

    def __init__(self, sizes):
        rows = torch.arange(float(sum(sizes))).reshape(-1, 1)
        self.batches = [(rows, rows[:, 0] + 0.5) for rows in rows.split(sizes)]

    def __iter__(self):
        return iter(self.batches)


@pytest.mark.long
@pytest.mark.parametrize("keeps_rest", [True, False])
def test_rebatching_keeps_every_row_once_and_in_order(keeps_rest):
    rng = random.Random(1)
    for _ in range(40):
        sizes = [rng.randint(1, 7) for _ in range(rng.randint(1, 8))]
        rows, total = rng.randint(2, 9), sum(sizes)
        kept = total if keeps_rest else total // rows * rows
        if not kept:
            continue
        lengths = [min(rows, kept - i) for i in range(0, kept, rows)]
        with reader(Pieces(sizes), rows=rows, keeps_rest=keeps_rest, slots=rng.randint(1, 4)) as r:
            for _ in range(2):
                batches = epoch(r)
                assert [len(first) for first, _ in batches] == lengths
                firsts, seconds = (torch.cat(column) for column in zip(*batches))
                assert firsts[:, 0].tolist() == list(range(kept))
                assert torch.equal(firsts[:, 0] + 0.5, seconds)


def test_an_epoch_given_up_in_a_half_full_slot_leaves_no_rows_behind():
    with reader(Pieces([3, 3, 3]), rows=4, keeps_rest=True, slots=1) as r:
        r.next()
        assert [batch[0][:, 0].tolist() for batch in [r.next()]] == [[4.0, 5.0, 6.0, 7.0]]
        r.begin()
        assert r.next()[0][:, 0].tolist() == [0.0, 1.0, 2.0, 3.0]


@pytest.mark.parametrize(
    ("batch", "shapes"),
    [
        (torch.tensor(1.0), "[()]"),
        ([torch.zeros(2), torch.zeros(3)], "[(2,), (3,)]"),
        ([torch.zeros(2), torch.tensor(0.0)], "[(2,), ()]"),
    ],
)
def test_rebatching_needs_rows(batch, shapes):
    with pytest.raises(Error) as caught, reader([batch], rows=2):
        pass
    assert str(caught.value.__cause__) == (
        "rebatched_size joins batches along dimension 0, which must be of one size in all tensors "
        f"of a batch; their shapes are {shapes}. Give every tensor a batch dimension, or leave "
        "rebatched_size out."
    )


# Random numbers.


class Noise:
    """Batches of random numbers, of three generators."""

    def __iter__(self):
        for _ in range(3):
            numbers = [torch.rand(()).item(), random.random(), np.random.rand()]
            yield torch.tensor(numbers, dtype=torch.float64)


def test_random_numbers_depend_on_seed_and_epoch_alone():
    """Not on how much of an epoch that was given up had been loaded."""
    with reader(Noise(), seed=5) as r:
        first, second = epoch(r), epoch(r)
    with reader(Noise(), seed=5, slots=1) as r:
        assert torch.equal(r.next(), first[0])
        assert torch.equal(torch.stack(epoch(r)), torch.stack(second))
    with reader(Noise(), seed=7) as r:
        other = epoch(r)
    everything = torch.stack([*first, *second, *other])
    assert len(everything.unique()) == everything.numel()


# Structures.


class Greedy(PairParser):
    def reconstruct(self, original_structure, tensor_iterator):
        return Pair(next(tensor_iterator), next(tensor_iterator), next(tensor_iterator))


@pytest.fixture
def pair_parser():
    registerCustomArgParser(Pair, PairParser())
    yield
    registerCustomArgParser(Pair, None)


@pytest.mark.parametrize("kind", [list, tuple])
def test_a_sequence_comes_back_as_a_list(kind):
    with reader([kind([torch.zeros(2), torch.ones(3)])]) as r:
        batch = r.next()
    assert type(batch) is list
    assert [len(tensor) for tensor in batch] == [2, 3]


def test_a_dict_comes_back_in_the_order_of_the_first():
    a, b = torch.zeros(1), torch.ones(2)
    with reader([{"a": a, "b": b}, {"b": b, "a": a}]) as r:
        r.next()
        batch = r.next()
    assert list(batch) == ["a", "b"]
    assert batch["b"].tolist() == [1, 1]


@pytest.mark.usefixtures("pair_parser")
def test_a_type_with_a_parser_comes_back_as_it_is():
    with reader([Pair(torch.zeros(1), torch.ones(2, dtype=torch.int8), "its label")]) as r:
        batch = r.next()
    assert type(batch) is Pair
    assert (batch.label, batch.second.dtype) == ("its label", torch.int8)
    assert batch.second.tolist() == [1, 1]


def test_a_parser_that_asks_for_too_much_is_no_end_of_the_epoch():
    registerCustomArgParser(Pair, PairParser())
    try:
        with reader([Pair(torch.zeros(1), torch.ones(1))]) as r:
            registerCustomArgParser(Pair, Greedy())
            with pytest.raises(Error) as caught:
                r.next()
    finally:
        registerCustomArgParser(Pair, None)
    assert caught.value.message == (
        "a structure holds more tensors than there are values for it, which are 2. Pass one value "
        "for each tensor; a custom parser's reconstruct() takes as many as its yieldTensors() "
        "yields."
    )


ADVICE = (
    "An AsynchronousDataAccessor carries a tensor, a flat list, tuple or dict of tensors, or an "
    "object whose type has a parser (registerCustomArgParser, where the module is imported). Leave "
    "the rest out in the dataset or in collate_fn, or use DataLoaderMode.Sync."
)


@pytest.mark.parametrize(
    ("batch", "text"),
    [
        (3, f"A batch of the dataset is of type int. {ADVICE}"),
        (Pair(torch.zeros(1), 1), f"A batch of the dataset is of type Pair. {ADVICE}"),
        ([torch.zeros(1), "x"], f"Element 1 of a batch is of type str. {ADVICE}"),
        ([[torch.zeros(1)]], f"Element 0 of a batch is of type list. {ADVICE}"),
        ({"a": torch.zeros(1), "b": 2.0}, f"Element 'b' of a batch is of type float. {ADVICE}"),
    ],
)
def test_what_is_no_tensor_is_refused_on_starting(batch, text):
    with pytest.raises(Error) as caught, reader([batch]):
        pass
    assert caught.value.message == (
        f"AsynchronousDataAccessor worker thread failed to start: the dataset raised AssertionError"
        f": {text}"
    )
    assert type(caught.value.__cause__) is AssertionError
    assert str(caught.value.__cause__) == text


@pytest.mark.parametrize(
    ("first", "second", "text"),
    [
        (
            torch.zeros(2),
            [torch.zeros(2)],
            "The first batch of the dataset is a tensor, and a later one is a list or tuple (list)."
            " Make all batches alike.",
        ),
        (
            {"a": torch.zeros(2)},
            {"b": torch.zeros(2)},
            "The first batch of the dataset has the keys ['a'], and a later one has ['b']. Make all"
            " batches alike.",
        ),
        (
            {"a": torch.zeros(2)},
            {"a": torch.zeros(2), "b": torch.zeros(2)},
            "The first batch of the dataset has the keys ['a'], and a later one has ['a', 'b']. "
            "Make all batches alike.",
        ),
        (
            [torch.zeros(2)],
            [torch.zeros(2)] * 2,
            "The first batch of the dataset has 1 tensors, and a later one has 2. Make all batches "
            "alike.",
        ),
        (
            torch.zeros(4, 2),
            torch.zeros(1, 2),
            "Tensor 0 of a batch has shape (1, 2), and that of the first batch has (4, 2). An "
            "AsynchronousDataAccessor needs all alike: use drop_last=True, or rebatched_size where "
            "only the number of rows differs.",
        ),
        (
            torch.zeros(2, dtype=torch.int32),
            torch.zeros(2),
            "Tensor 0 of a batch has dtype torch.float32, and that of the first batch has "
            "torch.int32, which can't hold its values. Make all batches of one dtype.",
        ),
    ],
)
def test_batches_that_are_not_alike_are_refused_at_their_place(first, second, text):
    """A batch of one row would otherwise be repeated until the slot is full."""
    with reader([first, second]) as r:
        r.next()
        with pytest.raises(AssertionError) as caught:
            r.next()
    assert str(caught.value) == text


def test_a_dtype_of_the_same_kind_is_converted_and_the_log_says_so_once(caplog):
    batches = [torch.zeros(1), torch.tensor([2]), torch.tensor([3])]
    with reader(batches) as r:
        assert [(b.dtype, b.item()) for b in epoch(r)] == [
            (torch.float32, value) for value in (0.0, 2.0, 3.0)
        ]
    assert [record.getMessage() for record in caplog.records] == [
        "Tensor 0 of a batch has dtype torch.int64, and becomes torch.float32 as in the first "
        "batch."
    ]


def test_gradients_stay_behind():
    with reader([torch.ones(2, requires_grad=True)]) as r:
        assert not r.next().requires_grad


# Errors.


class Odd(Exception):
    """Can be sent to another process, and not be received there."""

    def __init__(self, first, second):
        super().__init__(f"{first} and {second}")


class Fails:
    """Gives some batches, and raises."""

    def __init__(self, problem, good=2, epoch=1):
        self.problem, self.good, self.epoch = problem, good, epoch
        self.begun = 0

    def __iter__(self):
        self.begun += 1
        for i in range(self.good):
            yield torch.tensor(float(i))
        if self.begun == self.epoch:
            raise self.problem


@pytest.mark.parametrize("at", [1, 2])
def test_what_the_dataset_raises_comes_at_its_place_with_its_traceback(at):
    with reader(Fails(KeyError("k", 3), epoch=at), slots=5) as r:
        if at == 2:
            assert values(epoch(r)) == [0, 1]
            r.begin()
        assert [int(r.next()), int(r.next())] == [0, 1]
        with pytest.raises(KeyError) as caught:
            r.next()
    assert caught.value.args == ("k", 3)
    cause = str(caught.value.__cause__)
    assert cause.startswith("\n\nIn the worker process of the AsynchronousDataAccessor:\nTraceback")
    assert "raise self.problem" in cause


def test_an_exception_that_can_not_be_sent_comes_as_a_runtime_error():
    with reader(Fails(Odd(1, 2))) as r:
        r.next()
        r.next()
        with pytest.raises(RuntimeError) as caught:
            r.next()
    assert str(caught.value) == f"{Odd.__module__}.Odd: 1 and 2"


def test_an_exception_for_the_first_batch_is_a_failure_to_start(caplog):
    with pytest.raises(Error) as caught, reader(Fails(ValueError("no file"), good=0)):
        pass
    assert caught.value.message == (
        "AsynchronousDataAccessor worker thread failed to start: the dataset raised ValueError: no "
        "file"
    )
    assert type(caught.value.__cause__) is ValueError
    assert "raise self.problem" in caplog.text
    assert [record.levelno for record in caplog.records] == [logging.ERROR]


@pytest.mark.parametrize("data", [[], Numbers(0), Stream(0)])
def test_an_empty_dataset_is_a_failure_to_start(data):
    with pytest.raises(Error) as caught, reader(data):
        pass
    assert caught.value.message == (
        "AsynchronousDataAccessor worker thread failed to start: The Dataset is empty. So is a "
        "DataLoader with drop_last=True whose dataset has fewer samples than a combined batch."
    )


def test_a_worker_that_is_gone_is_told():
    with reader(Numbers(3)) as r:
        r.next()
        r._events.close()
        with pytest.raises(Error) as caught:
            r.next()
    assert caught.value.message == (
        "The worker of an AsynchronousDataAccessor is gone. Make a new accessor."
    )


def test_a_map_style_dataset_ends_at_its_length():
    """Numbers goes on beyond it, as datasets do that compute their samples."""
    with reader(Numbers(3)) as r:
        assert values(epoch(r)) == [0, 1, 2]


def test_torchs_loaders_are_read_like_any_iterable():
    with reader(TorchDataLoader(Numbers(4), batch_size=2)) as r:
        assert [batch.tolist() for batch in epoch(r)] == [[0, 1], [2, 3]]


# The ring itself.


def test_a_ring_goes_round():
    ring = RingBufferWriter([torch.zeros(2)], 3)
    other = RingBufferReader(ring.memory, ring.indices_mem)
    for i in range(7):
        assert ring.is_writable()
        ring.write([torch.full((2,), float(i))])
        ring.publish()
        assert other.take()[0].tolist() == [i, i]
        assert other.release()
        assert not other.release()


def test_a_full_ring_is_not_writable_until_a_slot_is_given_back():
    ring = RingBufferWriter([torch.zeros(1)], 2)
    other = RingBufferReader(ring.memory, ring.indices_mem)
    for _ in range(2):
        ring.publish()
    other.take()
    assert not ring.is_writable()
    other.release()
    assert ring.is_writable()
