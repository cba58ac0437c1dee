"""Ctrl-C while processes are started: never lost, never for them, and nothing waits for ever."""

import contextlib
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from typing import ClassVar, List

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import ipufit
from ipufit.data import loaders
from ipufit.data.loaders import end_workers
from ipufit.data.pipeline import fetch_ahead
from ipufit.errors import DataError
from ipufit.utils.interrupts import (
    defer_signals,
    is_interrupted,
    starting_processes,
)

pytestmark = [
    pytest.mark.both_engines,
    pytest.mark.skipif(not hasattr(os, "fork"), reason="processes can't be forked here"),
]
# A hang, not a slow computer.
HANG = 120.0

# Ctrl-C is pending when fork returns, so that it strikes in the first hook that is Python.
FORKED = """
import _thread, collections, functools, itertools, json, os, sys
plan = collections.deque()
strike = itertools.chain.from_iterable(iter(plan.popleft, None))
os.register_at_fork(after_in_parent=functools.partial(next, strike, None))
import logging, multiprocessing, threading
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset
import ipufit

class Samples(Dataset):
    def __len__(self):
        return 16

    def __getitem__(self, index):
        return torch.full((8,), float(index)), torch.tensor(index % 3)

class Own(DataLoader):
    def __iter__(self):
        yield from super().__iter__()

for kind, which, strikes in json.loads(sys.argv[1]):
    plan.clear()
    for fork in range(100):
        struck = which <= fork < which + strikes
        plan.append(itertools.islice(iter(_thread.interrupt_main, 0), 1) if struck else [None])
    loader = (Own if kind == "own" else DataLoader)(Samples(), batch_size=4, num_workers=2)
    model = ipufit.Model(nn.Linear(8, 3))
    model.compile("adam", "cross_entropy")
    held_out = loader if kind == "validation" else None
    prefetch = 0 if kind in ("own", "here") else 1
    try:
        loading = ipufit.Loading(prefetch=prefetch)
        model.fit(loader, epochs=3, validation_data=held_out, loading=loading, verbose=0)
        print("trained on")
    except KeyboardInterrupt:
        left = [t.name for t in threading.enumerate() if "ipufit" in t.name]
        print("interrupted", *multiprocessing.active_children(), *left, flush=True)
    logging.getLogger("x").warning(f"the lock is free after {kind} {which} {strikes}")
"""
# Kind of loader, the fork that is struck first, and how many are; the first two without
# --exhaustive.
STRUCK = [("fit", 0, 1), ("fit", 1, 2), ("fit", 3, 1), ("own", 0, 1), ("validation", 2, 1)]


@pytest.fixture(scope="module")
def struck(request):
    """What a process prints of each, and what it writes to stderr."""
    chosen = STRUCK if request.config.getoption("--exhaustive") else STRUCK[:2]
    ran = subprocess.run(
        [sys.executable, "-c", FORKED, json.dumps(chosen)],
        capture_output=True,
        text=True,
        timeout=HANG,
        check=True,
    )
    return dict(zip(chosen, zip(ran.stdout.splitlines(), ran.stderr.splitlines())))


@pytest.mark.few
@pytest.mark.parametrize(("kind", "fork"), [each[:2] for each in STRUCK if each[2] == 1])
def test_ctrl_c_while_a_worker_is_forked_ends_the_run(kind, fork, struck):
    """It was lost in a hook of fork, whose lock then held up the next fork for ever."""
    said, free = struck[kind, fork, 1]
    assert said == "interrupted"
    assert free == f"the lock is free after {kind} {fork} 1"


def test_the_lock_of_the_fork_is_free_after_a_second_ctrl_c(struck):
    """Who presses the keys twice must not hang either."""
    assert struck["fit", 1, 2] == ("interrupted", "the lock is free after fit 1 2")


class Interrupting(Dataset):
    """The worker that reads the second sample gets Ctrl-C, as all processes of a terminal do."""

    def __len__(self):
        return 8

    def __getitem__(self, index):
        assert multiprocessing.parent_process() is not None
        if index == 1:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.05)
        return torch.full((8,), float(index)), torch.tensor(index % 3)


@pytest.fixture
def children_before():
    """Processes that other tests have left, or whose loaders wait for the garbage collector."""
    return set(multiprocessing.active_children())


