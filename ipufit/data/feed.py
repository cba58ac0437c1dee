"""One source as the executions of each epoch."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
from typing import Any, Callable, Generator, Iterator, NamedTuple, Optional, Sequence

from ipufit.data.batches import Unpacker, executions
from ipufit.data.prefetch import prefetched
from ipufit.data.reading import is_dead_worker, told_dead_worker
from ipufit.data.rows import Horizon, Picked, batch_count
from ipufit.data.source import Source
from ipufit.data.weights import refuse_zero_update
from ipufit.errors import DataError
from ipufit.keeping import generators_kept
from ipufit.plan import Plan
from ipufit.program import CombinedBatch, MicroBatch, Mode, Place
from ipufit.randomness import DataStream, stream_key

__all__ = ["Feed"]

_NO_BATCH = object()

Stage = Callable[[CombinedBatch], CombinedBatch]


class _Sought(NamedTuple):
    """Where an epoch begins.

    Attributes:
        place: of the data.
        updates: of the epoch that are done.
    """

    place: Place
    updates: int


class Feed:
    """One source, cut into the executions of a plan.

    Args:
        source: the data.
        mode: train, evaluate or predict.
        own_loss: whether the module computes its own loss.
        seed: of the order of samples, and of the random numbers that the loader draws from torch
            in this process.
        domain: keeps them apart from those of other sources.
        cut_every: an execution ends wherever the number of updates fed so far is a multiple of one
            of these.
        prefetch: executions that a thread prepares ahead; 0 for none.

    Attributes:
        tells_place: whether somebody wants to know where the data stands after an execution.
    """

    def __init__(
        self,
        source: Source,
        mode: Mode,
        own_loss: bool,
        seed: int,
        domain: str,
        cut_every: Sequence[int] = (),
        prefetch: int = 0,
    ) -> None:
        self._source = source
        self._unpack = Unpacker(source, mode, own_loss)
        self._mode = mode
        self._seed = seed
        self._domain = domain
        self._cut_every = tuple(cut_every)
        self._prefetch = prefetch
        self._updates = 0
        self._horizon = Horizon()
        self._open: Optional[Generator[Any, None, None]] = None
        self._ahead: Optional[Iterator[Any]] = None
        self._ahead_epoch = -1
        self._place = Place(0, 0)
        self.tells_place = False
        self._sought: Optional[_Sought] = None

    def _start(self, epoch: int, plan: Plan) -> Iterator[Any]:
        """The raw batches of an epoch: a pass over the source, or the next part of many passes."""
        sought, self._sought = self._sought, None
        skip = done = 0
        if sought is not None:
            skip, done = self._source.go_to(sought.place)
        if self._mode is Mode.TRAIN and plan.fixed_updates is not None:
            count = plan.fixed_updates * plan.micro_batches_per_update
            if self._open is None:
                number = epoch if sought is None else sought.place.number
                if sought is None and self._source.micro_batches:
                    number, skip = divmod(epoch * count, self._source.micro_batches)
                self._open = self._passes(number, skip, done)
            left = plan.fixed_updates - (0 if sought is None else sought.updates)
            return _first(self._open, left * plan.micro_batches_per_update)
        self._close_open()
        self._open = self._pass(epoch, skip, done)
        return self._open

    def _pass(self, number: int, skip: int, done: int) -> Generator[Any, None, None]:
        """One pass over the source.

        Args:
            number: of the pass.
            skip: batches at its beginning that are read, but not wanted.
            done: batches that the source itself leaves out.
        """
        stream = DataStream(self._seed, self._domain, number)
        key = stream_key(self._seed, self._domain, "order", number)
        read, generators = done, self._source.generator_states()
        self._place = Place(number, read, generators)
        with contextlib.ExitStack() as skipping:
            if skip:
                # What is read once more draws once more.
                skipping.enter_context(generators_kept())
            for raw in self._source.epoch(stream, key, self._horizon):
                for each in raw.apart() if isinstance(raw, Picked) and read < skip else [raw]:
                    read += batch_count(each)
                    self._place = Place(number, read, generators)
                    if read > skip:
                        yield each
                    elif read == skip:
                        skipping.close()
                    del each
                del raw

    def _passes(self, number: int, skip: int, done: int) -> Generator[Any, None, None]:
        """Pass after pass, from one of its batches on."""
        while True:
            yield from self._pass(number, skip, done)
            if not self._place.batches:
                return
            number, skip, done = number + 1, 0, 0

    def seek(self, place: Place, updates: int, fed: int) -> None:
        """Let the next epoch to be read begin in its middle, as another run has left it.

        Args:
            place: of the last execution that was done.
            updates: of that epoch that are done.
            fed: updates of the whole run that are done.
        """
        self.close()
        self._sought = _Sought(place, updates)
        self._updates = fed

    def after(self, epoch: int, last: Optional[Place]) -> Optional[Place]:
        """Where the data stands after an epoch whose last execution left it there."""
        if self._ahead is not None:
            # Its first batch was looked at.
            return dataclasses.replace(self._place, batches=self._place.batches - 1)
        if self._open is not None:
            return last  # a pass that the next epoch goes on with
        own = self._source.own_place(between_epochs=True)
        return Place(epoch + 1, 0, self._source.generator_states(), own)

    def peek(self, epoch: int, plan: Plan) -> MicroBatch:
        """The first micro-batch of an epoch, which starts here and goes on where it is read next.

        Raises:
            DataError: there is none, or the program can't take it.
        """
        batches = self._start(epoch, plan)
        self._horizon.batches = 1
        first = next(batches, _NO_BATCH)
        if first is _NO_BATCH:
            raise self._source.no_batches(epoch)
        micro_batch = self._unpack.each(first, 0)[0]
        self._ahead = itertools.chain([first], batches)
        self._ahead_epoch = epoch
        return micro_batch

    @property
    def micro_batch_size(self) -> Optional[int]:
        """The loader's, or that of the first batch seen."""
        return self._unpack.micro_batch_size

    def executions(
        self, epoch: int, plan: Plan, stage: Optional[Stage] = None
    ) -> Generator[CombinedBatch, None, None]:
        """All of an epoch's executions, the smaller last one included. Close it when done.

        Args:
            epoch: its index.
            plan: of the executions.
            stage: what each goes through as soon as it is prepared, in the thread that does so.

        Raises:
            DataError: the epoch has no batch, fewer than were asked for, or one that the program
                can't take.
        """
        groups = prefetched(self._prepared(epoch, plan, stage), self._prefetch)
        with contextlib.closing(groups):
            yield from groups

    def _prepared(
        self, epoch: int, plan: Plan, stage: Optional[Stage]
    ) -> Generator[CombinedBatch, None, None]:
        batches, self._ahead = self._ahead, None
        done = 0 if self._sought is None else self._sought.updates
        if batches is None or self._ahead_epoch != epoch:
            batches = self._start(epoch, plan)
        check = None
        if self._mode is Mode.TRAIN:
            check = functools.partial(refuse_zero_update, role=self._source.role)

        def coming() -> int:
            return self._until_cut(plan, done)

        try:
            for batch in executions(
                batches,
                self._unpack.each,
                plan,
                self._source.reuses_memory,
                check,
                coming,
                self._horizon,
            ):
                updates = plan.updates_in(len(batch.micro_batches))
                done += updates
                self._updates += updates
                if self.tells_place:
                    # To ask the data itself may take time.
                    place = dataclasses.replace(self._place, own=self._source.own_place())
                    batch = dataclasses.replace(batch, place=place)
                yield batch if stage is None else stage(batch)
                del batch
        finally:
            if self._mode is not Mode.TRAIN or plan.fixed_updates is None:
                self._close_open()
        if not done:
            raise self._source.no_batches(epoch)
        if plan.fixed_updates is not None and done < plan.fixed_updates:
            raise self._source.too_few(done, plan.fixed_updates, epoch, plan.training)

    def _until_cut(self, plan: Plan, done: int) -> int:
        """Updates of the next execution at most, after so many of its epoch."""
        bounds = [every - self._updates % every for every in self._cut_every]
        if plan.fixed_updates is not None and plan.fixed_updates > done:
            bounds.append(plan.fixed_updates - done)
        return min([plan.device_iterations, *bounds])

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Tell of a worker process that ends during the block as of one that ends while read.

        torch raises that from a signal, wherever the main thread is just then.

        Raises:
            DataError: one did.
        """
        try:
            yield
        except RuntimeError as error:
            if not is_dead_worker(error):
                raise
            raise DataError(f"{self._source.role}: {told_dead_worker(error)}") from error

    def close(self) -> None:
        """Stop reading; safe twice."""
        self._ahead = None
        self._close_open()

    def _close_open(self) -> None:
        if self._open is not None:
            opened, self._open = self._open, None
            # After a second Ctrl-C the thread may still be reading; it closes when it is done.
            if not getattr(opened, "gi_running", False):
                opened.close()


def _first(batches: Iterator[Any], count: int) -> Iterator[Any]:
    """So many batches, of which never more are picked at once than are wanted."""
    while count > 0:
        raw = next(batches, _NO_BATCH)
        if raw is _NO_BATCH:
            return
        yield raw
        count -= batch_count(raw)
