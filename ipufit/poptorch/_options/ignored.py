"""Report options that were set and have no effect on this engine."""

from __future__ import annotations

import os
from typing import Any, Dict, List, Set, Tuple

from ipufit.poptorch._logging import logger
from ipufit.poptorch._options.options import Options
from ipufit.poptorch._options.reports import DEFAULT_EXCLUDES

__all__ = ["ignored", "report_ignored"]

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
