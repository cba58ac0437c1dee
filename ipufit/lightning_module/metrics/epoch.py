"""The values over an epoch of metric objects that a step logs."""

from __future__ import annotations

import copy
import math
from typing import Any, Dict, Optional, Sequence, Tuple

from ipufit.errors import MetricError
from ipufit.lightning_module.metrics.objects import (
    ModuleMetrics,
    Objects,
    has_seen,
    metric_at,
    number,
    quiet,
)
from ipufit.metrics.stored import is_plain, joined, restore, stored

__all__ = ["EpochMetrics"]


class EpochMetrics:
    """The values over an epoch of the metrics that a step logs, one of ipufit's metrics.

    They are updated by :class:`MeasuredProgram`.

    Args:
        metrics: of the module.
        step: tells the role of the step that is meant.
        role: "train", "validation" or "test"; None for that of the moment when it is used.
        copies: what to take in place of the module's own metrics.
    """

    name = "of the steps"
    writes = counts = False
    exact = lasts = True

    def __init__(
        self,
        metrics: ModuleMetrics,
        step: Any,
        role: Optional[str] = None,
        copies: Optional[Objects] = None,
    ) -> None:
        self._metrics = metrics
        self._step = step
        self._role = role
        self._copies = copies

    @property
    def names(self) -> Tuple[str, ...]:
        """Keys of :meth:`compute`, once the step has been recorded."""
        return () if self._role is None else tuple(self._metrics.epochs(self._role))

    @names.setter
    def names(self, names: Tuple[str, ...]) -> None:
        """They are known."""

    def fresh(self) -> EpochMetrics:
        """That of the present role; of one that has a role, a copy without state."""
        if self._role is None:
            role = self._step.role
            self._metrics.begin(role)
            return EpochMetrics(self._metrics, self._step, role)
        copies = copy.deepcopy(self._objects)
        for metric in copies.values():
            metric.reset()
        return EpochMetrics(self._metrics, self._step, self._role, copies)

    @property
    def _objects(self) -> Objects:
        assert self._role is not None
        return self._metrics.turn_to(self._role) if self._copies is None else self._copies

    def reset(self) -> None:
        """A new epoch."""
        if self._role is not None and self._copies is None:
            self._metrics.reset(self._role)

    def update(self, prediction: Any, target: Any, size: int, weight: Any) -> None:
        """Nothing: the program's outputs came first."""

    def compute(self) -> Dict[str, float]:
        """The values so far; nan before the first micro-batch."""
        objects, values = self._objects, {}
        assert self._role is not None
        for name, path in self._metrics.epochs(self._role).items():
            metric = metric_at(objects, path)
            with quiet(metric):
                values[name] = number(metric.compute(), name) if has_seen(metric) else math.nan
        return values

    def state_dict(self) -> Any:
        """Of every metric that the step calls.

        Raises:
            MetricError: one can't say.
        """
        for path, metric in self._objects.items():
            if not is_plain(metric):
                raise MetricError(
                    f"a checkpoint holds what every metric has seen, but self.{path} "
                    f"({type(metric).__name__}) can't say it. Use a plain metric of torchmetrics, "
                    "or leave checkpoint out."
                )
        return {path: stored(metric, path) for path, metric in self._objects.items()}

    def load_state_dict(self, state: Any) -> None:
        """Go on from there."""
        for path, metric in self._objects.items():
            if path in state:
                restore(metric, state[path])

    def joined(self, states: Sequence[Any]) -> Any:
        """As torchmetrics has declared it.

        Raises:
            MetricError: a state can't be joined.
        """
        return {
            path: joined(metric, [state[path] for state in states], f"self.{path}")
            for path, metric in self._objects.items()
        }

    def check_joined(self, processes: int) -> None:
        """Nothing yet: what the step calls is known when it has been recorded."""

    def higher_is_better(self) -> Dict[str, Optional[bool]]:
        """By name, as the metrics say."""
        objects = self._objects
        assert self._role is not None
        return {
            name: getattr(metric_at(objects, path), "higher_is_better", None)
            for name, path in self._metrics.epochs(self._role).items()
        }
