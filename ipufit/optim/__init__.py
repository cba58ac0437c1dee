"""Optimizers and what changes them: LAMB, update rules, schedules, and optimizer state.

:class:`LAMB` is the one optimizer of PopTorch that torch.optim does not have.
"""

# What users pass as optimizer and lr_scheduler is brought to one normal form in resolve.py and
# schedules/.

from ipufit.optim import schedules, state
from ipufit.optim.lamb import LAMB
from ipufit.optim.muon import Muon
from ipufit.optim.several import MultiOptimizer

__all__ = ["LAMB", "MultiOptimizer", "Muon", "schedules", "state"]
