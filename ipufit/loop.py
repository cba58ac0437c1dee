"""Epochs, executions, and when callbacks fire: the only loop in the project."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any, Callable, Dict, Iterator, List, Mapping, Optional

import torch
from torch import Tensor

from ipufit import tree
from ipufit.callbacks import CallbackList
from ipufit.data.batches import Unpacker, executions
from ipufit.data.source import Source
from ipufit.errors import DataError, NonFiniteLossError
from ipufit.history import History
from ipufit.interrupts import deferred
from ipufit.losses import Loss
from ipufit.metrics import MetricSet
from ipufit.plan import Plan
from ipufit.program import Anchors, CombinedBatch, MicroBatch, Mode, Program, loss_counts
from ipufit.randomness import DataStream

__all__ = ["Feed", "Fit", "Meter", "check_rows", "evaluate", "metric_target", "predict"]

_NO_BATCH = object()


class Feed:
    """One loader, cut into the executions of a plan.

    Args:
        source: the loader.
        mode: train, evaluate or predict.
        own_loss: whether the module computes its own loss.
        seed: of the random numbers that the loader draws from torch in this process.
        domain: keeps them apart from those of other loaders.
    """

    def __init__(self, source: Source, mode: Mode, own_loss: bool, seed: int, domain: str) -> None:
        self._source = source
        self._unpack = Unpacker(source, mode, own_loss)
        self._seed = seed
        self._domain = domain
        self._ahead: Optional[Iterator[Any]] = None
        self._ahead_epoch = -1

    def _open(self, epoch: int) -> Iterator[Any]:
        return self._source.epoch(DataStream(self._seed, self._domain, epoch))

    def peek(self, epoch: int) -> MicroBatch:
        """The first micro-batch of an epoch, which starts here and goes on where it is read next.

        Raises:
            DataError: there is none, or the program can't take it.
        """
        batches = self._open(epoch)
        first = next(batches, _NO_BATCH)
        if first is _NO_BATCH:
            raise self._source.no_batches(epoch)
        micro_batch = self._unpack(first, 0)
        self._ahead = itertools.chain([first], batches)
        self._ahead_epoch = epoch
        return micro_batch

    @property
    def micro_batch_size(self) -> Optional[int]:
        """The loader's, or that of the first batch seen."""
        return self._unpack.micro_batch_size

    def executions(self, epoch: int, plan: Plan) -> Iterator[CombinedBatch]:
        """All of an epoch's executions, the smaller last one included.

        Raises:
            DataError: the epoch has no batch, or one that the program can't take.
        """
        batches, self._ahead = self._ahead, None
        if batches is None or self._ahead_epoch != epoch:
            batches = self._open(epoch)
        empty = True
        for batch in executions(batches, self._unpack, plan, self._source.reuses_memory):
            empty = False
            yield batch
        if empty:
            raise self._source.no_batches(epoch)


class Meter:
    """The exact mean loss and the metrics of one epoch.

    Args:
        metrics: a set of their own.
        plan: of the program that is measured.
        loss: normal form; None when predicting.
    """

    def __init__(self, metrics: MetricSet, plan: Plan, loss: Loss) -> None:
        self._metrics = metrics
        self._plan = plan
        self._loss = loss
        self.samples = 0
        self.updates = 0
        self._total = 0.0
        self._values: Optional[Dict[str, float]] = None

    def reset(self) -> None:
        """A new epoch."""
        self.samples = self.updates = 0
        self._total = 0.0
        self._values = None
        self._metrics.reset()

    def add(self, batch: CombinedBatch, anchors: Anchors) -> None:
        """What an execution gave."""
        sizes = [micro_batch.size for micro_batch in batch.micro_batches]
        summed = self._loss.reduction == "sum"
        counts = loss_counts(sizes, self._plan.micro_batch_size, summed)
        # One after another, so that the sum has the same bits however an epoch is cut into
        # executions.
        for count, loss in zip(counts, anchors.losses.tolist()):
            self._total += count * loss
        self.samples += sum(sizes)
        self.updates += -(-len(sizes) // self._plan.micro_batches_per_update)
        self._values = None
        for micro_batch, outputs in zip(batch.micro_batches, anchors.outputs):
            target = metric_target(micro_batch, self._loss)
            self._metrics.update(outputs, target, micro_batch.size)

    @property
    def loss(self) -> float:
        """Mean over the samples so far."""
        return self._total / self.samples if self.samples else float("nan")

    def values(self) -> Dict[str, float]:
        """Loss and metrics over the samples so far."""
        if self._values is None:
            self._values = {"loss": self.loss, **self._metrics.compute()}
        return self._values


def metric_target(micro_batch: MicroBatch, loss: Loss) -> Any:
    """What metrics are held against: the target, or what a module with its own loss gets last."""
    args, kwargs, target = micro_batch.unpack()
    if not loss.in_module:
        return target
    if args:
        return args[-1]
    return kwargs.get("labels", kwargs.get("target"))


class _RunningLogs(Mapping[str, float]):
    """Values so far; metrics are worked out when somebody looks."""

    def __init__(self, meter: Meter) -> None:
        self._meter = meter

    def _cheap(self) -> Dict[str, float]:
        meter = self._meter
        return {"loss": meter.loss, "updates": meter.updates, "samples": meter.samples}

    def _all(self) -> Dict[str, float]:
        return {**self._meter.values(), **self._cheap()}

    def __getitem__(self, name: str) -> float:
        cheap = self._cheap()
        return cheap[name] if name in cheap else self._meter.values()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._all())

    def __len__(self) -> int:
        return len(self._all())


