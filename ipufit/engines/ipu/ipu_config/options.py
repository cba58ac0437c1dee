"""PopTorch's options from an IPUConfig: all of them, or those that ipufit does not set itself."""

from __future__ import annotations

from typing import Any

import torch

from ipufit.engines.ipu.ipu_config.parameters import ParameterValues
from ipufit.engines.ipu.options import new_options
from ipufit.engines.ipu.sdk import is_standin
from ipufit.errors import ConfigurationError
from ipufit.utils.random_streams import isolated

__all__ = ["engine_options", "to_options"]

_HOST = torch.device("cpu")
# The second generation of IPUs, and the card C600.
_VERSIONS = (2, 21)
# Numbers of PopART's enums: AccumulateOuterFragmentSchedule.OverlapMemoryOptimized and
# SubgraphCopyingStrategy.JustInTime.
_OVERLAP_MEMORY_OPTIMIZED = 3
_JUST_IN_TIME = 1


def to_options(sdk: Any, config: ParameterValues, for_inference: bool, compile_only: bool) -> Any:
    """The options that optimum-graphcore makes of a configuration.

    Args:
        sdk: PopTorch.
        config: for one type of pod.
        for_inference: for inference.
        compile_only: for programs that are compiled without an IPU.

    Raises:
        ConfigurationError: the values don't fit together, or the IPUs are of another kind.
    """
    if not compile_only and not is_standin(sdk):
        _check_hardware(sdk)
    options = engine_options(sdk, config, for_inference)
    stage = sdk.AutoStage.AutoIncrement
    if for_inference:
        options.replicationFactor(config.inference_replication_factor)
        options.deviceIterations(config.inference_device_iterations)
        options.outputMode(sdk.OutputMode.All)
        options.setExecutionStrategy(sdk.ShardedExecution(stage))
    else:
        options.replicationFactor(config.replication_factor)
        options.deviceIterations(config.device_iterations)
        options.Training.gradientAccumulation(config.gradient_accumulation_steps)
        options.Training.accumulationAndReplicationReductionType(sdk.ReductionType.Mean)
        options.outputMode(getattr(sdk.OutputMode, config.output_mode.capitalize()))
        options.setExecutionStrategy(sdk.PipelinedExecution(stage))
    if config.seed is not None:
        # PopTorch seeds torch's own generator at once, which is the user's.
        with isolated(_HOST):
            options.randomSeed(config.seed)
    if compile_only:
        options.useOfflineIpuTarget()
    return options


def _check_hardware(sdk: Any) -> None:
    version = sdk.ipuHardwareVersion() if sdk.ipuHardwareIsAvailable() else None
    if version not in _VERSIONS:
        came = "there is no IPU" if version is None else f"PopTorch finds version {version}"
        raise ConfigurationError(
            f"to_options is for IPUs of version {' or '.join(map(str, _VERSIONS))}, but {came}. "
            "Pass compile_only=True for options to compile without an IPU."
        )


def engine_options(sdk: Any, config: ParameterValues, for_inference: bool) -> Any:
    """Memory, precision and compiler: what a plan and ``compile`` don't say.

    Args:
        sdk: PopTorch.
        config: for one type of pod.
        for_inference: for inference.
    """
    prefix = "inference_" if for_inference else ""
    options = new_options(sdk, getattr(config, f"{prefix}ipus_per_replica"))
    options.autoRoundNumIPUs(True)
    memory = getattr(config, f"{prefix}matmul_proportion")
    ipus = getattr(config, f"{prefix}ipus_per_replica")
    by_ipu = memory if isinstance(memory, list) else [memory] * ipus
    options.setAvailableMemoryProportion({f"IPU{i}": share for i, share in enumerate(by_ipu)})
    replicas = getattr(config, f"{prefix}replication_factor")
    location = sdk.TensorLocationSettings()
    location.useOnChipStorage(not config.optimizer_state_offchip)
    location.useReplicatedTensorSharding(config.replicated_tensor_sharding and replicas > 1)
    options.TensorLocations.setOptimizerLocation(location)
    options.Precision.enableStochasticRounding(not for_inference)
    if config.enable_half_partials:
        options.Precision.setPartialsType(torch.float16)
    if config.auto_loss_scaling and not for_inference:
        options.Training.setAutomaticLossScaling(True)
    if config.executable_cache_dir not in ("", "disabled"):
        options.enableExecutableCaching(config.executable_cache_dir)
    if for_inference and config.explicit_ir_inference:
        options._Popart.set("enableExplicitIR", True)
    _set_compiler(options._Popart)
    return options


def _set_compiler(popart: Any) -> None:
    """Set what optimum-graphcore tells the compiler whatever the configuration says."""
    popart.set("disableGradAccumulationTensorStreams", True)
    popart.set("accumulateOuterFragmentSettings.schedule", _OVERLAP_MEMORY_OPTIMIZED)
    popart.set("accumulateOuterFragmentSettings.excludedVirtualGraphs", ["0"])
    popart.set("outlineThreshold", 10.0)
    popart.set("subgraphCopyingStrategy", _JUST_IN_TIME)
    popart.set("scheduleNonWeightUpdateGradientConsumersEarly", True)
    popart.setPatterns(
        {"TiedGather": True, "TiedGatherAccumulate": True, "UpdateInplacePrioritiesForIpu": True}
    )
    popart.set(
        "engineOptions",
        {"opt.useAutoloader": "true", "target.syncReplicasIndependently": "true"},
    )
