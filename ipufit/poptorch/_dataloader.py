"""DataLoader whose batches are combined batches, of the dataset's part that a process reads."""

from __future__ import annotations

import copy
from typing import Any, Dict, Iterator, List, Optional, Sequence, Tuple, Union

import torch
import torch.utils.data
from torch import Tensor
from torch.utils.data import IterableDataset, Sampler

from ipufit.data.loaders import length_of
from ipufit.poptorch._accessor import AsynchronousDataAccessor
from ipufit.poptorch._data_worker import CombiningLoader
from ipufit.poptorch._logging import error, logger
from ipufit.poptorch._utils import combined
from ipufit.poptorch.enums import DataLoaderMode
from ipufit.poptorch.options import Options


def share_bounds(
    samples: int, processes: int, process: int, step: int, drop_last: bool
) -> Tuple[int, int]:
    """Return the start and the size of the block of one process.

    Args:
        step: samples of a combined batch. With ``drop_last`` every process gets the same number of
            whole ones; otherwise samples are dealt out evenly, one more to each of the first
            processes while they last.
    """
    if drop_last:
        size = samples // (step * processes) * step
        return process * size, size
    size, rest = divmod(samples, processes)
    return process * size + min(process, rest), size + (process < rest)


class _Position(int):
    """A position in the whole dataset, where a plain number is one in the share."""


class ProcessShare:
    """A contiguous block of a dataset, in the order of the dataset or of one shuffling of it.

    The shuffling is of the whole dataset and the same in all processes, so that their blocks never
    meet. What ``drop_last`` leaves out lies behind the blocks in even epochs, and in front of them
    in odd ones, of which the first is one. Plain indices are those of the share.

    Args:
        seed: of the first epoch's shuffling, whose random numbers those of later epochs continue;
            None for no shuffling.
    Raises:
        Error: the samples make less than one combined batch for each process.
    """

    def __init__(
        self,
        dataset: Any,
        processes: int,
        process: int,
        step: int,
        drop_last: bool,
        seed: Optional[int] = None,
    ) -> None:
        self._dataset = dataset
        begin, self._size = share_bounds(len(dataset), processes, process, step, drop_last)
        if drop_last and not self._size:
            raise error(
                f"With drop_last=True {processes} processes need at least {processes} combined "
                f"batches of {step} samples ({processes * step}), and the dataset has "
                f"{len(dataset)}. Use smaller combined batches, or fewer processes."
            )
        # As PopTorch counts them: by one process's samples, not by those of all.
        shift = len(dataset) % self._size if seed is not None and drop_last else 0
        # Of even epochs, and of odd ones.
        self._offsets = begin, begin + shift
        self._seed = seed
        self._drawn = 0
        # The state, as generators can't be sent to other processes by all versions of torch.
        self._state: Optional[Tensor] = None
        self._positions: Union[range, Tensor] = range(begin, begin + self._size)

    def set_epoch(self, epoch: int) -> None:
        """Use the order of an epoch; the first one is 1."""
        if self._seed is None or epoch == self._drawn:
            return
        if epoch < self._drawn:
            self._drawn, self._state = 0, None
        generator = torch.Generator()
        generator.manual_seed(self._seed)
        if self._state is not None:
            generator.set_state(self._state)
        for _ in range(self._drawn, epoch):
            order = torch.randperm(len(self._dataset), generator=generator)
        self._drawn, self._state = epoch, generator.get_state()
        begin = self._offsets[epoch % 2]
        self._positions = order[begin : begin + self._size]

    def positions(self) -> Sequence[int]:
        """Return the positions in the dataset of the share's samples, in the order of the epoch."""
        positions: Sequence[int] = (
            self._positions.tolist() if isinstance(self._positions, Tensor) else self._positions
        )
        return positions

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> Any:
        return self._dataset[self._position(index)]

    def __getitems__(self, indices: List[int]) -> List[Any]:
        """Return several samples at once, where the dataset can."""
        positions = [self._position(index) for index in indices]
        if callable(getattr(self._dataset, "__getitems__", None)):
            samples: List[Any] = self._dataset.__getitems__(positions)
            return samples
        return [self._dataset[position] for position in positions]

    def _position(self, index: int) -> int:
        if isinstance(index, _Position):
            return int(index)
        if not -self._size <= index < self._size:
            raise IndexError(
                f"index {index} is not in the share of this process, which has {self._size} "
                "samples of the dataset."
            )
        return int(self._positions[index])


