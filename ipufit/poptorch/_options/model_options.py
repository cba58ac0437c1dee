"""Options of one model: derived from the user's, and those without effect reported."""

from __future__ import annotations

import os
from typing import Any, Dict, List, Optional, Set, Tuple

from ipufit.poptorch import enums
from ipufit.poptorch._errors import error
from ipufit.poptorch._logging import logger
from ipufit.poptorch._options.execution import PipelinedExecution, ShardedExecution
from ipufit.poptorch._options.options import DEFAULT_EXCLUDES, Options

__all__ = [
    "ignored",
    "model_options",
    "report_ignored",
]


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


# An option's key: the setter, and the value that says nothing.
_OPTIONS: Dict[str, Tuple[str, Any]] = {
    "available_memory_proportion": ("setAvailableMemoryProportion", {}),
    "log_dir": ("logDir", "."),
    "max_repeat_logs": ("maxRepeatLogs", 4),
    "model_name": ("modelName", None),
    "sync_pattern": ("syncPattern", 0),
}
_LOCATIONS = {
    "location_accumulator": "TensorLocations.setAccumulatorLocation",
    "location_activation": "TensorLocations.setActivationLocation",
    "location_optimizer": "TensorLocations.setOptimizerLocation",
    "location_weight": "TensorLocations.setWeightLocation",
    "numIOTiles": "TensorLocations.numIOTiles",
}
# Of the compiler's options: those with an effect here, and the setters of some others.
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
_SETTERS = {
    "enableStableNorm": "enableStableNorm",
    "enableStochasticRounding": "Precision.enableStochasticRounding",
    "engineOptions": "_Popart.setEngineOptions",
    "partialsTypeMatMuls": "Precision.setPartialsType",
    "patterns": "_Popart.setPatterns",
    "patterns_level": "_Popart.setPatterns",
    "rearrangeAnchorsOnHost": '_Popart.set("rearrangeAnchorsOnHost")',
}
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
    names = {
        setter
        for key, (setter, default) in _OPTIONS.items()
        if options._values.get(key, default) != default
    }
    locations = options.TensorLocations._values
    names.update(setter for key, setter in _LOCATIONS.items() if locations.get(key))
    if tuple(options._source_location_excludes) != DEFAULT_EXCLUDES:
        names.add("sourceLocationExcludes")
    for key, value in options._Popart.options.items():
        # False is the default of every setter's option.
        if key not in _HONOURED and not (key in _SETTERS and value is False):
            names.add(_setter_of(key, value))
    names.update(name for name in _ENVIRONMENT if os.environ.get(name))
    return sorted(names)


def _setter_of(key: str, value: object) -> str:
    """Return the setter of an option of the compiler."""
    if isinstance(value, dict):
        for field, setter in _FIELDS.items():
            if field in value:
                return setter
    return _SETTERS.get(key, f'_Popart.set("{key}")')


def report_ignored(options: Options) -> None:
    """Log each name from ``ignored`` once a process."""
    new = [name for name in ignored(options) if name not in _reported]
    if new:
        _reported.update(new)
        logger.warning("These options change nothing on this engine: %s", ", ".join(new))
