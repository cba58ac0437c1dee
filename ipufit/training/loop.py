"""Epochs, executions, and when callbacks fire: the only loop in the project."""

from __future__ import annotations

import contextlib
import dataclasses
import warnings
from typing import TYPE_CHECKING, Any, Callable, Dict, Generator, Iterator, List, Optional, Sequence

import torch
from torch import Tensor

from ipufit.callbacks import CallbackList
from ipufit.callbacks.history import History
from ipufit.core.batch import CombinedBatch, DataCursor, MicroBatch
from ipufit.core.plan import Plan
from ipufit.data.pipeline import Feed, Stage
from ipufit.engines.program import ExecutionResult, Program
from ipufit.errors import DataError, NonFiniteLossError
from ipufit.training.epoch_metrics import Meter
from ipufit.training.execution_sync import Together
from ipufit.training.sanity_check import FailureExplainer
from ipufit.utils import tree
from ipufit.utils.fault_injection import strike
from ipufit.utils.interrupts import SameProcess, deferred
from ipufit.utils.phase_timer import NO_CLOCK, NoClock
from ipufit.utils.verbosity import stacklevel_of_user

if TYPE_CHECKING:
    from ipufit.checkpoint.manager import Keeper
    from ipufit.core.train_config import HyperparameterSchedule
    from ipufit.report.recorder import Recorder

__all__ = ["Fit", "Job", "Measurement", "check_rows", "evaluate", "predict", "predictions"]


@dataclasses.dataclass
class Measurement:
    """A program with everything that measures it.

    Attributes:
        program: prepared.
        plan: with the micro-batch size that the loader really has.
        meter: its loss and metrics.
        first: the first micro-batch.
    """

    program: Program
    plan: Plan
    meter: Meter
    first: MicroBatch


@dataclasses.dataclass
class Job(Measurement):
    """A program with everything that feeds and measures it.

    Attributes:
        feed: the loader.
        together: brings in what other processes compute.
        explainer: says why module or loss can't take a micro-batch.
        outputs: the module's, as tensors without data.
    """

    feed: Feed
    together: Together
    explainer: FailureExplainer
    outputs: Any = None
    _batches: int = dataclasses.field(default=0, init=False)

    @contextlib.contextmanager
    def executions(
        self, epoch: int, stage: Optional[Stage] = None
    ) -> Iterator[Iterator[CombinedBatch]]:
        """Those of an epoch, as long as the block lasts."""
        self._batches = self.meter.updates * self.plan.micro_batches_per_update
        with contextlib.closing(self.feed.executions(epoch, self.plan, stage)) as batches:
            yield self.together.executions(batches)

    def prepare(self) -> None:
        """Take over what callbacks have changed in the module or the optimizer."""
        with deferred(), self.explainer.explained([self.first]):
            self.program.prepare(self.first)

    def run(self, batch: CombinedBatch) -> ExecutionResult:
        """One execution, and what it gave in all processes; outputs are those of this one."""
        with self._computing(batch):
            return self.together.run(self.program, batch)

    def predict(self, batch: CombinedBatch) -> Any:
        """The outputs of one execution for its samples, those of all processes."""
        with self._computing(batch):
            anchors = self.program.run(batch)
        for micro_batch, outputs in zip(batch.micro_batches, anchors.outputs):
            check_rows(outputs, micro_batch.size)
        return _joined(self.together.outputs(batch, anchors.outputs, self.outputs))

    @contextlib.contextmanager
    def _computing(self, batch: CombinedBatch) -> Iterator[None]:
        """Uninterrupted, and with the layer or the line that can't take what the block computes."""
        first = None if self.together.processes.is_distributed else self._batches
        with deferred(), self.explainer.explained(batch.micro_batches, first):
            yield
        self._batches += len(batch.micro_batches)


