"""PopTorch's public API on the embedded engine: no SDK, no IPU, the same meaning."""

from ipufit.poptorch import enums, ops, optim, options, poptorch_core, profiling, testing
from ipufit.poptorch._accessor import AsynchronousDataAccessor
from ipufit.poptorch._dataloader import DataLoader
from ipufit.poptorch._devices import ipuHardwareIsAvailable, ipuHardwareVersion
from ipufit.poptorch._impl import createPoptorchError, isRunningOnIpu, poptorchAtExit
from ipufit.poptorch._loading import load
from ipufit.poptorch._logging import logger, setLogLevel
from ipufit.poptorch._models import inferenceModel, trainingModel
from ipufit.poptorch._options.group import RENAMED as _RENAMED
from ipufit.poptorch._parsers import (
    ATTR_PREFIX,
    ICustomArgParser,
    accessAttributes,
    flattenTensorStructure,
    getIpuTensorId,
    reconstructTensorStructure,
    registerCustomArgParser,
    registerGeometricCustomArgParsers,
)
from ipufit.poptorch._poplar_executor import (
    PoplarExecutor,
    _OverwriteContextManager,
    registerPostCompileHook,
    registerPreCompileHook,
)
from ipufit.poptorch._printing import module_repr, print
from ipufit.poptorch._version import __version__
from ipufit.poptorch.enums import (
    AutoStage,
    CommGroupType,
    ConnectionType,
    DataLoaderMode,
    HalfFloatCastingBehavior,
    Liveness,
    MatMulSerializationMode,
    MeanReductionStrategy,
    MultiConvPlanType,
    OutputMode,
    OverlapMode,
    ReductionType,
    SharingStrategy,
    SyncPattern,
    VariableRetrievalMode,
)
from ipufit.poptorch.ops import (
    CPU,
    BeginBlock,
    Block,
    BlockFunction,
    LegacyBeginBlockFn,
    MultiConv,
    NameScope,
    attributes_lists,
    cond,
    ctc_beam_search_decoder,
    custom_op,
    dynamic_slice,
    dynamic_update,
    for_loop,
    fps,
    identity_loss,
    ipu_print_tensor,
    nearest,
    nop,
    recomputationCheckpoint,
    removeBlocks,
    serializedMatMul,
    set_available_memory,
    set_overlap_for_input,
    set_overlap_for_output,
)
from ipufit.poptorch.options import (
    Attribute,
    BlockId,
    ConfigFileError,
    Options,
    ParallelPhasedExecution,
    Phase,
    PipelinedExecution,
    SerialPhasedExecution,
    ShardedExecution,
    Stage,
    TensorLocationSettings,
)
from ipufit.poptorch.poptorch_core import (
    Error,
    RecoverableError,
    UnrecoverableError,
    importPoptorchMetadataFromFile,
)

__all__ = [
    "ATTR_PREFIX",
    "CPU",
    "AsynchronousDataAccessor",
    "Attribute",
    "AutoStage",
    "BeginBlock",
    "Block",
    "BlockFunction",
    "BlockId",
    "CommGroupType",
    "ConfigFileError",
    "ConnectionType",
    "DataLoader",
    "DataLoaderMode",
    "Error",
    "HalfFloatCastingBehavior",
    "ICustomArgParser",
    "LegacyBeginBlockFn",
    "Liveness",
    "MatMulSerializationMode",
    "MeanReductionStrategy",
    "MultiConv",
    "MultiConvPlanType",
    "NameScope",
    "Options",
    "OutputMode",
    "OverlapMode",
    "ParallelPhasedExecution",
    "Phase",
    "PipelinedExecution",
    "PoplarExecutor",
    "RecoverableError",
    "ReductionType",
    "SerialPhasedExecution",
    "ShardedExecution",
    "SharingStrategy",
    "Stage",
    "SyncPattern",
    "TensorLocationSettings",
    "UnrecoverableError",
    "VariableRetrievalMode",
    "_OverwriteContextManager",
    "__version__",
    "accessAttributes",
    "attributes_lists",
    "cond",
    "createPoptorchError",
    "ctc_beam_search_decoder",
    "custom_op",
    "dynamic_slice",
    "dynamic_update",
    "enums",
    "flattenTensorStructure",
    "for_loop",
    "fps",
    "getIpuTensorId",
    "identity_loss",
    "importPoptorchMetadataFromFile",
    "inferenceModel",
    "ipuHardwareIsAvailable",
    "ipuHardwareVersion",
    "ipu_print_tensor",
    "isRunningOnIpu",
    "load",
    "logger",
    "module_repr",
    "nearest",
    "nop",
    "ops",
    "optim",
    "options",
    "poptorchAtExit",
    "poptorch_core",
    "print",
    "profiling",
    "recomputationCheckpoint",
    "reconstructTensorStructure",
    "registerCustomArgParser",
    "registerGeometricCustomArgParsers",
    "registerPostCompileHook",
    "registerPreCompileHook",
    "removeBlocks",
    "serializedMatMul",
    "setLogLevel",
    "set_available_memory",
    "set_overlap_for_input",
    "set_overlap_for_output",
    "testing",
    "trainingModel",
]


def __getattr__(name: str) -> object:
    """Tell of a name that an earlier PopTorch had.

    Raises:
        AttributeError: of that name, or of any other one.
    """
    hint = f". It is called {_RENAMED[name]} in PopTorch 3.4." if name in _RENAMED else ""
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}{hint}")
