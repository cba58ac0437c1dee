"""What a loader tells the log: samples that are left out or read twice, and arguments unused."""

from __future__ import annotations

from typing import Any, Dict, Optional

from ipufit.poptorch._logging import logger
from ipufit.poptorch.enums import DataLoaderMode

__all__ = ["log_iterable", "log_rebatched", "log_sampled", "log_sized", "log_unused"]


def log_iterable(num_workers: int, kwargs: Dict[str, Any]) -> None:
    """Say that workers read an iterable dataset each for itself, if nothing parts it."""
    if num_workers > 1 and "worker_init_fn" not in kwargs:
        logger.warning(
            "An IterableDataset is read by num_workers=%d workers without a worker_init_fn: "
            "unless the dataset asks torch.utils.data.get_worker_info() for its part, each of its "
            "elements comes %d times.",
            num_workers,
            num_workers,
        )


def log_sized(dataset: Any, step: int, drop_last: bool) -> None:
    """Say what becomes of the samples that don't fill ``step``, the combined batches of one run."""
    samples = _length(dataset)
    if samples is None:
        return
    rest = samples % step
    if drop_last and samples < step:
        logger.warning(
            "The dataset has %d samples, fewer than a combined batch (%d), and drop_last=True: an "
            "epoch is empty. Use a smaller batch.",
            samples,
            step,
        )
    elif drop_last and rest:
        # PopTorch's rule and default, of which it says nothing.
        logger.debug(
            "%d of %d samples don't fill a combined batch of %d and are left out of every epoch "
            "(drop_last=True).",
            rest,
            samples,
            step,
        )
    elif rest:
        logger.warning(
            "The number of elements in the dataset (%d) is not divisible by the number of elements "
            "processed per step (%d) and drop_last=False: the last batch has %d, which a compiled "
            "model refuses. Pad it, or use drop_last=True.",
            samples,
            step,
            rest,
        )


def log_sampled(sampler: Any, batch_size: Optional[int], number: Optional[int]) -> None:
    """Say that the last batches of a sampler may not make a combined batch of ``number``."""
    if not number or not batch_size:
        return
    batches = _length(sampler)
    if batches is None:
        logger.warning(
            "The batch_sampler has no length and drop_last=False: the last combined batch may be "
            "of fewer than %d batches, which a compiled model refuses. Pad it, or use "
            "drop_last=True.",
            number,
        )
    elif batches % number:
        logger.warning(
            "The number of batches of the batch_sampler (%d) is not divisible by the number of "
            "batches processed per step (%d) and drop_last=False: the last combined batch is of %d "
            "(%d samples), which a compiled model refuses. Pad it, or use drop_last=True.",
            batches,
            number,
            batches % number,
            batches % number * batch_size,
        )


def log_rebatched(sampler: Any, rows: int) -> None:
    """Say that a sampler's batches are cut anew, if it doesn't tell how large they are."""
    if getattr(sampler, "batch_size", None) is None:
        logger.warning(
            "The batch_sampler has no batch_size, which counts as 1: its batches are joined and "
            "cut into combined batches of %d samples. Give it a batch_size, or use "
            "DataLoaderMode.Async and drop_last=True, to keep them whole.",
            rows,
        )


def log_unused(
    mode: DataLoaderMode,
    async_options: Optional[Dict[str, Any]],
    rebatched_worker_size: Optional[int],
) -> None:
    """Name the arguments that have no effect in this mode."""
    if async_options and mode is DataLoaderMode.Sync:
        logger.warning("async_options have no effect with mode=DataLoaderMode.Sync.")
    if rebatched_worker_size is not None:
        logger.warning(
            "rebatched_worker_size has no effect with mode=DataLoaderMode.%s: use AsyncRebatched.",
            mode.name,
        )


def _length(sampler: Any) -> Optional[int]:
    try:
        return len(sampler)
    except (TypeError, NotImplementedError):
        return None
