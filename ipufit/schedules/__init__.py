"""Hyper-parameters that change from update to update: a scheduler or callable in normal form."""

from ipufit.schedules.resolve import AtEpochEnd, resolve_schedule
from ipufit.schedules.schedule import Schedule

__all__ = ["AtEpochEnd", "Schedule", "resolve_schedule"]
