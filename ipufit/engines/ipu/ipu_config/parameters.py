"""The parameters of IPUConfig: names, defaults, and which values each one takes."""

from __future__ import annotations

import dataclasses
import difflib
import os
from typing import Any, Callable, Dict, Iterable, List, Optional, Tuple, Union

from ipufit.core import CONFIG_OUTPUT_MODES, ConfigOutputMode
from ipufit.errors import shown
from ipufit.partition.serialization import side_by_side
from ipufit.utils.error_collector import as_float, whole_number

_TWIN = "inference_"


class _UnfitError(Exception):
    """A value that the parameter doesn't take; with other words and an example, if there are."""


@dataclasses.dataclass(frozen=True)
class _Kind:
    """A set of values.

    Attributes:
        words: what a value must be, to follow "must be".
        example: one, as Python.
        read: the value in normal form, or _UnfitError.
    """

    words: str
    example: str
    read: Callable[[object], object]


@dataclasses.dataclass(frozen=True)
class Parameter:
    """One parameter.

    Attributes:
        default: its value where nothing was said; None where it follows from others.
        kind: which values it takes.
    """

    default: object
    kind: _Kind

    @property
    def optional(self) -> bool:
        """True if None is one of the values."""
        return self.default is None


def _whole(value: object, least: int) -> int:
    number = whole_number(value)
    if number is None or number < least:
        raise _UnfitError
    return number


def _plain(value: object) -> object:
    """Arrays and tensors as lists and numbers."""
    return value.tolist() if hasattr(value, "tolist") else value


def _wholes(value: object, least: int) -> List[int]:
    value = _plain(value)
    if not isinstance(value, (list, tuple)) or not value:
        raise _UnfitError
    return [_whole(part, least) for part in value]


def _seed(value: object) -> int:
    number = _whole(value, 0)
    if number >= 2**64:
        raise _UnfitError
    return number


def _proportion(value: object) -> float:
    number = as_float(value)
    if not 0 <= number <= 1:
        raise _UnfitError
    return number


def _proportions(value: object) -> Union[float, List[float]]:
    value = _plain(value)
    if isinstance(value, (list, tuple)) and value:
        return [_proportion(part) for part in value]
    return _proportion(value)


def _splits(value: object) -> List[int]:
    splits = _wholes(value, 0)
    if not any(splits):
        raise _UnfitError(f"{_SPLITS.words}, at least one in all", "None")
    moved = side_by_side(splits)
    if moved != splits:
        raise _UnfitError(f"{_SPLITS.words}, with no 0 between two others", str(moved))
    return splits


def _flag(value: object) -> bool:
    if not isinstance(value, bool):
        raise _UnfitError
    return value


def _mode(value: object) -> str:
    if not isinstance(value, str) or value not in CONFIG_OUTPUT_MODES:
        raise _UnfitError
    return value


def _folder(value: object) -> str:
    # Files of 2021 have null for no folder.
    path = "" if value is None else os.fspath(value) if hasattr(value, "__fspath__") else value
    if not isinstance(path, str):
        raise _UnfitError
    return path


def _keywords(value: object) -> Dict[str, object]:
    if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
        raise _UnfitError
    return dict(value)


_COUNT = _Kind("an integer of at least 1", "1", lambda value: _whole(value, 1))
_LAYERS = _Kind(
    "a list with the number of layers on each IPU, -1 for an even share of the rest",
    "[2, -1]",
    lambda value: _wholes(value, -1),
)
_SPLITS = _Kind(
    "a list with the number of splits on each IPU",
    "[0, 2, 2, 0]",
    _splits,
)
_MEMORY = _Kind("a number from 0 to 1, or a list with one for each IPU", "0.2", _proportions)
_FLAG = _Kind("True or False", "True", _flag)
_SEED = _Kind("an integer of at least 0 and less than 2**64", "0", _seed)
_MODE = _Kind(f"one of {', '.join(map(repr, CONFIG_OUTPUT_MODES))}", "'final'", _mode)
_FOLDER = _Kind("the path of a folder as a string, '' for none", "''", _folder)
_KEYWORDS = _Kind("a dict by names of arguments", "{}", _keywords)


def _parameter(default: object, kind: _Kind) -> Any:
    """Describe a parameter in the place of its value, as ``dataclasses.field`` does."""
    return Parameter(default, kind)