class ShuffledShare(Sampler):  # type: ignore[type-arg]  # generic in new versions of torch alone
    """Sampler of the positions in the dataset of a share's samples.

    They go to the loader's workers as they are: a worker has a copy of the share, which knows
    nothing of later epochs.
    """

    def __init__(self, share: ProcessShare) -> None:
        self._share = share

    def __len__(self) -> int:
        return len(self._share)

    def __iter__(self) -> Iterator[int]:
        return map(_Position, self._share.positions())


def _log_iterable(num_workers: int, kwargs: Dict[str, object]) -> None:
    """Warn that each worker reads all of an iterable dataset, if nothing parts it."""
    if num_workers > 1 and "worker_init_fn" not in kwargs:
        logger.warning(
            "An IterableDataset is read by num_workers=%d workers without a worker_init_fn: "
            "unless the dataset asks torch.utils.data.get_worker_info() for its part, each of its "
            "elements comes %d times.",
            num_workers,
            num_workers,
        )


def _log_sized(dataset: object, step: int, drop_last: bool) -> None:
    """Log what happens to the samples that don't fill ``step``, the combined batches of one run."""
    samples = length_of(dataset)
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


def _log_sampled(sampler: object, batch_size: Optional[int], number: Optional[int]) -> None:
    """Warn that the last batches of a sampler may not make a combined batch of ``number``."""
    if not number or not batch_size:
        return
    batches = length_of(sampler)
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


def _log_rebatched(sampler: object, rows: int) -> None:
    """Warn that a sampler's batches are divided anew, if it doesn't tell how large they are."""
    if getattr(sampler, "batch_size", None) is None:
        logger.warning(
            "The batch_sampler has no batch_size, which counts as 1: its batches are joined and "
            "cut into combined batches of %d samples. Give it a batch_size, or use "
            "DataLoaderMode.Async and drop_last=True, to keep them whole.",
            rows,
        )


def _log_unused(
    mode: DataLoaderMode,
    async_options: Optional[Dict[str, object]],
    rebatched_worker_size: Optional[int],
) -> None:
    """Warn of arguments that have no effect in this mode."""
    if async_options and mode is DataLoaderMode.Sync:
        logger.warning("async_options have no effect with mode=DataLoaderMode.Sync.")
    if rebatched_worker_size is not None:
        logger.warning(
            "rebatched_worker_size has no effect with mode=DataLoaderMode.%s: use AsyncRebatched.",
            mode.name,
        )


