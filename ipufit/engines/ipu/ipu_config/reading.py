"""Values from a file or a call: migrated from earlier releases, and checked together."""

from __future__ import annotations

import json
import re
from typing import AbstractSet, Any, Dict, List, Mapping, Optional, Sequence, Set, Tuple

from ipufit.core import PODS, PodType
from ipufit.engines.ipu.ipu_config.parameters import PARAMETERS, check_value, nearest
from ipufit.errors import ConfigurationError, shown

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
_WITHDRAWN: Dict[str, Tuple[Tuple[object, ...], str]] = {
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
    "use_popdist": ((False, None), "an external launcher starts the processes"),
    "profile_dir": (
        ("", None),
        "use enableProfiling(...) of to_options(), or the variable POPLAR_ENGINE_OPTIONS",
    ),
    "compile_only": ((False, None), "it is an argument of to_options()"),
    "synthetic_data": ((False, None), "use enableSyntheticData(True) of to_options()"),
}
_ON_CPU = "execute_encoder_on_cpu_for_generation"


def migrate_parameters(
    arguments: Mapping[str, object], faults: List[str]
) -> Tuple[Dict[str, object], List[str]]:
    """Migrate parameters to the names of today; unknown ones stay.

    Args:
        arguments: values by name, as a file or a call has them.
        faults: what can't be read is added here.

    Returns:
        Values by name, and notes on what was left aside or read differently.
    """
    values: Dict[str, object] = {}
    notes: List[str] = []
    for name, value in arguments.items():
        if name in _ABOUT:
            continue
        if name in _WITHDRAWN:
            neutral, hint = _WITHDRAWN[name]
            if not any(value is harmless or value == harmless for harmless in neutral):
                notes.append(f"{name}={shown(value)} was removed and is ignored: {hint}.")
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


def _list_layers(values: Dict[str, object], notes: List[str]) -> None:
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
        notes.append(
            f"{name}={shown(value)} is read as {shown(values[name])}: newer releases use a list."
        )


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _rename(values: Dict[str, object], old: str, new: str, notes: List[str]) -> None:
    if old in values:
        value = values.pop(old)
        if values.get(new) is None:
            values[new] = value
            notes.append(f"{old}={shown(value)} is read as {new}, its new name.")
        elif values[new] != value:
            notes.append(f"{old}={shown(value)} is ignored because of {new}={shown(values[new])}.")


def _split_by_mode(values: Dict[str, object], name: str, notes: List[str]) -> None:
    """Rename values by mode of a release that had three: training, inference, and both."""
    old, inference = f"training_{name}", f"inference_{name}"
    if old not in values:
        return
    both = values.get(name)
    if both is not None and values.get(inference) is None:
        values[inference] = both
    values[name] = values.pop(old)
    notes.append(f"{old}={shown(values[name])} is read as {name}, its new name.")


_DEFAULT = "default"
_LAYERS = ("embedding", "projection")


def read(
    arguments: Mapping[str, object], pod_type: Optional[PodType] = None, where: str = ""
) -> Dict[str, object]:
    """Check all values that were passed and derive the others.

    Args:
        arguments: values by name, in the form of any release of optimum-graphcore.
        pod_type: which of the values by pod type to take; None for those named "default".
        where: the file they came from, for the message.

    Returns:
        The attributes of a configuration: values of all parameters, ``notes`` on what was left
        aside or read differently, ``_passed`` with the names of the parameters that were passed,
        and ``_by_pod`` with the values by pod type.

    Raises:
        ConfigurationError: with every fault.
    """
    faults: List[str] = []
    by_pod: Dict[str, Dict[str, object]] = {}
    if pod_type is not None and pod_type not in PODS:
        faults.append(
            f"pod_type must be one of {', '.join(map(repr, PODS))}, or None for the values named "
            f"'default', got {shown(pod_type)}."
        )
        pod_type = None
    migrated, notes = migrate_parameters(arguments, faults)
    values: Dict[str, object] = {}
    bad: Set[str] = set()
    for name, value in migrated.items():
        if name not in PARAMETERS:
            faults.append(f"IPUConfig has no parameter {name!r}. {nearest(name)}")
            continue
        value_faults: List[str] = []
        if isinstance(value, dict) and value and not name.endswith("parallelize_kwargs"):
            by_pod[name], value = _of_pod(name, value, pod_type, value_faults)
        else:
            value = check_value(name, value, value_faults)
        values[name] = value
        bad |= {name} if value_faults else set()
        faults += value_faults
    passed = frozenset(values)
    values = filled(values)
    faults += incoherent(values, bad)
    raise_faults(faults, where)
    # A configuration for one pod has one value of everything.
    by_pod = by_pod if pod_type is None else {}
    return {**values, "_by_pod": by_pod, "_passed": passed, "notes": tuple(notes)}


