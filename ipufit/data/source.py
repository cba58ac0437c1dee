"""Where batches come from: arrays, a DataLoader, or any iterable of batches."""

from __future__ import annotations

import contextlib
import copy
import itertools
import sys
import weakref
from typing import Any, Callable, ContextManager, Iterable, Iterator, List, Optional, Tuple

import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from ipufit.core.batch import DataCursor, RawBatch
from ipufit.data import loaders
from ipufit.data.in_memory import (
    ArrayLoader,
    ReadAhead,
    batch_count,
    is_in_memory,
    rows_at,
    rows_in_memory,
)
from ipufit.data.loader_reader import (
    LoaderReader,
    as_worker,
    forget_workers,
    has_workers,
    read_here,
    reads_here,
)
from ipufit.data.read_errors import ends_in_a_sample, unreadable
from ipufit.data.sharding import RankShard, refuse_unshared
from ipufit.data.weights import ClassWeights
from ipufit.errors import DataError
from ipufit.utils.console import warn_user
from ipufit.utils.interrupts import is_interrupted
from ipufit.utils.random_streams import DataStream
from ipufit.utils.state import generators_of

_NOTHING: ContextManager[None] = contextlib.nullcontext()
_READ_AGAIN = (
    "Pass an object whose __iter__ starts again, such as a DataLoader or a list of batches."
)


# Loaders of which only one reader at a time gets every batch.
_BEING_READ: weakref.WeakKeyDictionary[object, object] = weakref.WeakKeyDictionary()


