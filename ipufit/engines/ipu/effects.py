"""Effects of settings on an engine: exact, approximated or none, and why.

The settings are the parameters of an IPUConfig and the setters of ``poptorch.Options``. One that is
in no table would be ignored in silence, so each of them has a row.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Dict, Iterable, List, Mapping, Tuple

from ipufit.processes import current
from ipufit.utils.console import fold

EXACT, APPROXIMATED, NONE = "exact", "approximated", "no effect here"
ENGINES = ("embedded", "ipu", "ipu-standin")

Row = Tuple[str, str]


@dataclasses.dataclass(frozen=True)
class Effect:
    """Effect of one setting on an engine.

    Attributes:
        name: of the parameter or setter.
        kind: EXACT, APPROXIMATED or NONE.
        why: the reason, or what stands for it.
        value: as a report shows it; empty where it shows none.
        is_set: whether it is another value than the default.
    """

    name: str
    kind: str
    why: str = ""
    value: str = ""
    is_set: bool = True

    def __str__(self) -> str:
        equals = f"={self.value}" if self.value else ""
        return f"{self.name}{equals}: {self.why}"


@dataclasses.dataclass(frozen=True)
class EffectReport:
    """The effects of all settings of one source on one engine.

    Attributes:
        source: such as "IPUConfig" or "training_options".
        engine: its name.
        effects: in the order in which a report has them.
        notes: what else is to be known, one sentence each.
    """

    source: str
    engine: str
    effects: Tuple[Effect, ...]
    notes: Tuple[str, ...] = ()

    def of(self, kind: str) -> List[Effect]:
        """Return the effects of a kind."""
        return [effect for effect in self.effects if effect.kind == kind]

    def in_full(self) -> str:
        """Write a line for every setting, by kind."""
        lines = [f"{self.source} on engine {self.engine!r}"]
        for kind in (EXACT, APPROXIMATED, NONE):
            lines += [f"{kind}:", *(f"  {effect}" for effect in self.of(kind))]
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes)])

    def in_short(self, hint: str = "") -> str:
        """Write the names by kind; of what was set and does not hold exactly, also why.

        Args:
            hint: to end the first line with.
        """
        lines = [f"{self.source} on engine {self.engine!r}{hint}"]
        for kind in (EXACT, APPROXIMATED, NONE):
            effects = self.of(kind)
            names = ", ".join(effect.name for effect in effects)
            lines.append(f"  {kind}: {names or 'none'}")
            if kind != EXACT:
                lines += [f"    {effect}" for effect in effects if effect.is_set]
        return fold("\n".join([*lines, *(f"note: {note}" for note in self.notes)]), 100)


# Parameters of an IPUConfig

# A configuration names no layers.
_EMBEDDING = "the embedding with most rows"
_PROJECTION = "the output projection"

_BOTH = {
    "replication_factor": (EXACT, "ipus = replication_factor x ipus_per_replica in fit"),
    "gradient_accumulation_steps": (EXACT, "gradient_accumulation in fit, reduced by the mean"),
    "device_iterations": (EXACT, "device_iterations in fit"),
    "ipus_per_replica": (EXACT, "the IPUs of one copy"),
    "layers_per_ipu": (EXACT, "layers_per_ipu of Parallel, which finds the layers by itself"),
    "output_mode": (EXACT, "outputs of compile; the loss is the mean over all samples anyway"),
    "seed": (APPROXIMATED, "seed of fit, which gives other random numbers than on an IPU"),
    "embedding_serialization_factor": (APPROXIMATED, f"Memory.serialize of {_EMBEDDING}"),
    "projection_serialization_factor": (APPROXIMATED, f"Memory.serialize of {_PROJECTION}"),
    "serialized_embedding_splits_per_ipu": (APPROXIMATED, f"Memory.serialize of {_EMBEDDING}"),
    "serialized_projection_splits_per_ipu": (APPROXIMATED, f"Memory.serialize of {_PROJECTION}"),
    "recompute_checkpoint_every_layer": (EXACT, "recompute=True: every repeated layer"),
    "parallelize_kwargs": (NONE, "there is no method parallelize that takes them"),
}
_ON_IPU = {
    "recompute_checkpoint_every_layer": (
        EXACT,
        "recomputationCheckpoint for the outputs of every repeated layer: a pipeline recomputes "
        "what is between them; a single IPU recomputes nothing",
    ),
    "seed": (APPROXIMATED, "seed of fit, from which each program gets its own seed"),
    "auto_loss_scaling": (EXACT, "Training.setAutomaticLossScaling"),
    "enable_half_partials": (EXACT, "Precision.setPartialsType"),
    "executable_cache_dir": (EXACT, "enableExecutableCaching"),
    "explicit_ir_inference": (EXACT, "the compiler's enableExplicitIR"),
    "matmul_proportion": (EXACT, "setAvailableMemoryProportion"),
    "optimizer_state_offchip": (EXACT, "TensorLocations.setOptimizerLocation"),
    "replicated_tensor_sharding": (EXACT, "TensorLocations.setOptimizerLocation"),
}
_EMBEDDED = {
    "auto_loss_scaling": (APPROXIMATED, "loss_scale='dynamic', which follows other rules"),
    "enable_half_partials": (NONE, "torch chooses the type of partial sums"),
    "executable_cache_dir": (NONE, "there are no executables: programs are recorded every time"),
    "explicit_ir_inference": (NONE, "another compiler records the program"),
    "matmul_proportion": (NONE, "there is no tile memory to divide"),
    "optimizer_state_offchip": (
        APPROXIMATED,
        "host memory between updates, on CUDA; no effect on a CPU",
    ),
    "replicated_tensor_sharding": (NONE, "replicas take turns in one process and share the state"),
}
# Where several processes train together.
_OF_SEVERAL = {
    "replicated_tensor_sharding": (
        APPROXIMATED,
        "shard='optimizer' of Memory: in parts over the processes, whose replicas share them",
    ),
}
_STANDIN = {
    "optimizer_state_offchip": (NONE, "there is one memory"),
    "recompute_checkpoint_every_layer": (
        NONE,
        "the outputs of every repeated layer are marked, but the stand-in recomputes nothing",
    ),
    "auto_loss_scaling": (APPROXIMATED, "a loss scale that follows rules of the stand-in"),
    "explicit_ir_inference": (NONE, "the stand-in has no such compiler"),
    "executable_cache_dir": (EXACT, "enableExecutableCaching, of recorded programs"),
}
_TABLES: Dict[str, Dict[str, Row]] = {
    "embedded": {**_BOTH, **_EMBEDDED},
    "ipu": {**_BOTH, **_ON_IPU},
    "ipu-standin": {**_BOTH, **_EMBEDDED, **_STANDIN},
}
_SAME = (EXACT, "the same in evaluate, predict and the validation of fit")
_TWINS = {
    "replication_factor": _SAME,
    "device_iterations": _SAME,
    "layers_per_ipu": (EXACT, "the same for inference, which is sharded"),
    "ipus_per_replica": (EXACT, "the IPUs of one copy in inference"),
}


def parameter_effects(names: Iterable[str], engine: str) -> Dict[str, Row]:
    """Return kind and reason for every parameter of an IPUConfig, in their order.

    Args:
        names: of the parameters.
        engine: its name; engines of your own are taken for the embedded one.
    """
    table = _TABLES.get(engine, _TABLES["embedded"])
    if trains_over_processes(engine):
        table = {**table, **_OF_SEVERAL}
    rows: Dict[str, Row] = {}
    for name in names:
        base = name[len("inference_") :] if name.startswith("inference_") else name
        kind, why = table[base]
        twin = _TWINS.get(base, (kind, why.replace("Memory.", "Memory.inference_")))
        rows[name] = (kind, why) if base == name else twin
    return rows


def trains_over_processes(engine: str) -> bool:
    """Return True if several processes train together on an engine that is no IPU."""
    return engine not in ("ipu", "ipu-standin") and current().is_distributed


# Setters of PopTorch's options, on an engine that is no IPU

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
        "loss_scale='dynamic', which follows other rules",
    ),
    "location_optimizer": (
        "TensorLocations.setOptimizerLocation",
        "off chip is host memory between updates, on CUDA; no effect on a CPU",
    ),
    "random_seed": (
        "randomSeed",
        "a seed, which gives other random numbers than on an IPU",
    ),
}
_LOCATION = "there is one memory, where the module is"
_PARTIALS = "torch chooses the type of partial sums"
_COMPILER = "it is for the compiler of an IPU"
_NO_DEVICE = "there is no IPU to attach to"
_NO_FILES = "there are no executables: programs are recorded every time"
_TURNS = "replicas take turns in one process"
_NO_LOG = "no log is written"
_NO_EFFECT = {
    "_module_namescope_enabled": ("disableModuleNamescope", "operators are never named"),
    "_relax_optimizer_checks": (
        "relaxOptimizerAttributesChecks",
        "attributes of optimizers are not checked",
    ),
    "_source_location_excludes": ("sourceLocationExcludes", "operators are never named"),
    "anchored_tensors": ("anchorTensor", "metrics and ipufit.log return values"),
    "available_memory_proportion": (
        "setAvailableMemoryProportion",
        "there is no tile memory to divide",
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
    "instrumentWithHardwareCycleCounter": ("logCycleCount", "there are no IPU cycles"),
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
    "syntheticDataMode": ("enableSyntheticData", "data is used as it is"),
    "updatableNamedBuffers": ("updatableNamedBuffers", "every run sees the current buffers"),
    "use_model": ("useIpuModel", _NO_DEVICE),
}
# Of a dictionary that several setters write, by one of its fields.
_BY_FIELD = {
    "autoReport.directory": ("enableProfiling", "there is no IPU report"),
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


def setter_effects(options: Any, has_strategy: bool, is_divided: bool) -> Tuple[Effect, ...]:
    """Sort the setters that were used by their effect on an engine without such options.

    Args:
        options: ``poptorch.Options``.
        has_strategy: whether they have an execution strategy of their own.
        is_divided: whether the module lies on several IPUs.
    """
    effects: Dict[str, Effect] = {}
    for key in _changed(options, has_strategy):
        for effect in _effects_of_key(key, options, is_divided):
            effects[effect.name] = effect
    return tuple(sorted(effects.values(), key=lambda effect: effect.name))


def _effects_of_key(key: str, options: Any, is_divided: bool) -> List[Effect]:
    if key in _APPROXIMATED:
        setter, why = _APPROXIMATED[key]
        return [Effect(setter, APPROXIMATED, why)]
    if key == "execution_mode" and not is_divided:
        return [Effect(_EXACT[key], NONE, "nothing divides the module")]
    if key in _EXACT:
        return [Effect(_EXACT[key], EXACT)]
    value = options._Popart.options.get(key)
    fields = value if isinstance(value, dict) else {}
    rows = [row for field, row in _BY_FIELD.items() if field in fields]
    rows = rows or [_NO_EFFECT.get(key, (f'_Popart.set("{key}")', _COMPILER))]
    return [Effect(setter, NONE, why) for setter, why in rows]


def _changed(options: Any, has_strategy: bool) -> List[str]:
    """Return the names of the values that are not those of fresh options."""
    fresh = type(options)()
    values, plain, missing = _values(options), _values(fresh), object()
    names = [
        name
        for name in {**plain, **values}
        if name not in _FOLLOWING and values.get(name, missing) != plain.get(name, missing)
    ]
    if has_strategy and "execution_mode" not in names:
        names.append("execution_mode")
    return names + [name for name in _ATTRIBUTES if getattr(options, name) != getattr(fresh, name)]


def _values(options: Any) -> Mapping[str, object]:
    """Return all values by name, whatever the output mode."""
    copy = options.clone()
    copy.set(output_mode=2)  # All: with the default mode there is no such dictionary
    values: Dict[str, object] = copy.toDict()
    values["output_mode"] = int(options.output_mode)
    # A bar is an object; whether there is one is what was said.
    values[_BAR] = _BAR in values
    return values
