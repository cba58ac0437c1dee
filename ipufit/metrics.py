"""Metrics: from what the user may pass to sums over an epoch.

A named metric is exact: values are summed in float64 beside their count and divided once, so that
no cut into micro-batches, replicas or executions changes the result. torchmetrics is never imported
here; its objects are known by their methods ``update``, ``compute`` and ``reset``.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import math
import numbers
import random
import sys
import warnings
from typing import (
    Any,
    Callable,
    Dict,
    Iterator,
    List,
    Mapping,
    Optional,
    Protocol,
    Sequence,
    Set,
    Tuple,
)

import torch
from torch import Tensor

from ipufit.errors import ConfigurationError, MetricError
from ipufit.losses import describe_tensor
from ipufit.metric_values import Values, is_error, lookup
from ipufit.randomness import isolated
from ipufit.tree import flatten, flatten_with_paths, map_leaves

__all__ = ["MetricSet", "resolve_metrics"]


class MetricSet:
    """The metrics of one epoch of one kind; training and validation have one each.

    Made by :func:`resolve_metrics`; without arguments it is empty.
    """

    def __init__(self, metrics: Sequence[_Metric] = ()) -> None:
        """Hold metrics that nobody else holds."""
        self._metrics = list(metrics)

    def __bool__(self) -> bool:
        """Whether there is any metric."""
        return bool(self._metrics)

    @property
    def names(self) -> Tuple[str, ...]:
        """Keys of :meth:`compute`; of a metric that returns several values, exact after a probe."""
        return tuple(name for metric in self._metrics for name in metric.names)

    @property
    def higher_is_better(self) -> Dict[str, bool]:
        """By name, for the metrics that are named ones or have this attribute, as torchmetrics'."""
        found = [item for metric in self._metrics for item in metric.higher_is_better().items()]
        return {name: bool(better) for name, better in found if better is not None}

    def fresh(self) -> MetricSet:
        """The same metrics without any state, sharing nothing with this set."""
        return MetricSet([metric.fresh() for metric in self._metrics])

    def reset(self) -> None:
        """Forget everything seen, at the start of an epoch."""
        for metric in self._metrics:
            metric.reset()

    def update(self, prediction: Any, target: Any, size: int) -> None:
        """Add one micro-batch.

        Args:
            prediction: the module's outputs, on the host, without padding.
            target: the targets, on the host.
            size: number of samples in both; of none, nothing happens.

        Raises:
            MetricError: a metric can't take them, chained from the metric's own error.
        """
        if not size:
            return
        for metric in self._metrics:
            given = (prediction, target)
            if metric.writes:
                given = map_leaves(_copy, given)
            before = _versions(given)
            with _named_failure(metric.name, prediction, target):
                metric.update(*given, size)
            # One metric's scratch work must not be what the next one, or the loss, sees.
            metric.writes = metric.writes or _versions(given) != before

    def compute(self) -> Dict[str, float]:
        """The values over everything since the last reset; nan before the first micro-batch.

        Raises:
            MetricError: a metric's value is not a number.
            ConfigurationError: two values have one name.
        """
        values: Dict[str, float] = {}
        for metric in self._metrics:
            for name, value in metric.compute().items():
                _check_name(name, values)
                values[name] = value
        return values

    def probe(self, prediction: Any, target: Any, size: int) -> None:
        """Find out, before any training, whether the metrics can take such tensors.

        It works on copies and leaves no state, no warning, and random number generators as they
        were; only :attr:`names` learns the keys that a metric really returns. A callable is called
        once.

        Args:
            prediction: tensors of the right shapes and dtypes, values anywhere in (0, 1).
            target: tensors of the right shapes and dtypes.
            size: number of samples in both.

        Raises:
            MetricError: a metric can't take them, or its value is not a number.
            ConfigurationError: two values have one name.
        """
        trial = self.fresh()
        prediction, target = map_leaves(_copy, (prediction, target))
        with warnings.catch_warnings(), _generators_kept():
            warnings.simplefilter("ignore")
            trial.update(prediction, target, size)
            for metric in trial._metrics:
                with _named_failure(metric.name, prediction, target):
                    metric.names = tuple(metric.compute())
            trial.compute()
        for metric, tried in zip(self._metrics, trial._metrics):
            metric.names, metric.writes = tried.names, tried.writes


