"""Hyper-parameters that change from update to update: a scheduler or callable in normal form.

``lr_scheduler`` of :meth:`ipufit.Model.compile` takes what :func:`resolve_schedule` takes. See
docs/schedules.md.
"""

from typing import TYPE_CHECKING

from ipufit.utils.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from ipufit.optim.schedules.resolve import AtEpochEnd, resolve_schedule
    from ipufit.optim.schedules.schedule import Schedule
else:
    __getattr__, __dir__ = lazy_exports(
        __name__,
        {
            "ipufit.optim.schedules.resolve": ("AtEpochEnd", "resolve_schedule"),
            "ipufit.optim.schedules.schedule": ("Schedule",),
        },
    )

__all__ = ["AtEpochEnd", "Schedule", "resolve_schedule"]
