"""Errors of the user's data code: with batch and sample, chained from the original."""

import gc
import multiprocessing
import os
import re
import signal

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils.data import DataLoader, Subset

import ipufit
from ipufit.callbacks import Callback
from ipufit.data.source import DataAdapter
from ipufit.errors import DataError
from ipufit.utils.random_streams import DataStream
from tests.faulty import Batches, Samples, Stream, batches, compiled, fit, refused
from tests.told import message

# torch may tell of a worker that died in the destructor of its iterator, where nobody can hear.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


@pytest.fixture(autouse=True)
def _iterators_end_with_their_test(monkeypatch):
    """An iterator in the frames of an exception would shut its workers down in another test."""
    # The collector ends the threads of the iterator's queues first, so that the word to end does
    # not reach its workers: torch would wait 5 s for each before it ends them itself.
    monkeypatch.setattr(torch.utils.data._utils, "MP_STATUS_CHECK_INTERVAL", 0.1)
    yield
    gc.collect()


SAMPLES = [(x, y) for batch in batches(5) for x, y in zip(*batch)]
MEND = "Fix that sample, or leave it out; its traceback is above."
LINE = "Its traceback above shows the line that failed."


class Breaks(Samples):
    """Fails at some samples."""

    def __init__(self, bad=(13,), error=ValueError, samples=SAMPLES):
        super().__init__(samples)
        self.bad = bad
        self.error = error

    def __getitem__(self, index):
        if index in self.bad:
            raise self.error(f"file {index} is broken")
        return super().__getitem__(index)


class Listed(Breaks):
    """Reads a whole batch at once."""

    def __getitems__(self, indices):
        return [self[index] for index in indices]


def bad_collate(samples):
    """Fails in the second batch."""
    if samples[0][0] is SAMPLES[4][0]:
        raise ValueError("can't be put together")
    return torch.utils.data.default_collate(samples)


def generator():
    """Fails in the third batch."""
    yield from batches(2)
    raise ValueError("no line 3")


def stream():
    """Fails within the second batch."""
    yield from SAMPLES[:6]
    raise ValueError("no line 6")


class Ends(Stream):
    """A stream that is made anew."""

    def __iter__(self):
        return self.samples()


