"""Loss and metrics of an epoch, exact whatever the plan."""

from __future__ import annotations

import math
import weakref
from typing import Any, Dict, Iterable, Iterator, List, Mapping, Optional, Sequence, Tuple, Union

from ipufit.core.batch import CombinedBatch, MicroBatch, loss_counts
from ipufit.core.logged_values import LogRule, Running, merge_rules
from ipufit.core.plan import Plan
from ipufit.engines.program import ExecutionResult
from ipufit.losses import Loss
from ipufit.metrics.metric_set import MetricInputs, MetricSet
from ipufit.processes import Processes
from ipufit.utils.names import check_log_name

# How often the value of a micro-batch counts in a sum, and how much that weighs in a mean. They
# differ for a loss that is a sum: a smaller micro-batch counts like a full one.
_Share = Tuple[float, float]


class EpochMetrics:
    """The exact mean loss, the metrics and the logged values of one epoch.

    Args:
        metrics: a set of their own.
        plan: of the program that is measured.
        loss: normal form; None when predicting.
        logged: names that module and loss log, as far as they are known, or their rules by name.
        settings: names under which the program speaks of itself.

    Attributes:
        metrics, settings: as given.
        samples: seen so far in this epoch.
        updates: done so far in this epoch, skipped ones included.
        skipped: updates left out because their gradient was not finite.
        last_loss: mean over the last execution.
        by_update: of names logged with ``on_update``, the value of every update, nan for one that
            logged none.
        settings_now: that the program reported after the last execution.
    """

    def __init__(
        self,
        metrics: MetricSet,
        plan: Plan,
        loss: Loss,
        logged: Union[Iterable[str], Mapping[str, LogRule]] = (),
        settings: Sequence[str] = (),
    ) -> None:
        self.settings = settings
        self._last_logs: Optional[weakref.ReferenceType[RunningLogs]] = None
        self._declared = (
            dict(logged) if isinstance(logged, Mapping) else dict.fromkeys(logged, LogRule())
        )
        self.metrics = metrics
        self._plan = plan
        self._loss = loss
        self.reset()

    @property
    def names(self) -> List[str]:
        """Keys of :meth:`values`, but for the settings."""
        names = dict.fromkeys(["loss", *self._declared, *self.metrics.names])
        rules = {**self._declared, **self._rules}
        return [name for name in names if not rules.get(name, LogRule()).is_none]

    @property
    def directions(self) -> Dict[str, str]:
        """By name "min" or "max", whichever is best, for values where it is known."""
        better = self.metrics.higher_is_better
        losses = dict.fromkeys(["loss", *self._loss.part_names], "min")
        return {**losses, **{n: "max" if up else "min" for n, up in better.items()}}

    def reset(self) -> None:
        """Forget all values, before an epoch."""
        self._settle()
        self.samples = self.updates = self.skipped = 0
        self.by_update: Dict[str, List[float]] = {}
        self._total = self._weight = 0.0
        self.last_loss = float("nan")
        self._logged: Dict[str, Running] = {}
        self._rules: Dict[str, LogRule] = {}
        self.settings_now: Dict[str, float] = {}
        self._values: Optional[Dict[str, float]] = None
        self.metrics.reset()

    def state_dict(self) -> Dict[str, Any]:
        """Return how far the epoch is, for a checkpoint.

        Raises:
            MetricError: a metric can't say what it has seen.
        """
        return {
            "samples": self.samples,
            "updates": self.updates,
            "skipped": self.skipped,
            "total": self._total,
            "weight": self._weight,
            "last_loss": self.last_loss,
            "by_update": {name: list(values) for name, values in self.by_update.items()},
            "logged": {name: running.state_dict() for name, running in self._logged.items()},
            "settings": dict(self.settings_now),
            "metrics": self.metrics.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned."""
        self.reset()
        self.samples, self.updates = int(state["samples"]), int(state["updates"])
        self.skipped, self.last_loss = int(state["skipped"]), float(state["last_loss"])
        self._total, self._weight = float(state["total"]), float(state["weight"])
        by_update = state["by_update"].items()
        self.by_update = {str(name): [float(v) for v in values] for name, values in by_update}
        self._logged = {str(name): Running.of(running) for name, running in state["logged"].items()}
        self._rules = {name: running.rule for name, running in self._logged.items()}
        self.settings_now = {str(name): float(value) for name, value in state["settings"].items()}
        self.metrics.load_state_dict(state["metrics"])

    def add(self, batch: CombinedBatch, anchors: ExecutionResult) -> None:
        """Add the results of an execution."""
        self._settle()
        by_update = batch.sizes(self._plan)
        sizes = [size for update in by_update for size in update]
        counted = anchors.counts.tolist() if anchors.counts is not None else None
        summed = self._loss.reduction == "sum"
        counts = counted or loss_counts(sizes, self._plan.micro_batch_size, summed)
        # One after another, so that the sum has the same bits however an epoch is cut into
        # executions.
        total = 0.0
        for count, loss in zip(counts, anchors.losses.tolist()):
            self._total += count * loss
            total += count * loss
        for weight in counted or sizes:
            self._weight += weight
        weight = sum(counted or sizes)
        self.last_loss = total / weight if weight else float("nan")
        lengths = [len(update) for update in by_update]
        shares = [(s, s) for s in sizes], [*zip(counts, counted or sizes)]
        self._add_logged(anchors, *shares, lengths)
        self.samples += sum(sizes)
        self.updates += len(by_update)
        self.skipped += anchors.skipped
        self.settings_now.update(anchors.settings)
        self._values = None
        if self.metrics:
            self.metrics.update_all(self._metric_inputs(batch, anchors))

    def _metric_inputs(self, batch: CombinedBatch, anchors: ExecutionResult) -> List[MetricInputs]:
        """Return what metrics see of the micro-batches whose outputs came back."""
        inputs: List[MetricInputs] = []
        structure, is_target_last = None, False
        takes_fields = self.metrics.takes_fields
        for place, outputs in zip(anchors.places, anchors.outputs):
            micro_batch = batch.micro_batches[place]
            # There are thousands of them in an epoch, and they are alike.
            if micro_batch.structure is not structure:
                structure = micro_batch.structure
                is_target_last = _is_target_last(micro_batch, self._loss)
            if is_target_last:
                target, sample_weight = micro_batch.leaves[-1], None
            else:
                target, sample_weight = metric_target(micro_batch, self._loss)
            fields = metric_fields(micro_batch, target) if takes_fields else {}
            inputs.append((outputs, target, micro_batch.size, sample_weight, fields))
        return inputs

    def _add_logged(
        self,
        anchors: ExecutionResult,
        sizes: Sequence[_Share],
        counts: Sequence[_Share],
        lengths: Sequence[int],
    ) -> None:
        self._rules = merge_rules(self._rules, anchors.rules)
        for name, rule in self._rules.items():
            if name not in self._logged:
                check_log_name(name, self.metrics.names, rule.exact)
                self._logged[name] = Running(rule)
            shares = counts if rule.counted else sizes
            values = [(values.get(name), share) for values, share in zip(anchors.logged, shares)]
            _add_all(self._logged[name], values)
            if rule.on_update:
                self._add_by_update(name, rule, values, lengths)

    def _add_by_update(
        self,
        name: str,
        rule: LogRule,
        values: Sequence[Tuple[Optional[float], _Share]],
        lengths: Sequence[int],
    ) -> None:
        """One value for every update, nan where nothing was logged."""
        by_update = self.by_update.setdefault(name, [math.nan] * self.updates)
        first = 0
        for length in lengths:
            one = Running(rule)
            _add_all(one, values[first : first + length])
            by_update.append(one.value)
            first += length

    @property
    def loss(self) -> float:
        """Mean over the samples so far, or over what the loss counts.

        Where losses take turns, the sum of the means of all, each over the updates that it has.
        """
        parts = self._loss.part_names if self._loss.turns else ()
        if parts:
            return sum(self._logged[name].value for name in parts if name in self._logged)
        return self._total / self._weight if self._weight else float("nan")

    @property
    def sums(self) -> Tuple[float, float]:
        """Sums that :attr:`loss` is made of: the losses times their weights, and the weights."""
        return self._total, self._weight

    def values_without_metrics(self) -> Dict[str, float]:
        """Return the loss, the logged values and the settings, which cost nothing to work out."""
        values = {"loss": self.loss}
        values.update((name, running.value) for name, running in self._logged.items())
        # A validation_step of Lightning's may have no loss, and says so under its name.
        values = {
            n: v for n, v in values.items() if n not in self._rules or not self._rules[n].is_none
        }
        values.update(self.settings_now)
        if "loss_scale" in self.settings_now:
            values["skipped_updates"] = self.skipped
        return values

    def running(self) -> RunningLogs:
        """The values so far, for callbacks; somebody who keeps them has those of this moment."""
        logs = RunningLogs(self)
        self._last_logs = weakref.ref(logs)
        return logs

    def _settle(self) -> None:
        """Before the values change: work out those that somebody has kept."""
        logs = self._last_logs() if self._last_logs is not None else None
        self._last_logs = None
        if logs is not None:
            logs.settle()

    def values(self) -> Dict[str, float]:
        """Loss, logged values and metrics over the samples so far.

        Of several processes the metrics are those of the samples of this one.
        """
        if self._values is None:
            self._values = self._with(self.metrics)
        return self._values

    def reduce_across_ranks(self, processes: Processes) -> Dict[str, float]:
        """Return :meth:`values` over the samples of all processes, which call at the same time."""
        if processes.is_distributed:
            return self._with(self.metrics.whole(processes))
        return dict(self.values())

    def _with(self, metrics: MetricSet) -> Dict[str, float]:
        first = self.values_without_metrics()
        names = (*self.settings_now, "skipped_updates")
        last = {name: first.pop(name) for name in names if name in first}
        return {**first, **metrics.compute(), **last}


def _add_all(running: Running, values: Sequence[Tuple[Optional[float], _Share]]) -> None:
    for value, (times, weight) in values:
        if value is not None:
            running.add(value, times, weight)


def metric_target(micro_batch: MicroBatch, loss: Loss) -> Tuple[Any, Any]:
    """Return the target that metrics compare with, and the weight of each sample.

    The target, or what a module with its own loss gets last; of a batch that goes to the user's
    code as it is, its second part.
    """
    args, kwargs, target, sample_weight = micro_batch.unpack()
    if not loss.in_module:
        return loss.target_of(target), sample_weight
    if loss.in_module == "whole":
        (batch,) = args
        args, kwargs = ((), dict(batch)) if isinstance(batch, Mapping) else (tuple(batch)[1:2], {})
        if isinstance(loss.targets, str) and loss.targets in kwargs:
            return kwargs[loss.targets], sample_weight
    if args:
        return args[-1], sample_weight
    return kwargs.get("labels", kwargs.get("target")), sample_weight


def metric_fields(micro_batch: MicroBatch, target: object) -> Dict[str, object]:
    """Return everything in a batch that has a name, the targets among it."""
    named = target if isinstance(target, Mapping) else {}
    return {**micro_batch.extras, **named, **micro_batch.unpack()[1]}


def _is_target_last(micro_batch: MicroBatch, loss: Loss) -> bool:
    """Return True if the last tensor is the target, and all samples count the same."""
    _, _, target, weight = micro_batch.structure.children
    return not loss.in_module and target.is_leaf and weight.is_none


class RunningLogs(Mapping[str, float]):
    """Values so far; metrics are worked out when somebody looks, at the latest when they change."""

    def __init__(self, meter: EpochMetrics) -> None:
        self._meter = meter
        self._settled: Optional[Dict[str, float]] = None

    def settle(self) -> None:
        """Work everything out, and look at the meter no more."""
        self._settled = self._all()

    def latest(self) -> RunningLogs:
        """The values as they are now."""
        return RunningLogs(self._meter)

    def copy(self) -> Dict[str, float]:
        """A dict of the same values."""
        return dict(self._all())

    def __repr__(self) -> str:
        return repr(self._all())

    def _cheap(self) -> Dict[str, float]:
        if self._settled is not None:
            return self._settled
        meter = self._meter
        return {
            **meter.values_without_metrics(),
            "updates": meter.updates,
            "samples": meter.samples,
        }

    def _all(self) -> Dict[str, float]:
        if self._settled is not None:
            return self._settled
        return {**self._meter.values(), **self._cheap()}

    def __bool__(self) -> bool:
        # Counting the values would work the metrics out.
        return True

    def __getitem__(self, name: str) -> float:
        cheap = self._cheap()
        return cheap[name] if name in cheap else self._all()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._all())

    def __len__(self) -> int:
        return len(self._all())
