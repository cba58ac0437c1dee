"""Loss and metrics of an epoch, exact whatever the plan."""

from __future__ import annotations

from typing import Any, Dict, Iterator, List, Mapping, Optional

from ipufit.losses import Loss
from ipufit.metrics import MetricSet
from ipufit.plan import Plan
from ipufit.program import Anchors, CombinedBatch, MicroBatch, loss_counts

__all__ = ["Meter", "RunningLogs", "metric_target"]


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

    @property
    def names(self) -> List[str]:
        """Keys of :meth:`values`."""
        return ["loss", *self._metrics.names]

    @property
    def directions(self) -> Dict[str, str]:
        """Whether "min" or "max" of a value is the best, for those where that is known."""
        better = self._metrics.higher_is_better
        return {"loss": "min", **{n: "max" if up else "min" for n, up in better.items()}}

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
    args, kwargs, target, _ = micro_batch.unpack()
    if not loss.in_module:
        return target
    if args:
        return args[-1]
    return kwargs.get("labels", kwargs.get("target"))


class RunningLogs(Mapping[str, float]):
    """Values so far; metrics are worked out when somebody looks."""

    def __init__(self, meter: Meter) -> None:
        self._meter = meter

    def _cheap(self) -> Dict[str, float]:
        meter = self._meter
        return {"loss": meter.loss, "updates": meter.updates, "samples": meter.samples}

    def _all(self) -> Dict[str, float]:
        return {**self._meter.values(), **self._cheap()}

    def __bool__(self) -> bool:
        # Counting the values would work the metrics out.
        return True

    def __getitem__(self, name: str) -> float:
        cheap = self._cheap()
        return cheap[name] if name in cheap else self._meter.values()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._all())

    def __len__(self) -> int:
        return len(self._all())
