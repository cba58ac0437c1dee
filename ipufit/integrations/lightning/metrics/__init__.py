"""Metric objects in the steps of a LightningModule.

The program hands out what they are called with, and the host updates them after each execution.
torchmetrics is never imported here.
"""

from ipufit.integrations.lightning.metrics.epoch import EpochMetrics
from ipufit.integrations.lightning.metrics.objects import ModuleMetrics
from ipufit.integrations.lightning.metrics.program import MeasuredProgram
from ipufit.integrations.lightning.metrics.recording import MetricCalls
from ipufit.integrations.lightning.metrics.values import MetricValue

__all__ = ["EpochMetrics", "MeasuredProgram", "MetricCalls", "MetricValue", "ModuleMetrics"]
