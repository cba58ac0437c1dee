"""Optimizers that torch lacks, several optimizers as one, schedules, and optimizer state.

:class:`LAMB` is the one optimizer of PopTorch that torch.optim does not have, :class:`Muon` is
torch's own for versions of torch before 2.9, and :class:`MultiOptimizer` is ``model.optimizer`` of
a model with several. See docs/optimizers-losses-metrics.md and docs/schedules.md.
"""

# What users pass as optimizer and lr_scheduler is brought to one normal form in resolve.py and
# schedules/.

from ipufit.utils.lazy_exports import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(__name__)
