"""What looks into a model for faults, without training it."""

from __future__ import annotations

from ipufit.diagnose.check_report import CheckReport
from ipufit.diagnose.finding import Finding

__all__ = ["CheckReport", "Finding"]
