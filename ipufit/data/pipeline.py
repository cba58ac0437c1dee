"""One source as the executions of each epoch, which a thread may prepare ahead."""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import functools
import itertools
import queue
import sys
import threading
from typing import Any, Callable, Generator, Iterator, List, NamedTuple, Optional, Sequence, Tuple

import torch

from ipufit.core.batch import CombinedBatch, DataCursor, MicroBatch, Mode, RawBatch
from ipufit.core.plan import Plan
from ipufit.data.batches import BatchValidator, OneShapeUpdates, executions, sharded_executions
from ipufit.data.casting import Casting
from ipufit.data.fields import BatchForm
from ipufit.data.in_memory import ReadAhead, batch_count
from ipufit.data.loaders import ordered_by_epoch
from ipufit.data.read_errors import describe_dead_worker, is_dead_worker
from ipufit.data.sharding import GlobalBatchIndex, RankShard
from ipufit.data.source import DataAdapter
from ipufit.data.weights import refuse_zero_update
from ipufit.errors import DataError
from ipufit.utils.interrupts import ForkGuard, defer_signals, is_interrupted
from ipufit.utils.random_streams import LOCK, DataStream, stream_key
from ipufit.utils.state import fork_rng

_NO_BATCH = object()
# How long an interrupt waits for the thread, in seconds, and then once more without what it reads.
_PATIENCE = 1.0

Stage = Callable[[CombinedBatch], CombinedBatch]
Executions = Generator[CombinedBatch, None, None]


class _Sought(NamedTuple):
    """Position at which the next epoch begins, when a run goes on from a checkpoint.

    Attributes:
        place: of the data.
        updates: of the epoch that are done.
    """

    place: DataCursor
    updates: int


@dataclasses.dataclass(frozen=True)
class JobSpec:
    """Description of a job: what is run, on which data, and how that is read.

    Attributes:
        source: the data.
        plan: its batch algebra.
        mode: train, evaluate or predict.
        seed: of all random numbers.
        domain: keeps them apart from those of other jobs.
        epoch: the first one.
        wants_outputs: whether somebody looks at the outputs of training.
        cut_every: an execution ends wherever the count of this job's updates is a multiple of one
            of these.
        prefetch: executions to prepare ahead.
        profile_folder: where the engine puts a profile that its own tools read, if it can.
        micro_batch_size: samples of a full micro-batch where the loader does not say; None takes
            those of the first batch that is read.
    """

    source: DataAdapter
    plan: Plan
    mode: Mode
    seed: int
    domain: str
    epoch: int = 0
    wants_outputs: bool = False
    cut_every: Sequence[int] = ()
    prefetch: int = 0
    profile_folder: Optional[str] = None
    micro_batch_size: Optional[int] = None


