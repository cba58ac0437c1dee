"""Datasets, options and a worker in a thread, for the tests of loading."""

import contextlib
import multiprocessing
import threading
import types

import pytest
import torch
from torch.utils.data import Dataset, IterableDataset

from ipufit.poptorch import Error
from ipufit.poptorch._accessor import BatchReader
from ipufit.poptorch._data_worker import Command, DataWorker, Stopped, WorkerSettings, _report
from ipufit.poptorch._parsers import ICustomArgParser


class Opts:
    """What a loader reads of poptorch.Options."""

    def __init__(self, iterations=1, accumulation=1, replicas=1, group=1, processes=(0, 1)):
        self.device_iterations = iterations
        self.replication_factor = replicas
        self.input_group_size = group
        self.Training = types.SimpleNamespace(gradient_accumulation=accumulation)
        self.Distributed = types.SimpleNamespace(processId=processes[0], numProcesses=processes[1])
        self.is_frozen = False

    def seeded(self, seed):
        self.random_seed = seed
        return self

    def exists(self, name):
        return hasattr(self, name)

    def _freeze(self):
        self.is_frozen = True


class Numbers(Dataset):
    """Sample i is the number i."""

    def __init__(self, length):
        self.length = length

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        return torch.tensor(float(index))


class Stream(IterableDataset):
    """The same numbers one after the other; says its length if asked to."""

    def __init__(self, length):
        self.length = length

    def __iter__(self):
        info = torch.utils.data.get_worker_info()
        first, step = (0, 1) if info is None else (info.id, info.num_workers)
        return (torch.tensor(float(i)) for i in range(first, self.length, step))


class SizedStream(Stream):
    def __len__(self):
        return self.length


class Pair:
    """A batch of a type of its own."""

    def __init__(self, first, second, label="label"):
        self.first, self.second, self.label = first, second, label


class PairParser(ICustomArgParser):
    """Takes all that is left of its iterator, as parsers may."""

    def yieldTensors(self, struct):
        yield struct.first
        yield struct.second

    def reconstruct(self, original_structure, tensor_iterator):
        return Pair(*tensor_iterator, label=original_structure.label)


def refused(kind, text, call, *args, **kwargs):
    """The call raises an error of this kind with exactly this text."""
    with pytest.raises(kind) as caught:
        call(*args, **kwargs)
    assert (caught.value.message if kind is Error else str(caught.value)) == text


def settings(**changes):
    values = {
        **{"slots": 3, "pause": 0.0, "loads_on": True, "loads_first": False},
        **{"rows": None, "keeps_rest": False, "seed": 0},
    }
    return WorkerSettings(**{**values, **changes})


@contextlib.contextmanager
def worker(dataset, **changes):
    """The reader's ends of a DataWorker's pipes; the worker runs in a thread.

    Yields:
        (commands, events, thread): without the reader's protocol.
    """
    events, its_events = multiprocessing.Pipe(duplex=False)
    its_commands, commands = multiprocessing.Pipe(duplex=False)

    def run():
        try:
            DataWorker(dataset, settings(**changes), its_commands, its_events).run()
        except Stopped:
            pass
        except Exception as problem:
            _report(problem, its_events)
        finally:
            its_events.close()

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield commands, events, thread
    finally:
        with contextlib.suppress(OSError):
            commands.send((Command.STOP, 0))
        events.close()
        thread.join()
        commands.close()
        its_commands.close()


@contextlib.contextmanager
def reader(dataset, **changes):
    """A BatchReader over a worker in a thread."""
    with worker(dataset, **changes) as (commands, events, _):
        yield BatchReader(commands, events)


def epoch(source):
    """All batches of one epoch, copied; sources are a BatchReader or a loader."""
    if not isinstance(source, BatchReader):
        return [copied(batch) for batch in source]
    source.begin()
    batches = []
    with contextlib.suppress(StopIteration):
        while True:
            batches.append(copied(source.next()))
    return batches


def copied(batch):
    return [t.clone() for t in batch] if isinstance(batch, list) else batch.clone()


def values(batches):
    """The numbers of batches of numbers, as a flat list."""
    return [int(value) for batch in batches for value in batch.reshape(-1).tolist()]
