"""The process that loads ahead: how it starts, what comes out of it, and that it always ends."""

import functools
import gc
import inspect
import os
import pathlib
import signal
import subprocess
import sys
import textwrap
import time

import pytest
import torch
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data import TensorDataset

from ipufit.poptorch import (
    AsynchronousDataAccessor,
    DataLoader,
    DataLoaderMode,
    Error,
    SharingStrategy,
    _accessor,
)
from tests.poptorch.loading import Numbers, Opts, SizedStream, Stream, epoch, refused, values

ROOT = pathlib.Path(__file__).parents[2]
fork = functools.partial(AsynchronousDataAccessor, sharing_strategy=SharingStrategy.Fork)


def pid_of(accessor):
    return accessor._worker._process.pid


def is_gone(pid):
    """Whether a process has ended, or does so within a while."""
    for _ in range(300):
        try:
            state = pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return True
        if state == "Z":
            return True
        time.sleep(0.05)
    return False


def shared_memory_of(pid):
    """What a process has left there under a name."""
    return [name for name in os.listdir("/dev/shm") if str(pid) in name]


# What comes out.


class Facts(Numbers):
    """Says of the process that it is read in: dynamo's import, threads, and the program."""

    def __getitem__(self, index):
        facts = ["torch._dynamo" in sys.modules, torch.get_num_threads(), os.getppid()]
        return torch.tensor(facts, dtype=torch.int64)


def rebatching(data, strategy):
    loader = DataLoader(Opts(), data, 2, drop_last=False)
    return AsynchronousDataAccessor(loader, sharing_strategy=strategy, rebatched_size=3)


# One of the two that import torch anew, which takes seconds.
@pytest.mark.long
@pytest.mark.parametrize("strategy", list(SharingStrategy))
def test_every_strategy_gives_the_same_batches(strategy):
    """Only FileSystem, and Fork, leave the dataset's own tensors where they are."""
    data = TensorDataset(torch.arange(7.0))
    accessor = rebatching(data, strategy)
    for _ in range(2):
        assert [value for (batch,) in accessor for value in batch.tolist()] == list(range(7))
    moves = strategy in (SharingStrategy.SharedMemory, SharingStrategy.ForkServer)
    assert data.tensors[0].is_shared() is moves
    accessor.terminate()


@pytest.mark.long
def test_a_worker_is_light_and_leaves_the_cores_to_the_model():
    has_dynamo, threads, parent = next(iter(AsynchronousDataAccessor(Facts(1)))).tolist()
    assert (has_dynamo, threads) == (False, 1)
    assert parent != os.getpid()  # the fork server


@pytest.mark.few("False-1")
@pytest.mark.parametrize("mode", [DataLoaderMode.Async, DataLoaderMode.AsyncRebatched])
@pytest.mark.parametrize("drop_last", [True, False])
def test_a_loader_with_workers_and_a_process_gives_every_sample_once(mode, drop_last):
    loader = DataLoader(
        Opts(iterations=2),
        Numbers(23),
        3,
        num_workers=2,
        drop_last=drop_last,
        mode=mode,
        rebatched_worker_size=None if mode is DataLoaderMode.Async else 4,
    )
    for _ in range(2):
        assert values(epoch(loader)) == list(range(18 if drop_last else 23))
    assert len(loader) == (3 if drop_last else 4)


@pytest.mark.long
def test_shuffled_epochs_differ_and_repeat_with_the_seed():
    orders = []
    for _ in range(2):
        torch.manual_seed(3)
        loader = DataLoader(Opts(), Numbers(20), 4, shuffle=True, mode=DataLoaderMode.Async)
        orders.append([values(epoch(loader)) for _ in range(2)])
    assert orders[0] == orders[1]
    assert orders[0][0] != orders[0][1]
    assert all(sorted(order) == list(range(20)) for order in orders[0])


@pytest.mark.long
def test_making_an_accessor_draws_no_random_numbers():
    before = torch.get_rng_state()
    fork(Numbers(2))
    assert torch.equal(torch.get_rng_state(), before)


class Breaks(Numbers):
    def __getitem__(self, index):
        if index == 2:
            raise LookupError("sample", index)
        return super().__getitem__(index)


@pytest.mark.long
def test_an_exception_comes_out_as_it_is_and_ends_the_process():
    accessor = AsynchronousDataAccessor(Breaks(4))
    pid = pid_of(accessor)
    assert [int(next(accessor)), int(next(accessor))] == [0, 1]
    with pytest.raises(LookupError) as caught:
        next(accessor)
    assert caught.value.args == ("sample", 2)
    assert 'raise LookupError("sample", index)' in str(caught.value.__cause__)
    assert is_gone(pid)
    assert_is_over(accessor)


def assert_is_over(accessor):
    for act in (next, iter):
        with pytest.raises(AssertionError) as caught:
            act(accessor)
        assert str(caught.value) == (
            "This AsynchronousDataAccessor has no worker process any more: it was terminated, or "
            "its dataset raised an exception. Make a new one."
        )


# Ends.