def resolve_metrics(metrics: object) -> MetricSet:
    """Bring metrics into normal form.

    Args:
        metrics: None, one metric, a list or tuple, or a dict from name to metric. A metric is a
            name; a callable ``(prediction, target)`` that gives a number for the micro-batch,
            weighted with its samples, or a tensor with one value per sample in dimension 0; or an
            object of torchmetrics, which is copied and never touched.

    The names:

    - ``accuracy`` (``acc``): with targets of class indices, shape (batch, ...) for a prediction of
      shape (batch, classes, ...), the share of predictions whose largest class is the target; -100
      is left out as in ``cross_entropy``. With a prediction of one value per sample and a target of
      the same shape, ``binary_accuracy``. A prediction and target of one shape and several classes
      is refused: it may be one-hot (``categorical_accuracy``, as Keras takes it) or multi-label
      (``binary_accuracy``), and these differ.
    - ``sparse_categorical_accuracy``: only the first of these.
    - ``binary_accuracy``: probabilities against 0.5; values outside [0, 1] are logits and refused.
      ``binary_accuracy_with_logits``: logits against 0.
    - ``categorical_accuracy``: one-hot targets of the prediction's shape (batch, classes, ...).
    - ``top_5_accuracy``, or any ``top_<k>_accuracy``: class indices or one-hot targets.
    - ``mse``, ``mean_squared_error``; ``mae``, ``mean_absolute_error``; ``rmse``,
      ``root_mean_squared_error`` (the root is taken once, of the mean over the epoch).
    - ``perplexity``: exp of the mean of ``cross_entropy`` from logits and class indices.

    Raises:
        UnknownNameError: no metric has that name.
        ConfigurationError: a name that comes twice or is reserved, or something that is no metric.
    """
    items: List[Tuple[Optional[str], object]]
    if metrics is None:
        items = []
    elif isinstance(metrics, Mapping) and not _is_object(metrics):
        items = [(_check_key(key), metric) for key, metric in metrics.items()]
    elif isinstance(metrics, (list, tuple)):
        items = [(None, metric) for metric in metrics]
    else:
        items = [(None, metrics)]
    resolved: List[_Metric] = []
    taken: Set[str] = set()
    for key, item in items:
        metric = _resolve(key, item, taken)
        for name in metric.names:
            _check_name(name, taken)
            taken.add(name)
        resolved.append(metric)
    return MetricSet(resolved)


def _check_key(key: object) -> str:
    if not isinstance(key, str) or not key:
        raise ConfigurationError(
            f"metrics as a dict must have names as keys, got {key!r}. Write {{'name': metric}}."
        )
    return key


def _check_name(name: str, taken: Any) -> None:
    if name == "loss" or name.startswith("val_"):
        raise ConfigurationError(
            "a metric must have a name of its own, 'loss' and 'val_...' are taken by the loss and "
            f"by validation, got {name!r}. Name it: metrics={{'name': metric}}."
        )
    if name in taken:
        raise ConfigurationError(
            f"metrics must have different names, got {name!r} twice. Give names: "
            f"metrics={{{name!r}: ..., '{name}_2': ...}}."
        )


def _is_object(metric: object) -> bool:
    methods = ("update", "compute", "reset")
    return not isinstance(metric, type) and all(
        callable(getattr(metric, method, None)) for method in methods
    )


def _resolve(key: Optional[str], metric: object, taken: Set[str]) -> _Metric:
    if isinstance(metric, str):
        values, finish = lookup(metric)
        name = key or metric
        part = functools.partial(_sum_of_elements, values, name)
        return _Mean(name, part, finish, not is_error(metric))
    if _is_object(metric):
        return _Object(key, metric)
    if callable(metric) and not isinstance(metric, type):
        name = key or _callable_name(metric, taken)
        better = getattr(metric, "higher_is_better", None)
        return _Mean(name, functools.partial(_sum_of_samples, metric, name), float, better)
    if isinstance(metric, type):
        came = f"the class {metric.__name__}. Pass an instance, {metric.__name__}(...)"
    else:
        came = f"{type(metric).__name__}. Pass for example metrics=['accuracy']"
    raise ConfigurationError(
        "a metric must be a name, a callable (prediction, target), or an object of torchmetrics, "
        f"got {came}."
    )