class BatchPipeline:
    """Cuts the batches of one source into the executions of a plan.

    Args:
        job: whose data it is. Its seed and domain fix the order of samples, and the random numbers
            that the loader draws from torch in this process.
        form: in which module and loss take batches.
        casting: chooses the dtypes of batches.
        mixes_shapes: whether micro-batches of one update may have several shapes.

    Attributes:
        tells_place: whether somebody wants to know where the data stands after an execution.
        unpacker: makes micro-batches of what the source yields.
    """

    def __init__(
        self,
        job: JobSpec,
        form: BatchForm,
        casting: Optional[Casting] = None,
        mixes_shapes: bool = True,
    ) -> None:
        self._job = job
        self._reorders = not mixes_shapes and job.mode is Mode.TRAIN
        self._source = job.source
        is_training = job.mode is Mode.TRAIN
        self._ordered_by_epoch = ordered_by_epoch(job.source.loader) if is_training else []
        self.unpacker = BatchValidator(job.source, job.mode, form, casting)
        if self.unpacker.micro_batch_size is None:
            # Else the first batch says it, which may be the last one of its shape.
            self.unpacker.micro_batch_size = job.micro_batch_size or job.source.usual_batch_size
        self._updates = 0
        # Updates of the epoch that were made, but whose batches are read once more.
        self._replayed = 0
        self._horizon = ReadAhead()
        self._open: Optional[Generator[RawBatch, None, None]] = None
        self._ahead: Optional[Iterator[RawBatch]] = None
        self._ahead_epoch = -1
        self._place = DataCursor(0, 0)
        self.tells_place = False
        self._sought: Optional[_Sought] = None
        # Of several processes: what all of them read, and where the passes over it begin.
        self._ledger: Optional[GlobalBatchIndex] = None
        self._portion: Optional[RankShard] = None
        self._begun: List[Tuple[int, DataCursor]] = []
        self._process: Optional[int] = None

    def _start(self, epoch: int, plan: Plan) -> Iterator[RawBatch]:
        """The raw batches of an epoch: a pass over the source, or the next part of many passes."""
        is_portion = self._source.is_portioned
        sought, self._sought = self._sought, None
        skip = done = 0
        self._replayed = 0
        if sought is not None:
            skip, done = self._source.go_to(sought.place)
            if plan.fixed_updates is None and not skip + done:
                self._replayed = sought.updates
        if self._job.mode is Mode.TRAIN and plan.fixed_updates is not None:
            count = plan.fixed_updates * plan.micro_batches_per_update
            if self._open is None:
                number = epoch if sought is None else sought.place.number
                if sought is None and self._source.micro_batches:
                    number, skip = divmod(epoch * count, self._source.micro_batches)
                self._count_anew(skip if is_portion else None)
                self._open = self._passes(plan, number, skip, done)
            if is_portion:
                return self._open
            left = plan.fixed_updates - (0 if sought is None else sought.updates)
            return _first(self._open, left * plan.micro_batches_per_update)
        self._close_open()
        self._count_anew(skip if is_portion else None)
        self._open = self._pass(plan, epoch, skip, done)
        return self._open

    def _count_anew(self, skipped: Optional[int]) -> None:
        """Begin to note what other processes read, if there are any."""
        self._ledger = None if skipped is None else GlobalBatchIndex(skipped)
        self._begun = []

    def _pass(
        self, plan: Plan, number: int, skip: int, done: int
    ) -> Generator[RawBatch, None, None]:
        """Read one pass over the source, batch by batch.

        Args:
            plan: says which of its batches this process reads.
            number: of the pass.
            skip: batches at its beginning that are read, but not wanted.
            done: batches that the source itself leaves out.
        """
        for set_epoch, begin in self._ordered_by_epoch:
            set_epoch(begin + number)
        stream = DataStream(self._job.seed, self._job.domain, number)
        key = stream_key(self._job.seed, self._job.domain, "order", number)
        read, generators = done, self._source.generator_states()
        self._place = DataCursor(number, read, generators)
        portion = self._portion = self._portion_of(plan, stream, self._place)
        if self._process is not None:
            # Whatever is drawn for the samples themselves is drawn anew in each process.
            stream = DataStream(self._job.seed, self._job.domain, number, "process", self._process)
        skip = skip if portion is None else portion.count(skip)
        wanted = self._horizon.batches
        with contextlib.ExitStack() as skipping:
            if skip:
                # What is read once more draws once more, and is not read together with the rest.
                skipping.enter_context(fork_rng())
                self._horizon.batches = min(wanted, skip)
            for raw in self._source.epoch(stream, key, self._horizon, portion):
                read += batch_count(raw)
                self._place = DataCursor(number, read, generators)
                if read > skip:
                    yield raw
                else:
                    self._horizon.batches = min(wanted, skip - read) or wanted
                    if read == skip:
                        skipping.close()
                del raw
        is_whole = portion is None and plan.fixed_updates is None
        if is_whole and read != self._source.micro_batches:
            self._source.check_length(read)

    def rows(self, epoch: int, places: List[int]) -> List[int]:
        """Rows of the user's data that come at these places of an epoch; [] where nobody knows."""
        job, is_own = self._job, self._process is None
        if job.plan.fixed_updates is not None or self._reorders or not is_own:
            return []
        stream = DataStream(job.seed, job.domain, epoch)
        key = stream_key(job.seed, job.domain, "order", epoch)
        return self._source.rows(stream, key, places)

    def _portion_of(self, plan: Plan, stream: DataStream, begin: DataCursor) -> Optional[RankShard]:
        """Find the part of the beginning pass that this process reads; None for all."""
        if self._ledger is None:
            return None
        self._begun.append((self._ledger.total, begin))
        drawing = contextlib.nullcontext if self._source.draws_nothing else stream.active
        return RankShard(plan, self._ledger, self._ledger.total, drawing)

    def _passes(
        self, plan: Plan, number: int, skip: int, done: int
    ) -> Generator[RawBatch, None, None]:
        """Pass after pass, from one of its batches on."""
        while True:
            yield from self._pass(plan, number, skip, done)
            if not (self._place.batches if self._portion is None else self._portion.total):
                return
            number, skip, done = number + 1, 0, 0

    def seek(self, place: DataCursor, updates: int, fed: int) -> None:
        """Let the next epoch to be read begin in its middle, as another run has left it.

        Args:
            place: of the last execution that was done.
            updates: of that epoch that are done.
            fed: updates of the whole run that are done.
        """
        self.close()
        self._sought = _Sought(place, updates)
        self._updates = fed

    def after(self, epoch: int, last: Optional[DataCursor]) -> Optional[DataCursor]:
        """Position of the data after an epoch whose last execution left it at ``last``."""
        if self._ahead is not None:
            # Its first batch was looked at.
            return dataclasses.replace(self._place, batches=self._place.batches - 1)
        if self._open is not None:
            return last  # a pass that the next epoch goes on with
        loader_state = self._source.own_place(between_epochs=True)
        return DataCursor(epoch + 1, 0, self._source.generator_states(), loader_state)

    def peek(self, epoch: int, plan: Plan) -> MicroBatch:
        """The first micro-batch of an epoch, which starts here and goes on where it is read next.

        Raises:
            DataError: there is none, or the program can't take it.
        """
        with self.watched():
            plan = self._read_by(plan)
            batches = self._start(epoch, plan)
            self._horizon.batches = 1
            first = next(batches, _NO_BATCH)
            self._ahead_epoch = epoch
            if first is _NO_BATCH:
                self._ahead = batches
                if self._portion is None or self._portion.example is None:
                    raise self._source.no_batches(epoch)
                # Other processes read all batches; what they look like must be known here too.
                return self.unpacker.each(self._portion.example(), 0)[0]
            micro_batch = self.unpacker.each(first, 0)[0]
            self._ahead = itertools.chain([first], batches)
            return micro_batch

    @property
    def order(self) -> int:
        """Tells the order of the samples that were looked at so far from another one, if it can."""
        return 0 if self._ledger is None else self._ledger.latest

    def executions(self, epoch: int, plan: Plan, stage: Optional[Stage] = None) -> Executions:
        """All of an epoch's executions, the smaller last one included. Close it when done.

        Args:
            epoch: its index.
            plan: of the executions.
            stage: what each goes through as soon as it is prepared, in the thread that does so.

        Raises:
            DataError: the epoch has no batch, fewer than were asked for, or one that the program
                can't take.
        """
        prepared = self._prepared(epoch, self._read_by(plan), stage)
        groups = fetch_ahead(prepared, self._job.prefetch, self._source.give_up)
        with contextlib.closing(groups):
            yield from groups

    def _read_by(self, plan: Plan) -> Plan:
        """The plan by which this process reads."""
        self._process = plan.process if plan.processes > 1 else None
        return plan if self._source.is_portioned else plan.alone

    def _prepared(self, epoch: int, plan: Plan, stage: Optional[Stage]) -> Executions:
        batches, self._ahead = self._ahead, None
        done = 0 if self._sought is None else self._sought.updates
        if batches is None or self._ahead_epoch != epoch:
            batches = self._start(epoch, plan)
        check = None
        if self._job.mode is Mode.TRAIN and self._process is None:
            check = functools.partial(refuse_zero_update, role=self._source.role)

        def coming() -> int:
            return self._until_cut(plan, done)

        unpack, horizon = self.unpacker.each, self._horizon
        one_shape = None
        if self._reorders and plan.micro_batches_per_update > 1:
            one_shape = OneShapeUpdates(plan, self._replayed, self._source.role)
        if self._ledger is None:
            combined = executions(batches, unpack, plan, check, coming, horizon, one_shape)
        else:
            combined = sharded_executions(batches, unpack, plan, self._ledger, coming, horizon)
        try:
            for batch in combined:
                updates = batch.updates(plan)
                done += updates
                self._updates += updates
                if self.tells_place:
                    # To ask the data itself may take time.
                    loader_state = self._source.own_place()
                    place = dataclasses.replace(self._here(), own=loader_state)
                    if one_shape is not None and one_shape.waits:
                        place = self._beginning(place, loader_state)
                    batch = dataclasses.replace(batch, place=place)
                yield batch if stage is None else stage(batch)
                del batch
        finally:
            if self._job.mode is not Mode.TRAIN or plan.fixed_updates is None:
                self._close_open()
        if not done:
            raise self._source.no_batches(epoch)
        if plan.fixed_updates is not None and done < plan.fixed_updates:
            raise self._source.too_few(done, plan.fixed_updates, epoch, plan.training)

    def _beginning(self, place: DataCursor, loader_state: object) -> DataCursor:
        """Position of the pass, where what waits for others of its shape is read once more.

        Args:
            place: of now.
            loader_state: what the data says of its place by itself; None if it does not.

        Raises:
            DataError: the data goes on by itself, and not from there.
        """
        if loader_state is not None:
            raise DataError(
                f"{self._source.role}: a checkpoint within an epoch needs data that can be read "
                "again from the beginning of the epoch, because micro-batches wait for others "
                "of their shape, but this data resumes from its own state. Pad to one shape in "
                "collate_fn, checkpoint at the ends of epochs, or use engine='embedded'."
            )
        return dataclasses.replace(place, batches=0)

    def _here(self) -> DataCursor:
        """Position of the data after the last execution that was read."""
        if self._ledger is None:
            return self._place
        end = self._ledger.begin
        begin, place = next(each for each in reversed(self._begun) if each[0] < end)
        return dataclasses.replace(place, batches=end - begin)

    def _until_cut(self, plan: Plan, done: int) -> int:
        """Updates of the next execution at most, after so many of its epoch."""
        bounds = [every - self._updates % every for every in self._job.cut_every]
        if plan.fixed_updates is not None and (plan.fixed_updates > done or self._ledger):
            bounds.append(plan.fixed_updates - done)
        return min([plan.device_iterations, *bounds])

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Tell of a worker process that ends during the block as of one that ends while read.

        torch raises that from a signal, wherever the main thread is just then.

        Raises:
            DataError: one did.
            KeyboardInterrupt: it did so by Ctrl-C, which all processes of a terminal get.
        """
        try:
            yield
        except (RuntimeError, DataError) as error:
            if not is_dead_worker(error):
                raise
            if is_interrupted(error):
                raise KeyboardInterrupt from error
            if isinstance(error, DataError):
                raise
            raise DataError(f"{self._source.role}: {describe_dead_worker(error)}") from error

    def close(self) -> None:
        """Stop reading; safe twice."""
        self._ahead = None
        self._close_open()
        for set_epoch, begin in self._ordered_by_epoch:
            set_epoch(begin)

    def _close_open(self) -> None:
        if self._open is not None:
            opened, self._open = self._open, None
            # After a second Ctrl-C the thread may still be reading; it closes when it is done.
            if not getattr(opened, "gi_running", False):
                opened.close()


def _first(batches: Iterator[object], count: int) -> Iterator[RawBatch]:
    """So many batches, of which never more are picked at once than are wanted."""
    while count > 0:
        raw = next(batches, _NO_BATCH)
        if raw is _NO_BATCH:
            return
        yield raw
        count -= batch_count(raw)


def fetch_ahead(
    items: Executions, depth: int, give_up: Callable[[], None] = lambda: None
) -> Executions:
    """Yield executions in their order, of which a thread prepares up to ``depth`` ahead.

    An exception of ``items`` is raised here, in its place, with its own traceback. Close what is
    returned to end the thread; it ends by itself after the last item. An interrupt, or the end of
    a worker process, does not wait for a thread that reads something slow.

    Args:
        items: closed at the end, in the thread that ran them.
        depth: of the queue; 0 works without a thread.
        give_up: ends what the thread reads, as nobody waits for it any more.
    """
    # Whoever holds the lock waits for the thread, and the thread would wait for the lock.
    if depth == 0 or LOCK._is_owned():  # type: ignore[attr-defined]
        yield from items
        return
    ahead = _Queue(items, depth)
    process = ForkGuard()
    try:
        ahead.start()
        while True:
            process.check()
            entry = ahead.get()
            if entry is None:
                return
            if isinstance(entry, BaseException):
                raise entry
            yield entry[0]
            del entry  # of an execution that is over nothing is kept
    finally:
        left_by = sys.exc_info()[1]
        # Whoever goes on while the thread still reads would find the generator in use.
        with defer_signals():
            is_over = is_interrupted(left_by) or is_dead_worker(left_by)
            ahead.close(give_up if is_over else None)


class _Queue:
    """A bounded queue and the thread that fills it. An item is begun only when there is room.

    Of queues written in C, which an exception from a signal's handler can't leave locked.
    """

    def __init__(self, items: Executions, depth: int) -> None:
        self._items = items
        self._ready: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._room: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._closed = False
        for _ in range(depth):
            self._room.put(None)
        self._world = _settings_of_thread()
        run = contextvars.copy_context().run
        self._thread = threading.Thread(
            target=run, args=(self._fill,), name="ipufit-prefetch", daemon=True
        )

    def start(self) -> None:
        """Begin to read. Ctrl-C waits until there is a thread that close can wait for."""
        with defer_signals():
            self._thread.start()

    def get(self) -> Any:
        """An item in a tuple, an error, or None at the end."""
        entry = self._ready.get()
        self._room.put(None)
        return entry

    def close(self, give_up: Optional[Callable[[], None]]) -> None:
        """End the thread and wait for it.

        Args:
            give_up: called when it does not end soon, and then it is left to itself; None to wait.
        """
        self._closed = True
        self._room.put(None)
        self._drop()
        if self._thread.ident is None:
            return
        if give_up is not None:
            self._thread.join(_PATIENCE)
            if self._thread.is_alive():
                give_up()
        self._thread.join(None if give_up is None else _PATIENCE)
        self._drop()

    def _drop(self) -> None:
        """Let go of the items that nobody takes any more."""
        with contextlib.suppress(queue.Empty):
            while True:
                self._ready.get_nowait()

    def _fill(self) -> None:
        last: Optional[BaseException] = None
        try:
            with self._world:
                try:
                    while self._has_room():
                        try:
                            item = next(self._items)
                        except StopIteration:
                            break
                        self._ready.put((item,))
                        del item
                finally:
                    self._items.close()
        except BaseException as error:
            last = error
        self._ready.put(last)

    def _has_room(self) -> bool:
        self._room.get()
        return not self._closed


def _settings_of_thread() -> contextlib.AbstractContextManager[None]:
    """Remember what torch keeps for each thread, and on which data code may depend.

    Returns:
        A context for another thread, with the same settings.
    """
    grad, inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
    device = torch.empty(0).device

    @contextlib.contextmanager
    def entered() -> Iterator[None]:
        place = contextlib.nullcontext() if device.type == "cpu" else device
        with torch.inference_mode(inference), torch.set_grad_enabled(grad), place:
            yield

    return entered()
