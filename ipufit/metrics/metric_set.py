"""All metrics of a model: tried before the first epoch, fed with micro-batches, read at its end."""

from __future__ import annotations

import contextlib
import warnings
from types import MappingProxyType
from typing import Dict, Iterator, List, Mapping, Optional, Sequence, Tuple

import torch
from torch import Tensor

from ipufit.errors import ConfigurationError, MetricError
from ipufit.metrics.kinds import Metric
from ipufit.metrics.values import shapes
from ipufit.processes import Processes
from ipufit.utils.names import check_log_name
from ipufit.utils.random_streams import LOCK
from ipufit.utils.state import fork_rng
from ipufit.utils.tree import flatten, map_leaves

# What metrics get of a micro-batch: prediction, target, size, sample_weight, and fields by name.
MetricInputs = Tuple[object, object, int, object, Mapping[str, object]]

# Several micro-batches as one, without weights.
JoinedBatches = Tuple[Tensor, Tensor, int, None, Mapping[str, object]]

# Elements that are worth a copy, to look at them all at once; and at most of those that wait.
_JOINED, _MOST = 2**16, 2**18


def concatenate(batches: Sequence[MetricInputs]) -> Optional[JoinedBatches]:
    """A copy of several micro-batches as one; None where they are not alike, or not small."""
    predictions, targets, _, weights, _ = zip(*batches) if batches else ((), (), (), (), ())
    if {*map(type, (*predictions, *targets))} != {Tensor} or {*map(type, weights)} != {type(None)}:
        return None
    # What follows looks at each form once, not at each of many micro-batches.
    forms = {(p.shape, t.shape, p.dtype, t.dtype) for p, t in zip(predictions, targets)}
    if not all(len(p) and len(t) and p[0] == t[0] for p, t, *_ in forms):
        return None
    if len({(p[1:], t[1:], *dtypes) for p, t, *dtypes in forms}) > 1:
        return None
    if len(batches) * max(p.numel() + t.numel() for p, t, *_ in forms) > _JOINED:
        return None
    return _as_one(batches)


def _as_one(batches: Sequence[MetricInputs]) -> JoinedBatches:
    predictions, targets, sizes, *_ = zip(*batches)
    return torch.cat(predictions), torch.cat(targets), sum(sizes), None, {}


def _form(one: JoinedBatches) -> object:
    prediction, target, *_ = one
    return prediction.shape[1:], target.shape[1:], prediction.dtype, target.dtype


