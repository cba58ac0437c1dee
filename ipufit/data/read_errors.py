"""Errors of the user's data code, told with the batch and the sample that they happened in."""

from __future__ import annotations

import contextlib
import dis
from pathlib import PurePath
from types import FrameType
from typing import Any, Callable, Iterable, Iterator, Optional, Tuple

from torch._utils import ExceptionWrapper
from torch.utils.data import DataLoader, IterableDataset, _utils

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
    what, cure = _what(error, loader, replay)
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
    """True if torch says by this error, or by its cause, that a worker process is gone."""
    causes = (error, None if error is None else error.__cause__)
    return any(
        isinstance(cause, RuntimeError) and str(cause).startswith("DataLoader worker (pid")
        for cause in causes
    )


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


class LocatedFailure(ExceptionWrapper):
    """Error that is being handled in a worker, which knows best where it has come from.

    Args:
        error: that the user's code raised.
        dataset: the user's.
        worker: its number.

    Attributes:
        description: what could not be read, and what to do.
    """

    def __init__(self, error: Exception, dataset: object, worker: int) -> None:
        where = f"in DataLoader worker process {worker}"  # as torch's worker says it
        super().__init__(where=where)  # type: ignore[no-untyped-call]
        self.description = _describe(error, dataset, contextlib.nullcontext)


_PLAIN = "the batch could not be read", "Its traceback above shows the line that failed."


def _what(error: Exception, loader: object, replay: Callable[[], object]) -> Tuple[str, str]:
    """Describe the failure, and what to do."""
    if not isinstance(loader, DataLoader):
        return _PLAIN
    if not _is_from_worker(error):
        return _describe(error, loader.dataset, replay)
    wrappers = [frame.f_locals.get("self") for frame in frames_of(error)]
    return next((w.description for w in wrappers if isinstance(w, LocatedFailure)), _PLAIN)


def _describe(error: Exception, dataset: object, replay: Callable[[], object]) -> Tuple[str, str]:
    """Describe the failure of code of the user's that torch has called in this process."""
    fetch = next((f for f in frames_of(error) if f.f_code in _FETCHES), None)
    if fetch is not None and _has_been_read(fetch.f_locals):
        # As torch's default_collate says it, in this process and in a worker.
        are_unequal = any(text in str(error) for text in ("equal size", "not resizable"))
        return "collate_fn failed", _PADS if are_unequal else _PLAIN[1]
    index = _index(error, fetch, replay)
    if index is None:
        return _PLAIN
    return (
        f"sample {index!r} of {type(dataset).__name__} could not be read",
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
