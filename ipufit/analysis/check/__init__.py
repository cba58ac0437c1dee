"""What looks into a model for faults, without training it."""

from __future__ import annotations

from ipufit.analysis.check.finding import Finding
from ipufit.analysis.check.report import CheckReport

__all__ = ["CheckReport", "Finding"]