CASES = {
    "sample": (
        lambda: DataLoader(Breaks(), 4),
        f"batch 3: sample 13 of Breaks could not be read: ValueError: file 13 is broken. {MEND}",
    ),
    "bare dataset": (
        lambda: Breaks((2,)),
        f"batch 0: sample 2 of Breaks could not be read: ValueError: file 2 is broken. {MEND}",
    ),
    "subset": (
        lambda: DataLoader(Subset(Breaks(), [0, 1, 2, 3, 12, 13]), 4),
        f"batch 1: sample 5 of Subset could not be read: ValueError: file 13 is broken. {MEND}",
    ),
    "whole batches": (
        lambda: DataLoader(Listed(), 4),
        f"batch 3: sample 13 of Listed could not be read: ValueError: file 13 is broken. {MEND}",
    ),
    "batched dataset": (
        lambda: DataLoader(Breaks((1,), samples=batches(3)), batch_size=None),
        f"batch 1: sample 1 of Breaks could not be read: ValueError: file 1 is broken. {MEND}",
    ),
    "no text": (
        lambda: DataLoader(Breaks(error=lambda text: KeyError()), 4),
        f"batch 3: sample 13 of Breaks could not be read: KeyError. {MEND}",
    ),
    "worker": (
        lambda: DataLoader(Breaks(), 4, num_workers=2),
        f"batch 3: sample 13 of Breaks could not be read: ValueError: file 13 is broken. {MEND}",
    ),
    "worker that draws by a generator and stays": (
        lambda: DataLoader(
            Breaks(),
            20,
            shuffle=True,
            num_workers=2,
            generator=torch.Generator().manual_seed(0),
            persistent_workers=True,
        ),
        f"batch 0: sample 13 of Breaks could not be read: ValueError: file 13 is broken. {MEND}",
    ),
    "worker with a timeout": (
        lambda: DataLoader(Breaks(), 4, num_workers=1, timeout=60),
        f"batch 3: sample 13 of Breaks could not be read: ValueError: file 13 is broken. {MEND}",
    ),
    "collate in a worker": (
        lambda: DataLoader(Samples(SAMPLES), 4, num_workers=1, collate_fn=bad_collate),
        f"batch 1: collate_fn failed: ValueError: can't be put together. {LINE}",
    ),
    "worker with a sampler": (
        lambda: DataLoader(Breaks(), 4, num_workers=1, sampler=list(range(20))),
        f"batch 3: the batch could not be read: ValueError: file 13 is broken. {LINE}",
    ),
    "stop": (
        lambda: DataLoader(Breaks(error=StopIteration), 4),
        f"batch 3: sample 13 of Breaks could not be read: StopIteration: file 13 is broken. {MEND}",
    ),
    "stop in a worker": (
        lambda: DataLoader(Breaks(error=StopIteration), 4, num_workers=2),
        f"batch 3: sample 13 of Breaks could not be read: StopIteration: file 13 is broken. {MEND}",
    ),
    "stop in collate": (
        lambda: DataLoader(Samples(SAMPLES), 4, collate_fn=lambda samples: next(iter([]))),
        f"batch 0: collate_fn failed: StopIteration. {LINE}",
    ),
    "stop of a batched dataset": (
        lambda: DataLoader(Breaks((1,), StopIteration, batches(3)), batch_size=None),
        "batch 1: sample 1 of Breaks could not be read: StopIteration: file 1 is broken. " + MEND,
    ),
    "collate": (
        lambda: DataLoader(Samples(SAMPLES), 4, collate_fn=bad_collate),
        f"batch 1: collate_fn failed: ValueError: can't be put together. {LINE}",
    ),
    "collate of a stream": (
        lambda: DataLoader(Stream(SAMPLES), 4, collate_fn=bad_collate),
        f"batch 1: collate_fn failed: ValueError: can't be put together. {LINE}",
    ),
    "stream": (
        lambda: DataLoader(Ends(stream), 4),
        f"batch 1: the batch could not be read: ValueError: no line 6. {LINE}",
    ),
    "generator": (
        generator,
        f"batch 2: the batch could not be read: ValueError: no line 3. {LINE}",
    ),
    "iterable": (
        lambda: Batches(generator()),
        f"batch 2: the batch could not be read: ValueError: no line 3. {LINE}",
    ),
}


@pytest.mark.few("1-iterable")
@pytest.mark.long("ipu-standin")
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("prefetch", [0, 1])
def test_an_error_of_data_code_names_batch_and_sample(name, prefetch):
    """Hours into a run, nobody wants to search a million files for the broken one."""
    make, text = CASES[name]
    model = compiled()
    with pytest.raises(DataError) as caught:
        fit(model, make(), loading=ipufit.Loading(prefetch=prefetch))
    assert str(caught.value) == f"training data, {text}"
    assert type(caught.value.__cause__) in (ValueError, KeyError, StopIteration)
    before = state_of(model)
    for method, role in ((model.evaluate, "evaluation"), (model.predict, "prediction")):
        with refused(model, DataError, f"{role} data, {text}"):
            method(make(), prefetch=prefetch, verbose=0)
    assert state_of(model) == before


def state_of(model):
    """How far it is trained."""
    return model._session.updates


@pytest.mark.long("ipu-standin")
def test_a_shuffled_worker_is_followed_to_its_sample():
    """torch's own shuffling is drawn from a stream that is known, so it can be drawn again."""
    plain = DataLoader(Breaks(), 4, shuffle=True)
    workers = DataLoader(Breaks(), 4, shuffle=True, num_workers=2)
    texts = []
    for loader in (plain, workers):
        texts.append(message(fit, compiled(), loader, epochs=range(1, 2), kind=DataError))
    assert texts[0] == texts[1]
    assert "sample 13 of Breaks could not be read: ValueError: file 13 is broken" in texts[0]


