"""Migration of files of earlier releases of optimum-graphcore to the parameters of the last one."""

from __future__ import annotations

from typing import Any, Dict, List, Mapping, Tuple

from ipufit.engines.ipu.ipu_config.parameters import shown

__all__ = ["migrate_parameters"]

# Written into every file; they say nothing about a run.
_ABOUT = frozenset(
    (
        "_commit_hash",
        "_name_or_path",
        "architectures",
        "model_type",
        "name_or_path",
        "optimum_version",
        "torch_dtype",
        "transformers_version",
    )
)
_TRAINING = ("layers_per_ipu", "ipus_per_replica", "matmul_proportion", "replication_factor")
# Withdrawn parameters: values that had no effect then, and what to know about others.
_WITHDRAWN: Dict[str, Tuple[Tuple[Any, ...], str]] = {
    "sharded_execution_for_inference": (
        (False, True, None),
        "inference is always sharded since",
    ),
    "enable_half_first_order_momentum": (
        (False, None),
        "set the optimizer's own dtype of that state instead",
    ),
    "decompose_grad_sum": (
        (False, None),
        "use options._Popart.set('decomposeGradSum', True) of to_options()",
    ),
    "use_popdist": ((False, None), "several processes are started from outside"),
    "profile_dir": (
        ("", None),
        "use enableProfiling(...) of to_options(), or the variable POPLAR_ENGINE_OPTIONS",
    ),
    "compile_only": ((False, None), "it is an argument of to_options()"),
    "synthetic_data": ((False, None), "use enableSyntheticData(True) of to_options()"),
}
_ON_CPU = "execute_encoder_on_cpu_for_generation"


def migrate_parameters(
    arguments: Mapping[str, Any], faults: List[str]
) -> Tuple[Dict[str, Any], List[str]]:
    """Migrate parameters to the names of today; unknown ones stay.

    Args:
        arguments: values by name, as a file or a call has them.
        faults: what can't be read is added here.

    Returns:
        Values by name, and notes on what was left aside or read differently.
    """
    values: Dict[str, Any] = {}
    notes: List[str] = []
    for name, value in arguments.items():
        if name in _ABOUT:
            continue
        if name in _WITHDRAWN:
            neutral, hint = _WITHDRAWN[name]
            if not any(value is harmless or value == harmless for harmless in neutral):
                notes.append(f"{name}={shown(value)} was withdrawn and is left aside: {hint}.")
        elif name == _ON_CPU:
            if value is not False:
                faults.append(
                    f"IPUConfig.{_ON_CPU} must be False, as no release supports anything else, got "
                    f"{shown(value)}. Leave it out."
                )
        else:
            values[name] = value
    _rename(values, "random_seed", "seed", notes)
    for name in _TRAINING:
        _split_by_mode(values, name, notes)
    for name in ("matmul_proportion", "inference_matmul_proportion"):
        value = values.get(name)
        if isinstance(value, (list, tuple)) and len(value) == 1:
            # Until May 2023 a list of one was for all IPUs.
            values[name] = value[0]
    _list_layers(values, notes)
    return values, notes


def _list_layers(values: Dict[str, Any], notes: List[str]) -> None:
    """Repeat one number of layers, as the first release wrote it, for each IPU."""
    for prefix in ("", "inference_"):
        name = f"{prefix}layers_per_ipu"
        value, ipus = values.get(name), values.get(f"{prefix}ipus_per_replica")
        counts = ipus if isinstance(ipus, int) and _is_count(ipus) else 1
        if _is_count(value):
            values[name] = [value] * counts
        elif isinstance(value, dict) and any(map(_is_count, value.values())):
            values[name] = {
                pod: [part] * counts if _is_count(part) else part for pod, part in value.items()
            }
        else:
            continue
        notes.append(f"{name}={shown(value)} is read as {shown(values[name])}, a list since.")


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _rename(values: Dict[str, Any], old: str, new: str, notes: List[str]) -> None:
    if old in values:
        value = values.pop(old)
        if values.get(new) is None:
            values[new] = value
            notes.append(f"{old}={shown(value)} is read as {new}, its name since.")
        elif values[new] != value:
            notes.append(f"{old}={shown(value)} is left aside beside {new}={shown(values[new])}.")


def _split_by_mode(values: Dict[str, Any], name: str, notes: List[str]) -> None:
    """Rename values by mode of a release that had three: training, inference, and both."""
    old, inference = f"training_{name}", f"inference_{name}"
    if old not in values:
        return
    both = values.get(name)
    if both is not None and values.get(inference) is None:
        values[inference] = both
    values[name] = values.pop(old)
    notes.append(f"{old}={shown(values[name])} is read as {name}, its name since.")