def raise_faults(faults: Sequence[str], where: str = "") -> None:
    """Raise one error with all faults, if there are any.

    Raises:
        ConfigurationError: there are.
    """
    unique = list(dict.fromkeys(faults))
    if unique and where:
        unique.insert(0, f"{where} can't be read as an IPUConfig:")
    if unique:
        raise ConfigurationError("\n".join(unique))


def check_changes(changes: Mapping[str, object], faults: List[str]) -> Dict[str, object]:
    """Bring new values of some parameters into normal form; faults are collected."""
    values = {}
    for name, value in changes.items():
        if name in PARAMETERS:
            values[name] = check_value(name, value, faults)
        else:
            faults.append(f"IPUConfig has no parameter {name!r}. {nearest(name)}")
    return values


_TRUE = ("true", "1", "y", "yes")
_FALSE = ("false", "0", "n", "no")
_NONE = ("none", "null")
# A comma that is not inside of brackets.
_BETWEEN = re.compile(r",(?![^\[]*\])")


def parse_changes(text: str, faults: List[str]) -> Dict[str, object]:
    """The values by name; what can't be read is noted.

    Args:
        text: ``name=value`` separated by commas. Lists are ``[a b c]`` or ``[a,b,c]``.
        faults: sentences are added here.
    """
    if not isinstance(text, str):
        faults.append(
            f"update_from_string needs a string such as 'seed=1,device_iterations=4', got "
            f"{shown(text)}. Use update(...) for a dict."
        )
        return {}
    changes: Dict[str, object] = {}
    for part in _BETWEEN.split(text) if text.strip() else []:
        name, equals, value = (piece.strip() for piece in part.partition("="))
        if not equals:
            faults.append(
                f"every change must be name=value, got {part!r}. Separate changes by commas, and "
                "the entries of a list by spaces: layers_per_ipu=[2 2]."
            )
        elif name in changes:
            faults.append(f"every change must appear once, got {name!r} again. Leave one out.")
        elif name not in PARAMETERS:
            faults.append(f"IPUConfig has no parameter {name!r}. {nearest(name)}")
        else:
            changes[name] = _read(name, value, faults)
    return changes


def _read(name: str, text: str, faults: List[str]) -> object:
    """A value from its text; whether it fits is looked at later."""
    parameter = PARAMETERS[name]
    words = text.lower()
    if parameter.optional and words in _NONE:
        return None
    if isinstance(parameter.default, bool):
        if words not in _TRUE + _FALSE:
            accepted = ", ".join(_TRUE + _FALSE)
            faults.append(
                f"IPUConfig.{name} must be one of {accepted} in a string, got {text!r}. Try true."
            )
        return words in _TRUE
    if isinstance(parameter.default, str):
        return text
    if text.startswith("[") and text.endswith("]"):
        text = "[" + ",".join(text[1:-1].replace(",", " ").split()) + "]"
    try:
        return json.loads(text)
    except ValueError:
        return text


