"""From what the user may pass as metrics to a set of them."""

from __future__ import annotations

import functools
from typing import (
    Any,
    Callable,
    Collection,
    Iterable,
    Iterator,
    List,
    Mapping,
    NamedTuple,
    Optional,
    Sequence,
    Set,
    Tuple,
    Union,
)

from torch import nn

from ipufit.core.objective_arguments import (
    argument_order,
    is_running_metric,
    keyword_names,
    required_names,
)
from ipufit.core.outputs import Key, label
from ipufit.errors import ConfigurationError, UnknownNameError
from ipufit.metrics import values
from ipufit.metrics.by_task import BY_TASK, TaskMetric, TaskMetricAdapter
from ipufit.metrics.kinds import Mean, Metric, OutputMetric, TorchMetricAdapter
from ipufit.metrics.metric_set import MetricSet
from ipufit.utils.names import check_log_name

# Under which an object's update may take the sample weights.
_WEIGHT_NAMES = ("sample_weight", "weight", "weights")


def resolve_metrics(
    metrics: object,
    weighted_metrics: object = None,
    outputs: Union[Sequence[str], int, None] = None,
) -> MetricSet:
    """Bring metrics into normal form.

    Args:
        metrics: None, one metric, a list or tuple, or a dict from name to metric. A metric is a
            name; a callable ``(prediction, target)`` that gives a number for the micro-batch,
            weighted with its samples, or a tensor with one value per sample in dimension 0; or an
            object of torchmetrics, which is copied and never touched. Parameters such as
            ``y_true, y_pred`` of a callable or of an object's ``update`` say another order: see
            :func:`ipufit.core.objective_arguments.argument_order`. Further parameters without a
            default get the fields of the batch that have their names. A list, tuple or dict as a
            value of the dict goes to the output that is its key, and its metrics are logged as
            ``<output>_<metric>``.
        weighted_metrics: the same, but every value is multiplied with its sample's weight, and the
            sum is divided by the sum of the weights; nan if that is zero. A callable gives one
            value per sample, or takes ``sample_weight`` and gives the weighted mean of the
            micro-batch; an object's ``update`` takes ``sample_weight``, ``weight`` or ``weights``.
            Whose name is taken by one of ``metrics`` is logged as ``weighted_<metric>``.
        outputs: what several losses go by, ``Loss.outputs``: names, then both arguments are dicts
            by output; or a number, then they are lists by position. None for one loss.

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
    - ``top_k_categorical_accuracy``, ``sparse_top_k_categorical_accuracy``: ``top_5_accuracy``.
    - ``mse``, ``mean_squared_error``; ``mae``, ``mean_absolute_error``; ``rmse``,
      ``root_mean_squared_error`` (the root is taken once, of the mean over the epoch).
    - ``mape``, ``mean_absolute_percentage_error``; ``msle``, ``mean_squared_logarithmic_error``;
      ``log_cosh``, ``hinge``, ``squared_hinge``, ``kl_divergence``, ``cosine_similarity``.
    - ``auc``, ``precision``, ``recall``, ``f1_score``, ``fbeta_score``, ``mean_io_u``,
      ``r2_score``, ``pearson_correlation``, ``concordance_correlation``: the classes of
      :mod:`ipufit.metrics` with their defaults, computed by torchmetrics.
    - ``perplexity``: exp of the mean of ``cross_entropy`` from logits and class indices.

    Raises:
        UnknownNameError: no metric has that name.
        ConfigurationError: a name that comes twice or is reserved, something that is no metric, or
            one that can't be weighted.
    """
    resolved: List[Metric] = []
    keys: Sequence[Key] = range(outputs) if isinstance(outputs, int) else outputs or ()
    names = {f"{label(key)}_loss" for key in keys}
    for argument, entries, weighted in (
        ("metrics", metrics, False),
        ("weighted_metrics", weighted_metrics, True),
    ):
        plain = frozenset(names)
        for item in _items(entries, argument, outputs):
            metric = _resolve(item, weighted, names, plain)
            for name in metric.names:
                names.add(check_log_name(name, names))
            resolved.append(metric)
    return MetricSet(resolved)


# ---- forms --------------------------------------------------------------------------------------


class _Item(NamedTuple):
    """One metric as the user gave it: for which output, under which name."""

    output: Optional[Key]
    name: Optional[str]
    metric: object


def _items(
    metrics: object, argument: str, outputs: Union[Sequence[str], int, None]
) -> Iterator[_Item]:
    if metrics is None:
        return
    if isinstance(outputs, int):
        if not isinstance(metrics, (list, tuple)) or len(metrics) != outputs:
            came = f"{type(metrics).__name__}"
            came += f" of {len(metrics)}" if isinstance(metrics, (list, tuple)) else ""
            raise ConfigurationError(
                f"{argument} must be a list with one element for each of the {outputs} losses, got "
                f"{came}. Pass a metric, a list of metrics or None for each output."
            )
        for position, entry in enumerate(metrics):
            yield from _of_output(position, entry)
    elif outputs is not None:
        if not isinstance(metrics, Mapping) or _is_object(metrics):
            raise ConfigurationError(
                f"{argument} must be a dict by output, like the losses, got "
                f"{type(metrics).__name__}. Write {{{next(iter(outputs))!r}: ['accuracy']}}."
            )
        for key, entry in metrics.items():
            yield from _of_output(_check_key(key, argument), entry)
    elif isinstance(metrics, Mapping) and not _is_object(metrics):
        for key, entry in metrics.items():
            if isinstance(entry, (list, tuple, Mapping)) and not _is_object(entry):
                position = isinstance(key, int) and not isinstance(key, bool) and key >= 0
                yield from _of_output(key if position else _check_key(key, argument), entry)
            else:
                yield _Item(None, _check_key(key, argument), entry)
    else:
        yield from _of_output(None, metrics)


