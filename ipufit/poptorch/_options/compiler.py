"""Options as the compiler of a model sees them: derived, checked, reported where without effect."""

from __future__ import annotations

import numbers
import os
from typing import Any, Dict, FrozenSet, List, Optional, Set, Tuple

from ipufit.poptorch import enums
from ipufit.poptorch._logging import error, logger
from ipufit.poptorch._options.execution import PipelinedExecution, ShardedExecution
from ipufit.poptorch._options.group import nearest
from ipufit.poptorch._options.options import DEFAULT_EXCLUDES, Options


def _names(text: str) -> FrozenSet[str]:
    return frozenset(text.split())


# By the type that a value must have; a dotted name is a field of one of the compiler's structures.
_KNOWN: Dict[str, FrozenSet[str]] = {
    "bool": _names(
        """
        aliasZeroCopy auto_round_num_ipus automaticLossScalingSettings.enabled
        batchSerializationSettings.concatOnExecutionPhaseChange
        batchSerializationSettings.concatOnPipelineStageChange
        batchSerializationSettings.concatOnVirtualGraphChange broadcast_buffers compileEngine
        constantWeights decomposeGradSum delayVarUpdates disableGradAccumulationTensorStreams
        disableOptimizerStateTensorStreams dotOpNames enableDistributedReplicatedGraphs
        enableEngineCaching enableExplicitIR enableExplicitMainLoops enableFloatingPointChecks
        enableFullyConnectedPass enableGradientAccumulation enableInplaceAmbiguityChecking
        enableLoadAndOffloadRNGState enableMergeExchange enableNonStableSoftmax enableOutlining
        enableOutliningCopyCostPruning enablePipelining enablePrefetchDatastreams
        enableReplicatedGraphs enableSerializedMatmuls enableStableNorm enableStochasticRounding
        enableSupportedDataTypeCasting ensureFp32LossScaleTensor explicitRecomputation
        exportPoplarComputationGraph exportPoplarVertexGraph groupHostSync
        groupNormStridedChannelGrouping instrumentWithHardwareCycleCounter opxAliasChecking
        opxModifyChecking rearrangeAnchorsOnHost rearrangeStreamsOnHost
        replicatedCollectivesSettings.mergeAllReduceCollectives
        replicatedCollectivesSettings.prepareScheduleForMergingCollectives
        scheduleNonWeightUpdateGradientConsumersEarly separateCallOpPdfs separate_backward_phase
        serial_phases_execution strictOpVersions useHostCopyOps use_model
        """
    ),
    "uint64": _names(
        """
        accumulateOuterFragmentSettings.schedule accumulationAndReplicationReductionType
        accumulationFactor accumulation_and_replication_reduction_type autoRecomputation
        autodiffSettings.stitchStrategy automaticLossScalingSettings.gradientTensorTrackingMethod
        automaticLossScalingSettings.updatePeriod batchSerializationSettings.batchSchedule
        batchSerializationSettings.factor batchSerializationSettings.method
        batchSerializationSettings.transformContext compilationProgressTotal connection_type
        defaultBufferingDepth defaultPrefetchBufferingDepth device_iterations
        distributed_process_id executionPhaseSettings.phases executionPhaseSettings.stages
        execution_mode finalDotOp firstDotOp globalReplicaOffset globalReplicationFactor
        gradient_accumulation input_cgt input_group_size ipu_id ipu_version looseThresholdAtPeak
        max_repeat_logs meanAccumulationAndReplicationReductionStrategy mergeVarUpdate
        mergeVarUpdateMemThreshold numIOTiles num_distributed_processes output_mode
        output_return_period random_seed replication_factor subgraphCopyingStrategy
        swapLimitScheduler sync_pattern syntheticDataMode tensors_liveness
        transitiveClosureOptimizationThreshold virtualGraphMode
        """
    ),
    "floating point": _names(
        """
        automaticLossScalingSettings.binEdgeLocation
        automaticLossScalingSettings.thresholdUpperCountProportion outlineSequenceBreakCost
        outlineThreshold timeLimitScheduler
        """
    ),
    "string": _names(
        """
        cachePath customCodeletCompileFlags kahnTieBreaker logDir log_dir model_name
        partialsTypeMatMuls saveInitializersToFile serializedPoprithmsShiftGraphsDir
        """
    ),
    "container": _names(
        """
        accumulateOuterFragmentSettings.excludedVirtualGraphs convolutionOptions customCodelets
        dotChecks engineOptions gclOptions hardwareInstrumentations lstmOptions matmulOptions
        reportOptions updatableNamedBuffers
        """
    ),
}
# Handled apart, each in its own way.
_APART = _names("anchored_tensors compilation_progress_bar_fn patterns patterns_level")
# Dicts of which a name alone says nothing.
_OPEN = _names("available_memory_proportion ipuof_configs")
# Of options that are enums: the last value that the compiler has.
_LARGEST = {
    "accumulation_and_replication_reduction_type": 2,
    "connection_type": 2,
    "execution_mode": 2,
    "input_cgt": 3,
    # It has no PostAndLoss.
    "meanAccumulationAndReplicationReductionStrategy": 1,
    "output_mode": 3,
    "sync_pattern": 2,
    "tensors_liveness": 3,
}
_COUNTS = {
    "device_iterations": "deviceIterations",
    "replication_factor": "replicationFactor",
    "gradient_accumulation": "Training.gradientAccumulation",
}


