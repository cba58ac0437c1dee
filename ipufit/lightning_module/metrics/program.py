"""A program whose outputs update the metric objects of a LightningModule."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import warnings
from typing import Any, Dict, Iterator, List, Mapping, Sequence

import torch
from torch import Tensor

from ipufit.core.batch import CombinedBatch, MicroBatch
from ipufit.core.logged_values import merge_rules
from ipufit.engines.program import (
    ExecutionResult,
    ForwardingProgram,
    Prepared,
    Program,
    ProgramSpec,
)
from ipufit.errors import ConfigurationError, MetricError
from ipufit.lightning_module.metrics.objects import (
    ModuleMetrics,
    Objects,
    as_number,
    metric_at,
    without_sync,
)
from ipufit.lightning_module.metrics.recording import MetricKey, find_calls
from ipufit.metrics.kinds import refuse_unjoined
from ipufit.metrics.values import shapes
from ipufit.utils import tree
from ipufit.utils.random_streams import LOCK
from ipufit.utils.state import fork_rng

__all__ = ["MeasuredProgram"]


class MeasuredProgram(ForwardingProgram):
    """Program whose outputs for metrics update the metric objects of a module.

    Args:
        program: the other one.
        metrics: of the module.
        role: whose step it is.
        spec: what the program was built from.
    """

    def __init__(
        self, program: Program, metrics: ModuleMetrics, role: str, spec: ProgramSpec
    ) -> None:
        super().__init__(program)
        self._metrics = metrics
        self._role = role
        self._spec = spec

    def prepare(self, example: MicroBatch) -> Prepared:
        """Build the program, and try the metrics on copies.

        Raises:
            MetricError: a metric can't take what it is called with.
            ConfigurationError: outputs are left out, so that metrics would miss some.
        """
        prepared = self._program.prepare(example)
        key = find_calls(prepared.outputs)
        if key is None:
            return prepared
        outputs = dict(prepared.outputs)
        tensors = outputs.pop(key)
        self._metrics.learn(self._role, key)
        self._check(key)
        if self._metrics.is_new(self._role, key):
            _try(key, self._metrics.turn_to(self._role), tensors)
        rules = merge_rules(prepared.rules, {value.name: value.rule for value in key.values})
        return Prepared(outputs, rules)

    def _check(self, key: MetricKey) -> None:
        outputs = self._spec.config.outputs
        if self._role == "train" and outputs.mode != "all":
            raise ConfigurationError(
                f"self.{key.calls[0].path} is updated with what the program hands out for every "
                f"micro-batch, which needs outputs='all', got {outputs.mode!r}. Leave outputs out."
            )
        if self._spec.processes.is_distributed:
            for path, metric in self._metrics.called(self._role).items():
                refuse_unjoined(metric, f"self.{path}", self._spec.processes.num_processes)

    def run(self, batch: CombinedBatch) -> ExecutionResult:
        """Run one execution, which logs the metric values of its micro-batches too.

        Raises:
            MetricError: a metric can't take what it is called with.
        """
        anchors = self._program.run(batch)
        if not any(map(find_calls, anchors.outputs)):
            return anchors
        keys = [find_calls(outputs) for outputs in anchors.outputs]
        for learnt in filter(None, keys):
            self._metrics.learn(self._role, learnt)
        objects = self._metrics.turn_to(self._role)
        logged: List[Mapping[str, float]] = list(anchors.logged) or [{} for _ in anchors.losses]
        rules, outputs_without_metrics = dict(anchors.rules), []
        for place, outputs, key in zip(anchors.places, anchors.outputs, keys):
            outputs = dict(outputs)
            if key is not None:
                values = _update_metrics(key, objects, outputs.pop(key))
                logged[place] = {**logged[place], **values}
                rules = merge_rules(rules, {value.name: value.rule for value in key.values})
            outputs_without_metrics.append(outputs)
        return dataclasses.replace(
            anchors, outputs=outputs_without_metrics, logged=logged, rules=rules
        )


def _update_metrics(key: MetricKey, objects: Objects, tensors: Any) -> Dict[str, float]:
    """Update the metrics with a micro-batch, and return the values that are logged of it."""
    wanted = {value.call for value in key.values}
    results: Dict[int, Any] = {}
    for number_of, call in enumerate(key.calls):
        metric = metric_at(objects, call.path)
        args, kwargs = call.arguments(tuple(_beside(metric, each) for each in tensors))
        with _named_failure(f"self.{call.path}", args, kwargs), torch.no_grad(), without_sync(
            metric
        ):
            if number_of in wanted:
                results[number_of] = metric(*args, **kwargs)
            else:
                metric.update(*args, **kwargs)
    values = {}
    for value in key.values:
        result = results[value.call]
        values[value.name] = as_number(
            result if value.key is None else result[value.key], value.name
        )
    return values


def _beside(metric: Any, tensor: Tensor) -> Tensor:
    """Move a tensor to the device of a metric's state."""
    device = getattr(metric, "device", None)
    if device is None:
        first = next(iter(metric.values(copy_state=False)), None)
        device = getattr(first, "device", tensor.device)
    return tensor.to(device)


def _try(key: MetricKey, objects: Objects, tensors: Sequence[Tensor]) -> None:
    """Find out, on copies and before any training, whether metrics can take such tensors.

    Raises:
        MetricError: one can't, or its value is no number.
    """
    with warnings.catch_warnings(), LOCK, fork_rng():
        warnings.simplefilter("ignore")
        trial = copy.deepcopy(dict(objects))
        for metric in trial.values():
            metric.reset()
        filled = tree.map_leaves(_filled, tuple(tensors))
        _update_metrics(key, trial, filled)
        for name, path in key.epochs.items():
            try:
                value = metric_at(trial, path).compute()
            except Exception:
                # Of so few samples it may have no value.
                continue
            as_number(value, name)


def _filled(leaf: Tensor) -> Tensor:
    if leaf.is_floating_point() or leaf.is_complex():
        return torch.rand(leaf.shape, dtype=leaf.dtype)
    return torch.zeros(leaf.shape, dtype=leaf.dtype)


@contextlib.contextmanager
def _named_failure(shown: str, args: Any, kwargs: Any) -> Iterator[None]:
    """Turn whatever a metric raises into an error that names it and the shapes."""
    try:
        yield
    except Exception as error:
        shown_args = [shapes(each) for each in (*args, *kwargs.values())]
        raise MetricError(
            f"{shown} must take what the step calls it with, got "
            f"{', '.join(shown_args) or 'nothing'}, and failed with {type(error).__name__}: "
            f"{str(error).rstrip('.')}. Call it with what its update takes."
        ) from error