def _of_output(output: Optional[Key], entry: object) -> Iterator[_Item]:
    """The metrics of one output, or of all: none, one, a list, or a dict by name."""
    if entry is None:
        return
    if isinstance(entry, Mapping) and not _is_object(entry):
        for name, metric in entry.items():
            yield _Item(output, _check_key(name, "metrics"), metric)
    elif isinstance(entry, (list, tuple)):
        for metric in entry:
            yield _Item(output, None, metric)
    else:
        yield _Item(output, None, entry)


def _check_key(key: object, argument: str) -> str:
    if not isinstance(key, str) or not key:
        raise ConfigurationError(
            f"{argument} as a dict must have names as keys, got {key!r}. Write {{'name': metric}}."
        )
    return key


# ---- one metric ---------------------------------------------------------------------------------


def _resolve(item: _Item, weighted: bool, names: Set[str], plain: Collection[str]) -> Metric:
    """One metric in normal form; a weighted one gives way to a plain one of its name."""
    prefix = "" if item.output is None else f"{label(item.output)}_"
    metric = _build(item, weighted, prefix, names)
    if weighted and any(prefix + name in plain for name in metric.names):
        metric = OutputMetric("weighted_", metric)
    return metric if item.output is None else OutputMetric(prefix, metric, item.output)


def _build(item: _Item, weighted: bool, prefix: str, names: Set[str]) -> Metric:
    metric: Any = item.metric
    if isinstance(metric, str):
        name = item.name or metric
        named = values.lookup(metric)
        if named is not None:
            part = functools.partial(values.sum_of_elements, named.values, prefix + name)
            traits = (named.finish, weighted, not named.is_error, named.is_count)
            return Mean(name, prefix + name, part, *traits)
        if metric.lower() not in BY_TASK:
            raise UnknownNameError("metric", metric, [*values.NAMED, *BY_TASK])
        return _by_task(name, BY_TASK[metric.lower()](), prefix + name, weighted)
    if isinstance(metric, TaskMetric):
        name = item.name or metric.name
        return _by_task(name, metric, prefix + name, weighted)
    if _is_object(metric):
        name = item.name or type(metric).__name__
        weight_name = _weight_name(metric, prefix + name) if weighted else None
        order = argument_order(metric.update, f"update of metric {prefix + name!r}")
        # Of a collection, those of all its members.
        members: Iterable[Any] = [metric]
        if isinstance(metric, nn.ModuleDict):
            members = metric.values()
        fields = tuple({name: 0 for each in members for name in _fields(each.update, weight_name)})
        how = (weight_name, (), order, fields)
        return TorchMetricAdapter(item.name, metric, prefix + name, *how)
    if is_running_metric(metric):
        raise ConfigurationError(
            "a metric must be a name, a callable (prediction, target), or an object of "
            f"torchmetrics, got {type(metric).__name__} with update_state and result, which would "
            "mix samples of training and validation. Pass the corresponding function, such as "
            "keras.metrics.mean_squared_error, or a name, such as 'mse'."
        )
    if callable(metric) and not isinstance(metric, type):
        name = item.name or _callable_name(metric, prefix, names)
        better = getattr(metric, "higher_is_better", None)
        order = argument_order(metric, f"metric {prefix + name!r}")
        ordered = functools.partial(order.call, metric)
        call = getattr(metric, "forward", metric)
        fields = _fields(call, "sample_weight" if weighted else None)
        if not weighted:
            part = functools.partial(values.sum_of_samples, ordered, prefix + name)
        else:
            takes = "sample_weight" in keyword_names(call)
            part = functools.partial(values.sum_of_weighted_samples, ordered, takes, prefix + name)
        return Mean(name, prefix + name, part, float, weighted, better, fields=fields)
    if isinstance(metric, type):
        came = f"the class {metric.__name__}. Pass an instance, {metric.__name__}(...)"
    else:
        came = f"{type(metric).__name__}. Pass for example metrics=['accuracy']"
    raise ConfigurationError(
        "a metric must be a name, a callable (prediction, target), or an object of torchmetrics, "
        f"got {came}."
    )


def _fields(call: Callable[..., object], weight_name: Optional[str]) -> Tuple[str, ...]:
    """Name what a metric takes of a batch: parameters without a default, behind the first two."""
    return tuple(name for name in required_names(call)[2:] if name != weight_name)


def _by_task(name: str, metric: TaskMetric, shown: str, weighted: bool) -> Metric:
    if weighted:
        raise ConfigurationError(
            f"weighted metric {shown!r} must take weights, but its torchmetrics implementation has "
            "none. Pass it under metrics, or a callable that gives one value per sample."
        )
    return TaskMetricAdapter(name, metric, shown)


def _is_object(metric: object) -> bool:
    methods = ("update", "compute", "reset")
    return not isinstance(metric, type) and all(
        callable(getattr(metric, method, None)) for method in methods
    )


def _weight_name(metric: Any, shown: str) -> str:
    names = keyword_names(metric.update)
    for name in names:
        if name in _WEIGHT_NAMES:
            return name
    came = ", ".join(names) or "none of these"
    raise ConfigurationError(
        f"weighted metric {shown!r} must take sample_weight, weight or weights in its update, got "
        f"{came}. Pass it under metrics, or a callable that "
        "gives one value per sample."
    )


def _callable_name(metric: Callable[..., object], prefix: str, names: Set[str]) -> str:
    inner = metric.func if isinstance(metric, functools.partial) else metric
    name = str(getattr(inner, "__name__", type(inner).__name__))
    if name != "<lambda>":
        return name
    name, index = "metric", 0
    while prefix + name in names:
        index += 1
        name = f"metric_{index}"
    return name