@pytest.mark.long
def test_terminate_ends_process_and_memory_and_leaves_tensors_valid():
    gc.collect()
    descriptors = len(os.listdir("/proc/self/fd"))
    accessor = fork(Numbers(9))
    pid, batch = pid_of(accessor), next(iter(accessor))
    accessor.terminate()
    assert is_gone(pid)
    assert batch == 0
    accessor.terminate()
    assert_is_over(accessor)
    del accessor, batch
    assert len(os.listdir("/proc/self/fd")) == descriptors
    assert shared_memory_of(pid) == shared_memory_of(os.getpid()) == []


@pytest.mark.long
def test_the_last_reference_ends_it_without_the_garbage_collector():
    gc.disable()
    try:
        accessor = fork(Numbers(9))
        pids = [pid_of(accessor)]
        del accessor
        options = {"sharing_strategy": SharingStrategy.Fork}
        loader = DataLoader(Opts(), Numbers(9), mode=DataLoaderMode.Async, async_options=options)
        pids.append(pid_of(loader._accessor))
        iterator = iter(loader)
        del loader
        # An iterator needs no loader. What it returned is overwritten once the next is asked for.
        assert [values([next(iterator)]) for _ in range(2)] == [[0], [1]]
        del iterator
        assert [is_gone(pid) for pid in pids] == [True, True]
    finally:
        gc.enable()


class Stuck(Numbers):
    def __getitem__(self, index):
        time.sleep(1000 if index else 0)
        return torch.zeros(())


def test_a_worker_that_hangs_in_the_dataset_is_ended(monkeypatch):
    monkeypatch.setattr(_accessor, "_PATIENCE", (0.05, 10, 10))
    accessor = fork(Stuck(3))
    pid = pid_of(accessor)
    iter(accessor)
    accessor.terminate()
    assert is_gone(pid)


@pytest.mark.long
def test_ctrl_c_is_for_the_program():
    accessor = fork(Numbers(50), buffer_size=1)
    os.kill(pid_of(accessor), signal.SIGINT)
    assert values(epoch(accessor)) == list(range(50))


def test_a_worker_that_is_killed_is_reported():
    accessor = fork(Numbers(50), buffer_size=1)
    next(iter(accessor))
    os.kill(pid_of(accessor), signal.SIGKILL)
    with pytest.raises(Error) as caught:
        list(accessor)
    assert caught.value.message == (
        "AsynchronousDataAccessor worker thread failed to start or died: its process ended with "
        "exit code -9. A negative one is the signal that ended it; -9 often means that memory ran "
        "out: use a smaller buffer_size or fewer workers. One that ended on starting has printed "
        'why; a script needs its main code under if __name__ == "__main__".'
    )
    assert_is_over(accessor)


@pytest.mark.long
def test_a_fork_of_the_program_leaves_the_process_alone():
    accessor = fork(Numbers(5), buffer_size=1)
    next(iter(accessor))
    child = os.fork()
    if child == 0:
        accessor.terminate()
        os._exit(0)
    os.waitpid(child, 0)
    assert values(epoch(accessor)) == [0, 1, 2, 3, 4]


SCRIPT = """
    import torch
    from ipufit.poptorch import AsynchronousDataAccessor
    from torch.utils.data import DataLoader, TensorDataset

    if __name__ == "__main__":
        data = DataLoader(TensorDataset(torch.arange(99.0)), num_workers=2)
        accessor = AsynchronousDataAccessor(data)
        next(accessor)
        print(accessor._worker._process.pid, flush=True)
        raise SystemExit("over")
"""


