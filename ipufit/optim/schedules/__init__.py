"""Hyper-parameters that change from update to update: a scheduler or callable in normal form.

``lr_scheduler`` of :meth:`ipufit.Model.compile` takes what :func:`resolve_schedule` takes. See
docs/schedules.md.
"""

from typing import TYPE_CHECKING

from ipufit.optim.schedules.curves import WSD, Constant, Cosine, Linear, OneCycle, Polynomial
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

# Sorted as sorted() does: WSD is no constant.
__all__ = [  # noqa: RUF022
    "AtEpochEnd",
    "Constant",
    "Cosine",
    "Linear",
    "OneCycle",
    "Polynomial",
    "Schedule",
    "WSD",
    "resolve_schedule",
]