def validate(values: Dict[str, Any]) -> None:
    """Refuse what the device's compiler would refuse.

    Args:
        values: those of ``Options.toDict()``.
    Raises:
        Error: an unknown name, a value of a type that the compiler has no options of, a count
            below 1, or an ``EveryN`` that does not divide the device iterations.
    """
    for name, value in values.items():
        if name in _APART or name in _OPEN or name.startswith("location_"):
            continue
        kind = _kind(name, value)
        if name not in _KNOWN[kind]:
            raise error(
                f"Unknown {kind} option {name}. {_hint(name, kind)} See "
                "poptorch.Options._Popart.set, which takes any name."
            )
        if kind == "uint64" and value > _LARGEST.get(name, value):
            raise error(
                f"The option {name} has the values 0 ... {_LARGEST[name]}, got {value!r}. Use "
                "another member of the enum: the device's compiler has no such one."
            )
        _log(name, value)
    if "patterns" in values and "patterns_level" not in values:
        raise error(
            "The compiler option patterns needs patterns_level. Use "
            "options._Popart.setPatterns(patterns, level)."
        )
    _validate_counts(values)


def _kind(name: str, value: object) -> str:
    """Return the compiler's name of a value's type."""
    if isinstance(value, bool):
        return "bool"
    if isinstance(value, numbers.Integral):
        if not 0 <= int(value) < 1 << 64 and name not in _COUNTS:
            raise error(f"The option {name} must be in 0 ... 2**64 - 1, got {value}.")
        return "uint64"
    if isinstance(value, float):
        return "floating point"
    if isinstance(value, str):
        return "string"
    if isinstance(value, (dict, list, set, tuple)):
        return "container"
    raise error(
        f"Unknown value type {type(value).__name__} for option {name}. Use a bool, int, "
        "float, str, list, set, tuple or dict."
    )


def _hint(name: str, kind: str) -> str:
    """Return a sentence about what the option could be."""
    others = [other for other, names in _KNOWN.items() if name in names]
    if others:
        return f"It is a {others[0]} option."
    every = frozenset().union(*_KNOWN.values())
    hint = nearest(name, every)
    return hint if hint.startswith("Did") else f"No {kind} option has a name like it."


def _log(name: str, value: object) -> None:
    """Say what the compiler is told, as PopTorch says it, so that its log can be searched alike."""
    if isinstance(value, dict):
        for key, entry in value.items():
            logger.debug("poptorch.Options set %s[%s] to %s", name, key, entry)
    elif isinstance(value, (list, set, tuple)):
        for entry in value:
            logger.debug("poptorch.Options added %s to %s", entry, name)
    else:
        shown = str(value).lower() if isinstance(value, bool) else getattr(value, "value", value)
        logger.debug("poptorch.Options set %s to value %s", name, shown)


def _validate_counts(values: Dict[str, Any]) -> None:
    """Refuse counts that no program can have."""
    for name, setter in _COUNTS.items():
        if values.get(name, 1) < 1:
            raise error(
                f"poptorch.Options().{setter} must be at least 1, got {values[name]}. "
                "Leave it out for 1."
            )
    iterations, period = values.get("device_iterations", 1), values.get("output_return_period", 1)
    every_n = values.get("output_mode") == enums.OutputMode.EveryN
    if every_n and (period > iterations or iterations % period):
        fitting = [n for n in range(1, iterations + 1) if iterations % n == 0]
        raise error(
            f"The N of OutputMode.EveryN must divide the device iterations, got N={period} and "
            f"deviceIterations({iterations}). Use one of {fitting}."
        )


def model_options(options: Optional[Options], training: bool) -> Options:
    """Return a model's own copy of options, and freeze the original.

    The output mode is picked where it is still the default, for anchored tensors too.

    Raises:
        Error: not ``Options``, or gradient accumulation for inference.
    """
    if options is None:
        copied = Options()
    elif isinstance(options, Options):
        options._freeze()
        copied = options.clone()
    else:
        raise error(
            f"options must be poptorch.Options, got {type(options).__name__}. Leave them out for "
            "the defaults."
        )
    if copied.defaultOutputMode():
        # Training is watched by its last loss; inference is after every result.
        copied.outputMode(enums.OutputMode.Final if training else enums.OutputMode.All)
    if not training and copied.Training.gradient_accumulation != 1:
        raise error(_accumulation_in_inference(copied))
    for anchor in copied.anchored_tensors.values():
        _, follows_outputs, _, _ = anchor
        if follows_outputs:
            anchor[2:] = [enums.OutputMode(copied.output_mode), copied.output_return_period]
    return copied