@pytest.mark.long("ipu-standin")
def test_an_error_in_a_later_pass_is_told_alike():
    """steps_per_epoch goes on over the end of the data."""

    class Later(Samples):
        reads = 0

        def __getitem__(self, index):
            self.reads += 1
            if self.reads > 10:
                raise ValueError("worn out")
            return super().__getitem__(index)

    with pytest.raises(DataError, match=r"sample 2 of Later could not be read: ValueError: worn o"):
        fit(compiled(), DataLoader(Later(SAMPLES[:8]), 4), steps_per_epoch=4)


@pytest.mark.long("ipu-standin")
def test_an_index_that_the_dataset_changes_is_not_taken_for_the_sample():
    """The sample that fails again is named, where the call does not say which it was."""

    class Turned(Samples):
        def __getitem__(self, index):
            index = 7 - index
            if index == 5:
                raise ValueError("worn out")
            return super().__getitem__(index)

    with pytest.raises(DataError, match=r"sample 2 of Turned could not be read: ValueError: worn"):
        fit(compiled(), DataLoader(Turned(SAMPLES[:8]), 8))


class Dies(Samples):
    """Ends its process."""

    def __getitem__(self, index):
        if index == 17:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(index)


TOLD = "a worker process of the DataLoader ended: RuntimeError: DataLoader worker (pid"
TRY = "Run with num_workers=0 to see why; the usual reason is a lack of (shared) memory."


@pytest.mark.long("ipu-standin")
@pytest.mark.parametrize("prefetch", [0, 1])
def test_a_worker_that_dies_keeps_torchs_text(prefetch, monkeypatch):
    """What torch knows of it is in the text, and training does not hang."""
    # torch's other way of telling, a signal at any time, would hit the test as well.
    handling = torch.utils.data._utils.signal_handling
    monkeypatch.setattr(handling, "_error_if_any_worker_fails", lambda: None)
    with pytest.raises(DataError) as caught:
        fit(
            compiled(),
            DataLoader(Dies(SAMPLES), 4, num_workers=1),
            loading=ipufit.Loading(prefetch=prefetch),
        )
    # Or that the connection to it is lost, if it was to hand over what it had made.
    told = r"RuntimeError: DataLoader worker \(pid|ConnectionResetError|EOFError|ConnectionRefused"
    where = r"training data, batch [34]: a worker process of the DataLoader ended: "
    assert re.match(f"{where}({told})", str(caught.value))
    assert str(caught.value).endswith(TRY)
    assert isinstance(caught.value.__cause__, (RuntimeError, ConnectionError, EOFError))


class DiesWhile(Samples):
    """Ends its process as long as a file is there, but not before training has begun."""

    def __init__(self, file):
        super().__init__(SAMPLES * 80)
        self.file = file

    def __getitem__(self, index):
        if index == 1200 and self.file.exists():
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(index)


@pytest.mark.long("ipu-standin")
@pytest.mark.parametrize("prefetch", [0, 1])
def test_a_loader_whose_workers_stay_can_be_read_again_after_one_died(prefetch, tmp_path):
    """torch itself refuses such a loader from then on."""
    file = tmp_path / "file"
    file.touch()
    loader = DataLoader(DiesWhile(file), 4, num_workers=2, persistent_workers=True)
    loading, model = ipufit.Loading(prefetch=prefetch), compiled()
    with pytest.raises(DataError, match="a worker process of the DataLoader ended"):
        fit(model, loader, loading=loading)
    assert not multiprocessing.active_children()
    file.unlink()
    history = fit(model, loader, loading=loading)
    assert len(history.history["loss"]) == 1


