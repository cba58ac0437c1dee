"""Hyper-parameters that change from update to update: a scheduler or callable in normal form.

``lr_scheduler`` of :meth:`ipufit.Model.compile` takes what :func:`resolve_schedule` takes. See
docs/schedules.md.
"""

from ipufit.utils.lazy_exports import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(__name__)