@dataclasses.dataclass
class Fit:
    """One call of ``fit``, ready to run.

    Attributes:
        program: prepared for training.
        feed: its batches.
        plan: its batch algebra.
        meter: training loss and metrics.
        callbacks: told of everything.
        history: filled epoch by epoch.
        validate: evaluates an epoch, or None.
        stopped: whether a callback has asked to stop.
    """

    program: Program
    feed: Feed
    plan: Plan
    meter: Meter
    callbacks: CallbackList
    history: History
    validate: Optional[Callable[[int], Dict[str, float]]]
    stopped: Callable[[], bool]

    def run(self, first_epoch: int, epochs: int) -> None:
        """Epochs from ``first_epoch`` up to, not including, ``epochs``."""
        self.callbacks.call("on_train_begin", {})
        logs: Dict[str, float] = {}
        try:
            for epoch in range(first_epoch, epochs):
                self.callbacks.call("on_epoch_begin", epoch, {})
                logs = self._epoch(epoch)
                self.history.append(epoch, logs)
                self.callbacks.call("on_epoch_end", epoch, logs)
                if self.stopped():
                    break
        finally:
            self.callbacks.call("on_train_end", logs)

    def _epoch(self, epoch: int) -> Dict[str, float]:
        self.meter.reset()
        for batch in self.feed.executions(epoch, self.plan):
            self._execution(batch, epoch)
            if self.stopped():
                break
        logs = dict(self.meter.values())
        if self.validate is not None:
            validation = self.validate(epoch)
            logs.update({f"val_{name}": value for name, value in validation.items()})
        return logs

    def _execution(self, batch: CombinedBatch, epoch: int) -> None:
        self.callbacks.call("on_train_batch_begin", self.meter.updates, {})
        try:
            with deferred():
                anchors = self.program.run(batch)
        except NonFiniteLossError as error:
            error.epoch = epoch
            raise
        self.meter.add(batch, anchors)
        self.callbacks.call("on_train_batch_end", self.meter.updates - 1, _RunningLogs(self.meter))


def evaluate(
    program: Program, feed: Feed, plan: Plan, meter: Meter, callbacks: CallbackList, epoch: int = 0
) -> Dict[str, float]:
    """Exact means over all samples of the loader."""
    meter.reset()
    callbacks.call("on_test_begin", {})
    for batch in feed.executions(epoch, plan):
        callbacks.call("on_test_batch_begin", meter.updates, {})
        meter.add(batch, program.run(batch))
        callbacks.call("on_test_batch_end", meter.updates - 1, _RunningLogs(meter))
    values = dict(meter.values())
    callbacks.call("on_test_end", values)
    return values


def predict(program: Program, feed: Feed, plan: Plan, callbacks: CallbackList) -> Any:
    """The outputs of all samples in the loader's order, in the module's own structure.

    Raises:
        DataError: an output has no row for each sample.
    """
    callbacks.call("on_predict_begin", {})
    rows: List[List[Any]] = []
    structure = None
    passes = 0
    for batch in feed.executions(0, plan):
        callbacks.call("on_predict_batch_begin", passes, {})
        anchors = program.run(batch)
        for micro_batch, outputs in zip(batch.micro_batches, anchors.outputs):
            check_rows(outputs, micro_batch.size)
            leaves, structure = tree.flatten(outputs)
            rows.append(leaves)
        passes += -(-len(batch.micro_batches) // plan.micro_batches_per_update)
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