class MetricSet:
    """The metrics of one epoch of one kind; training and validation have one each.

    Made by :func:`resolve_metrics`; without arguments it is empty.

    Attributes:
        takes_fields: whether a metric takes more of a batch than its target.
    """

    def __init__(self, metrics: Sequence[Metric] = ()) -> None:
        """Hold metrics that nobody else holds."""
        self._metrics = list(metrics)
        self.takes_fields = False
        for metric in metrics:
            self.takes_fields |= bool(metric.fields)
        # Executions whose metrics nobody has asked for yet. After the update of a network a metric
        # finds nothing of its own in the processor's caches: what is computed of several at once
        # costs hardly more than of one. They wait if the metrics are sure to take them: those that
        # took class indices of one form take every other micro-batch of it.
        self._pending: List[JoinedBatches] = []
        self._elements = 0
        self._accepted_form: object = None

    def __bool__(self) -> bool:
        """True if there is any metric."""
        return bool(self._metrics)

    @property
    def names(self) -> Tuple[str, ...]:
        """Keys of :meth:`compute`; of a metric that returns several values, exact after a probe."""
        return tuple(name for metric in self._metrics for name in metric.names)

    def by_name(self) -> Dict[str, Metric]:
        """The metrics by their names, those of one metric separated by commas."""
        return {", ".join(metric.names): metric for metric in self._metrics}

    @property
    def higher_is_better(self) -> Dict[str, bool]:
        """By name, for the metrics that are named ones or have this attribute, as torchmetrics'."""
        directions = [
            item for metric in self._metrics for item in metric.higher_is_better().items()
        ]
        return {name: bool(better) for name, better in directions if better is not None}

    def fresh(self) -> MetricSet:
        """Clone the set without any state, sharing nothing."""
        return MetricSet([metric.fresh() for metric in self._metrics])

    def reset(self) -> None:
        """Forget everything seen, at the start of an epoch."""
        self._drop_pending()
        for metric in self._metrics:
            metric.reset()

    def update(
        self,
        prediction: object,
        target: object,
        size: int,
        sample_weight: object = None,
        fields: Mapping[str, object] = MappingProxyType({}),
    ) -> None:
        """Add one micro-batch.

        Args:
            prediction: the module's outputs, on the host, without padding.
            target: the targets, on the host.
            size: number of samples in both; of none, nothing happens.
            sample_weight: for the weighted metrics, on the host: one tensor, or one for each output
                in the structure of the outputs; None counts as weights of 1.
            fields: of the batch, by name, for metrics that take some of them.

        Raises:
            MetricError: a metric can't take them, chained from the metric's own error.
        """
        self._update(self._metrics, (prediction, target, size, sample_weight, fields))

    def update_all(self, batches: Sequence[MetricInputs]) -> None:
        """Add the micro-batches of an execution, the arguments of :meth:`update` for each.

        Raises:
            MetricError: a metric can't take them, chained from the metric's own error.
        """
        counting = [metric for metric in self._metrics if metric.counts]
        one = concatenate(batches) if counting else None
        if one is None:
            counted: Sequence[Metric] = ()
        elif _form(one) == self._accepted_form:
            self._pending.append(one)
            self._elements += one[0].numel() + one[1].numel()
            counted = counting
        else:
            counted = [metric for metric in counting if self._counted(metric, one)]
            if len(counted) == len(counting) and one[0].shape != one[1].shape:
                self._accepted_form = _form(one)
        rest = [metric for metric in self._metrics if metric not in counted]
        for batch in batches if rest else ():
            self._update(rest, batch)
        if self._elements > _MOST:
            self._catch_up()

    def _counted(self, metric: Metric, one: MetricInputs) -> bool:
        """Add all micro-batches as one, where that gives the same bits.

        Of what the metric can't take it says so for the micro-batch in which it is.
        """
        try:
            self._update([metric], one)
        except MetricError:
            return False
        return True

    def _catch_up(self) -> None:
        """Add the micro-batches that wait."""
        pending = self._pending
        self._drop_pending()
        if pending:
            counting = [metric for metric in self._metrics if metric.counts]
            self._update(counting, _as_one(pending))

    def _drop_pending(self) -> None:
        self._pending, self._elements = [], 0

    def _update(self, metrics: Sequence[Metric], inputs: MetricInputs) -> None:
        prediction, target, size, sample_weight, fields = inputs
        if not size:
            return
        for metric in metrics:
            chosen = _fields_for(metric, fields) if metric.fields else {}
            arguments = (prediction, target, sample_weight, chosen)
            if metric.writes:
                arguments = map_leaves(_copy, arguments)
            tensors = [leaf for leaf in flatten(arguments)[0] if isinstance(leaf, Tensor)]
            before = _versions(tensors)
            with _named_failure(metric.name, prediction, target):
                metric.update(arguments[0], arguments[1], size, arguments[2], **arguments[3])
            # One metric's scratch work must not be what the next one, or the loss, sees.
            metric.writes = metric.writes or _versions(tensors) != before

    def compute(self) -> Dict[str, float]:
        """The values over everything since the last reset; nan before the first micro-batch.

        Raises:
            MetricError: a metric's value is not a number.
            ConfigurationError: two values have one name.
        """
        self._catch_up()
        values: Dict[str, float] = {}
        for metric in self._metrics:
            for name, value in metric.compute().items():
                check_log_name(name, values, metric.exact)
                values[name] = value
        return values

    def check_joined(self, processes: int) -> None:
        """Make sure that what so many processes see can be brought together.

        Raises:
            MetricError: naming the metric of which nobody knows how.
        """
        if processes > 1:
            for metric in self._metrics:
                metric.check_joined(processes)

    def whole(self, processes: Processes) -> MetricSet:
        """This set as if it had seen what those of all processes have."""
        if not processes.is_distributed or not self._metrics:
            return self
        merged = self.fresh()
        merged.load_state_dict(self.merge_states(processes.gather(self.state_dict(), "metrics")))
        for metric, source in zip(merged._metrics, self._metrics):
            metric.names = source.names
        return merged

    def merge_states(self, states: Sequence[Sequence[object]]) -> List[object]:
        """One state of those of several processes.

        Raises:
            MetricError: one can't be joined.
        """
        return [
            metric.merge_states(metric_states)
            for metric, metric_states in zip(self._metrics, zip(*states))
        ]

    def state_dict(self) -> List[object]:
        """Return the states of all metrics.

        Raises:
            MetricError: one can't say.
        """
        self._catch_up()
        return [metric.state_dict() for metric in self._metrics]

    def load_state_dict(self, state: Sequence[object]) -> None:
        """Restore what :meth:`state_dict` returned."""
        self._drop_pending()
        for metric, metric_state in zip(self._metrics, state):
            metric.load_state_dict(metric_state)

    def load_lasting(self, state: Sequence[object]) -> None:
        """Go on from there after the end of an epoch, with what it does not end."""
        for metric, metric_state in zip(self._metrics, state):
            if metric.lasts:
                metric.load_state_dict(metric_state)

    def probe(
        self,
        prediction: object,
        target: object,
        size: int,
        sample_weight: object = None,
        fields: Mapping[str, object] = MappingProxyType({}),
    ) -> None:
        """Find out, before any training, whether the metrics can take such tensors.

        It works on copies and leaves no state, no warning, and random number generators as they
        were; only :attr:`names` learns the keys that a metric really returns. A callable is called
        once.

        Args:
            prediction: tensors of the right shapes and dtypes, values anywhere in (0, 1).
            target: tensors of the right shapes and dtypes.
            size: number of samples in both.
            sample_weight, fields: as in :meth:`update`.

        Raises:
            MetricError: a metric can't take them, or its value is not a number.
            ConfigurationError: two values have one name.
        """
        trial = self.fresh()
        copies = map_leaves(_copy, (prediction, target, sample_weight))
        prediction, target, sample_weight = copies
        # Another thread may be reading data with torch's generator.
        with warnings.catch_warnings(), LOCK, fork_rng():
            warnings.simplefilter("ignore")
            trial.update(prediction, target, size, sample_weight, fields)
            for metric in trial._metrics:
                with _named_failure(metric.name, prediction, target):
                    metric.names = tuple(metric.compute())
            trial.compute()
        for metric, tried in zip(self._metrics, trial._metrics):
            metric.names, metric.writes = tried.names, tried.writes