def _callable_name(metric: Callable[..., Any], taken: Set[str]) -> str:
    inner = metric.func if isinstance(metric, functools.partial) else metric
    name = str(getattr(inner, "__name__", type(inner).__name__))
    if name != "<lambda>":
        return name
    name, index = "metric", 0
    while name in taken:
        index += 1
        name = f"metric_{index}"
    return name


# ---- the three kinds ----------------------------------------------------------------------------


class _Metric(Protocol):
    """What a set asks of a metric."""

    name: str
    names: Tuple[str, ...]
    # Whether it changes its arguments in place.
    writes: bool

    def fresh(self) -> _Metric: ...
    def reset(self) -> None: ...
    def update(self, prediction: Any, target: Any, size: int) -> None: ...
    def compute(self) -> Dict[str, float]: ...
    def higher_is_better(self) -> Dict[str, Optional[bool]]: ...


class _Mean:
    """A sum and a count in float64, and what is made of their quotient.

    Args:
        name: key of the result.
        part: sum and count of one micro-batch, from (prediction, target, size).
        finish: applied once to the mean.
        better: whether higher is better; None if nobody knows.
    """

    def __init__(
        self,
        name: str,
        part: Callable[[Any, Any, int], Tuple[float, int]],
        finish: Callable[[float], float],
        better: Optional[bool] = None,
    ) -> None:
        self.name = name
        self.names: Tuple[str, ...] = (name,)
        self.writes = False
        self._part = part
        self._finish = finish
        self._better = better
        self.reset()

    def fresh(self) -> _Mean:
        return _Mean(self.name, self._part, self._finish, self._better)

    def higher_is_better(self) -> Dict[str, Optional[bool]]:
        return {self.name: self._better}

    def reset(self) -> None:
        self._total = 0.0
        self._count = 0

    @torch.no_grad()
    def update(self, prediction: Any, target: Any, size: int) -> None:
        total, count = self._part(prediction, target, size)
        self._total += total
        self._count += count

    def compute(self) -> Dict[str, float]:
        mean = self._total / self._count if self._count else math.nan
        return {self.name: self._finish(mean)}


class _Object:
    """A metric or a collection of torchmetrics, or anything with the same three methods."""

    def __init__(self, key: Optional[str], metric: Any, names: Tuple[str, ...] = ()) -> None:
        self._key = key
        # One object in training and validation would mix both, and the user's is the user's.
        self._metric = copy.deepcopy(metric)
        self._metric.reset()
        self._seen = False
        self.name = key or type(metric).__name__
        self.names = names or self._declared()
        self.writes = False

    def _declared(self) -> Tuple[str, ...]:
        """The names known before anything is computed; a collection lists its members."""
        keys = getattr(self._metric, "keys", None)
        if not callable(keys):
            return (self.name,)
        return tuple(f"{self._key}_{key}" if self._key else str(key) for key in keys())

    def fresh(self) -> _Object:
        return _Object(self._key, self._metric, self.names)

    def higher_is_better(self) -> Dict[str, Optional[bool]]:
        declared = self._declared()
        if declared == (self.name,):
            return dict.fromkeys(self.names, getattr(self._metric, "higher_is_better", None))
        members = self._metric.values()
        return {n: getattr(m, "higher_is_better", None) for n, m in zip(declared, members)}

    def reset(self) -> None:
        self._metric.reset()
        self._seen = False

    @torch.no_grad()
    def update(self, prediction: Any, target: Any, size: int) -> None:
        self._metric.update(prediction, target)
        self._seen = True

    def compute(self) -> Dict[str, float]:
        if not self._seen:
            return dict.fromkeys(self.names, math.nan)
        result = self._metric.compute()
        if isinstance(result, Mapping):
            return dict(_flattened(self._key, result))
        return {self.name: _number(self.name, result)}


