"""Metric objects in the steps of a LightningModule.

The program hands out what they are called with, and the host updates them after each execution.
torchmetrics is never imported here.
"""

from ipufit.lightning_module.metrics.objects import ModuleMetrics, StepMetrics
from ipufit.lightning_module.metrics.program import MeasuredProgram
from ipufit.lightning_module.metrics.recording import MetricCalls, MetricValue

__all__ = ["MeasuredProgram", "MetricCalls", "MetricValue", "ModuleMetrics", "StepMetrics"]