class DataLoader(CombiningLoader):
    """A torch ``DataLoader`` whose batches are what one run of a model takes.

    Such a combined batch has batch_size × deviceIterations × replicationFactor ÷ (replicas that
    share an input) × gradientAccumulation samples, along dimension 0: device iteration (slowest),
    accumulation step, replica, place in the micro-batch.

    With ``drop_last=True``, the default, an epoch leaves out the samples that don't fill a combined
    batch; over an iterable dataset each of torch's workers leaves out its own, unless the mode is
    ``AsyncRebatched``. The log tells how many at level DEBUG. With ``drop_last=False`` the last
    batch is short, which a model refuses.

    With several processes (``options.Distributed``) each reads a part of the dataset: see
    ``auto_distributed_partitioning``.

    Args:
        options: frozen here.
        dataset: map-style or iterable.
        batch_size: of a micro-batch. None loads single elements as they are, combines nothing, and
            leaves ``options`` unset.
        shuffle: with several processes ``options.randomSeed`` has to be set.
        num_workers: torch's processes.
        drop_last: about the combined batch, or the last group of a ``batch_sampler``'s batches.
        persistent_workers: None for ``num_workers > 0``.
        auto_distributed_partitioning: give each process a contiguous block of the dataset, or of
            one shuffling of it that is the same in all. With ``drop_last`` each has the same number
            of combined batches, and what doesn't fill them is left out: at the end, or when
            shuffling by turns at the beginning and at the end. Without, samples are dealt out
            evenly. Iterable datasets have to be parted by hand.
        mode: ``Async`` loads in an ``AsynchronousDataAccessor``, whose tensors the next batch
            overwrites, and becomes ``AsyncRebatched`` where the last batch may be short.
        async_options: of the accessor, in an asynchronous mode.
        rebatched_worker_size: in ``AsyncRebatched`` the samples that a worker loads at a time; None
            for the combined batch size.
        batch_sampler: yields lists of indices; the batches of as many as make a combined batch are
            joined. ``len`` stays the sampler's.
        kwargs: of torch's ``DataLoader``.
    Raises:
        Error: ``batch_sampler`` together with ``batch_size``, ``shuffle`` or the automatic
            partitioning; too few samples for all processes; the accessor can't start.
        AssertionError: ``options`` are none; several processes and an iterable dataset, no seed to
            shuffle with, or ``batch_size=None``; ``rebatched_worker_size`` greater than the
            combined batch; ``rebatched_size`` in ``async_options``.
    """

    def __init__(
        self,
        options: Options,
        dataset: Any,
        batch_size: Optional[int] = 1,
        shuffle: Optional[bool] = None,
        num_workers: int = 0,
        drop_last: bool = True,
        persistent_workers: Optional[bool] = None,
        auto_distributed_partitioning: bool = True,
        mode: DataLoaderMode = DataLoaderMode.Sync,
        async_options: Optional[Dict[str, Any]] = None,
        rebatched_worker_size: Optional[int] = None,
        batch_sampler: Optional[Any] = None,
        **kwargs: Any,
    ) -> None:
        self._accessor: Optional[AsynchronousDataAccessor] = None
        self._share: Optional[ProcessShare] = None
        self._is_iterable = isinstance(dataset, IterableDataset)
        self._is_user_batch_sampler_set = batch_sampler is not None
        _check_options(options)
        processes = options.Distributed.numProcesses
        parts = auto_distributed_partitioning and processes > 1
        if self._is_user_batch_sampler_set:
            _check_batch_sampler(batch_size, shuffle, parts)
            batch_size = getattr(batch_sampler, "batch_size", None) or 1
            self.batch_sampler_drop_last = drop_last
        options._freeze()
        self._set_sizes(options, batch_size)

        if self._is_iterable:
            if parts:
                raise AssertionError(
                    "auto_distributed_partitioning not supported for IterableDataset, and there "
                    f"are {processes} processes. Let the dataset give each process its own part, "
                    "and pass auto_distributed_partitioning=False."
                )
            _log_iterable(num_workers, kwargs)
        elif self._is_user_batch_sampler_set:
            if not drop_last:
                _log_sampled(batch_sampler, batch_size, self._num_batches_to_combine)
        elif parts:
            dataset = self._share = self._part(options, dataset, drop_last, bool(shuffle))
            if shuffle and kwargs.get("sampler") is None:
                # The order is that of all processes together.
                kwargs["sampler"], shuffle = ShuffledShare(self._share), False
        elif self._combined_batch_size is not None:
            _log_sized(
                dataset if kwargs.get("sampler") is None else kwargs["sampler"],
                self._combined_batch_size,
                drop_last,
            )

        mode = DataLoaderMode(mode)
        rebatched_size = self._rebatched_size(mode, drop_last)
        _log_unused(mode, async_options, rebatched_worker_size if rebatched_size is None else None)
        size = 1 if self._is_user_batch_sampler_set else self._combined_batch_size
        if rebatched_size is not None:
            self.rebatched_drop_last = drop_last
            if self._is_user_batch_sampler_set:
                _log_rebatched(batch_sampler, rebatched_size)
            size = _worker_size(rebatched_worker_size, rebatched_size) or size
        # What the batches of a batch sampler leave over is dropped where they are joined, and what
        # rebatching leaves over in the process that does it.
        is_dropped_later = self._is_user_batch_sampler_set or rebatched_size is not None
        super().__init__(
            dataset,
            batch_size=size,
            shuffle=bool(shuffle),
            batch_sampler=batch_sampler,
            num_workers=num_workers,
            drop_last=drop_last and not is_dropped_later,
            persistent_workers=num_workers > 0
            if persistent_workers is None
            else persistent_workers,
            **kwargs,
        )
        if mode is not DataLoaderMode.Sync:
            self._accessor = self._made_accessor(async_options or {}, rebatched_size)

    def _set_sizes(self, options: Options, batch_size: Optional[int]) -> None:
        self._num_batches_to_combine: Optional[int] = None
        self._combined_batch_size = None
        if batch_size is None:
            return
        groups = options.replication_factor // options.input_group_size
        micro_batches = options.device_iterations * groups * options.Training.gradient_accumulation
        self._num_batches_to_combine = micro_batches
        self._combined_batch_size = batch_size * micro_batches
        self._options = options

    def _part(
        self, options: Options, dataset: object, drop_last: bool, shuffle: bool
    ) -> ProcessShare:
        if shuffle and not options.exists("random_seed"):
            raise AssertionError(
                "When using auto_distributed_partitioning you must set "
                "poptorch.Options.randomSeed() to shuffle, to the same number in all processes, so "
                "that they part the dataset in the same order."
            )
        step = self._combined_batch_size
        if step is None:
            raise AssertionError(
                "batch_size=None not allowed when using auto_distributed_partitioning. Pass a "
                "batch_size, or part the dataset yourself with auto_distributed_partitioning=False."
            )
        share = ProcessShare(
            dataset,
            options.Distributed.numProcesses,
            options.Distributed.processId,
            step,
            drop_last,
            options.random_seed if shuffle else None,
        )
        if drop_last:
            _log_sized(dataset, step * options.Distributed.numProcesses, drop_last)
        else:
            _log_sized(share, step, drop_last)
        return share

    def _rebatched_size(self, mode: DataLoaderMode, drop_last: bool) -> Optional[int]:
        """Return the number of rows of the accessor's batches; None where it doesn't rebatch."""
        size = self._combined_batch_size
        if mode is DataLoaderMode.AsyncRebatched:
            return size
        # A last batch that is short is one that only rebatching can hand over.
        is_short = mode is DataLoaderMode.Async and not drop_last and size is not None and size > 1
        return size if is_short else None

    def _made_accessor(
        self, async_options: Dict[str, Any], rebatched_size: Optional[int]
    ) -> AsynchronousDataAccessor:
        if "rebatched_size" in async_options:
            raise AssertionError(
                "async_options can't hold rebatched_size: a DataLoader rebatches to its combined "
                "batch size. Leave it out, and use mode=DataLoaderMode.AsyncRebatched."
            )
        # The accessor reads a twin: if it held this loader, the two would keep each other, and the
        # worker process, until the garbage collector found them.
        return AsynchronousDataAccessor(
            copy.copy(self), **async_options, rebatched_size=rebatched_size
        )

    def __len__(self) -> int:
        """Combined batches of an epoch; of a ``batch_sampler`` its own length.

        For an iterable dataset that says its length this is torch's estimate, which knows nothing
        of what each worker leaves out.
        """
        if self._accessor is not None and self._accessor.rebatched_size:
            return len(self._accessor)
        return super().__len__()

    @property
    def options(self) -> Options:
        """The options that it was made with; unset with ``batch_size=None``."""
        return self._options

    def terminate(self) -> None:
        """End the process of an asynchronous mode; no effect in ``Sync``."""
        if self._accessor is not None:
            self._accessor.terminate()

    def __del__(self) -> None:
        """Release the process, which ends when no iterator uses it either."""
        self._accessor = None

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]  # torch names its own class
        """Begin an epoch."""
        if self._accessor is not None:
            return iter(self._accessor)
        if self._share is not None:
            self._share.set_epoch(self._next_epoch)
        self._next_epoch += 1
        batches = super().__iter__()
        if self._is_user_batch_sampler_set and self._num_batches_to_combine != 1:
            assert self._num_batches_to_combine is not None
            return combined(batches, self._num_batches_to_combine, self.batch_sampler_drop_last)
        return batches


def _check_options(options: object) -> None:
    if not hasattr(options, "_freeze"):
        raise AssertionError(
            "The first argument of DataLoader must be poptorch.Options, got "
            f"{type(options).__name__}. Pass DataLoader(options, dataset, ...)."
        )


def _check_batch_sampler(batch_size: Optional[int], shuffle: Optional[bool], parts: bool) -> None:
    if batch_size != 1 or shuffle:
        raise error(
            "`batch_sampler` option is mutually exclusive with batch_size, shuffle. It says which "
            "samples are in a batch: leave the others out."
        )
    if parts:
        raise error(
            "`batch_sampler` option is mutually exclusive with auto_distributed_partitioning=True. "
            "Let the sampler choose the samples of each process, and pass "
            "auto_distributed_partitioning=False."
        )


def _worker_size(size: Optional[int], rebatched_size: int) -> Optional[int]:
    if size is not None and size > rebatched_size:
        raise AssertionError(
            f"The rebatched_worker_size ({size}) must be <= to the combined batch size "
            f"({rebatched_size}). Use a smaller one, or leave it out."
        )
    return size