class ParameterValues:
    """The values of all parameters of one configuration, in normal form, and their table.

    Attributes:
        notes: values of older files that were ignored or changed, one sentence each.
    """

    replication_factor: int = _parameter(1, _COUNT)
    inference_replication_factor: int = _parameter(1, _COUNT)
    gradient_accumulation_steps: int = _parameter(1, _COUNT)
    layers_per_ipu: List[int] = _parameter((-1,), _LAYERS)
    inference_layers_per_ipu: List[int] = _parameter(None, _LAYERS)
    ipus_per_replica: int = _parameter(None, _COUNT)
    inference_ipus_per_replica: int = _parameter(None, _COUNT)
    optimizer_state_offchip: bool = _parameter(False, _FLAG)
    replicated_tensor_sharding: bool = _parameter(False, _FLAG)
    matmul_proportion: Union[float, List[float]] = _parameter(0.2, _MEMORY)
    inference_matmul_proportion: Union[float, List[float]] = _parameter(None, _MEMORY)
    enable_half_partials: bool = _parameter(True, _FLAG)
    embedding_serialization_factor: Optional[int] = _parameter(None, _COUNT)
    inference_embedding_serialization_factor: Optional[int] = _parameter(None, _COUNT)
    serialized_embedding_splits_per_ipu: Optional[List[int]] = _parameter(None, _SPLITS)
    inference_serialized_embedding_splits_per_ipu: Optional[List[int]] = _parameter(None, _SPLITS)
    projection_serialization_factor: Optional[int] = _parameter(None, _COUNT)
    inference_projection_serialization_factor: Optional[int] = _parameter(None, _COUNT)
    serialized_projection_splits_per_ipu: Optional[List[int]] = _parameter(None, _SPLITS)
    inference_serialized_projection_splits_per_ipu: Optional[List[int]] = _parameter(None, _SPLITS)
    recompute_checkpoint_every_layer: bool = _parameter(False, _FLAG)
    device_iterations: int = _parameter(1, _COUNT)
    inference_device_iterations: int = _parameter(1, _COUNT)
    output_mode: ConfigOutputMode = _parameter("final", _MODE)
    seed: Optional[int] = _parameter(None, _SEED)
    auto_loss_scaling: bool = _parameter(False, _FLAG)
    executable_cache_dir: str = _parameter("", _FOLDER)
    explicit_ir_inference: bool = _parameter(False, _FLAG)
    parallelize_kwargs: Dict[str, Any] = _parameter(None, _KEYWORDS)
    inference_parallelize_kwargs: Dict[str, Any] = _parameter(None, _KEYWORDS)
    notes: Tuple[str, ...]


PARAMETERS: Dict[str, Parameter] = {
    name: value for name, value in vars(ParameterValues).items() if isinstance(value, Parameter)
}


def is_default(name: str, value: object) -> bool:
    """Return True for the value that a parameter has by default."""
    default = PARAMETERS[name].default
    return type(value) is type(default) and bool(value == default)


def twin(name: str) -> Optional[str]:
    """Return the parameter with the same meaning for inference; None if there is none."""
    return _TWIN + name if _TWIN + name in PARAMETERS else None


def check_value(name: str, value: object, faults: List[str], title: str = "") -> object:
    """Return a value in normal form; the default where something is wrong with it.

    Args:
        name: of the parameter.
        value: what came.
        faults: a sentence about what is wrong is added here.
        title: the name as the user wrote it, if it differs.
    """
    parameter = PARAMETERS[name]
    if value is None and parameter.optional:
        return None
    try:
        return parameter.kind.read(value)
    except _UnfitError as error:
        or_none = ", or None" if parameter.optional else ""
        words, example = error.args or (parameter.kind.words, parameter.kind.example)
        faults.append(
            f"IPUConfig.{title or name} must be {words}{or_none}, got {shown(value)}. Try "
            f"{example}."
        )
        return parameter.default


def nearest(name: str, names: Iterable[str] = PARAMETERS) -> str:
    """Return a hint at the name that was probably meant."""
    close = difflib.get_close_matches(name.lower(), list(names), n=1, cutoff=0.6)
    return f"Did you mean {close[0]!r}?" if close else "Leave it out."


def values_of(config: ParameterValues) -> Dict[str, Any]:
    """Return all values of a configuration by name, in their order."""
    return {name: getattr(config, name) for name in PARAMETERS}


@dataclasses.dataclass(frozen=True)
class IpuLayout:
    """How one copy of the model is divided over IPUs.

    Attributes:
        ipus_per_replica: IPUs of one copy.
        layers_per_ipu: layers on each of them, -1 for an even share of the rest.
        embedding_serialization_factor, projection_serialization_factor: parts into which the layer
            is cut on one IPU; None where the splits say it.
        serialized_embedding_splits_per_ipu, serialized_projection_splits_per_ipu: parts on each
            IPU, or None.
        recompute_checkpoint_every_layer: whether activations are computed again in the backward
            pass.
    """

    ipus_per_replica: int
    layers_per_ipu: Tuple[int, ...]
    embedding_serialization_factor: Optional[int]
    serialized_embedding_splits_per_ipu: Optional[Tuple[int, ...]]
    projection_serialization_factor: Optional[int]
    serialized_projection_splits_per_ipu: Optional[Tuple[int, ...]]
    recompute_checkpoint_every_layer: bool