@pytest.mark.few
@pytest.mark.parametrize("prefetch", [0, 1])
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_workers_have_nothing_to_do_with_ctrl_c(method, prefetch, children_before):
    """The process that waits for them decides: it may have a checkpoint to write first."""
    model = ipufit.Model(nn.Linear(8, 3))
    model.compile("sgd", "cross_entropy")
    loader = DataLoader(Interrupting(), 4, num_workers=1, multiprocessing_context=method)
    history = model.fit(loader, loading=ipufit.Loading(prefetch=prefetch), verbose=0)
    assert history.epoch == [0]
    assert history.params["updates_done"] == 2
    assert set(multiprocessing.active_children()) <= children_before


@pytest.mark.long
def test_a_program_that_a_worker_runs_still_hears_ctrl_c():
    """To ignore a signal, or to block it, is inherited; to handle it is not."""
    loader = DataLoader(Asking(), batch_size=None, num_workers=1)
    with starting_processes():
        iterator = iter(loader)
    assert [int(blocked) for blocked in iterator] == [0, 0]
    end_workers(iterator)


class Asking(Dataset):
    """Runs a program that says whether it blocks or ignores SIGINT."""

    def __len__(self):
        return 2

    def __getitem__(self, index):
        code = (
            "import signal; print(int(signal.SIGINT in signal.pthread_sigmask(0, []) "
            "or signal.getsignal(signal.SIGINT) != signal.default_int_handler))"
        )
        return subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE).stdout


class Signalled(multiprocessing.get_context("fork").Process):
    """A process, of which signals come while it is started."""

    numbers = ()

    def _Popen(self, *given):  # noqa: N802 - torch's iterator and this are where fork is called
        for number in self.numbers:
            signal.raise_signal(number)
        return super()._Popen(*given)


@pytest.fixture
def came():
    """Signals that handlers of the user's get, which stay in their place."""
    numbers = []

    def note(number, frame):
        numbers.append(number)

    before = {n: signal.signal(n, note) for n in (signal.SIGTERM, signal.SIGUSR1)}
    yield numbers
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    for number, handler in before.items():
        assert signal.getsignal(number) is note
        signal.signal(number, handler)


def test_every_signal_waits_until_the_process_is_started(came):
    """Any handler may raise, or ask for the lock that fork holds."""
    process = Signalled(target=time.sleep, args=(HANG,))
    process.numbers = (signal.SIGUSR1, signal.SIGINT, signal.SIGTERM, signal.SIGINT)

    def start():
        with starting_processes():
            process.start()
            assert process.is_alive()
            assert came == []

    with pytest.raises(KeyboardInterrupt):
        start()
    assert came == [signal.SIGUSR1, signal.SIGTERM]
    process.kill()  # it has inherited the handler of SIGTERM
    process.join()


def test_signals_come_at_once_where_no_process_is_started(came):
    """Code of the user's that runs there, a sampler's for example, may be what hangs."""
    begun = []

    def start():
        with starting_processes():
            signal.raise_signal(signal.SIGUSR1)
            begun.extend(came)
            signal.raise_signal(signal.SIGINT)
            begun.append("not interrupted")

    with pytest.raises(KeyboardInterrupt):
        start()
    assert begun == [signal.SIGUSR1]


class Striking(torch.utils.data.Sampler):
    """Ctrl-C comes while its first indices are drawn, which torch does as it starts workers."""

    def __init__(self, times):
        self.times = times
        self.went_on = False

    def __iter__(self):
        for _ in range(self.times):
            signal.raise_signal(signal.SIGINT)
        self.went_on = True
        return iter(range(8))

    def __len__(self):
        return 8


@pytest.mark.parametrize(("times", "went_on"), [(1, True), (2, False)])
def test_a_second_ctrl_c_does_not_wait_for_a_sampler(times, went_on, children_before):
    """The first lets workers be started whole; who can't wait for that presses again."""
    model = ipufit.Model(nn.Linear(8, 3))
    model.compile("sgd", "cross_entropy")
    sampler = Striking(times)
    with pytest.raises(KeyboardInterrupt):
        model.fit(DataLoader(Samples(), 4, sampler=sampler, num_workers=2), verbose=0)
    assert sampler.went_on is went_on
    assert set(multiprocessing.active_children()) <= children_before


