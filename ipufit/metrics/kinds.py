"""The kinds of metrics: a mean, an object of torchmetrics, and one of several outputs."""

from __future__ import annotations

import copy
import dataclasses
import math
from typing import Any, Callable, Dict, Iterator, List, Mapping, Optional, Protocol, Sequence, Tuple

import torch
from torch import Tensor, nn

from ipufit.core.objective_arguments import PREDICTION_FIRST, ArgumentOrder, as_weights
from ipufit.core.outputs import Key, pick
from ipufit.errors import MetricError
from ipufit.metrics.values import Part, number_of

# The state of an object of torchmetrics: what it has declared, or says itself.
State = Dict[str, Any]


class Metric(Protocol):
    """Protocol of a metric in a set, and the defaults of one that says no more.

    Attributes:
        name: for messages.
        names: keys of :meth:`compute`; exact after a trial.
        writes: whether it changes its arguments in place.
        counts: whether several micro-batches as one, without weights, give the bits that they
            give in turn.
        exact: whether its names are the same in validation, without "val_" before them.
        lasts: whether it may go on with what it has seen when an epoch has ended.
        fields: names of what it takes of a batch beside prediction and target.
    """

    name: str
    names: Tuple[str, ...]
    writes: bool = False
    counts: bool = False
    exact: bool = False
    lasts: bool = False
    fields: Tuple[str, ...] = ()

    def fresh(self) -> Metric:
        """Clone the metric without state, sharing nothing."""

    def reset(self) -> None:
        """Forget everything seen."""

    def update(
        self, prediction: object, target: object, size: int, weight: object, /, **fields: object
    ) -> None:
        """Add one micro-batch."""

    def compute(self) -> Dict[str, float]:
        """The values so far; nan before the first micro-batch."""

    def state_dict(self) -> object:
        """Return the state for a checkpoint.

        Raises:
            MetricError: it can't say.
        """

    def load_state_dict(self, state: Any) -> None:
        """Restore what :meth:`state_dict` returned."""

    def merge_states(self, states: Sequence[Any]) -> object:
        """One state of what several processes have seen, each a part of the samples.

        Raises:
            MetricError: nobody knows how.
        """

    def check_joined(self, processes: int) -> None:
        """Make sure, before any work, that :meth:`merge_states` will do, as it does by itself.

        Raises:
            MetricError: it won't.
        """
        return

    def higher_is_better(self) -> Dict[str, Optional[bool]]:
        """By name; None where nobody knows."""