class DataAdapter:
    """The user's data as batches, and what can be known of it before it runs.

    Args:
        loader: an iterable of batches.
        role: what it is for, such as "training data".
        shuffled: the loader, or the rows, of an epoch in the order of a key; None where the loader
            has an order of its own.
        class_weights: by class, or None.
        is_cut: whether of several processes each has a loader with samples of its own.

    Attributes:
        loader: the iterable of batches, untouched.
        micro_batch_size: the loader's batch size, or None when only its first batch tells.
        usual_batch_size: what a batch sampler that may yield any number of samples says of it.
        samples: samples in an epoch that reach the program, or None when unknown.
        dropped: samples in an epoch that a loader with ``drop_last=True`` leaves out.
        micro_batches: batches in an epoch, or None when unknown.
        most: batches of an epoch to read at most; None for all.
        reuses_memory: whether a batch may be overwritten when the next one is fetched.
        is_portioned: whether of several processes each reads a portion of the loader's batches,
            and knows how large the others are.
    """

    def __init__(
        self,
        loader: Any,
        role: str,
        shuffled: Optional[Callable[[int], Iterable[RawBatch]]] = None,
        class_weights: Optional[ClassWeights] = None,
        is_cut: bool = False,
    ) -> None:
        refuse_no_batches(loader, role)
        self._is_cut = is_cut
        self.is_portioned = False
        self.loader: Iterable[RawBatch] = loader
        self.role = role
        self.class_weights = class_weights
        self.micro_batch_size: Optional[int] = None
        self.usual_batch_size: Optional[int] = None
        self.samples: Optional[int] = None
        self.dropped = 0
        self.micro_batches = loaders.batch_total(loader)
        self.most: Optional[int] = None
        self.reuses_memory = loaders.may_reuse_memory(loader)
        self._shuffled = shuffled
        self._worker: Optional[Tuple[int, int]] = None
        self._has_yielded = self._has_warned = False
        self._being_read: object = None
        self._reader: Optional[LoaderReader] = None
        if isinstance(loader, ArrayLoader):
            self.micro_batch_size, self.samples = loader.batch_size, loader.samples
        elif loaders.reads_as_torch(loader):
            self._look_into(loader)

    def _look_into(self, loader: Any) -> None:
        sampler = loader.batch_sampler
        if loader.batch_size is None and type(sampler) is not BatchSampler:
            size = getattr(sampler, "batch_size", 0)
            if type(size) is int and size > 0:
                self.usual_batch_size = size
            return
        batch_sampler = sampler if loader.batch_size is None else loader
        size = self.micro_batch_size = int(batch_sampler.batch_size)
        if isinstance(loader.dataset, IterableDataset):
            return
        total = loaders.length_of(batch_sampler.sampler)
        if total is None:
            return
        self.dropped = total % size if batch_sampler.drop_last else 0
        self.samples = total - self.dropped

    @property
    def smallest(self) -> Optional[int]:
        """Samples of a smaller last micro-batch that any epoch may end with, if that is known."""
        if self.samples is None or not self.micro_batch_size:
            return None
        return self.samples % self.micro_batch_size or None

    def limit(self, batches: int) -> None:
        """Read so many batches of an epoch at most; every epoch starts anew."""
        self.most = batches if self.most is None else min(batches, self.most)
        if self.micro_batches is not None and self.micro_batches > batches:
            self.micro_batches = batches
            self.dropped = 0
        if self.samples is not None and self.micro_batch_size:
            self.samples = min(self.samples, batches * self.micro_batch_size)

    def again(self, role: str) -> DataAdapter:
        """Make an adapter of this data for another role."""
        source = copy.copy(self)
        source.role = role
        source.class_weights = source._reader = None
        return source

    def first_batches(self, count: int) -> DataAdapter:
        """Make an adapter of the first batches of this data alone, which are kept in memory."""
        batches = loaders.FirstBatches(loaders.without_shuffling(self.loader), count)
        few = DataAdapter(batches, self.role, class_weights=self.class_weights)
        few.micro_batch_size, few.samples = self.micro_batch_size, self.samples
        few.micro_batches = self.micro_batches
        few.reuses_memory = False
        few.limit(count)
        return few

    def share(self, processes: int, process: int) -> None:
        """Find out, and settle, what each of several processes reads.

        Raises:
            DataError: nobody knows.
        """
        self.is_portioned, self._worker = False, None
        if processes == 1:
            return
        if not self._is_cut:
            refuse_unshared(self.loader, self.role, processes)
            self.is_portioned = not self._is_stream
            self._worker = (process, processes) if self._is_stream else None
        if not self.is_portioned:
            # What the others have nobody knows.
            self.samples = self.micro_batches = None
            self.dropped = 0

    @property
    def _is_stream(self) -> bool:
        loader: object = self.loader
        return isinstance(loader, DataLoader) and isinstance(loader.dataset, IterableDataset)

    @property
    def is_shuffled(self) -> bool:
        """Say whether ipufit gives every epoch an order of its own."""
        return self._shuffled is not None

    def rows(self, stream: DataStream, key: int, places: List[int]) -> List[int]:
        """Rows of the user's data that come at places of a pass; [] where nobody knows.

        Args:
            stream, key: as for :meth:`epoch`.
            places: of samples, from 0.
        """
        if self._generators():
            return []  # they have gone on
        with stream.active():
            return rows_at(self.loader if self._shuffled is None else self._shuffled(key), places)

    @property
    def draws_nothing(self) -> bool:
        """True if batches are read without a random number of torch's."""
        return isinstance(self.loader, ArrayLoader)

    @property
    def reads_alone(self) -> bool:
        """True if no code of the user's runs in this process while batches are read.

        Then random numbers are drawn for the first batch of a pass at most.

        Only then may another thread read them unasked: code of the user's may belong to the thread
        that opened a database, say, or look at what training has done.
        """
        loader: Any = self.loader
        if rows_in_memory(loader) is not None:
            return True
        return (
            loaders.reads_as_torch(loader)
            and loader.num_workers > 0
            and loaders.has_torchs_samplers(loader)
        )

    @property
    def is_held(self) -> bool:
        """True if batches are rows of what is in the host's memory already."""
        rows = rows_in_memory(self.loader)
        return rows is not None and all(map(is_in_memory, rows.leaves()))

    def own_place(self, between_epochs: bool = False) -> object:
        """Position that the data itself reports, by torchdata's convention; None if it has none.

        Between two epochs a loader says so too, which may have an order to go on with; what a
        stream says then is that there is nothing left.
        """
        stateful = self._stateful
        if stateful is None or (between_epochs and stateful is not self.loader):
            return None
        return stateful.state_dict()

    @property
    def _stateful(self) -> Any:
        """Object with ``state_dict`` and ``load_state_dict``: the loader, or a stream read here."""
        loader: Any = self.loader
        candidates = [loader]
        if loaders.reads_as_torch(loader) and not loader.num_workers:
            candidates += [loader.dataset] if isinstance(loader.dataset, IterableDataset) else []
        for each in candidates:
            if all(callable(getattr(each, n, None)) for n in ("state_dict", "load_state_dict")):
                return each
        return None

    def generator_states(self) -> List[Tensor]:
        """Read the states of the user's generators as the order of the next pass is drawn."""
        states = [generator.get_state() for generator in self._generators()]
        loader: Any = self.loader
        if states and loader.persistent_workers and loader.generator and not has_workers(loader):
            # New workers draw their seed before the order, those that stay draw none; where a run
            # goes on they are there, as the first batch was looked at.
            ahead = torch.Generator(device="cpu").set_state(states[0])
            torch.empty((), dtype=torch.int64).random_(generator=ahead)
            states[0] = ahead.get_state()
        return states

    def _generators(self) -> List[torch.Generator]:
        return generators_of(self.loader) if loaders.reads_as_torch(self.loader) else []

    def go_to(self, place: DataCursor) -> Tuple[int, int]:
        """Let the next pass be the one that a run was in.

        Returns:
            How many of its batches come that are done, and how many do not come any more.

        Raises:
            DataError: the data is not what it was.
        """
        if place.own is not None:
            if self._stateful is None:
                raise DataError(
                    f"{self.role} saved its own state in the checkpoint, but has no "
                    "load_state_dict now. Pass the same kind of data."
                )
            self._stateful.load_state_dict(place.own)
            return 0, place.batches
        for generator, state in zip(self._generators(), place.generators):
            generator.set_state(state)
        return place.batches, 0

    def epoch(
        self,
        stream: DataStream,
        key: int = 0,
        horizon: Optional[ReadAhead] = None,
        portion: Optional[RankShard] = None,
    ) -> Iterator[RawBatch]:
        """The batches of one epoch, each as the loader yields it, or several as ``RowBlock``.

        Args:
            stream: torch's random numbers while they are fetched.
            key: fixes the order of what has none of its own.
            horizon: how far rows may be read ahead; None for not at all.
            portion: which of them are wanted; None for all.

        Raises:
            DataError: the user's code failed; chained from its error.
        """
        loader = self.loader if self._shuffled is None else self._shuffled(key)
        # torch has one iterator for all readers of such a loader: a second would end the first.
        exclusive = isinstance(loader, DataLoader) and loader.persistent_workers
        exclusive = exclusive and rows_in_memory(loader) is None
        if exclusive and loader in _BEING_READ:
            raise DataError(
                f"{self.role} is a DataLoader with persistent_workers=True that is already being "
                "read; torch would end the first iteration early, and samples would be lost. "
                "Use a second DataLoader over the same dataset."
            )
        # Stands for this pass, also when it is given up and a later one has begun.
        claim = object() if exclusive else None
        if exclusive:
            _BEING_READ[loader] = claim
        try:
            yield from self._read(loader, stream, horizon or ReadAhead(), portion, claim)
        finally:
            if exclusive and _BEING_READ.get(loader) is claim:
                del _BEING_READ[loader]

    def _read(
        self,
        loader: Any,
        stream: DataStream,
        horizon: ReadAhead,
        portion: Optional[RankShard],
        claim: object,
    ) -> Iterator[RawBatch]:
        iterator: object = None
        index = rows_read = 0
        limit = loaders.stream_length(loader)
        alone = self.reads_alone
        located_errors = _LocatedErrors(loader, self.role, stream)
        # A loader of torch's has a new iterator, with new workers, for each pass.
        is_new = loaders.reads_as_torch(loader) and not loader.persistent_workers
        starts = _NOTHING if self.is_held else loaders.starting_workers(loader)
        try:
            with located_errors, self._drawing(stream), starts:
                rows = rows_in_memory(loader)
                if rows is None:
                    _draw_as_for_new_workers(loader)
                if rows is None or portion is not None:
                    iterator = self._batches(loader, rows, horizon, portion)
                else:
                    iterator = rows.picked(horizon, self.most)
                # The one that has workers.
                self._being_read = getattr(iterator, "iterator", iterator)
            while portion is not None or self.most is None or index < self.most:
                # torch's samplers draw the whole order at once. What draws nothing must leave the
                # generator alone: a callback may draw from it while another thread reads.
                drawing = _NOTHING if alone and index else self._drawing(stream)
                located_errors.batch = index if portion is None else portion.number(index)
                # A generator begins only now, and may read a loader with workers.
                starts = (
                    _NOTHING
                    if index or is_new or self.is_held
                    else loaders.starting_workers(loader)
                )
                # A stream that is read here may ask which worker it is.
                turn = (
                    _NOTHING
                    if self._worker is None or loader.num_workers
                    else as_worker(loader.dataset, *self._worker)
                )
                with located_errors, drawing, turn, starts:
                    try:
                        batch = next(iterator)
                    except StopIteration as error:
                        if ends_in_a_sample(error, loader):
                            raise
                        return
                self._has_yielded = True
                if limit is not None:
                    # Without a batch size, every sample is a batch.
                    rows_read += 1 if loader.batch_size is None else loaders.row_count(batch)
                    if rows_read > limit:
                        raise self._repeated(loader, limit)
                index += batch_count(batch)
                yield batch
                # Here and below: of what is done with, nothing is held while the next is read.
                del batch
        finally:
            # Let go of, not closed: one that the user holds as well may be gone on with.
            finished, self._being_read, iterator = self._being_read, None, None
            # Persistent workers may read something slow, which torch would wait for later. If one
            # of them is gone, no pass can go on with the others.
            if is_new or (
                loaders.reads_as_torch(loader)
                and (is_interrupted(sys.exc_info()[1]) or loaders.has_lost_worker(finished))
            ):
                # Those of a later pass are not ours.
                if _BEING_READ.get(loader) is claim:
                    forget_workers(loader)
                loaders.end_workers(finished)
            del finished

    def give_up(self) -> None:
        """End the workers that another thread waits for, which then fails to read."""
        loaders.kill_workers(self._being_read)
        loader: Any = self.loader
        if loaders.reads_as_torch(loader) and loader.persistent_workers:
            # Of those of this pass there are none left to go on with, and nobody waits for it.
            forget_workers(loader)
            _BEING_READ.pop(loader, None)

    def _batches(
        self,
        loader: Any,
        rows: Optional[ArrayLoader],
        horizon: ReadAhead,
        portion: Optional[RankShard],
    ) -> Iterator[RawBatch]:
        """Start a pass over a loader, or over the batches that a shard names."""
        if rows is not None and portion is not None:
            return portion.rows(rows, self.most).picked(horizon)
        indices: Iterable[List[int]] = ()
        if portion is not None and isinstance(loader, (list, tuple)):
            whole = (lambda: loader, loaders.row_count, lambda batch: batch)
            return portion.picked(*whole, self.most, draws_once=True, are_indices=False)
        if portion is not None:
            indices = portion.indices(loader, self.most, self.reads_alone)
        elif loaders.sends_groups(loader) or reads_here(loader):
            indices = itertools.islice(loader.batch_sampler, self.most)
        elif self._worker is None or not loader.num_workers:
            return iter(loader)
        if reads_here(loader):
            return read_here(loader, indices, horizon)
        self._reader = LoaderReader.of(loader, self._worker, self._reader)
        return self._reader.start(indices, horizon)

    def _drawing(self, stream: DataStream) -> ContextManager[None]:
        return _NOTHING if self.draws_nothing else stream.active()

    def _repeated(self, loader: Any, length: int) -> DataError:
        kind = type(loader.dataset).__name__
        return DataError(
            f"{self.role}: every sample must come once in an epoch, but the {loader.num_workers} "
            f"workers of the DataLoader yield more samples than {length} = {kind}.__len__(). "
            "Each worker has a copy of the dataset: let __iter__ yield a part of the samples, "
            "chosen by torch.utils.data.get_worker_info(), or use one worker."
        )

    def check_length(self, batches: int) -> None:
        """Warn, once, if a whole pass has yielded another number of batches than the data says."""
        # A length may change between passes; batches by number are read by it.
        is_right = isinstance(self.loader, loaders.BatchSequence) or not batches
        length = batches if is_right else loaders.batch_total(self.loader)
        if length not in (None, batches) and self.most is None and not self._has_warned:
            self._has_warned = True
            warn_user(
                f"{self.role} must have as many batches as its length says, {length}, but "
                f"{batches} came. Learning-rate schedules and the progress bar go by the length: "
                "correct __len__ of the loader, its dataset or its sampler, or leave it out."
            )

    def check_epochs(self, epochs: int) -> None:
        """Refuse several epochs of what can be read only once.

        Raises:
            DataError: it is a generator, or another iterator of Python's or torch's own.
        """
        kind = type(self.loader)
        reads_once = kind.__module__.partition(".")[0] in ("builtins", "itertools", "torch")
        if epochs > 1 and reads_once and isinstance(self.loader, Iterator):
            raise DataError(
                f"{self.role} must be readable in each of the {epochs} epochs, got a "
                f"{kind.__name__}, which can be read only once. {_READ_AGAIN}"
            )

    def no_batches(self, epoch: int) -> DataError:
        """Make the error for an epoch without a single batch."""
        if self._has_yielded:
            return DataError(
                f"{self.role} must yield batches in every epoch, but it yielded none in epoch "
                f"{epoch + 1}. An iterator can be read only once. " + _READ_AGAIN
            )
        if self.dropped:
            return DataError(
                f"{self.role} yields no batch: its dataset has {self.dropped} samples, batch_size "
                f"is {self.micro_batch_size} and drop_last=True. Use drop_last=False, or a "
                f"batch_size of at most {self.dropped}."
            )
        if isinstance(self.loader, Iterator):
            return DataError(
                f"{self.role} must yield at least one batch, but it is empty. An iterator can be "
                f"read only once. {_READ_AGAIN}"
            )
        return DataError(
            f"{self.role} must yield at least one batch, but it is empty. Check the dataset's "
            "length and the sampler."
        )

    def too_few(self, updates: int, wanted: int, epoch: int, training: bool) -> DataError:
        """The error for an epoch that ended before it had all that it was to have."""
        name, unit = ("steps_per_epoch", "updates") if training else ("steps", "device iterations")
        kept_text = " The training so far is kept." if training else ""
        return DataError(
            f"{self.role} must last for {name}={wanted} {unit}, but ended after {updates} of "
            f"epoch {epoch + 1}, and can't be read again.{kept_text} Pass data that yields more, "
            f"or a smaller {name}."
        )

    def origin(self) -> str:
        """Name where in the user's code samples or batches are made, for error messages."""
        loader = self.loader
        if isinstance(loader, DataLoader):
            candidates = [loader.collate_fn, *loaders.sample_makers(loader.dataset)]
        else:
            candidates = [*loaders.sample_makers(loader), getattr(loader, "gi_code", None)]
        for candidate in candidates:
            place = loaders.place_of(candidate)
            if place:
                return f" Batches are made at {place[0]}:{place[1]}."
        return ""

    def preview(self) -> List[RawBatch]:
        """Make a batch of the first samples; none where that disturbs the loader's own order."""
        loader: Any = self.loader
        if isinstance(loader, (list, tuple, ArrayLoader)):
            return list(itertools.islice(loader, 1))
        if not loaders.reads_as_torch(loader) or self.samples is None:
            return []
        # A sampler of the user's may pick by something else than numbers from 0.
        sampler: object = loader.sampler if loader.batch_size else loader.batch_sampler
        sampler = getattr(sampler, "sampler", sampler)
        if type(sampler).__module__.partition(".")[0] != "torch":
            return []
        # SubsetRandomSampler leaves the others out, which may be unreadable.
        rows = getattr(sampler, "indices", range(len(loader.dataset)))[: self.micro_batch_size or 1]
        return [loader.collate_fn([loader.dataset[i] for i in rows])] if len(rows) else []