class Samples(Dataset):
    """Each takes so long to read."""

    def __init__(self, seconds=0.0, begun=None):
        self.seconds = seconds
        self.begun = begun

    def __len__(self):
        return 8

    def __getitem__(self, index):
        if self.begun is not None:
            self.begun.set()
        time.sleep(self.seconds)
        return torch.full((8,), float(index)), torch.tensor(index % 3)


def test_workers_that_do_not_end_are_ended_all_at_once(monkeypatch):
    """torch waits five seconds for each of them."""
    monkeypatch.setattr(loaders, "_PATIENCE", 0.1)
    loader = DataLoader(Samples(HANG), 4, num_workers=2)
    iterator = iter(loader)
    processes = list(iterator._workers)
    end_workers(iterator)
    assert [each.is_alive() for each in processes] == [False] * 2
    end_workers(iterator)


@pytest.mark.long
def test_an_interrupt_does_not_wait_for_a_thread_that_reads_for_ever():
    """And who only stops early waits: what is read next would find it still being read."""
    may, waits, given_up = threading.Event(), threading.Event(), []

    def items():
        yield 1
        waits.set()
        may.wait(HANG)

    def interrupted():
        with contextlib.closing(fetch_ahead(items(), 1, lambda: given_up.append(True))) as ahead:
            assert next(ahead) == 1
            assert waits.wait(HANG)
            raise KeyboardInterrupt

    ahead = fetch_ahead(items(), 1, lambda: given_up.append(True))
    assert next(ahead) == 1
    assert waits.wait(HANG)
    release = threading.Timer(0.2, may.set)
    release.start()
    ahead.close()
    release.join()
    assert not given_up
    may.clear()
    waits.clear()
    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert given_up == [True]
    may.set()


def test_an_error_does_not_swallow_the_interrupt_before_it():
    """Ctrl-C reaches workers too, and torch raises from another signal that one has ended."""

    def run():
        with defer_signals():
            signal.raise_signal(signal.SIGINT)
            raise RuntimeError("DataLoader worker (pid 1) exited unexpectedly")

    with pytest.raises(KeyboardInterrupt) as caught:
        run()
    assert isinstance(caught.value.__context__, RuntimeError)
    assert is_interrupted(caught.value)


@pytest.fixture
def end_of_a_worker():
    """torch's handler of SIGCHLD, as it is after a worker has ended."""

    def ended(number, frame):
        raise RuntimeError("DataLoader worker (pid 1) exited unexpectedly")

    ended.__module__ = "torch.utils.data._utils.signal_handling"
    before = signal.signal(signal.SIGCHLD, ended)
    yield ended
    assert signal.getsignal(signal.SIGCHLD) is ended
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    signal.signal(signal.SIGCHLD, before)


@pytest.mark.parametrize("error", [None, KeyError, KeyboardInterrupt])
def test_the_end_of_a_worker_waits_for_the_end_of_a_block_and_for_its_own_error(
    error, end_of_a_worker
):
    """In the middle of a recording it would look like an error of the module."""
    seen = []

    def run():
        with defer_signals():
            with defer_signals(interrupts=False):
                signal.raise_signal(signal.SIGCHLD)
                seen.append("inner")
            if error is KeyboardInterrupt:
                signal.raise_signal(signal.SIGINT)
            elif error is not None:
                raise error
            seen.append("outer")

    with pytest.raises(error or RuntimeError):
        run()
    assert seen == (["inner"] if error is KeyError else ["inner", "outer"])


def test_ctrl_c_need_not_wait_where_only_workers_do(end_of_a_worker):
    with pytest.raises(KeyboardInterrupt), defer_signals(interrupts=False):
        signal.raise_signal(signal.SIGINT)


class OutOfTimeError(Exception):
    """Raised by a handler of the user's."""


class Watchdog:
    """Has a handler as a method."""

    def bark(self, number, frame):
        raise OutOfTimeError(number)


def bark(number, frame):
    """A handler that is a function."""
    raise OutOfTimeError(number)


@pytest.fixture(params=["function", "method"])
def watchdog(request):
    """A handler for SIGTERM that raises."""
    handler = bark if request.param == "function" else Watchdog().bark
    before = signal.signal(signal.SIGTERM, handler)
    yield
    assert signal.getsignal(signal.SIGTERM) == handler
    signal.signal(signal.SIGTERM, before)


