"""Errors of the user's data code, told with the batch and the sample that they happened in."""

from __future__ import annotations

import dis
import itertools
from pathlib import PurePath
from types import FrameType
from typing import Any, Callable, Iterable, Iterator, List, Optional, Tuple

import torch
from torch._utils import ExceptionWrapper
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    _utils,
)

from ipufit.errors import DataError, IpufitError


def unreadable(
    error: Exception, loader: object, role: str, batch: int, replay: Callable[[], object]
) -> Exception:
    """The error to raise for one that came while batch number ``batch`` was read.

    Args:
        error: what the user's code, or torch's, raised.
        loader: what was read.
        role: what it is for.
        batch: index in the epoch.
        replay: a context in which torch's random numbers start as they did in this epoch.

    Returns:
        A DataError to be chained from ``error``; one of our own as it is.
    """
    if isinstance(error, IpufitError):
        return error
    # What a worker has sent is fetched from it: if it is gone by then, the connection is.
    lost = isinstance(error, (ConnectionError, EOFError)) and bool(
        getattr(loader, "num_workers", 0)
    )
    if is_dead_worker(error) or (lost and not _is_from_worker(error)):
        return DataError(f"{role}, batch {batch}: {describe_dead_worker(error)}")
    what, cure = _what(error, loader, batch, replay)
    text = str(error)
    came = f"{type(error).__name__}: {text}" if text else type(error).__name__
    if _is_from_worker(error):
        came = _original(text, type(error).__name__)
    came = came.rstrip().rstrip(".")
    return DataError(f"{role}, batch {batch}: {what}: {came}. {cure}")


def ends_in_a_sample(error: StopIteration, loader: object) -> bool:
    """True if the user's code raised it for a sample, rather than torch after the last batch.

    To a loop over the loader both look alike, and the rest of the epoch would be lost.
    """
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        return False
    return any(frame.f_code in _ENDS for frame in frames_of(error))


def is_dead_worker(error: Optional[BaseException]) -> bool:
    """True if torch says by this error that a worker process is gone."""
    return isinstance(error, RuntimeError) and str(error).startswith("DataLoader worker (pid")


def describe_dead_worker(error: Exception) -> str:
    """Describe the death of a worker in our words and torch's."""
    came = f"{type(error).__name__}: {error}".rstrip().rstrip(".")
    return (
        f"a worker process of the DataLoader ended: {came}. Run with num_workers=0 to see why; "
        "the usual reason is a lack of (shared) memory."
    )


_FETCHES = (
    _utils.fetch._MapDatasetFetcher.fetch.__code__,
    _utils.fetch._IterableDatasetFetcher.fetch.__code__,
)
# The last one is where torch raises a worker's error again.
_ENDS = (*_FETCHES, ExceptionWrapper.reraise.__code__)
_PADS = (
    "Pass a collate_fn that pads the samples of a batch to one size, such as the pad of an "
    "ipufit.data.LengthBuckets(...) over the dataset."
)


def _what(
    error: Exception, loader: object, batch: int, replay: Callable[[], object]
) -> Tuple[str, str]:
    """Describe the failure, and what to do."""
    plain = "the batch could not be read", "Its traceback above shows the line that failed."
    if not isinstance(loader, DataLoader):
        return plain
    if _is_from_worker(error):
        index = _sought(error, loader.dataset, _indices(loader, batch, replay), replay)
    else:
        fetch = next((f for f in frames_of(error) if f.f_code in _FETCHES), None)
        if fetch is not None and _has_been_read(fetch.f_locals):
            # As torch's default_collate says it.
            return "collate_fn failed", _PADS if "equal size" in str(error) else plain[1]
        index = _index(error, fetch, replay)
    if index is None:
        return plain
    return (
        f"sample {index!r} of {type(loader.dataset).__name__} could not be read",
        "Fix that sample, or leave it out; its traceback is above.",
    )


def _is_from_worker(error: Exception) -> bool:
    return str(error).startswith("Caught ") and " in DataLoader worker process " in str(error)


def _original(text: str, kind: str) -> str:
    """The last line of the worker's traceback: the error as it was there."""
    lines = [line for line in text.splitlines() if line and not line[0].isspace()]
    matching = [line for line in lines if line.partition(":")[0].rpartition(".")[2] == kind]
    return matching[-1] if matching else lines[-1]


def frames_of(error: BaseException) -> Iterator[FrameType]:
    """The frames that an error has passed through, from the outermost on."""
    traceback = error.__traceback__
    while traceback is not None:
        yield traceback.tb_frame
        traceback = traceback.tb_next


def _has_been_read(local: Any) -> bool:
    """True if all samples of the batch were there already when ``fetch`` failed."""
    if "data" not in local:
        return False
    fetcher = local["self"]
    if not hasattr(fetcher, "dataset_iter") or not fetcher.auto_collation:
        return True
    # Of a stream the list is there while it is being filled.
    return fetcher.ended or len(local["data"]) == len(local["possibly_batched_index"])


def _index(error: Exception, fetch: Any, replay: Callable[[], object]) -> object:
    """The index of the sample that could not be read; None if nobody knows it."""
    if fetch is None or hasattr(fetch.f_locals["self"], "dataset_iter"):
        return None
    fetcher, wanted = fetch.f_locals["self"], fetch.f_locals["possibly_batched_index"]
    if not fetcher.auto_collation:
        return wanted
    frames = list(frames_of(error))
    for frame in frames:
        if "torch" in PurePath(frame.f_code.co_filename).parts and "idx" in frame.f_locals:
            return frame.f_locals["idx"]
    # From Python 3.12 on a comprehension forgets its variable when it fails; what it called knows.
    for frame in frames[frames.index(fetch) + 1 :][:1]:
        index = _first_argument(frame)
        if isinstance(index, int) and index in wanted:
            return index
    return _sought(error, fetcher.dataset, wanted, replay)


def _first_argument(frame: FrameType) -> object:
    """Read what a method was called with, after ``self``; None where it has assigned to that."""
    code = frame.f_code
    if code.co_argcount < 2:
        return None
    name = code.co_varnames[1]
    for step in dis.get_instructions(code):
        # One instruction of Python 3.13 may store two variables.
        names = step.argval if isinstance(step.argval, tuple) else (step.argval,)
        if step.opname.startswith(("STORE", "DELETE")) and name in names:
            return None
    return frame.f_locals.get(name)


def _sought(
    error: Exception, dataset: Any, indices: Iterable[object], replay: Callable[[], Any]
) -> object:
    """Which sample of a batch made it fail: the first that fails again in the same way."""
    for index in indices:
        try:
            with replay():
                dataset[index]
        except Exception as again:
            same = isinstance(error, type(again)) or f"{type(again).__name__}: " in str(error)
            return index if same else None
    return None


def _indices(loader: Any, batch: int, replay: Callable[[], Any]) -> List[object]:
    """The indices of a batch, where torch's own samplers make the order reproducible."""
    if (
        isinstance(loader.dataset, IterableDataset)
        or type(loader.batch_sampler) is not BatchSampler
        or type(loader.sampler) not in (RandomSampler, SequentialSampler)
        or loader.persistent_workers
        or loader.generator is not None
    ):
        return []
    with replay():
        # As torch's iterator does: a seed for the workers first, then the order.
        torch.empty((), dtype=torch.int64).random_()
        return [*next(itertools.islice(loader.batch_sampler, batch, None), ())]
