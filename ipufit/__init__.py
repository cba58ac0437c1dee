"""A Keras-like fit library for PyTorch whose whole training step is one traced program."""

from typing import TYPE_CHECKING, Any

from ipufit import callbacks, data, engines, errors, losses, metrics, optim, partition
from ipufit._version import __version__ as __version__
from ipufit.callbacks.history import History
from ipufit.checkpoint.settings import Checkpoint
from ipufit.core.logged_values import log
from ipufit.core.plan import Plan
from ipufit.core.train_config import EMA, Clip, LossScale, Memory, Outputs, Precision, Reduction
from ipufit.data.settings import Loading, Validation
from ipufit.data.sharding import Sharded
from ipufit.losses import TrainStep
from ipufit.partition.request import Parallel
from ipufit.processes import distributed
from ipufit.report import Report
from ipufit.training.model import Model, load, register_steps_model
from ipufit.utils.lazy_exports import lazy_exports
from ipufit.utils.random_streams import seed_everything

if TYPE_CHECKING:
    from ipufit.analysis.tuner import BatchSize, LearningRates
    from ipufit.engines.ipu.ipu_config import IPUConfig
    from ipufit.engines.ipu.preflight.report import PreflightReport
    from ipufit.planner.partition_plan import PartitionPlan
    from ipufit.training.model import StepsModel
else:
    __getattr__, __dir__ = lazy_exports(
        __name__,
        {
            "ipufit.analysis.tuner": ("BatchSize", "LearningRates"),
            "ipufit.engines.ipu.ipu_config": ("IPUConfig",),
            "ipufit.engines.ipu.preflight.report": ("PreflightReport",),
            "ipufit.planner.partition_plan": ("PartitionPlan",),
        },
        moved={
            "optimizer_state": "ipufit.optim.state",
            "parallel": "ipufit.partition",
            "schedules": "ipufit.optim.schedules",
        },
    )

# Sorted as sorted() does: EMA is no constant.
__all__ = [  # noqa: RUF022
    "BatchSize",
    "Checkpoint",
    "Clip",
    "EMA",
    "History",
    "IPUConfig",
    "LearningRates",
    "Loading",
    "LossScale",
    "Memory",
    "Model",
    "Outputs",
    "Parallel",
    "PartitionPlan",
    "Plan",
    "Precision",
    "PreflightReport",
    "Reduction",
    "Report",
    "Sharded",
    "TrainStep",
    "Validation",
    "callbacks",
    "data",
    "distributed",
    "engines",
    "errors",
    "load",
    "log",
    "losses",
    "metrics",
    "optim",
    "partition",
    "seed_everything",
]


@register_steps_model
def _model_of_lightning(module: Any, engine: Any, device: Any) -> "StepsModel":
    # Imported here, as above: few models are LightningModules.
    from ipufit.lightning_module import LightningModel

    return LightningModel(module, engine, device)
