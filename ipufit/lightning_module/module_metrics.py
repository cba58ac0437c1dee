"""Metric objects of a LightningModule, with a state for each step, and their values over epochs.

The program hands out what a step calls them with, and the host updates them after each execution.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import math
import warnings
from typing import Any, Dict, Iterator, List, Mapping, Optional, Sequence, Set, Tuple

import torch
from torch import Tensor, nn

from ipufit.core.batch import CombinedBatch, MicroBatch
from ipufit.core.logged_values import merge_rules
from ipufit.engines import Program
from ipufit.engines.program import ExecutionResult, ForwardingProgram, Prepared, ProgramSpec
from ipufit.errors import ConfigurationError, MetricError
from ipufit.lightning_module.inspection import MetricObject, is_collection, is_metric, metrics_in
from ipufit.lightning_module.metric_calls import MetricKey, find_calls
from ipufit.lightning_module.steps import Steps
from ipufit.metrics.kinds import Metric, is_plain, merge_states, refuse_unjoined, restore, stored
from ipufit.metrics.metric_set import random_like
from ipufit.metrics.values import number_of, shapes
from ipufit.processes import Processes
from ipufit.utils import tree
from ipufit.utils.random_streams import LOCK
from ipufit.utils.state import fork_rng, replaced

Objects = Mapping[str, MetricObject]

# What to do about a logged metric that computes several numbers.
_BY_PARTS = "compute it in an on_..._epoch_end and log its parts"


class ModuleMetrics:
    """Metric objects of a module, whose state is that of the step that ran last.

    A metric that several steps call, such as those of training and validation, counts apart in
    each.

    Args:
        module: the LightningModule.
        by_trainer: whether a Trainer computes and resets them, for which none counts apart.
    """

    def __init__(self, module: nn.Module, by_trainer: bool = False) -> None:
        self._module = module
        self._by_trainer = by_trainer
        self._objects: Objects = {}
        self._known: Dict[str, Dict[MetricKey, MetricKey]] = {}
        self._tried: Set[Tuple[str, MetricKey]] = set()
        self._held: Dict[str, str] = {}
        self._aside: Dict[Tuple[str, str], Dict[str, Any]] = {}
        self._late: List[str] = []

    def find(self) -> Objects:
        """Return the metrics of the module by path, without those inside of others."""
        self._objects = dict(metrics_in(self._module, inside=False))
        return self._objects

    def begin(self, role: str) -> None:
        """Forget what a step did: a new program of it is made."""
        self.find()
        self._known[role] = {}

    def learn(self, role: str, key: MetricKey) -> None:
        """Learn from a key what the step does with a micro-batch of some size."""
        self._known.setdefault(role, {})[key] = key

    def is_new(self, role: str, key: MetricKey) -> bool:
        """Return True for the first question about a key."""
        there = (role, key) in self._tried
        self._tried.add((role, key))
        return not there

    def epochs(self, role: str) -> Dict[str, str]:
        """Return the paths of the metrics whose values over the epoch a step logs, by name."""
        return {n: path for key in self._known.get(role, ()) for n, path in key.epochs.items()}

    def called(self, role: str) -> Objects:
        """Return the metrics of :meth:`find` that a step calls."""
        calls = {call.path for key in self._known.get(role, ()) for call in key.calls}
        return {p: m for p, m in self._objects.items() if any(_is_in(each, p) for each in calls)}

    def turn_to(self, role: str) -> Objects:
        """Give the metrics that the step calls the state of that step.

        Raises:
            ConfigurationError: another step calls it too, and nobody knows where it keeps its
                state.
        """
        objects = self.called(role)
        for path, metric in objects.items() if not self._by_trainer else ():
            before = self._held.setdefault(path, role)
            if before == role:
                continue
            if not is_plain(metric):
                raise ConfigurationError(
                    f"self.{path} ({type(metric).__name__}) is called in the {before} step and in "
                    f"the {role} step, but can't count them separately. Create one metric for "
                    "each."
                )
            self._aside[path, before] = stored(metric, path)
            metric.reset()
            if (path, role) in self._aside:
                restore(metric, self._aside.pop((path, role)))
            self._held[path] = role
        return objects

    def logged(self, role: str) -> Iterator[Tuple[str, MetricObject]]:
        """Yield the metrics that a step logs, by the names of values, as a Trainer takes them."""
        objects = self.called(role)
        for collection in filter(is_collection, objects.values()):
            # Members that share one state get copies of it, as log_dict makes them.
            collection.values(copy_state=True)
        for name, path in self.epochs(role).items():
            yield name, _inside(objects, path)

    def reset(self, role: str) -> None:
        """Reset the metrics that are logged, as Lightning does at the end of an epoch."""
        objects = self.turn_to(role)
        logged = {path for key in self._known.get(role, ()) for path in key.resets}
        for path in sorted({*logged, *self._late}):
            _metric_at(objects if path in logged else self._objects, path).reset()
        self._late = []

    def finish(self) -> None:
        """Reset the metrics at the end of training or an evaluation."""
        for role in self._known:
            self.reset(role)

    def computed(self, name: str, metric: MetricObject) -> float:
        """The value of one that is logged at the end of an epoch, after which it is reset.

        Raises:
            ConfigurationError: it is not the module's.
        """
        paths = {id(each): path for path, each in metrics_in(self._module)}
        if id(metric) not in paths or is_collection(metric):
            raise ConfigurationError(
                f"self.log({name!r}) must get a metric that is an attribute of the LightningModule,"
                f" got {type(metric).__name__}. Make it one in __init__; a collection is for "
                "self.log_dict."
            )
        self._late.append(paths[id(metric)])
        return number_of(f"self.{paths[id(metric)]}", metric.compute(), _BY_PARTS)

    @contextlib.contextmanager
    def shown(self, role: str, processes: Optional[Processes] = None) -> Iterator[None]:
        """Give the objects the state of a step, in the block, for hooks of the module.

        Args:
            role: whose.
            processes: of several, which all come here, the state is that of all; None for the own.
        """
        objects = self.turn_to(role)
        local_states: Dict[str, Dict[str, Any]] = {}
        if processes is not None and processes.is_distributed and objects:
            local_states = {path: stored(metric, path) for path, metric in objects.items()}
            states = processes.gather(local_states, "metrics")
            for path, metric in objects.items():
                restore(metric, merge_states(metric, [each[path] for each in states], path))
        with contextlib.ExitStack() as stack:
            for metric in self._objects.values():
                stack.enter_context(_without_sync(metric))
            yield
        for path, state in local_states.items():
            # A hook may have reset it; else it goes on from its own part.
            if _has_seen(objects[path]):
                restore(objects[path], state)


def _metric_at(objects: Objects, path: str) -> MetricObject:
    """Return a metric by its path, which may lie inside one of these objects."""
    for outer, metric in objects.items():
        if outer != path and _is_in(path, outer) and is_collection(metric):
            # Members that share one state are shown it.
            metric.values(copy_state=False)
    return _inside(objects, path)


def _inside(objects: Objects, path: str) -> MetricObject:
    for outer, metric in objects.items():
        if _is_in(path, outer):
            inner = metric if outer == path else metric.get_submodule(path[len(outer) + 1 :])
            assert is_metric(inner)
            return inner
    raise AssertionError(path)


def _is_in(path: str, outer: str) -> bool:
    return path == outer or path.startswith(f"{outer}.")


def _members(metric: nn.Module) -> List[Any]:
    return [each for each in metric.modules() if hasattr(each, "_update_count")]


def _has_seen(metric: MetricObject) -> bool:
    """Return True if a metric has been updated since it was reset."""
    return any(each._update_count for each in _members(metric))


def _without_sync(metric: MetricObject) -> contextlib.AbstractContextManager[None]:
    """Keep a metric, in the block, from asking other processes by itself."""
    names = ("sync_on_compute", "_to_sync")
    return replaced(*((each, name, False) for each in _members(metric) for name in names))


@dataclasses.dataclass(eq=False)
class StepMetrics(Metric):
    """Metric of ipufit for the values over an epoch of the metrics that a step logs.

    They are updated by :class:`MeasuredProgram`.

    Attributes:
        metrics: of the module.
        step: tells the role of the step that is meant.
        role: "train", "validation" or "test"; None for that of the moment when it is used.
        copies: what to take in place of the module's own metrics.
    """

    name = "of the steps"
    exact = lasts = True

    metrics: ModuleMetrics
    step: Steps
    role: Optional[str] = None
    copies: Optional[Objects] = None

    @property
    def names(self) -> Tuple[str, ...]:
        """Keys of :meth:`compute`, once the step has been recorded."""
        return () if self.role is None else tuple(self.metrics.epochs(self.role))

    @names.setter
    def names(self, names: Tuple[str, ...]) -> None:
        """Ignore names from outside: they follow from what the step has logged."""

    def fresh(self) -> StepMetrics:
        """Return the metrics of the present role or, if this has a role, a copy without state."""
        if self.role is None:
            role = self.step.role
            self.metrics.begin(role)
            return StepMetrics(self.metrics, self.step, role)
        copies = copy.deepcopy(self._objects)
        for metric in copies.values():
            metric.reset()
        return StepMetrics(self.metrics, self.step, self.role, copies)

    @property
    def _objects(self) -> Objects:
        assert self.role is not None
        return self.metrics.turn_to(self.role) if self.copies is None else self.copies

    def reset(self) -> None:
        """Begin a new epoch."""
        if self.role is not None and self.copies is None:
            self.metrics.reset(self.role)

    def update(
        self, prediction: object, target: object, size: int, weight: object, /, **fields: object
    ) -> None:
        """Do nothing: the program has updated the metrics."""

    def compute(self) -> Dict[str, float]:
        """Return the values so far; nan before the first micro-batch."""
        objects, values = self._objects, {}
        assert self.role is not None
        for name, path in self.metrics.epochs(self.role).items():
            metric = _metric_at(objects, path)
            with _without_sync(metric):
                if _has_seen(metric):
                    values[name] = number_of(name, metric.compute(), _BY_PARTS)
                else:
                    values[name] = math.nan
        return values

    def state_dict(self) -> Dict[str, Dict[str, Any]]:
        """Return the state of every metric that the step calls.

        Raises:
            MetricError: one can't say.
        """
        for path, metric in self._objects.items():
            if not is_plain(metric):
                raise MetricError(
                    f"a checkpoint holds the state of every metric, but self.{path} "
                    f"({type(metric).__name__}) can't return it. Use a plain torchmetrics metric, "
                    "or leave checkpoint out."
                )
        return {path: stored(metric, path) for path, metric in self._objects.items()}

    def load_state_dict(self, state: Mapping[str, Dict[str, Any]]) -> None:
        """Restore what :meth:`state_dict` returned."""
        for path, metric in self._objects.items():
            if path in state:
                restore(metric, state[path])

    def merge_states(self, states: Sequence[Any]) -> Dict[str, Dict[str, Any]]:
        """Merge states as torchmetrics has declared it.

        Raises:
            MetricError: a state can't be joined.
        """
        return {
            path: merge_states(metric, [state[path] for state in states], f"self.{path}")
            for path, metric in self._objects.items()
        }

    def check_joined(self, processes: int) -> None:
        """Do nothing: which metrics the step calls is known once it has been recorded."""

    def higher_is_better(self) -> Dict[str, Optional[bool]]:
        """Return the direction of every value, as its metric says."""
        objects = self._objects
        assert self.role is not None
        return {
            name: getattr(_metric_at(objects, path), "higher_is_better", None)
            for name, path in self.metrics.epochs(self.role).items()
        }


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
                f"self.{key.calls[0].path} is updated with the outputs of every micro-batch, which "
                f"needs outputs='all', got {outputs.mode!r}. Leave outputs out."
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


def _update_metrics(
    key: MetricKey, objects: Objects, tensors: Sequence[Tensor]
) -> Dict[str, float]:
    """Update the metrics with a micro-batch, and return the values that are logged of it."""
    wanted = {value.call for value in key.values}
    results: Dict[int, Any] = {}
    for place, call in enumerate(key.calls):
        metric = _metric_at(objects, call.path)
        args, kwargs = call.arguments(tuple(_beside(metric, each) for each in tensors))
        with _named_failure(f"self.{call.path}", args, kwargs), torch.no_grad(), _without_sync(
            metric
        ):
            if place in wanted:
                results[place] = metric(*args, **kwargs)
            else:
                metric.update(*args, **kwargs)
    values = {}
    for value in key.values:
        result = results[value.call]
        result = result if value.key is None else result[value.key]
        values[value.name] = number_of(value.name, result, _BY_PARTS)
    return values


def _beside(metric: MetricObject, tensor: Tensor) -> Tensor:
    """Move a tensor to the device of a metric's state."""
    members = metric.values(copy_state=False) if is_collection(metric) else [metric]
    return tensor.to(next((member.device for member in members), tensor.device))


def _try(key: MetricKey, objects: Objects, tensors: Sequence[Tensor]) -> None:
    """Find out, on copies and before any training, whether metrics can take such tensors.

    Raises:
        MetricError: one can't, or its value is not a number.
    """
    with warnings.catch_warnings(), LOCK, fork_rng():
        warnings.simplefilter("ignore")
        trial = copy.deepcopy(dict(objects))
        for metric in trial.values():
            metric.reset()
        numbers = tree.map_leaves(random_like, tuple(tensors))
        _update_metrics(key, trial, numbers)
        for name, path in key.epochs.items():
            try:
                value = _metric_at(trial, path).compute()
            except Exception:
                # Of so few samples it may have no value.
                continue
            number_of(name, value, _BY_PARTS)


@contextlib.contextmanager
def _named_failure(
    shown: str, args: Sequence[object], kwargs: Mapping[str, object]
) -> Iterator[None]:
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
