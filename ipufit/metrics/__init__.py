"""Metrics: from what the user may pass to sums over an epoch.

The classes here are metrics that torchmetrics computes, under Keras' names and with Keras' values,
for ``metrics`` of :meth:`ipufit.Model.compile`, which takes a name for the defaults of each. All
other metrics that have a name are in docs/optimizers-losses-metrics.md.

A named metric is exact: values are summed in float64 beside their count and divided once, so that
no cut into micro-batches, replicas or executions changes the result.
"""

# torchmetrics is not imported with this package; its objects are known by their methods update,
# compute and reset, and by_task.py makes those that have a name. Users have the names of
# __init__.pyi, rooms above metric_set and resolve; a new named metric is a row in values.py, or in
# by_task.py where sums over elements do not do.

from ipufit.utils.lazy_exports import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(__name__)
