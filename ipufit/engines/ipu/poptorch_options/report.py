"""Effects of PopTorch's setters on an engine that is no IPU, with reasons."""

from __future__ import annotations

import dataclasses
import textwrap
from typing import Any, Dict, List, Tuple

from ipufit.engines.ipu.poptorch_options.reading import PopTorchOptions

__all__ = ["SetterEffects", "setter_effects"]

# By the name in ``toDict``: the setter.
_EXACT = {
    "accumulation_and_replication_reduction_type": (
        "Training.accumulationAndReplicationReductionType"
    ),
    "auto_round_num_ipus": "autoRoundNumIPUs",
    "device_iterations": "deviceIterations",
    "execution_mode": "setExecutionStrategy",
    "gradient_accumulation": "Training.gradientAccumulation",
    "output_mode": "outputMode",
    "replication_factor": "replicationFactor",
}
# And why it does not hold exactly.
_APPROXIMATED = {
    "automaticLossScalingSettings.enabled": (
        "Training.setAutomaticLossScaling",
        "loss_scale='dynamic', which follows rules of its own",
    ),
    "location_optimizer": (
        "TensorLocations.setOptimizerLocation",
        "off chip is host memory between updates, on CUDA; in the host's own there is no other",
    ),
    "random_seed": (
        "randomSeed",
        "a seed, of which other random numbers are made than on an IPU",
    ),
}
_LOCATION = "there is one memory, where the module is"
_PARTIALS = "torch chooses the type of partial sums"
_COMPILER = "it is for the compiler of an IPU"
_NO_DEVICE = "there is no IPU to attach to"
_NO_FILES = "there are no executables: programs are recorded anew"
_TURNS = "replicas take turns in one process"
_NO_LOG = "no log is written"
_NO_EFFECT = {
    "_module_namescope_enabled": ("disableModuleNamescope", "operators are never named"),
    "_relax_optimizer_checks": (
        "relaxOptimizerAttributesChecks",
        "an optimizer's attributes are not looked through",
    ),
    "_source_location_excludes": ("sourceLocationExcludes", "operators are never named"),
    "anchored_tensors": ("anchorTensor", "metrics and ipufit.log bring values out"),
    "available_memory_proportion": (
        "setAvailableMemoryProportion",
        "there is no memory of tiles to share out",
    ),
    "broadcast_buffers": ("broadcastBuffers", _TURNS),
    "cachePath": ("enableExecutableCaching", _NO_FILES),
    "compilation_progress_bar_fn": ("showCompilationProgressBar", "recording draws no bar"),
    "connection_type": ("connectionType", _NO_DEVICE),
    "convolutionOptions": ("Precision.setPartialsType", _PARTIALS),
    "enableEngineCaching": ("enableExecutableCaching", _NO_FILES),
    "enableFloatingPointChecks": (
        "Precision.enableFloatingPointExceptions",
        "torch raises nothing; the TerminateOnNaN callback ends a fit",
    ),
    "enableStableNorm": ("enableStableNorm", "torch computes the statistics of norms"),
    "enableStochasticRounding": (
        "Precision.enableStochasticRounding",
        "torch rounds to the nearest number",
    ),
    "engineOptions": ("_Popart.setEngineOptions", _COMPILER),
    "instrumentWithHardwareCycleCounter": ("logCycleCount", "there are no cycles of an IPU"),
    "ipu_id": ("useIpuId", _NO_DEVICE),
    "ipu_version": ("useOfflineIpuTarget", _NO_DEVICE),
    "location_accumulator": ("TensorLocations.setAccumulatorLocation", _LOCATION),
    "location_activation": ("TensorLocations.setActivationLocation", _LOCATION),
    "location_weight": ("TensorLocations.setWeightLocation", _LOCATION),
    "log_dir": ("logDir", _NO_LOG),
    "max_repeat_logs": ("maxRepeatLogs", _NO_LOG),
    "meanAccumulationAndReplicationReductionStrategy": (
        "Training.setMeanAccumulationAndReplicationReductionStrategy",
        "gradients are added up and divided at the end",
    ),
    "model_name": ("modelName", "no report names the model"),
    "numIOTiles": ("TensorLocations.numIOTiles", "there are no tiles"),
    "partialsTypeMatMuls": ("Precision.setPartialsType", _PARTIALS),
    "sync_pattern": ("syncPattern", _TURNS),
    "syntheticDataMode": ("enableSyntheticData", "data is what it is given"),
    "updatableNamedBuffers": ("updatableNamedBuffers", "every run sees buffers as they are"),
    "use_model": ("useIpuModel", _NO_DEVICE),
}
# Of a dictionary that several setters write, by one of its fields.
_BY_FIELD = {
    "autoReport.directory": ("enableProfiling", "there is no report of an IPU"),
    "enableConvDithering": ("Training.setConvolutionDithering", "there are no tiles"),
}
# Never without another value that is listed.
_FOLLOWING = (
    "input_cgt",
    "input_group_size",
    "ipuof_configs",
    "output_return_period",
    "separate_backward_phase",
    "serial_phases_execution",
    "tensors_liveness",
)
# Of the options themselves, and not among their values.
_ATTRIBUTES = ("_module_namescope_enabled", "_relax_optimizer_checks", "_source_location_excludes")
_BAR = "compilation_progress_bar_fn"