@dataclasses.dataclass(eq=False)
class Mean(Metric):
    """A sum and a count in float64, and what is made of their quotient.

    Attributes:
        key: of the result.
        name: in messages.
        part: sum and count of one micro-batch.
        finish: applied once to the mean.
        weighted: whether it gets the sample weights.
        better: whether higher is better; None if nobody knows.
        counts: whether the sum is a number of elements.
        fields: names of what it takes of a batch beside prediction and target.
    """

    key: str
    name: str
    part: Part
    finish: Callable[[float], float]
    weighted: bool = False
    better: Optional[bool] = None
    counts: bool = False
    fields: Tuple[str, ...] = ()

    def __post_init__(self) -> None:
        self.names: Tuple[str, ...] = (self.key,)
        self.reset()

    def fresh(self) -> Mean:
        """Clone the metric without state, sharing nothing."""
        metric = copy.copy(self)
        metric.reset()
        return metric

    def higher_is_better(self) -> Dict[str, Optional[bool]]:
        """By name; None where nobody knows."""
        return {self.key: self.better}

    def reset(self) -> None:
        """Forget everything seen."""
        self._total = 0.0
        self._count = 0.0

    def state_dict(self) -> Dict[str, float]:
        """Return sum and count."""
        return {"total": self._total, "count": self._count}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Restore what :meth:`state_dict` returned."""
        self._total, self._count = float(state["total"]), float(state["count"])

    def merge_states(self, states: Sequence[Mapping[str, float]]) -> Dict[str, float]:
        """Add up sums and counts of several processes."""
        return {name: math.fsum(state[name] for state in states) for name in ("total", "count")}

    @torch.no_grad()
    def update(
        self, prediction: object, target: object, size: int, weight: object, /, **fields: object
    ) -> None:
        """Add one micro-batch."""
        weight = weight if self.weighted else None
        total, count = self.part(prediction, target, size, weight, **fields)
        self._total += total
        self._count += count

    def compute(self) -> Dict[str, float]:
        """The values so far; nan before the first micro-batch."""
        mean = self._total / self._count if self._count else math.nan
        return {self.key: self.finish(mean)}


@dataclasses.dataclass(eq=False)
class TorchMetricAdapter(Metric):
    """A metric or a collection of torchmetrics, or anything with the same three methods.

    Attributes:
        key: the user's name for it, before those of a collection's members.
        metric: a copy of the user's object.
        name: in messages.
        weight_name: under which its update takes the sample weights, or None.
        names: keys of the result if they are known.
        order: in which its update takes prediction and target.
        fields: names of what its update takes of a batch beside these.
    """

    key: Optional[str]
    metric: Any
    name: str
    weight_name: Optional[str] = None
    names: Tuple[str, ...] = ()
    order: ArgumentOrder = PREDICTION_FIRST
    fields: Tuple[str, ...] = ()

    def __post_init__(self) -> None:
        # One object in training and validation would mix both, and the user's is the user's.
        self.metric = copy.deepcopy(self.metric)
        self.metric.reset()
        without_talk(self.metric)
        self._seen = False
        self._own = self.key or type(self.metric).__name__
        self.names = self.names or self._declared()

    def _declared(self) -> Tuple[str, ...]:
        """The names known before anything is computed; a collection lists its members."""
        keys = getattr(self.metric, "keys", None)
        if not callable(keys):
            return (self._own,)
        return tuple(f"{self.key}_{key}" if self.key else str(key) for key in keys())

    def fresh(self) -> TorchMetricAdapter:
        """Clone the metric without state, sharing nothing."""
        how = (self.weight_name, self.names, self.order, self.fields)
        return TorchMetricAdapter(self.key, self.metric, self.name, *how)

    def higher_is_better(self) -> Dict[str, Optional[bool]]:
        """By name, as the object says in an attribute of this name, like torchmetrics'."""
        declared = self._declared()
        if declared == (self._own,):
            return dict.fromkeys(self.names, getattr(self.metric, "higher_is_better", None))
        members = self.metric.values()
        return {n: getattr(m, "higher_is_better", None) for n, m in zip(declared, members)}

    def reset(self) -> None:
        """Forget everything seen."""
        self.metric.reset()
        self._seen = False

    def state_dict(self) -> State:
        """Return the state of the object.

        Raises:
            MetricError: nobody knows where it keeps it.
        """
        return {"seen": self._seen, "metric": stored(self.metric, self.name)}

    def load_state_dict(self, state: State) -> None:
        """Restore what :meth:`state_dict` returned."""
        self._seen = bool(state["seen"])
        restore(self.metric, state["metric"])

    def merge_states(self, states: Sequence[State]) -> State:
        """Merge states as torchmetrics has declared them.

        Raises:
            MetricError: a state can't be joined.
        """
        metric_states = [state["metric"] for state in states]
        return {
            "seen": any(state["seen"] for state in states),
            "metric": merge_states(self.metric, metric_states, self.name),
        }

    def check_joined(self, processes: int) -> None:
        """Make sure that it is one of torchmetrics, which says how.

        Raises:
            MetricError: it is not.
        """
        refuse_unjoined(self.metric, self.name, processes)

    @torch.no_grad()
    def update(
        self, prediction: object, target: object, size: int, weight: object, /, **fields: object
    ) -> None:
        """Add one micro-batch."""
        if self.weight_name is not None:
            weight = torch.ones(size) if weight is None else as_weights(weight, MetricError)
            fields[self.weight_name] = weight
        self.order.call(self.metric.update, prediction, target, **fields)
        self._seen = True

    def compute(self) -> Dict[str, float]:
        """The values so far; nan before the first micro-batch."""
        if not self._seen:
            return dict.fromkeys(self.names, math.nan)
        result = self.metric.compute()
        if isinstance(result, Mapping):
            return dict(_flattened(self.key, result))
        return {self._own: number_of(self.name, result)}