class Struck(nn.Linear):
    """A signal comes while it runs for so many samples, for the first time in a test."""

    times: ClassVar[List[int]] = []

    def __init__(self, samples=4):
        super().__init__(8, 3)
        self.samples = samples

    def forward(self, inputs):
        if len(inputs) == self.samples and not self.times:
            self.times.append(self.samples)
            signal.raise_signal(signal.SIGTERM)
        return super().forward(inputs)


def model_of(module, lr=0.1):
    model = ipufit.Model(module)
    model.compile(lambda params: torch.optim.SGD(params, lr=lr), "cross_entropy")
    return model


X, Y = torch.ones(6, 8), torch.zeros(6, dtype=torch.long)
CALLS = {
    "fit": lambda: model_of(Struck()).fit(X, Y, batch_size=4, verbose=0),
    "a later shape": lambda: model_of(Struck(2)).fit(X, Y, batch_size=4, verbose=0),
    "predict": lambda: model_of(Struck()).predict(X, batch_size=4, verbose=0),
    "summary": lambda: model_of(Struck()).summary(X[:4]),
    "fit_many": lambda: ipufit.fit_many(
        lambda lr: model_of(Struck(), lr), {"lr": [0.1, 0.2]}, X, Y, batch_size=4, verbose=0
    ),
}


@pytest.mark.parametrize("call", CALLS)
def test_what_a_handler_of_the_users_raises_is_no_fault_of_the_module(call, watchdog):
    """It was lost: the module was said to be one that can't be recorded, and training went on."""
    Struck.times.clear()
    with pytest.raises(OutOfTimeError):
        CALLS[call]()


def test_a_handler_of_the_users_waits_for_the_end_of_a_block_but_not_twice(came):
    """It may be what ends a block that hangs; Ctrl-C without a handler does not wait."""

    def run():
        with defer_signals(interrupts=False, handlers=True):
            signal.raise_signal(signal.SIGTERM)
            signal.raise_signal(signal.SIGUSR1)
            assert came == []
            signal.raise_signal(signal.SIGTERM)
            assert came == [signal.SIGTERM]
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        run()
    assert came == [signal.SIGTERM, signal.SIGTERM, signal.SIGUSR1]


@pytest.mark.parametrize("interrupt", [False, True])
def test_a_worker_that_ends_by_ctrl_c_is_no_error_of_the_data(interrupt):
    """ "A lack of (shared) memory is the usual reason" sent users looking for a fault."""

    class Breaks(ipufit.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            try:
                if interrupt:
                    raise KeyboardInterrupt
            finally:
                raise RuntimeError("DataLoader worker (pid 1) exited unexpectedly")

    model = ipufit.Model(nn.Linear(8, 3))
    model.compile("sgd", "cross_entropy")
    with pytest.raises(KeyboardInterrupt if interrupt else DataError):
        model.fit(DataLoader(Samples(), 4), callbacks=Breaks(), verbose=0)


@pytest.mark.long
@pytest.mark.parametrize("prefetch", [0, 1])
def test_persistent_workers_that_are_slow_end_with_the_interrupt(prefetch, children_before):
    """torch would wait five seconds for each, whenever the loader is let go of."""
    model = ipufit.Model(nn.Linear(8, 3))
    model.compile("sgd", "cross_entropy")
    begun = multiprocessing.Event()
    loader = DataLoader(Samples(HANG, begun), 4, num_workers=2, persistent_workers=True)

    def press():
        assert begun.wait(HANG)
        time.sleep(0.1)
        os.kill(os.getpid(), signal.SIGINT)

    strike = threading.Thread(target=press)
    strike.start()
    with pytest.raises(KeyboardInterrupt):
        model.fit(loader, loading=ipufit.Loading(prefetch=prefetch), verbose=0)
    strike.join()
    assert set(multiprocessing.active_children()) <= children_before
    # Others are started when it is read next.
    loader.dataset.seconds = 0.0
    assert model.fit(loader, loading=ipufit.Loading(prefetch=prefetch), verbose=0).epoch == [0]
    end_workers(loader._iterator)
