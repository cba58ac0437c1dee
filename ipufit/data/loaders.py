"""DataLoaders: facts about one that does not run, and the start and end of its workers."""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import itertools
import multiprocessing.resource_tracker
import time
from typing import Any, Callable, Dict, Iterable, Iterator, List, Optional, Tuple

from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
    dataloader,
    default_collate,
)

from ipufit.core.batch import RawBatch, copy_leaf
from ipufit.data.in_memory import ArrayLoader, EpochOrder
from ipufit.data.read_errors import frames_of
from ipufit.utils import tree
from ipufit.utils.interrupts import defer_signals, starting_processes
from ipufit.utils.state import samplers_of


def is_torchs(value: object) -> bool:
    """True if torch, or ipufit, wrote its class."""
    return type(value).__module__.partition(".")[0] in ("torch", "ipufit")


def reads_as_torch(loader: object) -> bool:
    """True of a DataLoader whose batches no ``__iter__`` of a subclass makes or changes."""
    return isinstance(loader, DataLoader) and type(loader).__iter__ is DataLoader.__iter__


def may_reuse_memory(loader: Any) -> bool:
    """Torch's collate makes new tensors, workers send new ones, and a list holds its own."""
    if isinstance(loader, ArrayLoader):
        return False
    if reads_as_torch(loader):
        # A collate_fn of ours is an object of a class.
        is_copying = loader.collate_fn is default_collate or is_torchs(loader.collate_fn)
        makes_new = loader.batch_sampler is not None and is_copying
        return not makes_new and loader.num_workers == 0
    return not isinstance(loader, (list, tuple))


def batch_total(loader: object) -> Optional[int]:
    """Batches of an epoch; of a stream only where torch's count of them can be relied on."""
    if isinstance(loader, DataLoader) and isinstance(loader.dataset, IterableDataset):
        return length_of(loader) if loader.num_workers <= 1 else None
    return length_of(loader)


def stream_length(loader: object) -> Optional[int]:
    """Samples that a stream read by several workers says it has; None for anything else."""
    if not isinstance(loader, DataLoader) or loader.num_workers < 2:
        return None
    return length_of(loader.dataset) if isinstance(loader.dataset, IterableDataset) else None


def row_count(batch: object) -> int:
    """Rows of a raw batch, of whatever has a shape; 0 where it has nothing to count."""
    shapes: Iterator[Any] = (getattr(leaf, "shape", ()) for leaf in tree.flatten(batch)[0])
    return next((int(shape[0]) for shape in shapes if len(shape)), 0)


def length_of(sized: Any) -> Optional[int]:
    """Length of a loader, or None where it has none."""
    try:
        return len(sized)
    except (TypeError, NotImplementedError):
        return None


def sample_makers(owner: object) -> Tuple[Any, Any]:
    """The methods of a dataset or iterable that make its samples or batches."""
    while isinstance(owner, (Subset, BatchSequence)):
        owner = owner.dataset
    kind = type(owner)
    return getattr(kind, "__getitem__", None), getattr(kind, "__iter__", None)


def place_of(candidate: Any) -> Optional[Tuple[str, int]]:
    """File and line of a function or callable object of the user's, if there is one."""
    if isinstance(candidate, functools.partial):
        candidate = candidate.func
    if callable(candidate) and not inspect.isroutine(candidate):
        candidate = type(candidate).__call__
    module = getattr(candidate, "__module__", "") or ""
    if candidate is None or module.split(".")[0] in ("torch", "builtins", "ipufit"):
        return None
    try:
        return str(inspect.getsourcefile(candidate)), inspect.getsourcelines(candidate)[1]
    except (TypeError, OSError):
        return None


def shuffles(loader: object) -> bool:
    """Say whether a sampler of a DataLoader draws the order, as far as samplers show it."""
    samplers = samplers_of(loader) if isinstance(loader, DataLoader) else ()
    return any(hasattr(s, "generator") or getattr(s, "shuffle", False) is True for s in samplers)


def without_shuffling(loader: Any) -> Any:
    """Make a loader in the order of the dataset, where the shuffling is torch's."""
    if not reads_as_torch(loader) or type(loader.sampler) is not RandomSampler:
        return loader
    if type(loader.batch_sampler) is not BatchSampler or not loader.batch_size:
        return loader
    sampler = SequentialSampler(loader.dataset)
    batches = BatchSampler(sampler, loader.batch_size, loader.drop_last)
    return like(loader, sampler=sampler, batch_sampler=batches, persistent_workers=False)


class BatchSequence:
    """Batches that are picked by number, as a ``keras.utils.PyDataset`` has them.

    Its ``on_epoch_begin`` is called before every pass, ``on_epoch_end`` after the last batch.

    Args:
        dataset: a PyDataset, or an object with such methods.
        key: of the order of the batches; None for their own.

    Attributes:
        dataset: the user's.
    """

    def __init__(self, dataset: Any, key: Optional[int] = None) -> None:
        self.dataset = dataset
        self._key = key

    def __len__(self) -> int:
        dataset = self.dataset
        count = dataset.num_batches if hasattr(dataset, "num_batches") else len(dataset)
        # None, of one that never ends, is a TypeError, as of whatever has no length.
        return int(count)

    def __iter__(self) -> Iterator[RawBatch]:
        if hasattr(self.dataset, "on_epoch_begin"):
            self.dataset.on_epoch_begin()
        count = length_of(self)
        order: Iterable[int] = itertools.count() if count is None else range(count)
        if count is not None and self._key is not None:
            order = EpochOrder(count, self._key)
        for index in order:
            yield self.dataset[index]
        self.dataset.on_epoch_end()