@dataclasses.dataclass
class Fit:
    """One call of ``fit``, ready to run.

    Attributes:
        job: the training program, its loader and its measures.
        callbacks: told of everything.
        history: filled epoch by epoch.
        validate: evaluates after an epoch, or None.
        stopped: whether a callback has asked to stop.
        schedule: told of epoch ends, or None.
        validates: whether there is a validation after this epoch.
        keeper: writes checkpoints, and goes on from one; None for neither.
        agree_to_stop: lets all processes know whether a callback has asked to stop in one of them.
        may_stop: whether one may do so in the middle of an epoch.
        recorder: writes down what happens; None for nobody.
        named: what the values of a validation are called beside those of training.
        place: where the data stands after the last execution.

    Raises:
        ConfigurationError: a callback waits for a value that nobody gives; before any hook.
    """

    job: Job
    callbacks: CallbackList
    history: History
    validate: Optional[Callable[[int, CallbackList], Dict[str, float]]]
    stopped: Callable[[], bool]
    schedule: Optional[HyperparameterSchedule] = None
    validates: Callable[[int], bool] = lambda epoch: True
    keeper: Optional[Keeper] = None
    agree_to_stop: Callable[[], None] = lambda: None
    may_stop: bool = False
    recorder: Optional[Recorder] = None
    named: Callable[[str], str] = "val_{}".format
    place: Optional[DataCursor] = dataclasses.field(default=None, init=False)
    _process: SameProcess = dataclasses.field(default_factory=SameProcess, init=False)
    _non_finite: Optional[NonFiniteLossError] = dataclasses.field(default=None, init=False)

    def run(self, first_epoch: int, epochs: int) -> None:
        """Epochs from ``first_epoch`` up to, not including, ``epochs``."""
        self.callbacks.check_monitors()
        logs: Dict[str, float] = {}
        try:
            self.callbacks.call("on_train_begin", {})
            found = None
            if self.keeper is not None:
                self.keeper.begin(self)
                found = self.keeper.found
            for epoch in range(first_epoch, epochs):
                begun = found is not None and found.in_epoch and epoch == first_epoch
                if not begun:
                    with self._clock.during("callbacks"):
                        self.callbacks.call("on_epoch_begin", epoch, {})
                    self.job.meter.reset()
                # Callbacks may have changed the module or the optimizer.
                self.job.prepare()
                if self.recorder is not None:
                    self.recorder.begin_epoch(epoch)
                logs = self._epoch(epoch)
                self.job.program.publish()
                with self._clock.during("callbacks"):
                    self._end_epoch(epoch, logs)
                self.agree_to_stop()
                if self.keeper is not None:
                    with self._clock.during("checkpoint"):
                        self.keeper.end_epoch(self, epoch, logs)
                if self.recorder is not None:
                    self.recorder.end_epoch()
                if self.ending():
                    break
            self.job.program.adopt_averages()
        finally:
            try:
                self.callbacks.call("on_train_end", logs)
            finally:
                self.callbacks.call("close")

    @property
    def _clock(self) -> NoClock:
        return NO_CLOCK if self.recorder is None else self.recorder.clock

    def ending(self) -> bool:
        """Whether training ends with the execution that was the last."""
        return self._non_finite is not None or self.stopped()

    def _end_epoch(self, epoch: int, logs: Dict[str, float]) -> None:
        try:
            self.callbacks.call("on_epoch_end", epoch, logs)
        finally:
            # A callback before it has failed; the epoch has been trained all the same.
            if epoch not in self.history.epoch:
                self.history.append(epoch, logs)

    def _epoch(self, epoch: int) -> Dict[str, float]:
        stage = getattr(self.job.program, "stage", None)
        with self.job.executions(epoch, stage) as batches:
            for batch in self._clock.reading(batches):
                self._execution(batch, batch.updates(self.job.plan), epoch)
                self.place = batch.place
                if self.may_stop:
                    self.agree_to_stop()
                # The memory of its samples is free for the next ones.
                del batch
                if self.keeper is not None:
                    with self._clock.during("checkpoint"):
                        self.keeper.end_execution(self, epoch)
                if self.recorder is not None and self._non_finite is None:
                    self.recorder.executed()
                if self.ending():
                    break
        if self.recorder is not None:
            self.recorder.end_executions()
        logs = self.job.meter.whole_values(self.job.together.processes)
        if self._non_finite is not None:
            logs["loss"] = self._non_finite.value
        self._warn_of_skipped(epoch)
        self.job.together.share_buffers(self.job.program)
        if self.validate is not None and self.validates(epoch):
            with self._clock.during("validation"):
                validation = self.validate(epoch, self.callbacks)
            logs.update({self.named(name): value for name, value in validation.items()})
        if self.schedule is not None:
            self.schedule.end_epoch(logs)
        self._note_updates()
        return logs

    def _note_updates(self) -> None:
        """Keep what was logged for every update; updates are counted from ``compile``."""
        first = self.job.program.updates - self.job.meter.updates
        for name, values in self.job.meter.by_update.items():
            for index, value in enumerate(values):
                self.history.append_update(name, first + index, value)

    def _warn_of_skipped(self, epoch: int) -> None:
        meter = self.job.meter
        if meter.skipped and meter.skipped == meter.updates:
            warnings.warn(
                f"all {meter.updates} updates of epoch {epoch} were skipped, because their "
                "gradients were not finite at the loss scale: nothing was learned. Choose a "
                "smaller loss_scale, or 'dynamic'.",
                UserWarning,
                stacklevel=stacklevel_of_user(),
            )

    def _execution(self, batch: CombinedBatch, updates: int, epoch: int) -> None:
        clock, program = self._clock, self.job.program
        clock.turn("callbacks")
        self.callbacks.call("on_train_batch_begin", self.job.meter.updates, {})
        clock.turn("compute")
        try:
            self._process.check()
            strike(program, updates)
            anchors = self.job.run(batch)
        except NonFiniteLossError as error:
            error.place(epoch, self.job.meter.samples)
            if not self.callbacks.ask("on_non_finite", error):
                raise
            self._non_finite = error
            return
        meter = self.job.meter
        clock.turn("metrics")
        meter.add(batch, anchors)
        clock.turn("callbacks")
        self.callbacks.show_outputs(anchors.outputs)
        self.callbacks.call("on_train_batch_end", meter.updates - 1, meter.running())


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
    values = meter.whole_values(job.together.processes)
    callbacks.call("on_test_end", values)
    return values


def predict(job: Job, callbacks: CallbackList) -> Any:
    """The outputs of all samples in the loader's order, in the module's own structure.

    Raises:
        DataError: an output has no row for each sample.
    """
    return _joined(list(predictions(job, callbacks)))


def predictions(job: Job, callbacks: CallbackList) -> Generator[Any, None, None]:
    """The same, one execution at a time.

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