@pytest.mark.long("ipu-standin")
def test_a_pass_that_was_given_up_keeps_the_loader_from_nobody():
    """On a busy machine its thread may take longer to notice than the user is kept waiting."""
    loader = DataLoader(Samples(SAMPLES), 4, num_workers=2, persistent_workers=True)
    source, other = DataAdapter(loader, "data"), DataAdapter(loader, "data")
    left = source.epoch(DataStream(0, "data", 0))
    next(left)
    source.give_up()
    count = len(list(other.epoch(DataStream(0, "data", 1))))
    assert count == len(loader)
    workers = set(multiprocessing.active_children())
    assert len(workers) == 2
    # It lets go of nothing that the later pass has.
    begun = other.epoch(DataStream(0, "data", 2))
    next(begun)
    left.close()
    with pytest.raises(DataError, match="already being read"):
        next(source.epoch(DataStream(0, "data", 3)))
    assert len(list(begun)) == count - 1
    assert set(multiprocessing.active_children()) == workers


# Worker processes that are still to be ended; a look at those that live forgets the dead.
TO_END = []


class Kills(nn.Linear):
    """Ends a worker process of the loader when it is recorded, or in its fifth call."""

    def __init__(self, when):
        super().__init__(4, 3)
        self.when = when
        self.calls = 0

    def forward(self, x):
        self.calls += self.when == "run"
        is_time = isinstance(x, FakeTensor) if self.when == "recorded" else self.calls == 5
        if is_time and TO_END:
            worker = multiprocessing.active_children()[TO_END.pop()]
            os.kill(worker.pid, signal.SIGKILL)
            os.waitid(os.P_PID, worker.pid, os.WEXITED | os.WNOWAIT)
            # Python calls the handler of SIGCHLD between two of its steps, before what follows.
        return super().forward(x)


@pytest.mark.embedded_only("on IPUs the module runs in another place")
@pytest.mark.skipif(not hasattr(os, "waitid"), reason="nobody can wait for a process here")
@pytest.mark.parametrize("prefetch", [0, 1])
@pytest.mark.parametrize("when", ["recorded", "run"])
def test_a_worker_that_dies_in_the_module_is_no_fault_of_the_module(when, prefetch):
    """fit ran it eagerly from then on, with a warning, or ended in the middle of an update."""
    module = Kills(when)
    model = compiled(module, run_eagerly=when == "run")
    data = DataLoader(Samples(SAMPLES * 80), 4, num_workers=2)
    TO_END[:] = [0]
    with pytest.raises(DataError) as caught:
        fit(model, data, loading=ipufit.Loading(prefetch=prefetch), gradient_accumulation=2)
    assert re.match("training data(, batch .*)?: a worker process of the Data", str(caught.value))
    # It dies in the first half of the third update.
    assert (module.calls, model._session.updates) == ((6, 3) if when == "run" else (0, 0))


@pytest.mark.long
def test_a_worker_that_dies_meanwhile_is_told_alike():
    """torch raises from a signal, wherever the main thread is just then."""
    error = RuntimeError("DataLoader worker (pid 7) is killed by signal: Killed. ")

    class Signal(Callback):
        def on_train_batch_end(self, batch, logs=None):
            raise error

    with pytest.raises(DataError) as caught:
        fit(compiled(), batches(3), callbacks=Signal())
    text = f"training data: {TOLD} 7) is killed by signal: Killed. {TRY}"
    assert str(caught.value) == text
    assert caught.value.__cause__ is error
    error = RuntimeError("mine")
    with pytest.raises(RuntimeError, match="mine"):
        fit(compiled(), batches(3), callbacks=Signal())


@pytest.mark.long("ipu-standin")
def test_ragged_samples_are_a_matter_of_collate_fn():
    """torch's own collate can't stack them."""
    ragged = [(torch.zeros(n), torch.zeros(3)) for n in (4, 5, 4, 4)]
    text = message(fit, compiled(), DataLoader(Samples(ragged), 4), kind=DataError)
    assert text.startswith("training data, batch 0: collate_fn failed: RuntimeError: stack expects")
