"""Hyper-parameters that change from update to update: a scheduler or callable in normal form."""

from typing import TYPE_CHECKING

from ipufit.on_use import on_use

if TYPE_CHECKING:
    from ipufit.schedules.resolve import AtEpochEnd, resolve_schedule
    from ipufit.schedules.schedule import Schedule
else:
    __getattr__, __dir__ = on_use(
        __name__,
        {
            "AtEpochEnd": "ipufit.schedules.resolve",
            "Schedule": "ipufit.schedules.schedule",
            "resolve_schedule": "ipufit.schedules.resolve",
        },
    )

__all__ = ["AtEpochEnd", "Schedule", "resolve_schedule"]