@dataclasses.dataclass(frozen=True)
class SetterEffects:
    """Setters that were used, by their effect.

    Attributes:
        role: the argument of ``compile``.
        exact: as on an IPU.
        approximated: something else stands for it; with what.
        none: no effect; with why.
    """

    role: str
    exact: List[str]
    approximated: Dict[str, str]
    none: Dict[str, str]

    def text(self, engine: str) -> str:
        """Format the three lists with their reasons; empty where nothing was set."""
        if not (self.exact or self.approximated or self.none):
            return ""
        lines = [f"{self.role} on engine {engine!r}", _wrapped("exact", self.exact)]
        for kind, rows in (("approximated", self.approximated), ("no effect here", self.none)):
            lines.append(_wrapped(kind, list(rows)))
            lines += [f"    {setter}: {why}" for setter, why in rows.items()]
        return "\n".join(lines)


def setter_effects(options: PopTorchOptions, is_divided: bool) -> SetterEffects:
    """Sort the setters that were used by their effect on an engine without such options.

    Args:
        options: of one argument.
        is_divided: whether the module lies on several IPUs.
    """
    exact: List[str] = []
    approximated: Dict[str, str] = {}
    none: Dict[str, str] = {}
    for key in _changed(options):
        if key in _APPROXIMATED:
            setter, why = _APPROXIMATED[key]
            approximated[setter] = why
        elif key == "execution_mode" and not is_divided:
            none[_EXACT[key]] = "nothing divides the module"
        elif key in _EXACT:
            exact.append(_EXACT[key])
        else:
            for setter, why in _without_effect(key, options.options):
                none[setter] = why
    return SetterEffects(
        options.role, sorted(exact), dict(sorted(approximated.items())), dict(sorted(none.items()))
    )


def _without_effect(key: str, options: Any) -> List[Tuple[str, str]]:
    """The setters of a value that has no effect, and why it has none."""
    value = options._Popart.options.get(key)
    fields = value if isinstance(value, dict) else {}
    rows = [row for field, row in _BY_FIELD.items() if field in fields]
    return rows or [_NO_EFFECT.get(key, (f'_Popart.set("{key}")', _COMPILER))]


def _changed(options: PopTorchOptions) -> List[str]:
    """Names of the values that are not those of fresh options."""
    users, fresh = options.options, type(options.options)()
    values, plain, missing = _values(users), _values(fresh), object()
    names = [
        name
        for name in {**plain, **values}
        if name not in _FOLLOWING and values.get(name, missing) != plain.get(name, missing)
    ]
    if options.strategy is not None and "execution_mode" not in names:
        names.append("execution_mode")
    return names + [name for name in _ATTRIBUTES if getattr(users, name) != getattr(fresh, name)]


def _values(options: Any) -> Dict[str, Any]:
    """All values by name, whatever the output mode."""
    copy = options.clone()
    copy.set(output_mode=2)  # All: with the default mode there is no such dictionary
    values: Dict[str, Any] = copy.toDict()
    values["output_mode"] = int(options.output_mode)
    # A bar is an object; whether there is one is what was said.
    values[_BAR] = _BAR in values
    return values


def _wrapped(kind: str, names: List[str]) -> str:
    text = f"  {kind}: {', '.join(names) or 'none'}"
    return textwrap.fill(text, 100, subsequent_indent=" " * 6, break_on_hyphens=False)
