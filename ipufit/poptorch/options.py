"""PopTorch's options: how a model is compiled, cut over IPUs and run."""

from __future__ import annotations

from ipufit.poptorch import enums, ops
from ipufit.poptorch._logging import logger
from ipufit.poptorch._options.execution import (
    Attribute,
    BlockId,
    ParallelPhasedExecution,
    Phase,
    PipelinedExecution,
    SerialPhasedExecution,
    ShardedExecution,
    Stage,
)
from ipufit.poptorch._options.execution import _IExecutionStrategy as _IExecutionStrategy
from ipufit.poptorch._options.execution import _IPhasedExecution as _IPhasedExecution
from ipufit.poptorch._options.files import ConfigFileError
from ipufit.poptorch._options.group import TensorLocationSettings
from ipufit.poptorch._options.group import _DistributedOptions as _DistributedOptions
from ipufit.poptorch._options.group import _JitOptions as _JitOptions
from ipufit.poptorch._options.group import _PopartOptions as _PopartOptions
from ipufit.poptorch._options.group import _PrecisionOptions as _PrecisionOptions
from ipufit.poptorch._options.group import _TensorLocationOptions as _TensorLocationOptions
from ipufit.poptorch._options.group import _TrainingOptions as _TrainingOptions
from ipufit.poptorch._options.options import Options

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
    "enums",
    "logger",
    "ops",
]