def _of_pod(
    name: str, value: Dict[str, object], pod_type: Optional[str], faults: List[str]
) -> Tuple[Dict[str, object], object]:
    """Return all values by pod type in normal form, and the one for this pod."""
    checked = {}
    names = (*PODS, _DEFAULT)
    for pod, part in value.items():
        if pod not in names:
            meant = str(pod).lower()
            cure = nearest(meant, names) if meant in names else "Choose one of these."
            faults.append(
                f"IPUConfig.{name} may have values by type of pod, which is one of "
                f"{', '.join(map(repr, names))}, got {shown(pod)}. {cure}"
            )
            continue
        checked[pod] = check_value(name, part, faults, f"{name}[{pod!r}]")
    wanted = _DEFAULT if pod_type is None else pod_type
    if not faults and wanted not in checked:
        came = ", ".join(map(repr, value))
        faults.append(
            f"IPUConfig.{name} must have a value named 'default' if pod_type is not set, got "
            f"values for {came}. Pass one of these as pod_type."
            if pod_type is None
            else f"IPUConfig.{name} must have a value for pod_type={pod_type!r}, got values for "
            f"{came}. Choose one of these, or add the value."
        )
    return checked, checked.get(wanted, PARAMETERS[name].default)


def filled(arguments: Mapping[str, object]) -> Dict[str, object]:
    """Return the values of all parameters in their order; twins follow as in optimum-graphcore."""
    values: Dict[str, Any] = {}
    values.update((name, arguments.get(name, p.default)) for name, p in PARAMETERS.items())
    values["layers_per_ipu"] = list(values["layers_per_ipu"])
    layers = values["layers_per_ipu"]
    if values["inference_layers_per_ipu"] is None:
        values["inference_layers_per_ipu"] = list(layers)
    if values["ipus_per_replica"] is None:
        values["ipus_per_replica"] = len(layers)
    if values["inference_ipus_per_replica"] is None:
        ipus, inference = values["ipus_per_replica"], values["inference_layers_per_ipu"]
        follows_layers = ipus == len(layers) or inference != [-1]
        values["inference_ipus_per_replica"] = len(inference) if follows_layers else ipus
    if values["inference_matmul_proportion"] is None:
        memory = values["matmul_proportion"]
        if isinstance(memory, list):
            fits = len(memory) == values["inference_ipus_per_replica"]
            memory = list(memory) if fits else PARAMETERS["matmul_proportion"].default
        values["inference_matmul_proportion"] = memory
    for prefix in ("", "inference_"):
        for layer in _LAYERS:
            factor = f"{prefix}{layer}_serialization_factor"
            splits = f"{prefix}serialized_{layer}_splits_per_ipu"
            if values[factor] is None and values[splits] is None:
                values[factor] = 1
        name = f"{prefix}parallelize_kwargs"
        values[name] = {} if values[name] is None else values[name]
    return values


def incoherent(values: Mapping[str, object], bad: AbstractSet[str] = frozenset()) -> List[str]:
    """Return the contradictions between values, a sentence each.

    Args:
        values: of all parameters.
        bad: those that are wrong by themselves, of which nothing more is said.
    """
    faults: List[str] = []
    for prefix in ("", "inference_"):
        ipus = f"{prefix}ipus_per_replica"
        faults += _lengths(values, bad, prefix, ipus)
        for layer in _LAYERS:
            factor = f"{prefix}{layer}_serialization_factor"
            splits = f"{prefix}serialized_{layer}_splits_per_ipu"
            both = values[factor] is not None and values[splits] is not None
            if both and not bad & {factor, splits}:
                faults.append(
                    f"IPUConfig.{factor} cuts a layer on one IPU and IPUConfig.{splits} over "
                    f"several, so one of them must be None, got {values[factor]} and "
                    f"{values[splits]}. Leave one out."
                )
    return faults


def _lengths(
    values: Mapping[str, object], bad: AbstractSet[str], prefix: str, ipus: str
) -> List[str]:
    """Return faults of lists that have another length than there are IPUs."""
    faults = []
    count = values[ipus]
    lists = ["layers_per_ipu", "matmul_proportion"]
    lists += [f"serialized_{layer}_splits_per_ipu" for layer in _LAYERS]
    for name in (prefix + name for name in lists):
        value = values[name]
        if not isinstance(value, list) or len(value) == count or bad & {name, ipus}:
            continue
        # One wildcard is for any number of IPUs; and on one IPU there is nothing to choose.
        if name.endswith("layers_per_ipu") and -1 in value and 1 in (len(value), count):
            continue
        faults.append(
            f"IPUConfig.{name} must have one entry for each of the IPUs of a replica, of which "
            f"IPUConfig.{ipus} has {count}, got {value}. Change one of them."
        )
    return faults
