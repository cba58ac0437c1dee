"""Metrics: from what the user may pass to sums over an epoch.

A named metric is exact: values are summed in float64 beside their count and divided once, so that
no cut into micro-batches, replicas or executions changes the result. torchmetrics is never imported
here; its objects are known by their methods ``update``, ``compute`` and ``reset``. Rooms above use
what is exported here; a new named metric is a row in ``values``.
"""

from ipufit.metrics.metric_set import MetricSet
from ipufit.metrics.resolve import resolve_metrics

__all__ = ["MetricSet", "resolve_metrics"]
