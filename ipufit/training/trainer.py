"""Trainer: the only loop of the project, and the job that it runs."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from typing import Any, Callable, Dict, Generator, Iterator, List, Mapping, Optional, Sequence

from ipufit.callbacks.callback_list import CallbackObserver, Measurement, Observer
from ipufit.callbacks.history import History
from ipufit.core.batch import CombinedBatch, DataCursor, Mode
from ipufit.core.outputs import check_rows, join_rows
from ipufit.core.train_config import HyperparameterSchedule
from ipufit.data.pipeline import BatchPipeline
from ipufit.engines.program import ExecutionResult, Program
from ipufit.errors import NonFiniteLossError
from ipufit.training.execution_sync import ExecutionSync
from ipufit.training.sanity_check import FailureExplainer
from ipufit.utils.console import warn_user
from ipufit.utils.fault_injection import raise_injected_fault
from ipufit.utils.interrupts import ForkGuard, call_each, defer_signals
from ipufit.utils.phase_timer import NO_CLOCK, NoClock


@dataclasses.dataclass
class Job(Measurement):
    """A program with everything that feeds and measures it.

    Attributes:
        pipeline: combines the batches of the data.
        sync: brings in what other processes compute.
        explainer: says why module or loss can't take a micro-batch.
        renewed: returns a program like that one, or itself while it trains what is to be trained.
        outputs: the module's, as tensors without data.
        end: updates of the model when a fit ends; 0 where nobody knows.
        run: computes one execution: what it gave in all processes, but for the outputs, which are
            those of this one unless the job predicts.
    """

    pipeline: BatchPipeline
    sync: ExecutionSync
    explainer: FailureExplainer
    renewed: Callable[[Program], Program]
    outputs: object = None
    end: int = 0
    run: Callable[[CombinedBatch], ExecutionResult] = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        self.run = self.program.run
        if self.mode is Mode.PREDICT:
            self.run = self._predict
        elif self.sync.processes.is_distributed:
            self.run = functools.partial(self.sync.run, self.program)

    @contextlib.contextmanager
    def executions(self, epoch: int) -> Iterator[Iterator[CombinedBatch]]:
        """Open the executions of an epoch for the time of the block."""
        stage = self.program.stage
        with contextlib.closing(self.pipeline.executions(epoch, self.plan, stage)) as batches:
            yield self.sync.executions(batches)

    def prepare(self) -> None:
        """Take over what callbacks have changed in the module or the optimizer."""
        with defer_signals(), self.explainer.explained([self.first]):
            program = self.renewed(self.program)
            if program is not self.program:
                self.program = program
                self.__post_init__()
                program.expect(max(self.end - program.updates, 0))
            program.prepare(self.first)

    def _predict(self, batch: CombinedBatch) -> ExecutionResult:
        """Run one execution; the outputs are those of all processes, in the order of the data."""
        result = self.program.run(batch)
        outputs = [*map(check_rows, result.outputs, batch.micro_batches)]
        outputs = self.sync.outputs(batch, outputs, self.outputs)
        return dataclasses.replace(result, outputs=outputs)


@dataclasses.dataclass(eq=False)
class Trainer:
    """Runs a program over epochs of data, measures it, and tells observers what happens.

    Fit, evaluate and predict are this class with programs and observers of their own.

    Attributes:
        job: the program, its data and its measures.
        observers: are told of everything, in this order.
        history: of a fit; filled epoch by epoch.
        validate: evaluates after an epoch, and returns values by their names in the history; None
            for no validation.
        validates: whether there is a validation after this epoch.
        stopped: whether a callback has asked to stop.
        schedule: told of epoch ends, or None.
        clock: counts the seconds of the run by phase.
        epoch: index of the present epoch.
        place: where the data stands after the last execution.
    """

    job: Job
    observers: Sequence[Observer]
    history: History = dataclasses.field(default_factory=History)
    validate: Optional[Callable[[int], Mapping[str, float]]] = None
    validates: Callable[[int], bool] = lambda epoch: True
    stopped: Callable[[], bool] = lambda: False
    schedule: Optional[HyperparameterSchedule] = None
    clock: NoClock = NO_CLOCK

    def __post_init__(self) -> None:
        self.epoch = 0
        self.place: Optional[DataCursor] = None
        self._process = ForkGuard()
        self._non_finite: Optional[NonFiniteLossError] = None
        self._batches = 0

    def run(self, epochs: range, is_within_epoch: bool = False) -> None:
        """Train.

        Args:
            epochs: indices of the epochs.
            is_within_epoch: whether a checkpoint has begun the first epoch.
        """
        logs: Dict[str, float] = {}
        try:
            for observer in self.observers:
                observer.begin_fit(self)
            for epoch in epochs:
                self.epoch = epoch
                if not (is_within_epoch and epoch == epochs.start):
                    for observer in self.observers:
                        with self.clock.during(observer.phase):
                            observer.notify("on_epoch_begin", epoch, {})
                    self.job.meter.reset()
                # Observers may have changed the module or the optimizer.
                self.job.prepare()
                for _ in self.run_epoch(epoch):
                    pass
                logs = self._epoch_logs(epoch)
                self.job.program.publish()
                for observer in self.observers:
                    with self.clock.during(observer.phase):
                        observer.end_epoch(epoch, logs)
                if self.ending():
                    break
            self.job.program.adopt_averages()
        finally:
            try:
                # After an error too, the last hooks find, and may replace, what fit leaves.
                self.job.program.enter_eval()
            finally:
                call_each(lambda each: each.end_fit(logs), iter(self.observers))

    def evaluate(self, epoch: int = 0) -> Dict[str, float]:
        """Return the exact means over all samples of the data."""
        meter = self.job.meter
        meter.reset()
        self._notify("on_test_begin", {})
        for _ in self.run_epoch(epoch):
            pass
        values = meter.reduce_across_ranks(self.job.sync.processes)
        self._notify("on_test_end", values)
        return values

    def predict(self) -> Generator[None, None, None]:
        """Predict for all samples in the order of the data, and pause after each execution.

        Raises:
            DataError: an output has no row for each sample.
        """
        self._notify("on_predict_begin", {})
        yield from self.run_epoch(0)
        self._notify("on_predict_end", {})

    def run_epoch(self, epoch: int) -> Generator[None, None, None]:
        """Run the executions of one epoch, and pause after each."""
        clock, observers = self.clock, self.observers
        for observer in observers:
            with clock.during(observer.phase):
                observer.begin_executions(epoch)
        self._batches = self.job.meter.updates * self.job.plan.micro_batches_per_update
        with self.job.executions(epoch) as batches:
            for batch in clock.reading(batches):
                outputs = self.run_execution(batch, epoch)
                self.place = batch.place
                # The memory of its samples is free for the next ones.
                del batch
                if outputs is not None:
                    for observer in observers:
                        clock.turn(observer.phase)
                        observer.end_execution(epoch, outputs)
                del outputs
                yield
                if self.ending():
                    break
        for observer in observers:
            with clock.during(observer.phase):
                observer.end_executions()

    def run_execution(self, batch: CombinedBatch, epoch: int) -> Optional[List[Any]]:
        """Run one execution, and return its outputs; None for one whose loss ends training."""
        clock, job = self.clock, self.job
        for observer in self.observers:
            clock.turn(observer.phase)
            observer.begin_execution(job.meter.updates, batch)
        clock.turn("compute")
        try:
            if job.mode is Mode.TRAIN:
                self._process.check()
                raise_injected_fault(job.program, batch.updates(job.plan))
            # What explains an error runs the module, too.
            with defer_signals():
                if job.explainer.is_apart:
                    # A wrong one would end the use of the GPU for the whole process.
                    job.explainer.check_labels(batch.micro_batches, self._batches)
                try:
                    result = job.run(batch)
                except Exception as error:
                    job.explainer.raise_explained(error, batch.micro_batches, self._batches)
                    raise
                if job.mode is Mode.EVALUATE:
                    place = functools.partial(self._place, epoch)
                    job.explainer.examine(result.losses, batch.micro_batches, self._batches, place)
        except NonFiniteLossError as error:
            self._place(epoch, error)
            # Every observer hears of it, also after one that handles it.
            answers = [observer.notify("on_non_finite", error) for observer in self.observers]
            if not any(answers):
                raise
            self._non_finite = error
            return None
        self._batches += len(batch.micro_batches)
        clock.turn("metrics")
        job.meter.add(batch, result)
        return result.outputs

    def _place(self, epoch: int, error: NonFiniteLossError) -> None:
        """Say in an error which samples of the data it is about."""
        rows = functools.partial(self.job.pipeline.rows, epoch)
        error.place(epoch, self.job.meter.samples, rows)

    @property
    def pipeline(self) -> BatchPipeline:
        """The pipeline of the data."""
        return self.job.pipeline

    @property
    def shards_data(self) -> bool:
        """True if ipufit shards the data, or one process reads all of it."""
        sync = self.job.sync
        return sync.is_portioned or not sync.processes.is_distributed

    def ending(self) -> bool:
        """Return True if training ends with the last execution."""
        return self._non_finite is not None or self.stopped()

    def _notify(self, hook: str, *args: object) -> None:
        for observer in self.observers:
            observer.notify(hook, *args)

    def _epoch_logs(self, epoch: int) -> Dict[str, float]:
        """Return the values of an epoch whose executions are over, its validation included."""
        job = self.job
        logs = job.meter.reduce_across_ranks(job.sync.processes)
        if self._non_finite is not None:
            logs["loss"] = self._non_finite.value
        self._warn_of_skipped(epoch)
        job.sync.share_buffers(job.program)
        job.program.enter_eval()
        if self.validate is not None and self.validates(epoch):
            with self.clock.during("validation"):
                logs.update(self.validate(epoch))
        if self.schedule is not None:
            self.schedule.end_epoch(logs)
        # Logged values of single updates; these are counted from compile.
        first = job.program.updates - job.meter.updates
        for name, by_update in job.meter.by_update.items():
            for index, value in enumerate(by_update):
                self.history.append_update(name, first + index, value)
        return logs

    def _warn_of_skipped(self, epoch: int) -> None:
        meter = self.job.meter
        if meter.skipped and meter.skipped == meter.updates:
            warn_user(
                f"all {meter.updates} updates of epoch {epoch + 1} were skipped, because their "
                "gradients were not finite at the loss scale: the model learned nothing. Choose a "
                "smaller ipufit.Precision(loss_scale=...), or 'dynamic'.",
            )


class PredictionObserver(CallbackObserver):
    """Shows callbacks what each execution predicts, and keeps it until it is taken.

    Attributes:
        padding_value: of outputs of several shapes; None for a list of rows.
    """

    padding_value: Optional[float] = None
    _outputs: Optional[List[object]] = None

    def end_execution(self, epoch: int, outputs: List[object]) -> None:
        """Call ``on_predict_batch_end`` with the outputs for all samples of the execution."""
        self._outputs = self._outputs or []
        self._outputs += outputs
        logs = {"outputs": join_rows(outputs, self.padding_value)}
        self.callbacks.call("on_predict_batch_end", self.meter.updates - 1, logs)

    def take(self) -> Any:
        """Return the outputs of all executions since the last call, and keep them no longer."""
        outputs, self._outputs = self._outputs, None
        return join_rows(outputs or [], self.padding_value)