class OutputMetric(Metric):
    """Another metric under longer names, on one of several outputs if it has a key.

    Args:
        prefix: before all its names, such as ``"a_"``.
        inner: the metric.
        key: of the output and target that it gets, or None for all that there is.
    """

    def __init__(self, prefix: str, inner: Metric, key: Optional[Key] = None) -> None:
        self._prefix = prefix
        self._inner = inner
        self._key = key
        self.name, self.fields = inner.name, inner.fields

    @property
    def names(self) -> Tuple[str, ...]:
        """Keys of :meth:`compute`; exact after a trial."""
        return tuple(f"{self._prefix}{name}" for name in self._inner.names)

    @names.setter
    def names(self, names: Tuple[str, ...]) -> None:
        """Keys of :meth:`compute`; exact after a trial."""
        self._inner.names = tuple(name[len(self._prefix) :] for name in names)

    def fresh(self) -> OutputMetric:
        """Clone the metric without state, sharing nothing."""
        return OutputMetric(self._prefix, self._inner.fresh(), self._key)

    def higher_is_better(self) -> Dict[str, Optional[bool]]:
        """By name; None where nobody knows."""
        return {f"{self._prefix}{n}": up for n, up in self._inner.higher_is_better().items()}

    def reset(self) -> None:
        """Forget everything seen."""
        self._inner.reset()

    def state_dict(self) -> object:
        """Return the state of the metric for this output."""
        return self._inner.state_dict()

    def load_state_dict(self, state: object) -> None:
        """Restore what :meth:`state_dict` returned."""
        self._inner.load_state_dict(state)

    def merge_states(self, states: Sequence[object]) -> object:
        """Merge the states that the metric for this output has in several processes."""
        return self._inner.merge_states(states)

    def check_joined(self, processes: int) -> None:
        """Refuse a metric for this output whose states can't be merged."""
        self._inner.check_joined(processes)

    def update(
        self, prediction: object, target: object, size: int, weight: object, /, **fields: object
    ) -> None:
        """Add one micro-batch."""
        if self._key is not None:
            where = f"metric {self.name!r}"
            prediction = pick(prediction, self._key, f"{where}: the module's outputs", MetricError)
            target = pick(target, self._key, f"{where}: the target", MetricError)
            if weight is not None and not isinstance(weight, Tensor):
                absent = isinstance(weight, Mapping) and self._key not in weight
                weight = (
                    None
                    if absent
                    else pick(weight, self._key, f"{where}: sample_weight", MetricError)
                )
        self._inner.update(prediction, target, size, weight, **fields)

    def compute(self) -> Dict[str, float]:
        """The values so far; nan before the first micro-batch."""
        return {f"{self._prefix}{name}": value for name, value in self._inner.compute().items()}


def _flattened(
    prefix: Optional[str], result: Mapping[object, object]
) -> Iterator[Tuple[str, float]]:
    for key, value in result.items():
        name = f"{prefix}_{key}" if prefix else str(key)
        if isinstance(value, Mapping):
            yield from _flattened(name, value)
        else:
            yield name, number_of(name, value)


# Of torchmetrics' wrappers, those that keep nothing besides the metrics inside.
_PLAIN_WRAPPERS = ("ClasswiseWrapper", "MultioutputWrapper", "MultitaskWrapper")


def stored(metric: Any, shown: str) -> State:
    """The state of an object with the methods of torchmetrics' metrics.

    torchmetrics' own ``state_dict`` leaves out what is not declared persistent, which is all of it
    in most metrics; so what ``add_state`` declared is taken. Anything else says it itself.

    Raises:
        MetricError: it does not.
    """
    if all(callable(getattr(metric, name, None)) for name in ("keys", "values")):
        # Members that share one state while they are only added to are given copies of it.
        metric.values()
    declared = _declared(metric)
    if declared:
        return {"metrics": [_state(each) for each in declared]}
    if callable(getattr(metric, "state_dict", None)) and callable(
        getattr(metric, "load_state_dict", None)
    ):
        return {"own": metric.state_dict()}
    raise MetricError(
        f"a checkpoint in the middle of an epoch holds the state of every metric, but {shown!r} "
        f"({type(metric).__name__}) can't return it. Give it state_dict and load_state_dict, use a "
        "plain torchmetrics metric, or leave checkpoint out."
    )


