"""Who cuts data into the parts of several processes: ipufit, the data itself, or nobody."""

from __future__ import annotations

import contextlib
import dataclasses
from types import CodeType
from typing import Any, Callable, Iterable, Iterator, Optional

import torch
from torch.utils.data import IterableDataset, get_worker_info
from torch.utils.data import _utils as torchs_utils
from torch.utils.data.distributed import DistributedSampler

from ipufit.data.arrays import ArrayLoader
from ipufit.data.loaders import like, reads_as_torch
from ipufit.data.rank_shards import RankShard
from ipufit.errors import DataError

__all__ = [
    "AsWorkerOfAll",
    "Sharded",
    "ShardedLoader",
    "as_worker",
    "asks_for_workers",
    "refuse_unshared",
]

_torchs_worker: Any = torchs_utils.worker


class Sharded:
    """Data of which every process has a part of its own already.

    ipufit gives each process its part of tensors, datasets and DataLoaders by itself. Of an
    iterable of your own it can't know whether it yields the same samples in every process: cut it
    by ``torch.distributed.get_rank()`` or the like, and say so with this.

    Args:
        loader: an iterable of batches, an IterableDataset, or a DataLoader; it yields samples that
            no other process gets.

    Raises:
        DataError: it is none of these.
    """

    def __init__(self, loader: Iterable[Any]) -> None:
        if isinstance(loader, (torch.Tensor, str, bytes, dict)) or not hasattr(
            type(loader), "__iter__"
        ):
            raise DataError(
                "Sharded takes what yields this process's batches, such as a DataLoader, got "
                f"{type(loader).__name__}. Pass tensors, arrays and datasets as they are: each "
                "process reads its part of them."
            )
        self.loader = loader


def asks_for_workers(dataset: Any) -> bool:
    """True if the code of a stream asks which worker it is, as torch's documentation has it."""
    for kind in type(dataset).__mro__:
        if kind.__module__.partition(".")[0] == "torch":
            continue
        for member in vars(kind).values():
            code = getattr(member, "__code__", None)
            if code is not None and "get_worker_info" in _names(code):
                return True
    return False


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


@dataclasses.dataclass(frozen=True)
class _Worker:
    """Facts that torch has of a worker, under its names."""

    id: int
    num_workers: int
    seed: int
    dataset: Any


@contextlib.contextmanager
def as_worker(dataset: Any, process: int, processes: int) -> Iterator[None]:
    """Within the block the data that is read in this process takes it for a worker of its own."""
    before = _torchs_worker._worker_info
    worker = _Worker(process, processes, torch.initial_seed(), dataset)
    _torchs_worker._worker_info = worker
    try:
        yield
    finally:
        _torchs_worker._worker_info = before


@dataclasses.dataclass(frozen=True)
class AsWorkerOfAll:
    """Starts a worker that takes itself for one of those of all processes.

    Attributes:
        process: of this worker.
        processes: how many there are.
        then: the user's own ``worker_init_fn``, or None.
    """

    process: int
    processes: int
    then: Optional[Callable[[int], Any]]

    def __call__(self, worker: int) -> None:
        """Called by torch in the worker."""
        info = get_worker_info()
        assert info is not None
        number, count = self.process * info.num_workers + info.id, info.num_workers
        # torch has no other place for it.
        _torchs_worker._worker_info = _Worker(
            number, self.processes * count, info.seed, info.dataset
        )
        if self.then is not None:
            self.then(worker)


def refuse_unshared(loader: Any, role: str, processes: int) -> None:
    """Make sure that it is known which process reads which samples.

    Raises:
        DataError: it is not, or samples would be read twice.
    """
    cure = (
        "Let it yield the samples of this process alone, and say so: ipufit.Sharded(loader); or "
        "pass tensors, a map-style dataset, or a DataLoader over one."
    )
    if isinstance(loader, (ArrayLoader, list, tuple)):
        return
    kind = type(loader).__name__
    if not reads_as_torch(loader):
        raise DataError(
            f"{role}: each of {processes} processes must read samples of its own, but a {kind} may "
            f"yield the same ones in all. {cure}"
        )
    samplers = (loader.sampler, loader.batch_sampler, getattr(loader.batch_sampler, "sampler", 0))
    if any(isinstance(sampler, DistributedSampler) for sampler in samplers):
        raise DataError(
            f"{role}: each process reads its part of the DataLoader's order, but its "
            "DistributedSampler leaves a part of it already, and repeats samples to make parts "
            "equal. Leave the sampler out: DataLoader(dataset, batch_size, shuffle=True)."
        )
    if isinstance(loader.dataset, IterableDataset):
        if not asks_for_workers(loader.dataset):
            raise DataError(
                f"{role}: each of {processes} processes must read samples of its own, but "
                f"{type(loader.dataset).__name__} does not ask which part to yield. Let its "
                "__iter__ ask torch.utils.data.get_worker_info(), which counts the workers of all "
                f"processes. {cure}"
            )
    elif loader.batch_sampler is None:
        raise DataError(
            f"{role}: each of {processes} processes must know how large the batches of the others "
            "are, but a DataLoader with batch_size=None makes them in the dataset. Use batch_size "
            "or batch_sampler, or cut it yourself and say so: ipufit.Sharded(loader)."
        )


class _ShardSampler:
    """Batch sampler whose batches are set anew for every pass: the shard of another one's."""

    def __init__(self) -> None:
        self.indices: Iterator[Any] = iter(())

    def __iter__(self) -> Iterator[Any]:
        return self.indices


class ShardedLoader:
    """Reads like a DataLoader of map-style data, with workers of its own.

    Args:
        loader: that it reads like.

    Attributes:
        whole: as given.
    """

    def __init__(self, loader: Any) -> None:
        self.whole = loader
        self._sampler = _ShardSampler()
        self._own = like(loader, batch_sampler=self._sampler)

    def batches(self, portion: RankShard, most: Optional[int], draws_once: bool) -> Iterator[Any]:
        """One pass over the own batches.

        Args:
            portion: says which they are.
            most: batches of the pass at most, of all processes.
            draws_once: whether random numbers are drawn for the first batch at most.
        """
        whole = self.whole

        def every() -> Any:
            if whole.generator is None:
                # torch's iterator draws a seed for the workers before the order.
                torch.empty((), dtype=torch.int64).random_()
            return whole.batch_sampler

        def read(indices: Any) -> Any:
            return whole.collate_fn([whole.dataset[index] for index in indices])

        self._sampler.indices = portion.picked(every, len, read, most, draws_once)
        return iter(self._own)
