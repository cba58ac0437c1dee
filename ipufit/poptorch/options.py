"""PopTorch's options: how a model is compiled, cut over IPUs and run."""

from __future__ import annotations

from ipufit.poptorch import enums, ops
from ipufit.poptorch._logging import logger
from ipufit.poptorch._options.distributed import _DistributedOptions
from ipufit.poptorch._options.files import ConfigFileError
from ipufit.poptorch._options.locations import TensorLocationSettings, _TensorLocationOptions
from ipufit.poptorch._options.numbers import _JitOptions, _PrecisionOptions
from ipufit.poptorch._options.options import Options
from ipufit.poptorch._options.popart import _PopartOptions
from ipufit.poptorch._options.stages import Attribute, BlockId, Phase, Stage
from ipufit.poptorch._options.strategies import (
    ParallelPhasedExecution,
    PipelinedExecution,
    SerialPhasedExecution,
    ShardedExecution,
    _IExecutionStrategy,
    _IPhasedExecution,
)
from ipufit.poptorch._options.training import _TrainingOptions

__all__ = [
    "Attribute",
    "BlockId",
    "ConfigFileError",
    "Options",
    "ParallelPhasedExecution",
    "Phase",
    "PipelinedExecution",
    "SerialPhasedExecution",
    "ShardedExecution",
    "Stage",
    "TensorLocationSettings",
    "_DistributedOptions",
    "_IExecutionStrategy",
    "_IPhasedExecution",
    "_JitOptions",
    "_PopartOptions",
    "_PrecisionOptions",
    "_TensorLocationOptions",
    "_TrainingOptions",
    "enums",
    "logger",
    "ops",
]