def _fields_for(metric: Metric, fields: Mapping[str, object]) -> Dict[str, object]:
    """Pick what a metric takes of a batch beside prediction and target.

    Raises:
        MetricError: the batch has no such field.
    """
    for name in metric.fields:
        if name not in fields:
            raise MetricError(
                f"metric {metric.name!r} takes {name!r} from the batch, whose fields are "
                f"{', '.join(map(repr, fields)) or 'none'}. Rename the parameter to one of these, "
                "or give it a default; a batch has fields if it is a dict."
            )
    return {name: fields[name] for name in metric.fields}


def random_like(leaf: object) -> object:
    """Make numbers to try metrics on in place of a tensor: in (0, 1), or zeros if it has integers.

    They are on the host. What is no tensor stays.
    """
    if not isinstance(leaf, Tensor):
        return leaf
    if leaf.is_floating_point() or leaf.is_complex():
        return torch.rand(leaf.shape, dtype=leaf.dtype, device="cpu")
    return torch.zeros(leaf.shape, dtype=leaf.dtype, device="cpu")


def _copy(leaf: object) -> object:
    return leaf.clone() if isinstance(leaf, Tensor) else leaf


def _versions(tensors: Sequence[Tensor]) -> List[int]:
    """Count the in-place changes of each tensor, by torch's version counters."""
    return [tensor._version for tensor in tensors]


@contextlib.contextmanager
def _named_failure(name: str, prediction: object, target: object) -> Iterator[None]:
    """Turn whatever a metric raises into an error that names it and both shapes."""
    try:
        yield
    except ConfigurationError:
        raise
    except Exception as error:
        raise MetricError(
            f"metric {name!r} must take the module's outputs and the targets, got prediction of "
            f"{shapes(prediction)} and target of {shapes(target)}, and failed with "
            f"{type(error).__name__}: {str(error).rstrip('.')}. Pass a metric for these, or a "
            "callable metric(prediction, target) that converts them."
        ) from error
