"""Epochs, executions, and when callbacks fire: the only loop in the project."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any, Callable, Dict, Generator, Iterator, List, Optional, Sequence

import torch
from torch import Tensor

from ipufit.callbacks import CallbackList
from ipufit.callbacks.callback_list import Observer
from ipufit.callbacks.history import History
from ipufit.callbacks.running_fit import Measurement
from ipufit.core.batch import CombinedBatch, DataCursor
from ipufit.core.train_config import HyperparameterSchedule
from ipufit.data.pipeline import BatchPipeline, Stage
from ipufit.engines.program import ExecutionResult
from ipufit.errors import DataError, NonFiniteLossError
from ipufit.training.execution_sync import ExecutionSync
from ipufit.training.sanity_check import FailureExplainer
from ipufit.utils import tree
from ipufit.utils.console import warn_user
from ipufit.utils.fault_injection import raise_injected_fault
from ipufit.utils.interrupts import ForkGuard, defer_sigint
from ipufit.utils.phase_timer import NO_CLOCK, NoClock

__all__ = ["Fit", "Job", "check_rows", "evaluate", "predict", "predictions"]


@dataclasses.dataclass
class Job(Measurement):
    """A program with everything that feeds and measures it.

    Attributes:
        feed: the loader.
        sync: brings in what other processes compute.
        explainer: says why module or loss can't take a micro-batch.
        outputs: the module's, as tensors without data.
    """

    feed: BatchPipeline
    sync: ExecutionSync
    explainer: FailureExplainer
    outputs: Any = None
    _batches: int = dataclasses.field(default=0, init=False)

    @contextlib.contextmanager
    def executions(
        self, epoch: int, stage: Optional[Stage] = None
    ) -> Iterator[Iterator[CombinedBatch]]:
        """Open the executions of an epoch for the time of the block."""
        self._batches = self.meter.updates * self.plan.micro_batches_per_update
        with contextlib.closing(self.feed.executions(epoch, self.plan, stage)) as batches:
            yield self.sync.executions(batches)

    def prepare(self) -> None:
        """Take over what callbacks have changed in the module or the optimizer."""
        with defer_sigint(), self.explainer.explained([self.first]):
            self.program.prepare(self.first)

    def run(self, batch: CombinedBatch) -> ExecutionResult:
        """One execution, and what it gave in all processes; outputs are those of this one."""
        with self._computing(batch):
            return self.sync.run(self.program, batch)

    def predict(self, batch: CombinedBatch) -> Any:
        """The outputs of one execution for its samples, those of all processes."""
        with self._computing(batch):
            anchors = self.program.run(batch)
        for micro_batch, outputs in zip(batch.micro_batches, anchors.outputs):
            check_rows(outputs, micro_batch.size)
        return _joined(self.sync.outputs(batch, anchors.outputs, self.outputs))

    @contextlib.contextmanager
    def _computing(self, batch: CombinedBatch) -> Iterator[None]:
        """Uninterrupted, and with the layer or the line that can't take what the block computes."""
        first = None if self.sync.processes.is_distributed else self._batches
        with defer_sigint(), self.explainer.explained(batch.micro_batches, first):
            yield
        self._batches += len(batch.micro_batches)


