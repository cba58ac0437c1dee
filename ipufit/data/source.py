"""Where batches come from: a DataLoader, or any iterable of batches."""

from __future__ import annotations

import functools
import inspect
import weakref
from typing import Any, Iterable, Iterator, List, Optional, Tuple

from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    Subset,
    default_collate,
)

from ipufit.errors import DataError
from ipufit.randomness import DataStream

__all__ = ["Source"]

_READ_AGAIN = (
    "Pass an object whose __iter__ starts anew, such as a DataLoader or a list of batches."
)


# Loaders of which only one reader at a time gets every batch.
_BEING_READ: Any = weakref.WeakSet()


class Source:
    """The user's loader, and what can be known of it before it runs.

    Attributes:
        loader: the iterable of batches, untouched.
        micro_batch_size: the loader's batch size, or None when only its first batch tells.
        samples: samples in an epoch that reach the program, or None when unknown.
        dropped: samples in an epoch that a loader with ``drop_last=True`` leaves out.
        micro_batches: batches in an epoch, or None when unknown.
        reuses_memory: whether a batch may be overwritten when the next one is fetched.
    """

    def __init__(self, loader: Any, role: str) -> None:
        _refuse_what_has_no_batches(loader, role)
        self.loader: Iterable[Any] = loader
        self.role = role
        self.micro_batch_size: Optional[int] = None
        self.samples: Optional[int] = None
        self.dropped = 0
        self.micro_batches = _length(loader)
        self.reuses_memory = _may_reuse_memory(loader)
        self._has_yielded = False
        if isinstance(loader, DataLoader):
            self._look_into(loader)

    def _look_into(self, loader: Any) -> None:
        sampler = loader.batch_sampler
        if loader.batch_size is None and type(sampler) is not BatchSampler:
            return
        batch_sampler = sampler if loader.batch_size is None else loader
        size = self.micro_batch_size = int(batch_sampler.batch_size)
        if isinstance(loader.dataset, IterableDataset):
            return
        total = _length(batch_sampler.sampler)
        if total is None:
            return
        self.dropped = total % size if batch_sampler.drop_last else 0
        self.samples = total - self.dropped

    def epoch(self, stream: DataStream) -> Iterator[Any]:
        """The batches of one epoch, fetched with ``stream`` as torch's random numbers."""
        loader = self.loader
        # torch has one iterator for all readers of such a loader: a second would end the first.
        exclusive = isinstance(loader, DataLoader) and loader.persistent_workers
        if exclusive and loader in _BEING_READ:
            raise DataError(
                f"{self.role} is a DataLoader with persistent_workers=True that is being read "
                "already; torch would end the first reading early, and samples would be lost. Use "
                "a second DataLoader over the same dataset."
            )
        if exclusive:
            _BEING_READ.add(loader)
        try:
            with stream.active():
                iterator = iter(loader)
            while True:
                with stream.active():
                    try:
                        batch = next(iterator)
                    except StopIteration:
                        return
                self._has_yielded = True
                yield batch
        finally:
            if exclusive:
                _BEING_READ.discard(loader)

    def check_epochs(self, epochs: int) -> None:
        """Refuse several epochs of what can be read only once.

        Raises:
            DataError: it is a generator, or another iterator of Python's or torch's own.
        """
        kind = type(self.loader)
        known = kind.__module__.partition(".")[0] in ("builtins", "itertools", "torch")
        if epochs > 1 and known and isinstance(self.loader, Iterator):
            raise DataError(
                f"{self.role} must be readable in each of the {epochs} epochs, got a "
                f"{kind.__name__}, which can be read only once. {_READ_AGAIN}"
            )

    def no_batches(self, epoch: int) -> DataError:
        """The error for an epoch without a single batch."""
        if self._has_yielded:
            return DataError(
                f"{self.role} must yield batches in every epoch, but it yielded none in epoch "
                f"{epoch}, after those of the epoch before. An iterator can be read only once. "
                + _READ_AGAIN
            )
        if self.dropped:
            return DataError(
                f"{self.role} yields no batch: its dataset has {self.dropped} samples, batch_size "
                f"is {self.micro_batch_size} and drop_last=True. Use drop_last=False, or a "
                f"batch_size of at most {self.dropped}."
            )
        if isinstance(self.loader, Iterator):
            return DataError(
                f"{self.role} must yield at least one batch, but it is empty. An iterator that was "
                f"read before stays empty. {_READ_AGAIN}"
            )
        return DataError(
            f"{self.role} must yield at least one batch, but it is empty. Check the dataset's "
            "length and the sampler."
        )

    def origin(self) -> str:
        """Where in the user's code samples or batches are made, for error messages."""
        loader = self.loader
        if isinstance(loader, DataLoader):
            candidates = [loader.collate_fn, *_methods(loader.dataset)]
        else:
            candidates = [*_methods(loader), getattr(loader, "gi_code", None)]
        for candidate in candidates:
            place = _place(candidate)
            if place:
                return f" Batches are made at {place[0]}:{place[1]}."
        return ""

    def preview(self) -> List[Any]:
        """One batch, of the first samples; none where the loader's own order would suffer."""
        loader = self.loader
        if isinstance(loader, (list, tuple)):
            return list(loader[:1])
        if not isinstance(loader, DataLoader) or self.samples is None:
            return []
        # A sampler of the user's may pick by something else than numbers from 0.
        sampler: Any = loader.sampler if loader.batch_size else loader.batch_sampler
        sampler = getattr(sampler, "sampler", sampler)
        if type(sampler).__module__.partition(".")[0] != "torch":
            return []
        size = min(self.micro_batch_size or 1, len(loader.dataset))  # type: ignore[arg-type]
        return [loader.collate_fn([loader.dataset[i] for i in range(size)])] if size else []


