"""Epochs, executions, and when callbacks fire: the only loop in the project."""

from __future__ import annotations

import dataclasses
from typing import Any, Callable, Dict, List, Optional

import torch
from torch import Tensor

from ipufit import tree
from ipufit.callbacks import CallbackList
from ipufit.data.feed import Feed
from ipufit.errors import DataError, NonFiniteLossError
from ipufit.history import History
from ipufit.interrupts import deferred
from ipufit.meter import Meter, RunningLogs
from ipufit.plan import Plan
from ipufit.program import CombinedBatch, MicroBatch, Program

__all__ = ["Fit", "Job", "check_rows", "evaluate", "predict"]


@dataclasses.dataclass
class Job:
    """A program with everything that feeds and measures it.

    Attributes:
        program: prepared.
        feed: its loader.
        plan: with the micro-batch size that the loader really has.
        meter: its loss and metrics.
        first: the first micro-batch.
    """

    program: Program
    feed: Feed
    plan: Plan
    meter: Meter
    first: MicroBatch


@dataclasses.dataclass
class Fit:
    """One call of ``fit``, ready to run.

    Attributes:
        job: the training program, its loader and its measures.
        callbacks: told of everything.
        history: filled epoch by epoch.
        validate: evaluates after an epoch, or None.
        stopped: whether a callback has asked to stop.

    Raises:
        ConfigurationError: a callback waits for a value that nobody gives; before any hook.
    """

    job: Job
    callbacks: CallbackList
    history: History
    validate: Optional[Callable[[int, CallbackList], Dict[str, float]]]
    stopped: Callable[[], bool]
    _non_finite: Optional[NonFiniteLossError] = dataclasses.field(default=None, init=False)

    def run(self, first_epoch: int, epochs: int) -> None:
        """Epochs from ``first_epoch`` up to, not including, ``epochs``."""
        self.callbacks.check_monitors()
        logs: Dict[str, float] = {}
        try:
            self.callbacks.call("on_train_begin", {})
            for epoch in range(first_epoch, epochs):
                self.callbacks.call("on_epoch_begin", epoch, {})
                # Callbacks may have changed the module or the optimizer.
                self.job.program.prepare(self.job.first)
                logs = self._epoch(epoch)
                self.job.program.publish()
                self._end_epoch(epoch, logs)
                if self._ending():
                    break
        finally:
            try:
                self.callbacks.call("on_train_end", logs)
            finally:
                self.callbacks.call("close")

    def _ending(self) -> bool:
        return self._non_finite is not None or self.stopped()

    def _end_epoch(self, epoch: int, logs: Dict[str, float]) -> None:
        try:
            self.callbacks.call("on_epoch_end", epoch, logs)
        finally:
            # A callback before it has failed; the epoch has been trained all the same.
            if epoch not in self.history.epoch:
                self.history.append(epoch, logs)

    def _epoch(self, epoch: int) -> Dict[str, float]:
        self.job.meter.reset()
        for batch in self.job.feed.executions(epoch, self.job.plan):
            self._execution(batch, epoch)
            if self._ending():
                break
        logs = dict(self.job.meter.values())
        if self._non_finite is not None:
            logs["loss"] = self._non_finite.value
        if self.validate is not None:
            validation = self.validate(epoch, self.callbacks)
            logs.update({f"val_{name}": value for name, value in validation.items()})
        return logs

    def _execution(self, batch: CombinedBatch, epoch: int) -> None:
        self.callbacks.call("on_train_batch_begin", self.job.meter.updates, {})
        try:
            with deferred():
                anchors = self.job.program.run(batch)
        except NonFiniteLossError as error:
            error.epoch = epoch
            if not self.callbacks.ask("on_non_finite", error):
                raise
            self._non_finite = error
            return
        self.job.meter.add(batch, anchors)
        self.callbacks.call(
            "on_train_batch_end", self.job.meter.updates - 1, RunningLogs(self.job.meter)
        )


def evaluate(job: Job, callbacks: CallbackList, epoch: int = 0) -> Dict[str, float]:
    """Exact means over all samples of the loader."""
    meter = job.meter
    meter.reset()
    callbacks.call("on_test_begin", {})
    for batch in job.feed.executions(epoch, job.plan):
        callbacks.call("on_test_batch_begin", meter.updates, {})
        meter.add(batch, job.program.run(batch))
        callbacks.call("on_test_batch_end", meter.updates - 1, RunningLogs(meter))
    values = dict(meter.values())
    callbacks.call("on_test_end", values)
    return values


def predict(job: Job, callbacks: CallbackList) -> Any:
    """The outputs of all samples in the loader's order, in the module's own structure.

    Raises:
        DataError: an output has no row for each sample.
    """
    callbacks.call("on_predict_begin", {})
    rows: List[List[Any]] = []
    structure = None
    passes = 0
    for batch in job.feed.executions(0, job.plan):
        callbacks.call("on_predict_batch_begin", passes, {})
        anchors = job.program.run(batch)
        for micro_batch, outputs in zip(batch.micro_batches, anchors.outputs):
            check_rows(outputs, micro_batch.size)
            leaves, structure = tree.flatten(outputs)
            rows.append(leaves)
        passes += -(-len(batch.micro_batches) // job.plan.micro_batches_per_update)
        callbacks.call("on_predict_batch_end", passes - 1, {})
    assert structure is not None
    joined = [_join(list(column)) for column in zip(*rows)]
    callbacks.call("on_predict_end", {})
    return tree.unflatten(joined, structure)


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
