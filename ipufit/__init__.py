"""A Keras-like fit library for PyTorch whose whole training step is one traced program."""

from ipufit import callbacks, errors, optim, schedules
from ipufit.history import History
from ipufit.model import Model
from ipufit.plan import Plan
from ipufit.seeding import seed_everything

__all__ = [
    "History",
    "Model",
    "Plan",
    "callbacks",
    "errors",
    "optim",
    "schedules",
    "seed_everything",
]

__version__ = "0.1.0"