class _LocatedErrors:
    """A context whose errors, the user's code's, leave with the place where they happened.

    Attributes:
        batch: index of the one that is read.
    """

    def __init__(self, loader: object, role: str, stream: DataStream) -> None:
        self.batch = 0
        self._loader = loader
        self._role = role
        self._stream = stream

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: Optional[BaseException], trace: object) -> None:
        if not isinstance(error, Exception):
            return
        replay = self._stream.again
        located = unreadable(error, self._loader, self._role, self.batch, lambda: replay().active())
        if located is not error:
            raise located from error


def _draw_as_for_new_workers(loader: object) -> None:
    """Make the order of an epoch the same whether or not workers are left from the one before.

    torch draws their seed, and then the order; for workers that are there it draws no seed.
    """
    if not isinstance(loader, DataLoader) or not loader.persistent_workers:
        return
    if loader.generator is None and has_workers(loader):
        torch.empty((), dtype=torch.int64).random_()


def refuse_no_batches(loader: object, role: str) -> None:
    """Refuse what can be no data.

    Raises:
        DataError: it is a text, a dict, a class, or nothing to iterate over.
    """
    if isinstance(loader, (str, bytes, dict)) or not hasattr(type(loader), "__iter__"):
        came = f"the class {loader.__name__}" if isinstance(loader, type) else type(loader).__name__
        cure = "Pass for example DataLoader(dataset, batch_size=...)."
        if hasattr(type(loader), "__getitem__") and not isinstance(loader, (str, bytes, dict)):
            cure = (
                "If data[i] is a sample, pass DataLoader(data, batch_size=32); if it is a "
                "batch, DataLoader(data, batch_size=None)."
            )
        raise DataError(
            f"{role} must be tensors, arrays, a dataset, a DataLoader or an iterable of batches, "
            f"got {came}. {cure}"
        )