def _accumulation_in_inference(options: Options) -> str:
    text = (
        "You must set poptorch.Options().Training.gradientAccumulation to 1 or leave it as its "
        "default value (1) when running a poptorch.inferenceModel()."
    )
    strategy = options._execution_strategy
    if isinstance(strategy, PipelinedExecution) and not isinstance(strategy, ShardedExecution):
        text += (
            " Use poptorch.Options().deviceIterations to process a sufficient number of batches "
            "each run for pipelined execution instead."
        )
    return f"{text} Got {options.Training.gradient_accumulation}."


# Of an option without an effect here, by its key: the setter, and the value that says nothing.
_SETTERS: Dict[str, Tuple[str, object]] = {
    "available_memory_proportion": ("setAvailableMemoryProportion", {}),
    "enableStableNorm": ("enableStableNorm", False),
    "enableStochasticRounding": ("Precision.enableStochasticRounding", False),
    "engineOptions": ("_Popart.setEngineOptions", None),
    "location_accumulator": ("TensorLocations.setAccumulatorLocation", {}),
    "location_activation": ("TensorLocations.setActivationLocation", {}),
    "location_optimizer": ("TensorLocations.setOptimizerLocation", {}),
    "location_weight": ("TensorLocations.setWeightLocation", {}),
    "log_dir": ("logDir", "."),
    "max_repeat_logs": ("maxRepeatLogs", 4),
    "model_name": ("modelName", None),
    "numIOTiles": ("TensorLocations.numIOTiles", None),
    "partialsTypeMatMuls": ("Precision.setPartialsType", None),
    "patterns": ("_Popart.setPatterns", None),
    "patterns_level": ("_Popart.setPatterns", None),
    "rearrangeAnchorsOnHost": ('_Popart.set("rearrangeAnchorsOnHost")', False),
    "sync_pattern": ("syncPattern", 0),
}
# Of the compiler's options: those with an effect here.
_HONOURED = frozenset(
    (
        "automaticLossScalingSettings.binEdgeLocation",
        "automaticLossScalingSettings.enabled",
        "automaticLossScalingSettings.gradientTensorTrackingMethod",
        "automaticLossScalingSettings.thresholdUpperCountProportion",
        "automaticLossScalingSettings.updatePeriod",
        "cachePath",
        "enableEngineCaching",
        "enableFloatingPointChecks",
        # True is refused: only hardware has cycles.
        "instrumentWithHardwareCycleCounter",
        "syntheticDataMode",
        "updatableNamedBuffers",
    )
)
# Set by a setter with one of these fields.
_FIELDS = {
    "autoReport.directory": "enableProfiling",
    "enableConvDithering": "Training.setConvolutionDithering",
    "partialsType": "Precision.setPartialsType",
}
_ENVIRONMENT = (
    "POPLAR_ENGINE_OPTIONS",
    "POPTORCH_EXPORT_PROTO_AS_BINARY",
    "POPTORCH_EXPORT_PROTO_FILE",
    "POPTORCH_IPU_MODEL_VERSION",
    "POPTORCH_LOG_DEST",
    "POPTORCH_MAX_GRAPH_LEN",
    "PVTI_OPTIONS",
)

_reported: Set[str] = set()


def ignored(options: Options) -> List[str]:
    """Return the setters and environment variables that were used and have no effect, sorted.

    A value that is the default counts as not set. Execution strategies, ``autoRoundNumIPUs``,
    ``useIpuModel``, ``useIpuId`` and ``connectionType`` are not among them: what they forbid is
    forbidden here.
    """
    groups = {**options._values, **options.TensorLocations._values}
    used = {key: value for key, value in groups.items() if key in _SETTERS}
    used.update(options._Popart.options)
    names = {
        _setter_of(key, value)
        for key, value in used.items()
        if key not in _HONOURED and (key not in _SETTERS or value != _SETTERS[key][1])
    }
    if tuple(options._source_location_excludes) != DEFAULT_EXCLUDES:
        names.add("sourceLocationExcludes")
    names.update(name for name in _ENVIRONMENT if os.environ.get(name))
    return sorted(names)


def _setter_of(key: str, value: object) -> str:
    """Return the setter of an option."""
    if isinstance(value, dict):
        for field, setter in _FIELDS.items():
            if field in value:
                return setter
    return _SETTERS[key][0] if key in _SETTERS else f'_Popart.set("{key}")'


def report_ignored(options: Options) -> None:
    """Log each name from ``ignored`` once a process."""
    new = [name for name in ignored(options) if name not in _reported]
    if new:
        _reported.update(new)
        logger.warning("These options change nothing on this engine: %s", ", ".join(new))
