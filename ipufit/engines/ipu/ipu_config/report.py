"""Report of the effect of each parameter on an engine: exact, approximate, or none, and why."""

from __future__ import annotations

import textwrap
from typing import Any, Dict, List, Tuple

from ipufit.engines.ipu.ipu_config.parameters import PARAMETERS, ParameterValues, shown
from ipufit.errors import ConfigurationError
from ipufit.processes import current

__all__ = ["APPROXIMATED", "EXACT", "NONE", "changed", "in_full", "in_short", "lists"]

EXACT, APPROXIMATED, NONE = "exact", "approximated", "no effect here"
_ENGINES = ("embedded", "ipu", "ipu-standin")

Row = Tuple[str, str]

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
    "seed": (APPROXIMATED, "seed of fit, of which other random numbers are made than on an IPU"),
    "embedding_serialization_factor": (APPROXIMATED, f"Memory.serialize of {_EMBEDDING}"),
    "projection_serialization_factor": (APPROXIMATED, f"Memory.serialize of {_PROJECTION}"),
    "serialized_embedding_splits_per_ipu": (APPROXIMATED, f"Memory.serialize of {_EMBEDDING}"),
    "serialized_projection_splits_per_ipu": (APPROXIMATED, f"Memory.serialize of {_PROJECTION}"),
    "recompute_checkpoint_every_layer": (EXACT, "recompute=True: every repeated layer"),
    "parallelize_kwargs": (NONE, "there is no method parallelize to give them to"),
}
_ON_IPU = {
    "recompute_checkpoint_every_layer": (
        EXACT,
        "recomputationCheckpoint for the outputs of every repeated layer, between which a pipeline "
        "computes again; one IPU computes nothing again",
    ),
    "seed": (APPROXIMATED, "seed of fit, of which a seed for each program is made"),
    "auto_loss_scaling": (EXACT, "Training.setAutomaticLossScaling"),
    "enable_half_partials": (EXACT, "Precision.setPartialsType"),
    "executable_cache_dir": (EXACT, "enableExecutableCaching"),
    "explicit_ir_inference": (EXACT, "the compiler's enableExplicitIR"),
    "matmul_proportion": (EXACT, "setAvailableMemoryProportion"),
    "optimizer_state_offchip": (EXACT, "TensorLocations.setOptimizerLocation"),
    "replicated_tensor_sharding": (EXACT, "TensorLocations.setOptimizerLocation"),
}
_EMBEDDED = {
    "auto_loss_scaling": (APPROXIMATED, "loss_scale='dynamic', which follows rules of its own"),
    "enable_half_partials": (NONE, "torch chooses the type of partial sums"),
    "executable_cache_dir": (NONE, "there are no executables: programs are recorded anew"),
    "explicit_ir_inference": (NONE, "another compiler records the program"),
    "matmul_proportion": (NONE, "there is no memory of tiles to share out"),
    "optimizer_state_offchip": (
        APPROXIMATED,
        "host memory between updates, on CUDA; in the host's own there is no other",
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
        "the outputs of every repeated layer are marked, but the stand-in computes nothing again",
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
    "embedding_serialization_factor": (
        APPROXIMATED,
        f"Memory.inference_serialize of {_EMBEDDING}",
    ),
    "projection_serialization_factor": (
        APPROXIMATED,
        f"Memory.inference_serialize of {_PROJECTION}",
    ),
    "serialized_embedding_splits_per_ipu": (
        APPROXIMATED,
        f"Memory.inference_serialize of {_EMBEDDING}",
    ),
    "serialized_projection_splits_per_ipu": (
        APPROXIMATED,
        f"Memory.inference_serialize of {_PROJECTION}",
    ),
}


def lists(engine: str) -> Dict[str, Row]:
    """For every parameter, in their order, which list it is in and why.

    Args:
        engine: its name; engines of your own are taken for the embedded one.
    """
    table = _TABLES.get(engine, _TABLES["embedded"])
    if _over_processes(engine):
        table = {**table, **_OF_SEVERAL}
    rows: Dict[str, Row] = {}
    for name in PARAMETERS:
        base = name[len("inference_") :] if name.startswith("inference_") else name
        row = table[base]
        rows[name] = _TWINS.get(base, row) if base != name else row
    return rows


def _over_processes(engine: str) -> bool:
    return engine not in ("ipu", "ipu-standin") and current().is_distributed


def changed(config: ParameterValues) -> Dict[str, Any]:
    """The parameters whose value is not the one they have in ``IPUConfig()``."""
    plain = type(config)()
    return {
        name: getattr(config, name)
        for name in PARAMETERS
        if getattr(config, name) != getattr(plain, name)
    }


def in_full(config: ParameterValues, engine: str) -> str:
    """A line for every parameter.

    Raises:
        ConfigurationError: there is no such engine.
    """
    if engine not in _ENGINES:
        raise ConfigurationError(
            f"engine must be one of {', '.join(map(repr, _ENGINES))}, got {shown(engine)}. Try "
            "'embedded'."
        )
    lines = [f"IPUConfig on engine {engine!r}"]
    for kind in (EXACT, APPROXIMATED, NONE):
        lines.append(f"{kind}:")
        lines += [
            f"  {name}={shown(getattr(config, name))}: {why}"
            for name, (effect, why) in lists(engine).items()
            if effect == kind
        ]
    return "\n".join([*lines, *_remarks(config, engine)])


def in_short(config: ParameterValues, engine: str) -> str:
    """The names in the three lists; of what was set and does not hold exactly, also why."""
    rows, changes = lists(engine), changed(config)
    engine_argument = repr(engine) if engine in _ENGINES else ""
    lines = [f"IPUConfig on engine {engine!r}; config.report({engine_argument}) says why"]
    for kind in (EXACT, APPROXIMATED, NONE):
        names = [name for name, (effect, _) in rows.items() if effect == kind]
        lines.append(_wrapped(f"  {kind}: {', '.join(names) or 'none'}"))
        if kind != EXACT:
            lines += [
                _wrapped(f"    {name}={shown(value)}: {rows[name][1]}")
                for name, value in changes.items()
                if rows[name][0] == kind
            ]
    return "\n".join([*lines, *_remarks(config, engine)])


def _wrapped(text: str) -> str:
    indent = " " * (len(text) - len(text.lstrip()) + 4)
    return textwrap.fill(text, 100, subsequent_indent=indent, break_on_hyphens=False)


def _remarks(config: ParameterValues, engine: str) -> List[str]:
    """Return further remarks on this configuration."""
    lines = [f"note: {note}" for note in config.notes]
    is_alone = config.replication_factor == 1 and not _over_processes(engine)
    if config.replicated_tensor_sharding and is_alone:
        lines.append(
            "note: replicated_tensor_sharding needs a replication_factor of more than 1: nothing "
            "is shared."
        )
    return list(map(_wrapped, lines))
