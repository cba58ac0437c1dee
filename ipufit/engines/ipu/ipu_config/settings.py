"""A configuration as IpuSettings, as PopTorch's options, and as effects on an engine."""

from __future__ import annotations

from types import ModuleType
from typing import Any, Dict, List

import torch

from ipufit.core.train_config import Outputs
from ipufit.engines.ipu.effects import (
    Effect,
    EffectReport,
    parameter_effects,
    trains_over_processes,
)
from ipufit.engines.ipu.ipu_config.parameters import PARAMETERS, ParameterValues, values_of
from ipufit.engines.ipu.options import new_options
from ipufit.engines.ipu.sdk import is_standin
from ipufit.engines.ipu_settings import IpuSettings, LayerCut, ModeSettings, Setting, times
from ipufit.errors import ConfigurationError, shown
from ipufit.partition.embedding_layers import KINDS
from ipufit.processes import current
from ipufit.utils.random_streams import isolated

_CHANGE = "Leave it out, or change the config."
_RECOMPILE = "Leave it out, or compile with another config."
_EITHER = "Leave one out."


def read_settings(config: ParameterValues) -> IpuSettings:
    """Read what a configuration fixes of a run.

    Args:
        config: for one type of pod.
    """
    recompute, sharded = config.recompute_checkpoint_every_layer, config.replicated_tensor_sharding
    cure = "" if recompute else (", or set that to True and name layers in recompute")
    mean = "where gradients are reduced by the mean, as in optimum-graphcore"
    rounds = "where IPUs are rounded up to a power of two, as in optimum-graphcore"
    # PopTorch's default is the final one in training.
    mode = "final" if config.output_mode == "default" else config.output_mode
    scale = Setting("dynamic", "IPUConfig.auto_loss_scaling", _EITHER, "which is True", fills=False)
    return IpuSettings(
        _mode_settings(config, ""),
        _mode_settings(config, "inference_"),
        outputs=Setting(
            Outputs(mode), "IPUConfig.output_mode", _CHANGE, f"which is {config.output_mode!r}"
        ),
        gradient_reduction=Setting("mean", "config", _EITHER, mean),
        loss_scale=scale if config.auto_loss_scaling else None,
        offload_optimizer=Setting(
            config.optimizer_state_offchip, "IPUConfig.optimizer_state_offchip", _CHANGE
        ),
        shard=Setting(
            "optimizer" if sharded else "none",
            "IPUConfig.replicated_tensor_sharding",
            _CHANGE,
            f"which is {sharded}",
            # Replicas of one process have one state anyway.
            fills=current().is_distributed,
        ),
        auto_round_ipus=Setting(True, "config", _EITHER, rounds),
        recompute=Setting(
            recompute, "IPUConfig.recompute_checkpoint_every_layer", f"Leave it out{cure}."
        ),
        remarks=(f"Work, seed and options come from {config!r}.",),
    )


def _mode_settings(config: ParameterValues, prefix: str) -> ModeSettings:
    """Read what a configuration fixes of training, or with "inference_" of inference."""
    values = values_of(config)

    def work(name: str) -> Setting[int]:
        value = values[name]
        return Setting(value, f"IPUConfig.{name}", _RECOMPILE, f"which says {value}")

    replicas = work(f"{prefix}replication_factor")
    ipus = Setting(
        values[f"{prefix}ipus_per_replica"], f"IPUConfig.{prefix}ipus_per_replica", _CHANGE
    )
    return ModeSettings(
        ipus=times(replicas, ipus.value, f"{prefix}ipus_per_replica"),
        device_iterations=work(f"{prefix}device_iterations"),
        gradient_accumulation=None if prefix else work("gradient_accumulation_steps"),
        seed=None
        if prefix or config.seed is None
        else Setting(config.seed, "IPUConfig.seed", _RECOMPILE),
        ipus_per_replica=ipus,
        layers_per_ipu=Setting(
            list(values[f"{prefix}layers_per_ipu"]), f"IPUConfig.{prefix}layers_per_ipu", _CHANGE
        ),
        cuts={kind: _cut(values, kind, prefix) for kind in KINDS},
    )


def _cut(values: Dict[str, Any], kind: str, prefix: str) -> Setting[LayerCut]:
    """Read how a layer is cut; a factor of 1 cuts nothing."""
    name = f"{prefix}serialized_{kind}_splits_per_ipu"
    cut: LayerCut = values[name]
    if cut is None:
        name = f"{prefix}{kind}_serialization_factor"
        cut = None if values[name] == 1 else values[name]
    return Setting(cut, f"IPUConfig.{name}", _EITHER)


def changed_parameters(config: ParameterValues) -> Dict[str, object]:
    """Return the parameters whose value is not the one they have in ``IPUConfig()``."""
    values, plain = values_of(config), values_of(type(config)())
    return {name: value for name, value in values.items() if value != plain[name]}


def effects_of(config: ParameterValues, engine: str) -> EffectReport:
    """Report what every parameter does on an engine."""
    changes = changed_parameters(config)
    values = values_of(config)
    effects = tuple(
        Effect(name, kind, why, shown(values[name]), name in changes)
        for name, (kind, why) in parameter_effects(PARAMETERS, engine).items()
    )
    notes: List[str] = list(config.notes)
    is_alone = config.replication_factor == 1 and not trains_over_processes(engine)
    if config.replicated_tensor_sharding and is_alone:
        notes.append(
            "replicated_tensor_sharding needs a replication_factor of more than 1: nothing is "
            "shared."
        )
    return EffectReport("IPUConfig", engine, effects, tuple(notes))


# The second generation of IPUs, and the card C600.
_VERSIONS = (2, 21)
# Numbers of PopART's enums: AccumulateOuterFragmentSchedule.OverlapMemoryOptimized and
# SubgraphCopyingStrategy.JustInTime.
_OVERLAP_MEMORY_OPTIMIZED = 3
_JUST_IN_TIME = 1


def to_options(
    sdk: ModuleType, config: ParameterValues, for_inference: bool, compile_only: bool
) -> Any:
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
        with isolated():
            options.randomSeed(config.seed)
    if compile_only:
        options.useOfflineIpuTarget()
    return options


def _check_hardware(sdk: ModuleType) -> None:
    version = sdk.ipuHardwareVersion() if sdk.ipuHardwareIsAvailable() else None
    if version not in _VERSIONS:
        came = "there is no IPU" if version is None else f"PopTorch finds version {version}"
        raise ConfigurationError(
            f"to_options is for IPUs of version {' or '.join(map(str, _VERSIONS))}, but {came}. "
            "Pass compile_only=True for options to compile without an IPU."
        )


def engine_options(sdk: ModuleType, config: ParameterValues, for_inference: bool) -> Any:
    """Memory, precision and compiler: what a plan and ``compile`` don't say.

    Args:
        sdk: PopTorch.
        config: for one type of pod.
        for_inference: for inference.
    """
    prefix = "inference_" if for_inference else ""
    ipus = getattr(config, f"{prefix}ipus_per_replica")
    options = new_options(sdk, ipus)
    options.autoRoundNumIPUs(True)
    memory = getattr(config, f"{prefix}matmul_proportion")
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