def restore(metric: Any, state: State) -> None:
    """Go on from what :func:`stored` returned."""
    if "own" in state:
        metric.load_state_dict(state["own"])
        return
    for each, member in zip(_declared(metric), state["metrics"]):
        for name, value in member["values"].items():
            now = getattr(each, name)
            if isinstance(now, Tensor) and isinstance(value, Tensor):
                value = value.to(now.device)
            setattr(each, name, list(value) if isinstance(value, list) else value)
        each._update_count = member["updates"]
        each._computed = None


def is_plain(metric: object) -> bool:
    """True if :func:`stored` takes all that the object keeps."""
    return bool(_declared(metric))


def refuse_unjoined(metric: object, shown: str, processes: int) -> None:
    """Make sure that what several processes have seen can be brought together.

    Raises:
        MetricError: nobody knows how.
    """
    if not _declared(metric):
        raise MetricError(
            f"each of {processes} processes sees a part of the samples, but there is no way to "
            f"combine the states of {shown!r} ({type(metric).__name__}). Use a plain torchmetrics "
            "metric, or a callable metric(prediction, target)."
        )


def merge_states(metric: object, states: Sequence[State], shown: str) -> State:
    """Merge the states that :func:`stored` returned in each process.

    States are joined as torchmetrics has declared it for each, by sum, maximum, minimum or one
    after another.

    Raises:
        MetricError: a mean of means, which does not tell how much each stands for.
    """
    members = []
    for index, each in enumerate(_declared(metric)):
        member_states = [state["metrics"][index] for state in states]
        updated = [part for part in member_states if part["updates"]]
        if len(updated) < 2:
            members.append((updated or member_states)[0])
            continue
        values = {
            name: _join_values(each._reductions[name], [part["values"][name] for part in updated])
            for name in updated[0]["values"]
        }
        for name, value in values.items():
            if value is None:
                raise MetricError(
                    f"{shown!r} ({type(each).__name__}) keeps a mean, {name!r}, and the means of "
                    "several processes can't be combined without their sample counts. Use a metric "
                    "that keeps sums."
                )
        members.append({"updates": sum(part["updates"] for part in updated), "values": values})
    return {"metrics": members}


def _join_values(reduction: Optional[Callable[[Tensor], Tensor]], values: Sequence[Any]) -> object:
    """One of several values of a state; None where they are unequal means."""
    if isinstance(values[0], list):
        return [each for value in values for each in value]
    stacked = torch.stack([torch.as_tensor(value) for value in values])
    if getattr(reduction, "__name__", "") == "dim_zero_mean":
        return values[0] if bool((stacked == stacked[0]).all()) else None
    return stacked if reduction is None else reduction(stacked)


def without_talk(metric: object) -> None:
    """Keep torchmetrics from asking other processes by itself, at a time of its own."""
    for each in _declared(metric):
        each.sync_on_compute = each._to_sync = False


def _declared(metric: object) -> List[Any]:
    """List the torchmetrics in it; none if something in it keeps more than it declares."""
    modules = metric.modules() if isinstance(metric, nn.Module) else [metric]
    members = [each for each in modules if isinstance(getattr(each, "_defaults", None), dict)]
    if any(not hasattr(each, "_update_count") or _keeps_more(each) for each in members):
        return []
    return members


def _keeps_more(metric: object) -> bool:
    is_wrapper = any(".wrappers." in kind.__module__ for kind in type(metric).__mro__)
    return is_wrapper and type(metric).__name__ not in _PLAIN_WRAPPERS


def _state(metric: Any) -> State:
    values = {name: _copy_state(getattr(metric, name)) for name in metric._defaults}
    return {"updates": metric._update_count, "values": values}


def _copy_state(value: object) -> object:
    if isinstance(value, Tensor):
        return value.detach().clone()
    return [_copy_state(each) for each in value] if isinstance(value, list) else value
