"""Loading of batches ahead of time, in a separate process."""

from __future__ import annotations

from typing import Any, Callable, Optional, Union

import torch
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data import IterableDataset

from ipufit.poptorch._data_process import DataProcess
from ipufit.poptorch._data_worker import CombiningLoader, WorkerSettings
from ipufit.poptorch._errors import error
from ipufit.poptorch.enums import SharingStrategy

__all__ = ["AsynchronousDataAccessor"]


class AsynchronousDataAccessor:
    """Loads the batches of a dataset ahead, in another process, into a ring buffer.

    The tensors are the ring buffer's shared memory: asking for the next batch, or for the end of
    the epoch, lets the process overwrite them. ``clone()`` what you keep.

    The process begins with the first batch at once. Batches must be alike in structure, shapes and
    dtypes; a list or a tuple comes back as a list. What the dataset raises is raised by ``next``,
    in its place, and ends the process. Random numbers in it depend on ``torch.manual_seed`` before
    it was made, and on the epoch.

    Args:
        dataset: any iterable of batches: a tensor each, a flat list, tuple or dict of tensors, or
            an object with a registered parser. A map-style dataset is read from 0 to its length.
        buffer_size: batches that are loaded ahead, the one in use included.
        miss_sleep_time_in_ms: when the buffer is full, milliseconds between two looks at it.
        load_indefinitely: begin the next epoch when one has been loaded. Otherwise ``iter`` does.
        early_preload: fill the buffer at once, not from the first ``iter`` on.
        sharing_strategy: how the process is started and gets the dataset, a member or its name.
            ``ForkServer`` and
            ``SharedMemory`` hand it over with its tensors in shared memory, ``FileSystem`` through
            a file; ``Fork`` copies nothing, and is unsafe where threads run.
        rebatched_size: rows of the batches, which are joined along dimension 0 and cut anew. The
            last ``rows % rebatched_size`` are left out of an epoch, unless the dataset is a
            DataLoader with ``drop_last=False``.
    Raises:
        Error: the DataLoader already has one; the dataset is empty or raises; the process doesn't
            start.
        AssertionError: no such ``sharing_strategy``; a DataLoader with ``drop_last=False`` and
            batches of several samples
            without ``rebatched_size``; ``rebatched_size`` or ``buffer_size`` is too small.
    """

    def __init__(
        self,
        dataset: Any,
        buffer_size: int = 3,
        miss_sleep_time_in_ms: float = 0.1,
        load_indefinitely: bool = True,
        early_preload: bool = False,
        sharing_strategy: SharingStrategy = SharingStrategy.ForkServer,
        rebatched_size: Optional[int] = None,
    ) -> None:
        self._worker: Optional[DataProcess] = None
        _check_loader(dataset, rebatched_size)
        if rebatched_size is not None and rebatched_size <= 1:
            raise AssertionError(
                f"rebatched_size must be None or greater than 1, got {rebatched_size}. A combined "
                "batch of one sample needs no rebatching: use DataLoaderMode.Async for it."
            )
        if buffer_size < 1:
            raise AssertionError(
                f"buffer_size must be at least 1, got {buffer_size}. Each slot holds one batch."
            )
        if miss_sleep_time_in_ms < 0:
            raise AssertionError(
                f"miss_sleep_time_in_ms must not be negative, got {miss_sleep_time_in_ms}. Use 0 "
                "for no pause."
            )
        self._dataset = dataset
        self.rebatched_size = rebatched_size
        self._worker = DataProcess(
            dataset,
            WorkerSettings(
                slots=buffer_size,
                pause=miss_sleep_time_in_ms / 1000,
                loads_on=bool(load_indefinitely),
                loads_first=bool(early_preload),
                rows=rebatched_size,
                keeps_rest=self._keeps_rest,
                # Read and not drawn: making a loader leaves the program's random numbers alone.
                seed=torch.initial_seed(),
            ),
            _strategy_of(sharing_strategy),
        )

    @property
    def _keeps_rest(self) -> bool:
        loader = self._dataset
        if not isinstance(loader, CombiningLoader):
            return False
        drop_last = loader.rebatched_drop_last
        return not (loader.drop_last if drop_last is None else drop_last)

    def terminate(self) -> None:
        """End the process and give its memory back. Tensors that are still in use stay valid."""
        if self._worker is not None:
            self._worker.stop()
            self._worker = None

    def __del__(self) -> None:
        """End the process with the last reference."""
        self.terminate()

    def __len__(self) -> int:
        """Return the number of batches in an epoch.

        Raises:
            TypeError: the dataset has no length.
        """
        if not self.rebatched_size:
            return len(self._dataset)
        batches, rest = divmod(_rows_of(self._dataset), self.rebatched_size)
        return batches + bool(rest and self._keeps_rest)

    def __iter__(self) -> AsynchronousDataAccessor:
        """Start an epoch, unless one has started and nothing has been read from it."""
        self._or_end(self._alive().begin)
        return self

    def __next__(self) -> Any:
        """The next batch."""
        return self._or_end(self._alive().next)

    def _or_end(self, act: Callable[[], Any]) -> Any:
        try:
            return act()
        except StopIteration:
            raise
        except Exception:
            self.terminate()
            raise

    def _alive(self) -> DataProcess:
        if self._worker is None:
            raise AssertionError(
                "This AsynchronousDataAccessor has no worker process any more: it was terminated, "
                "or its dataset raised an exception. Make a new one."
            )
        return self._worker


def _strategy_of(value: Union[SharingStrategy, int, str]) -> SharingStrategy:
    """Return the sharing strategy with this value or name."""
    if isinstance(value, str) and value in SharingStrategy.__members__:
        return SharingStrategy[value]
    if isinstance(value, int) and value in list(SharingStrategy):
        return SharingStrategy(value)
    raise AssertionError(
        "sharing_strategy must be a poptorch.SharingStrategy or the name of one, "
        f"{', '.join(SharingStrategy.__members__)}, got {value!r}. Name one of them."
    )


def _check_loader(dataset: Any, rebatched_size: Optional[int]) -> None:
    if not isinstance(dataset, CombiningLoader):
        return
    if dataset._accessor is not None:
        raise error(
            "The DataLoader already uses an AsynchronousDataAccessor internally. Iterate over the "
            "DataLoader itself, or make it with mode=DataLoaderMode.Sync."
        )
    if dataset._is_user_batch_sampler_set or dataset.drop_last or rebatched_size is not None:
        return
    if dataset.combinedBatchSize not in (None, 1):
        raise AssertionError(
            "The 'drop_last=False' option from the DataLoader only works if 'rebatched_size' is "
            "specified too: its last batch may be shorter than the slots of the buffer. Pass "
            f"rebatched_size={dataset.combinedBatchSize}, or drop_last=True."
        )


def _rows_of(dataset: Any) -> int:
    """Return the number of samples in an epoch."""
    if not isinstance(dataset, TorchDataLoader):
        return len(dataset) * int(getattr(dataset, "batch_size", None) or 1)
    if dataset.batch_size is None:
        return len(dataset.dataset)  # type: ignore[arg-type]
    is_stream = isinstance(dataset.dataset, IterableDataset)
    rows = len(dataset.dataset if is_stream else dataset.sampler)  # type: ignore[arg-type]
    return rows // dataset.batch_size * dataset.batch_size if dataset.drop_last else rows