@pytest.fixture
def program(tmp_path):
    """A program that ends in the middle of an epoch."""
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(SCRIPT))
    with subprocess.Popen(
        [sys.executable, str(script)],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as running:
        yield running
        running.kill()


@pytest.mark.long
def test_the_end_of_the_program_is_the_end_of_the_process(program):
    """Without a word, and with torch's own processes below it."""
    output, errors = program.communicate(timeout=120)
    assert (program.returncode, errors.decode()) == (1, "over\n")
    assert is_gone(int(output))
    assert shared_memory_of(int(output)) == []


@pytest.mark.long
def test_a_program_that_is_killed_leaves_no_process():
    reading, writing = os.pipe()
    program = os.fork()
    if program == 0:
        accessor = fork(Numbers(99))
        os.write(writing, str(pid_of(accessor)).encode())
        os.kill(os.getpid(), signal.SIGKILL)
    os.close(writing)
    assert os.WTERMSIG(os.waitpid(program, 0)[1]) == signal.SIGKILL
    with os.fdopen(reading, "rb") as pipe:
        assert is_gone(int(pipe.read()))


# What is refused, and what is asked of the process.


def test_a_dataset_that_can_not_be_sent_is_refused():
    class Local(Numbers):
        pass

    with pytest.raises(Error) as caught:
        AsynchronousDataAccessor(Local(3))
    assert caught.value.message.startswith(
        "AsynchronousDataAccessor worker thread failed to start: its dataset could not be handed "
        "to the process ("
    )
    assert caught.value.message.endswith(
        "). Everything in it, collate_fn and worker_init_fn included, must be picklable: define "
        "functions and classes at the top of a module, or use SharingStrategy.Fork."
    )
    assert caught.value.__cause__ is not None
    assert values(epoch(fork(Local(3)))) == [0, 1, 2]


def test_a_loader_has_one_accessor():
    loader = DataLoader(
        Opts(),
        Numbers(3),
        mode=DataLoaderMode.Async,
        async_options={"sharing_strategy": SharingStrategy.Fork},
    )
    refused(
        Error,
        "The DataLoader already uses an AsynchronousDataAccessor internally. Iterate over the "
        "DataLoader itself, or make it with mode=DataLoaderMode.Sync.",
        AsynchronousDataAccessor,
        loader,
    )


def test_a_loader_that_drops_nothing_has_to_be_rebatched():
    refused(
        AssertionError,
        "The 'drop_last=False' option from the DataLoader only works if 'rebatched_size' is "
        "specified too: its last batch may be shorter than the slots of the buffer. Pass "
        "rebatched_size=4, or drop_last=True.",
        AsynchronousDataAccessor,
        DataLoader(Opts(iterations=2), Numbers(9), 2, drop_last=False),
    )


@pytest.mark.long
@pytest.mark.parametrize(
    ("change", "text"),
    [
        (
            {"rebatched_size": 1},
            "rebatched_size must be None or greater than 1, got 1. A combined batch of one sample "
            "needs no rebatching: use DataLoaderMode.Async for it.",
        ),
        (
            {"buffer_size": 0},
            "buffer_size must be at least 1, got 0. Each slot holds one batch.",
        ),
        (
            {"miss_sleep_time_in_ms": -1},
            "miss_sleep_time_in_ms must not be negative, got -1. Use 0 for no pause.",
        ),
    ],
)
def test_numbers_have_their_limits(change, text):
    refused(AssertionError, text, AsynchronousDataAccessor, Numbers(3), **change)


class Asked:
    """Stands for the process: keeps what was asked for."""

    def __init__(self, dataset, settings, strategy):
        self.dataset, self.settings, self.strategy = dataset, settings, strategy

    def stop(self):
        pass


@pytest.fixture
def asked(monkeypatch):
    monkeypatch.setattr(_accessor, "DataProcess", Asked)


@pytest.mark.usefixtures("asked")
@pytest.mark.parametrize(
    ("argument", "value", "field", "expected", "default"),
    [
        ("buffer_size", 7, "slots", 7, 3),
        ("miss_sleep_time_in_ms", 20.0, "pause", 0.02, 0.0001),
        ("load_indefinitely", False, "loads_on", False, True),
        ("early_preload", True, "loads_first", True, False),
        ("rebatched_size", 4, "rows", 4, None),
    ],
)
def test_every_argument_reaches_the_process(argument, value, field, expected, default):
    assert getattr(AsynchronousDataAccessor([])._worker.settings, field) == default
    changed = AsynchronousDataAccessor([], **{argument: value})
    assert getattr(changed._worker.settings, field) == expected


@pytest.mark.usefixtures("asked")
def test_the_strategy_and_the_seed_reach_the_process():
    torch.manual_seed(11)
    accessor = AsynchronousDataAccessor([])
    assert accessor._worker.strategy is SharingStrategy.ForkServer
    assert accessor._worker.settings.seed == 11
    assert fork([])._worker.strategy is SharingStrategy.Fork


@pytest.mark.usefixtures("asked")
@pytest.mark.parametrize(
    ("data", "rebatched", "length", "keeps_rest"),
    [
        (Numbers(9), None, 9, False),
        (Numbers(9), 2, 4, False),
        (TorchDataLoader(Numbers(9), 2), None, 5, False),
        (TorchDataLoader(Numbers(9), 2), 4, 2, False),
        (TorchDataLoader(Numbers(9), 2, drop_last=True), 3, 2, False),
        (TorchDataLoader(SizedStream(9), 2), 4, 2, False),
        (DataLoader(Opts(), Numbers(9), 2), None, 4, False),
        (DataLoader(Opts(), Numbers(9), 2), 4, 2, False),
        (DataLoader(Opts(), Numbers(9), 2, drop_last=False), 4, 3, True),
        (DataLoader(Opts(), SizedStream(9), 2, drop_last=False), 4, 3, True),
        (DataLoader(Opts(), Numbers(9), 2, drop_last=False, sampler=[1, 2, 3]), 2, 2, True),
        (DataLoader(Opts(), Numbers(9), batch_sampler=[[0, 1]] * 4, drop_last=False), 4, 3, True),
    ],
)
def test_the_length_counts_what_comes(data, rebatched, length, keeps_rest):
    accessor = AsynchronousDataAccessor(data, rebatched_size=rebatched)
    assert len(accessor) == length
    assert accessor._worker.settings.keeps_rest is keeps_rest


@pytest.mark.usefixtures("asked")
def test_a_stream_without_length_has_none():
    with pytest.raises(TypeError):
        len(AsynchronousDataAccessor(Stream(3)))


def test_the_signature_is_poptorchs():
    assert str(inspect.signature(AsynchronousDataAccessor)).startswith("(dataset")