def _flattened(prefix: Optional[str], result: Mapping[Any, Any]) -> Iterator[Tuple[str, float]]:
    for key, value in result.items():
        name = f"{prefix}_{key}" if prefix else str(key)
        if isinstance(value, Mapping):
            yield from _flattened(name, value)
        else:
            yield name, _number(name, value)


def _number(name: str, value: Any) -> float:
    if isinstance(value, Tensor) and value.numel() == 1 and not value.is_complex():
        return float(value)
    if isinstance(value, numbers.Real):
        return float(value)
    raise MetricError(
        f"metric {name!r} must give a scalar, got {_shapes(value)}. Average it, for example with "
        "average='macro', or wrap it in a metric that does."
    )


# ---- sums and counts ----------------------------------------------------------------------------


def _sum_of_elements(
    values: Values, name: str, prediction: Any, target: Any, size: int
) -> Tuple[float, int]:
    """Of a named metric. Every element counts the same, so samples of one shape do as well."""
    for role, value in (("prediction", prediction), ("target", target)):
        if not isinstance(value, Tensor):
            raise MetricError(
                f"metric {name!r} takes one tensor as {role}, got {type(value).__name__}. Pass a "
                "callable metric(prediction, target) that picks its tensors."
            )
    found = values(name, prediction, target)
    return float(found.double().sum()), found.numel()


def _sum_of_samples(
    metric: Callable[..., Any], name: str, prediction: Any, target: Any, size: int
) -> Tuple[float, int]:
    """Of a user's callable: one value per sample, or one for the micro-batch."""
    value = metric(prediction, target)
    if isinstance(value, Tensor) and not value.is_complex():
        if not value.dim():
            return float(value) * size, size
        if value.shape[0] == size and value.numel():
            return float(value.double().reshape(size, -1).mean(1).sum()), size
    elif isinstance(value, numbers.Real):
        return float(value) * size, size
    raise MetricError(
        f"metric {name!r} must give a number, or a tensor of {size} values, one for each sample, "
        f"got {_shapes(value)}. Reduce it over all but the samples, for example with .mean()."
    )


def _copy(leaf: Any) -> Any:
    return leaf.clone() if isinstance(leaf, Tensor) else leaf


def _versions(value: Any) -> List[int]:
    """Counters of in-place changes of all tensors."""
    return [leaf._version for leaf in flatten(value)[0] if isinstance(leaf, Tensor)]


# ---- errors and quiet ---------------------------------------------------------------------------


def _shapes(value: Any) -> str:
    """What came, for a sentence: shapes and dtypes of all tensors in it."""
    leaves, structure = flatten_with_paths(value)
    if structure.kind is None or not leaves:
        return describe_tensor(value)
    inside = "; ".join(f"{path} {describe_tensor(leaf)}" for path, leaf in leaves)
    return f"{type(value).__name__} ({inside})"


@contextlib.contextmanager
def _named_failure(name: str, prediction: Any, target: Any) -> Iterator[None]:
    """Turn whatever a metric raises into an error that names it and both shapes."""
    try:
        yield
    except ConfigurationError:
        raise
    except Exception as error:
        raise MetricError(
            f"metric {name!r} must take the module's outputs and the targets, got prediction of "
            f"{_shapes(prediction)} and target of {_shapes(target)}, and failed with "
            f"{type(error).__name__}: {str(error).rstrip('.')}. Pass a metric made for these, or a "
            "callable metric(prediction, target) that brings them into form."
        ) from error


@contextlib.contextmanager
def _generators_kept() -> Iterator[None]:
    """Leave torch's host generator, Python's, and NumPy's if it is loaded, as they are found."""
    numpy = sys.modules.get("numpy")
    python_state = random.getstate()
    numpy_state = numpy.random.get_state() if numpy is not None else None
    try:
        with isolated(torch.device("cpu")):
            yield
    finally:
        random.setstate(python_state)
        if numpy is not None:
            numpy.random.set_state(numpy_state)
