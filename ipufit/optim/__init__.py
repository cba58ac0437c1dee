"""Optimizers and what changes them: LAMB, update rules, schedules, and optimizer state.

:class:`LAMB` is the one optimizer of PopTorch that torch.optim does not have.
"""

# What users pass as optimizer and lr_scheduler is brought to one normal form in resolve.py and
# schedules/.

from ipufit.utils.lazy_exports import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(__name__)