class FirstBatches:
    """The first batches of an iterable, read once and kept, so that every epoch has the same.

    Args:
        batches: what to read from.
        count: how many.
    """

    def __init__(self, batches: Iterable[object], count: int) -> None:
        self._batches = batches
        self._count = count
        self._rest: Optional[Iterator[RawBatch]] = None
        self._kept: List[RawBatch] = []

    def __iter__(self) -> Iterator[RawBatch]:
        for index in range(self._count):
            if index == len(self._kept):
                if self._rest is None:
                    self._rest = iter(self._batches)
                try:
                    batch = next(self._rest)
                except StopIteration:
                    return
                self._kept.append(tree.map_leaves(copy_leaf, batch))
            yield self._kept[index]


def like(loader: DataLoader[object], **changes: object) -> DataLoader[object]:
    """Another DataLoader over the same data, with the same options of reading but for some."""
    other = copy.copy(loader)
    # Its __init__ would warn once more of what the user's has warned of.
    vars(other).update(changes, _iterator=None)
    return other


def sends_groups(loader: object) -> bool:
    """True if nobody can tell by the batches whether workers send them one by one or together."""
    if type(loader) is not DataLoader or not loader.num_workers or loader.batch_sampler is None:
        return False
    if isinstance(loader.dataset, IterableDataset):
        return False
    # Older versions of torch have no other order.
    return getattr(loader, "in_order", True) and has_torchs_samplers(loader)


def has_torchs_samplers(loader: DataLoader[object]) -> bool:
    """True if no code of the user's chooses samples."""
    return all(map(is_torchs, samplers_of(loader)))


def ordered_by_epoch(loader: object) -> List[Tuple[Callable[[int], object], int]]:
    """Return what tells parts of a loader the epoch, and the present epoch of each.

    torch's DistributedSampler is such a part, and streams of Hugging Face are. What does not say
    its epoch keeps the one it has.
    """
    epochs: Dict[int, Tuple[Callable[[int], object], int]] = {}
    for part in (loader, getattr(loader, "dataset", None), *samplers_of(loader)):
        epoch = getattr(part, "epoch", None)
        if isinstance(epoch, int) and hasattr(part, "set_epoch"):
            epochs[id(part)] = part.set_epoch, epoch
    return [*epochs.values()]


# How long all workers together may take to end by themselves, in seconds; torch gives each five.
_PATIENCE = 1.0
_INIT = dataloader._MultiProcessingDataLoaderIter.__init__.__code__


@contextlib.contextmanager
def starting_workers(loader: Any) -> Iterator[None]:
    """Let reading of a loader begin, with workers or without, and signals do no harm.

    Args:
        loader: of torch, or anything that may read one.
    """
    silent = reads_as_torch(loader) and loader.num_workers > 0 and not _forks(loader)
    if silent:
        # It would let SIGINT through again as it is started.
        multiprocessing.resource_tracker.ensure_running()
    try:
        with starting_processes(silent):
            yield
    except BaseException as error:
        _end_torn(error)
        raise


def _end_torn(error: Optional[BaseException]) -> None:
    """End the workers of an iterator that is not whole, which lives as long as the traceback."""
    while error is not None:
        for frame in frames_of(error):
            if frame.f_code is _INIT:
                with contextlib.suppress(AttributeError):
                    end_workers(frame.f_locals["self"])
        error = error.__context__


def _forks(loader: DataLoader[object]) -> bool:
    context: Any = loader.multiprocessing_context or multiprocessing
    method: Optional[str] = context.get_start_method(allow_none=True)
    return (method or multiprocessing.get_all_start_methods()[0]) == "fork"


def end_workers(iterator: Any) -> None:
    """End the workers of a pass over a DataLoader that nobody reads on, if it has any.

    Ctrl-C waits until they have ended, which takes about a second at most.
    """
    workers: List[Any] = getattr(iterator, "_workers", [])
    if not workers:
        return
    with defer_signals():
        deadline = time.monotonic() + _PATIENCE
        # torch ends them one after the other, and lets go of them only then.
        iterator._workers = [_Impatient(worker, deadline) for worker in workers]
        try:
            iterator._shutdown_workers()
        finally:
            for worker in workers:
                worker.join(_PATIENCE)
                if worker.exitcode is None:
                    worker.kill()
                    worker.join()


def has_lost_worker(iterator: object) -> bool:
    """True if a worker of a pass has ended."""
    workers: List[Any] = getattr(iterator, "_workers", [])
    return any(worker.exitcode is not None for worker in workers)


def kill_workers(iterator: object) -> None:
    """End the workers of a pass while another thread waits for them, which will notice."""
    for worker in getattr(iterator, "_workers", []):
        # torch's handler of SIGTERM lets them end without an error here.
        worker.terminate()


class _Impatient:
    """A worker process that is waited for until a deadline at most."""

    def __init__(self, worker: Any, deadline: float) -> None:
        self._worker = worker
        self._deadline = deadline

    def join(self, timeout: Optional[float] = None) -> None:
        """Wait; ``timeout`` is not waited for."""
        self._worker.join(max(0.0, self._deadline - time.monotonic()))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._worker, name)