@dataclasses.dataclass
class Fit:
    """One call of ``fit``, ready to run.

    Attributes:
        job: the training program, its loader and its measures.
        observers: are told of everything, in this order.
        history: filled epoch by epoch.
        validate: evaluates after an epoch, or None.
        stopped: whether a callback has asked to stop.
        schedule: told of epoch ends, or None.
        validates: whether there is a validation after this epoch.
        named: what the values of a validation are called beside those of training.
        clock: counts the seconds of the run by phase.
        place: where the data stands after the last execution.
    """

    job: Job
    observers: Sequence[Observer]
    history: History
    validate: Optional[Callable[[int], Dict[str, float]]]
    stopped: Callable[[], bool]
    schedule: Optional[HyperparameterSchedule] = None
    validates: Callable[[int], bool] = lambda epoch: True
    named: Callable[[str], str] = "val_{}".format
    clock: NoClock = NO_CLOCK
    place: Optional[DataCursor] = dataclasses.field(default=None, init=False)
    _process: ForkGuard = dataclasses.field(default_factory=ForkGuard, init=False)
    _non_finite: Optional[NonFiniteLossError] = dataclasses.field(default=None, init=False)

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
                if not (is_within_epoch and epoch == epochs.start):
                    for observer in self.observers:
                        with self.clock.during(observer.phase):
                            observer.notify("on_epoch_begin", epoch, {})
                    self.job.meter.reset()
                # Observers may have changed the module or the optimizer.
                self.job.prepare()
                self._run_executions(epoch)
                logs = self._epoch_logs(epoch)
                self.job.program.publish()
                for observer in self.observers:
                    with self.clock.during(observer.phase):
                        observer.end_epoch(epoch, logs)
                if self.ending():
                    break
            self.job.program.adopt_averages()
        finally:
            _end_all(self.observers, logs)

    @property
    def feed(self) -> BatchPipeline:
        """The pipeline of the training data."""
        return self.job.feed

    @property
    def shards_data(self) -> bool:
        """True if ipufit shards the data, or one process reads all of it."""
        sync = self.job.sync
        return sync.is_portioned or not sync.processes.is_distributed

    def ending(self) -> bool:
        """Return True if training ends with the last execution."""
        return self._non_finite is not None or self.stopped()

    def _run_executions(self, epoch: int) -> None:
        for observer in self.observers:
            with self.clock.during(observer.phase):
                observer.begin_executions(epoch)
        with self.job.executions(epoch, self.job.program.stage) as batches:
            for batch in self.clock.reading(batches):
                outputs = self._run_execution(batch, epoch)
                self.place = batch.place
                # The memory of its samples is free for the next ones.
                del batch
                if outputs is not None:
                    for observer in self.observers:
                        self.clock.turn(observer.phase)
                        observer.end_execution(epoch, outputs)
                del outputs
                if self.ending():
                    break
        for observer in self.observers:
            with self.clock.during(observer.phase):
                observer.end_executions()

    def _run_execution(self, batch: CombinedBatch, epoch: int) -> Optional[List[Any]]:
        """Run one execution, and return its outputs; None for one whose loss ends training."""
        clock, job = self.clock, self.job
        for observer in self.observers:
            clock.turn(observer.phase)
            observer.notify("on_train_batch_begin", job.meter.updates, {})
        clock.turn("compute")
        try:
            self._process.check()
            raise_injected_fault(job.program, batch.updates(job.plan))
            result = job.run(batch)
        except NonFiniteLossError as error:
            error.place(epoch, job.meter.samples)
            # Every observer hears of it, also after one that handles it.
            answers = [observer.notify("on_non_finite", error) for observer in self.observers]
            if not any(answers):
                raise
            self._non_finite = error
            return None
        clock.turn("metrics")
        job.meter.add(batch, result)
        return result.outputs

    def _epoch_logs(self, epoch: int) -> Dict[str, float]:
        """Return the values of an epoch whose executions are over, its validation included."""
        logs = self.job.meter.reduce_across_ranks(self.job.sync.processes)
        if self._non_finite is not None:
            logs["loss"] = self._non_finite.value
        self._warn_of_skipped(epoch)
        self.job.sync.share_buffers(self.job.program)
        if self.validate is not None and self.validates(epoch):
            with self.clock.during("validation"):
                validation = self.validate(epoch)
            logs.update({self.named(name): value for name, value in validation.items()})
        if self.schedule is not None:
            self.schedule.end_epoch(logs)
        # Logged values of single updates; these are counted from compile.
        first = self.job.program.updates - self.job.meter.updates
        for name, by_update in self.job.meter.by_update.items():
            for index, value in enumerate(by_update):
                self.history.append_update(name, first + index, value)
        return logs

    def _warn_of_skipped(self, epoch: int) -> None:
        meter = self.job.meter
        if meter.skipped and meter.skipped == meter.updates:
            warn_user(
                f"all {meter.updates} updates of epoch {epoch} were skipped, because their "
                "gradients were not finite at the loss scale: nothing was learned. Choose a "
                "smaller loss_scale, or 'dynamic'.",
            )


def _end_all(observers: Sequence[Observer], logs: Dict[str, float]) -> None:
    """End every observer, whatever the others raise; several errors are chained."""
    if observers:
        try:
            observers[0].end_fit(logs)
        finally:
            _end_all(observers[1:], logs)


def evaluate(job: Job, callbacks: CallbackList, epoch: int = 0) -> Dict[str, float]:
    """Exact means over all samples of the loader."""
    meter = job.meter
    meter.reset()
    callbacks.call("on_test_begin", {})
    with job.executions(epoch) as batches:
        for batch in batches:
            callbacks.call("on_test_batch_begin", meter.updates, {})
            anchors = job.run(batch)
            meter.add(batch, anchors)
            callbacks.call("on_test_batch_end", meter.updates - 1, meter.running())
    values = meter.reduce_across_ranks(job.sync.processes)
    callbacks.call("on_test_end", values)
    return values


def predict(job: Job, callbacks: CallbackList) -> Any:
    """The outputs of all samples in the loader's order, in the module's own structure.

    Raises:
        DataError: an output has no row for each sample.
    """
    return _joined(list(predictions(job, callbacks)))


def predictions(job: Job, callbacks: CallbackList) -> Generator[Any, None, None]:
    """Yield the outputs of all samples in the loader's order, one execution at a time.

    Raises:
        DataError: an output has no row for each sample.
    """
    callbacks.call("on_predict_begin", {})
    passes = 0
    with job.executions(0) as batches:
        for batch in batches:
            callbacks.call("on_predict_batch_begin", passes, {})
            piece = [job.predict(batch)]
            passes += batch.updates(job.plan)
            callbacks.call("on_predict_batch_end", passes - 1, {"outputs": piece[0]})
            # Not kept here while the next one is computed.
            yield piece.pop()
    callbacks.call("on_predict_end", {})


def _joined(outputs: Sequence[Any]) -> Any:
    """Outputs of several micro-batches as those of one."""
    structure = tree.flatten(outputs[-1])[1]
    columns = zip(*(tree.flatten(each)[0] for each in outputs))
    return tree.unflatten([_join(list(column)) for column in columns], structure)


def check_rows(outputs: Any, size: int) -> None:
    """Make sure that ``predict`` can join the outputs for ``size`` samples with those for others.

    Raises:
        DataError: an output has no row for each sample.
    """
    for path, leaf in tree.flatten_with_paths(outputs, "output")[0]:
        if isinstance(leaf, Tensor) and (leaf.dim() == 0 or leaf.shape[0] != size):
            raise DataError(
                f"predict returns one row per sample, but {path} has shape {tuple(leaf.shape)} for "
                f"{size} samples. Return it from forward with the samples along its first "
                "dimension, or leave it out when the module is in eval mode."
            )


def _join(column: List[Any]) -> Any:
    return torch.cat(column) if isinstance(column[0], Tensor) else column[0]
