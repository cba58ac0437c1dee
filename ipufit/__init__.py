"""A Keras-like fit library for PyTorch whose whole training step is one traced program."""

from typing import TYPE_CHECKING

from ipufit import callbacks, engines, errors, optim, optimizer_state, parallel, schedules
from ipufit.checkpoints.settings import Checkpoint
from ipufit.data.sharding import Sharded
from ipufit.history import History
from ipufit.loading import load
from ipufit.logged import log
from ipufit.model import Model
from ipufit.on_use import on_use
from ipufit.plan import Plan
from ipufit.processes import distributed
from ipufit.recipe import LossScale
from ipufit.report import Report
from ipufit.seeding import seed_everything

if TYPE_CHECKING:
    from ipufit.finders import BatchSize
    from ipufit.ipu_config import IPUConfig
    from ipufit.lr_finder import LearningRates
    from ipufit.parallel.partition_plan import PartitionPlan
    from ipufit.preflight.report import PreflightReport
else:
    __getattr__, __dir__ = on_use(
        __name__,
        {
            "BatchSize": "ipufit.finders",
            "IPUConfig": "ipufit.ipu_config",
            "LearningRates": "ipufit.lr_finder",
            "PartitionPlan": "ipufit.parallel.partition_plan",
            "PreflightReport": "ipufit.preflight.report",
        },
    )

__all__ = [
    "BatchSize",
    "Checkpoint",
    "History",
    "IPUConfig",
    "LearningRates",
    "LossScale",
    "Model",
    "PartitionPlan",
    "Plan",
    "PreflightReport",
    "Report",
    "Sharded",
    "callbacks",
    "distributed",
    "engines",
    "errors",
    "load",
    "log",
    "optim",
    "optimizer_state",
    "parallel",
    "schedules",
    "seed_everything",
]

__version__ = "0.1.0"
