"""Options as plain data, for files.

Plain data is what JSON has: nothing in a file can name a class or run code. Types that JSON does
not have are marked: ``{"enum": ["OutputMode", "All"]}``, ``{"tuple": [...]}``, ``{"dict": [[key,
value]]}``.
"""

from __future__ import annotations

import enum
from typing import Any, Callable, Dict, List

from ipufit.poptorch import enums
from ipufit.poptorch._errors import error
from ipufit.poptorch._options.execution import (
    ParallelPhasedExecution,
    Phase,
    PipelinedExecution,
    SerialPhasedExecution,
    ShardedExecution,
    Stage,
    _IExecutionStrategy,
    _IPhasedExecution,
)
from ipufit.poptorch._options.files import ENUMS
from ipufit.poptorch._options.options import Options

__all__ = ["from_data", "to_data"]

_STRATEGIES: Dict[str, Any] = {
    kind.__name__: kind
    for kind in (
        ParallelPhasedExecution,
        PipelinedExecution,
        SerialPhasedExecution,
        ShardedExecution,
    )
}
_GROUPS = ("_training", "_distributed", "_tensor_locations")
_FLAGS = (
    "_module_namescope_enabled",
    "_relax_optimizer_checks",
    "_show_compilation_progress_bar",
    "_source_location_excludes",
)
_CONTAINERS: Dict[str, Callable[[Any], Any]] = {"list": list, "set": set, "tuple": tuple}


class _Bare(Options):
    """Options that ignore the environment."""

    def _read_environment(self) -> None:
        """Read nothing."""


def to_data(options: Options) -> Dict[str, Any]:
    """Convert options to plain data.

    Raises:
        Error: a value that is not plain, such as a tensor given to ``_Popart.set``.
    """
    return {
        "values": _encode("Options", options._values),
        "groups": {name: _encode(name, getattr(options, name)._values) for name in _GROUPS},
        "compiler": _encode("_Popart", options._Popart.options),
        "flags": {name: _encode(name, getattr(options, name)) for name in _FLAGS},
        "strategy": _strategy_data(options._execution_strategy),
    }


def from_data(data: Dict[str, Any]) -> Options:
    """Rebuild options from plain data; they are not frozen, and ignore the environment."""
    options: Options = _Bare()
    options.__class__ = Options
    options._values = _decode(data["values"])
    for name in _GROUPS:
        getattr(options, name)._values = _decode(data["groups"][name])
    options._Popart.options = _decode(data["compiler"])
    for name in _FLAGS:
        setattr(options, name, _decode(data["flags"][name]))
    options._execution_strategy = _strategy(data["strategy"])
    return options


def _encode(where: str, value: Any) -> Any:
    """Convert a value to plain data."""
    if isinstance(value, enum.Enum) and type(value).__name__ in ENUMS:
        return {"enum": [type(value).__name__, value.name]}
    if value is None or type(value) in (bool, int, float, str):
        return value
    if type(value) is dict:
        pairs = [[_encode(where, key), _encode(where, entry)] for key, entry in value.items()]
        return {"dict": pairs}
    for name, kind in _CONTAINERS.items():
        if type(value) is kind:
            return {name: [_encode(where, entry) for entry in value]}
    raise error(
        "Options in a file are numbers, strings, enums, lists, tuples, sets and dicts; "
        f"{where} has a value of type {type(value).__name__}. Leave it out."
    )


def _decode(data: object) -> Any:
    """Rebuild a value from plain data."""
    if not isinstance(data, dict):
        return data
    ((mark, entries),) = data.items()
    if mark == "enum":
        return ENUMS[entries[0]][entries[1]]
    if mark == "dict":
        return {_decode(key): _decode(entry) for key, entry in entries}
    return _CONTAINERS[mark](_decode(entry) for entry in entries)


def _stage_data(stage: Stage) -> Dict[str, Any]:
    return {"blocks": stage.blocks, "ipu": stage._ipu}


def _stage(data: Dict[str, Any]) -> Stage:
    stage = Stage(*data["blocks"])
    return stage if data["ipu"] is None else stage.ipu(data["ipu"])


def _strategy_data(strategy: _IExecutionStrategy) -> Dict[str, Any]:
    """Convert a strategy to its class' name and its stages."""
    kind = type(strategy).__name__
    if type(strategy) is not _STRATEGIES.get(kind):
        raise error(
            f"An execution strategy in a file is one of {', '.join(_STRATEGIES)}, got {kind}."
        )
    if isinstance(strategy, _IPhasedExecution):
        return {
            "kind": kind,
            "phases": [[_stage_data(stage) for stage in p.stages] for p in strategy._phases],
            "liveness": strategy._tensors_liveness.name,
            "separate": strategy._separate_backward_phase,
        }
    assert isinstance(strategy, PipelinedExecution)
    # A stage of several blocks is in the map once for each.
    stages: List[Stage] = []
    for stage in strategy._block_map.values():
        if stage not in stages:
            stages.append(stage)
    return {
        "kind": kind,
        "auto": strategy._auto_stage.name,
        "stages": [_stage_data(stage) for stage in stages],
    }


def _strategy(data: Dict[str, Any]) -> _IExecutionStrategy:
    """Rebuild a strategy from plain data."""
    kind = _STRATEGIES[data["kind"]]
    if "phases" in data:
        phased: _IPhasedExecution = kind(*(Phase(*map(_stage, p)) for p in data["phases"]))
        phased._tensors_liveness = enums.Liveness[data["liveness"]]
        return phased.useSeparateBackwardPhase(data["separate"])
    stages: List[Any] = [_stage(stage) for stage in data["stages"]]
    strategy: PipelinedExecution = kind(*stages or [enums.AutoStage[data["auto"]]])
    return strategy