def _refuse_what_has_no_batches(loader: Any, role: str) -> None:
    if _is_array(loader):
        raise DataError(
            f"{role} must be a loader of batches, got {type(loader).__name__}. Wrap it: "
            "DataLoader(TensorDataset(x, y), batch_size=...)."
        )
    if isinstance(loader, tuple) and any(_is_array(part) for part in loader):
        raise DataError(
            f"{role} must be a loader of batches, got a tuple of tensors or arrays. Wrap them: "
            "DataLoader(TensorDataset(x, y), batch_size=...)."
        )
    if isinstance(loader, Dataset) and not isinstance(loader, DataLoader):
        raise DataError(
            f"{role} must be a loader of batches, got the dataset {type(loader).__name__}. Wrap "
            "it: DataLoader(dataset, batch_size=...)."
        )
    if isinstance(loader, (str, bytes, dict)) or not hasattr(type(loader), "__iter__"):
        came = f"the class {loader.__name__}" if isinstance(loader, type) else type(loader).__name__
        raise DataError(
            f"{role} must be a DataLoader or an iterable of batches, got {came}. Pass for example "
            "DataLoader(dataset, batch_size=...)."
        )


def _is_array(value: Any) -> bool:
    return isinstance(value, Tensor) or type(value).__module__ == "numpy"


def _may_reuse_memory(loader: Any) -> bool:
    """Torch's collate makes new tensors, workers send new ones, and a list holds its own."""
    if isinstance(loader, DataLoader):
        makes_new = loader.batch_sampler is not None and loader.collate_fn is default_collate
        return not makes_new and loader.num_workers == 0
    return not isinstance(loader, (list, tuple))


def _length(sized: Any) -> Optional[int]:
    try:
        return len(sized)
    except (TypeError, NotImplementedError):
        return None


def _methods(owner: Any) -> Tuple[Any, Any]:
    while isinstance(owner, Subset):
        owner = owner.dataset
    kind = type(owner)
    return getattr(kind, "__getitem__", None), getattr(kind, "__iter__", None)


def _place(candidate: Any) -> Optional[Tuple[str, int]]:
    if isinstance(candidate, functools.partial):
        candidate = candidate.func
    if callable(candidate) and not inspect.isroutine(candidate):
        candidate = type(candidate).__call__
    module = getattr(candidate, "__module__", "") or ""
    if candidate is None or module.split(".")[0] in ("torch", "builtins"):
        return None
    try:
        return str(inspect.getsourcefile(candidate)), inspect.getsourcelines(candidate)[1]
    except (TypeError, OSError):
        return None
