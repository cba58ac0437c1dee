"""Modules, optimizers and options as plain values for a file, and back.

A file may only name classes, and only those that the program has imported already are used. Neither
their constructors nor any other code of theirs runs while reading; torch's own modules restore
themselves.
"""

from __future__ import annotations

import functools
import types
from typing import Any, Callable, Dict, List, Optional, Tuple

import torch
from torch import Tensor, nn

from ipufit.poptorch import _codec, enums, optim
from ipufit.poptorch._logging import Error, error
from ipufit.poptorch._optimizer_settings import OPTIMIZERS
from ipufit.poptorch._options import execution
from ipufit.poptorch._options.options import Options
from ipufit.poptorch._wrapping import isWrapped

# What torch itself keeps of a module; the rest of its attributes are the user's.
_OWN = frozenset(nn.Module().__dict__)


class UnknownClass(Exception):
    """A class that a file names is not imported in this program."""


class WeightsOnly(nn.Module):
    """Replaces a module whose class is not imported, with its weights under their names.

    Args:
        path: the class, as "module:name".
    """

    def __init__(self, path: str = "") -> None:
        super().__init__()
        self.class_path = path

    def forward(self, *args: object, **kwargs: object) -> Any:
        """Refuse the call, because the module's code is not there.

        Raises:
            Error: always.
        """
        module, _, name = self.class_path.partition(":")
        raise error(
            f"the file holds the compiled program and the weights of {name}, but not its Python "
            f"code, so that it can't be compiled again. Import {module} before poptorch.load(), "
            "or wrap a new model and load the state_dict() of this one into it."
        )


def module_to_values(model: nn.Module) -> List[_codec.Values]:
    """Convert a module and its submodules to values that ``write_file`` takes.

    Raises:
        Error: it has hooks, or an attribute that a file can't hold; the message says where.
    """
    modules = list(model.modules())
    order = {id(module): number for number, module in enumerate(modules)}
    names = {id(module): name for name, module in model.named_modules()}
    return [_one(module, names[id(module)], order) for module in modules]


def _one(module: nn.Module, name: str, order: Dict[int, int]) -> Dict[str, object]:
    kind = type(module)._poptorch_plain if isWrapped(module) else type(module)  # type: ignore[attr-defined]
    # What torch's own modules leave out of a file, they make anew.
    getstate = getattr(kind, "__getstate__", None) if _is_torchs(kind) else None
    state = module.__dict__ if getstate is None else getstate(module)
    for key, value in state.items():
        if key in _OWN and key.endswith("_hooks") and value:
            raise error(
                f"{name or 'the model'} has hooks ({key}), which a file can't hold. Remove them "
                "before you save, or save with export_model=False."
            )
    return {
        "class": _codec.class_path(kind),
        "training": module.training,
        "parameters": list(module._parameters.items()),
        "buffers": list(module._buffers.items()),
        "not_saved": sorted(module._non_persistent_buffers_set),
        "modules": [
            (key, None if child is None else order[id(child)])
            for key, child in module._modules.items()
        ],
        "attributes": [
            (key, _attribute(value, f"{name}.{key}" if name else key))
            for key, value in state.items()
            if key not in _OWN
        ],
    }


def _attribute(value: object, name: str) -> Tuple[str, object]:
    function = getattr(value, "__name__", None)
    for place in (nn.functional, torch):
        path = f"{place.__name__}:{function}"
        if function and _functions().get(path) is value:
            return ("function", path)
    try:
        _codec.make_codec().encode(value)
    except Error as reason:
        raise error(
            f"the attribute {name} can't be saved: {reason.message} Or save with "
            "export_model=False."
        ) from reason
    return ("value", value)


def _is_torchs(kind: type) -> bool:
    return kind.__module__.startswith("torch.nn.")


def module_from_values(values: List[_codec.Values]) -> nn.Module:
    """Rebuild the module of ``module_to_values`` with classes that are imported in this program.

    Raises:
        UnknownClass: one is not.
        InvalidContent: no module is written like this.
    """
    with _codec.refuse_malformed("it holds no sound module"):
        modules = [_empty(entry["class"]) for entry in values]
        _fill(modules, values)
        for module, entry in zip(modules, values):
            # The method of nn.Module, but for classes of torch.
            kind: Any = type(module) if _is_torchs(type(module)) else nn.Module
            kind.__setstate__(module, {**module.__dict__, **_attributes(entry)})
        return modules[0]


def weights_from_values(path: str, values: List[_codec.Values]) -> nn.Module:
    """Rebuild the weights of ``module_to_values`` in modules without code, under the same names.

    Args:
        path: the class of the whole module, as "module:name".
        values: of the module and its submodules.

    Raises:
        InvalidContent: no module is written like this.
    """
    modules: List[nn.Module] = [WeightsOnly(path) for _ in values]
    _fill(modules, values)
    return modules[0]


def _empty(path: object) -> nn.Module:
    kind = _codec.imported_class(path, nn.Module)
    if kind is None:
        raise UnknownClass(path)
    module: nn.Module = object.__new__(kind)
    nn.Module.__init__(module)
    return module


def _fill(modules: List[nn.Module], values: List[_codec.Values]) -> None:
    """Give modules their parameters, buffers, submodules and modes."""
    for module, entry in zip(modules, values):
        for name, parameter in entry["parameters"]:
            _expect(name, parameter, nn.Parameter)
            module._parameters[name] = parameter
        for name, buffer in entry["buffers"]:
            _expect(name, buffer, Tensor)
            module._buffers[name] = buffer
        for name, number in entry["modules"]:
            _expect(name, number, int)
            if number is not None and not 0 <= number < len(modules):
                raise _codec.InvalidContent(f"it has no module {number}")
            module._modules[name] = None if number is None else modules[number]
        module._non_persistent_buffers_set = set(entry["not_saved"])
        module.training = bool(entry["training"])


def _attributes(entry: _codec.Values) -> _codec.Values:
    attributes: _codec.Values = {}
    for name, (kind, value) in entry["attributes"]:
        if not isinstance(name, str) or name in _OWN:
            raise _codec.InvalidContent(f"{name!r} can't be an attribute of a module")
        attributes[name] = _function(value) if kind == "function" else value
    return attributes


def _expect(name: object, value: object, kind: type) -> None:
    if not isinstance(name, str) or not (value is None or isinstance(value, kind)):
        raise _codec.InvalidContent(f"{name!r} is no {kind.__name__}")


def _function(path: object) -> Any:
    function = _functions().get(path) if isinstance(path, str) else None
    if function is None:
        raise _codec.InvalidContent(f"{path!r} is not a function of torch")
    return function


@functools.lru_cache(maxsize=None)
def _functions() -> Dict[str, object]:
    """Map paths to functions of torch that modules have as attributes, such as activations."""
    functions = {}
    for name, value in vars(nn.functional).items():
        defined_here = getattr(value, "__module__", None) == nn.functional.__name__ and callable(
            value
        )
        if defined_here or isinstance(value, types.BuiltinFunctionType):
            functions[f"{nn.functional.__name__}:{name}"] = value
    for name in dir(torch._C._VariableFunctions):
        value = vars(torch).get(name)
        if not name.startswith("_") and name != "from_file" and callable(value):
            functions[f"torch:{name}"] = value
    return functions


# A file can name these and no other.
_CLASSES: Dict[str, Callable[..., torch.optim.Optimizer]] = {
    _codec.class_path(kind): kind for kind in OPTIMIZERS
}


# What an optimizer of torch may have besides, and those of the front end have.
_SETTINGS = sorted(
    {
        name
        for kind in (optim.SGD, optim.Adam, optim.AdamW, optim.RMSprop, optim.LAMB)
        for name in kind._child_only
    }
    | {"max_weight_norm"}
)


def optimizer_to_values(optimizer: torch.optim.Optimizer) -> _codec.Values:
    """Convert an optimizer to values: class, settings, and the model's own parameters.

    The state on the device is not included.

    Raises:
        Error: an optimizer of a class of the user's.
    """
    kind = _codec.class_path(type(optimizer))
    if kind not in _CLASSES:
        raise error(
            "a file holds optimizers of torch.optim and poptorch.optim, got "
            f"{kind.replace(':', '.')}. Use one of these as it is, or save with "
            "export_model=False."
        )
    marks = getattr(optimizer, "variable_attrs", None)
    return {
        "class": kind,
        "groups": [dict(group) for group in optimizer.param_groups],
        "defaults": dict(optimizer.defaults),
        "settings": {n: vars(optimizer)[n] for n in _SETTINGS if n in vars(optimizer)},
        "variable": None if marks is None else list(marks._variable_attributes),
        "state": [(parameter, dict(state)) for parameter, state in optimizer.state.items()],
    }


def optimizer_from_values(values: Optional[_codec.Values]) -> Optional[torch.optim.Optimizer]:
    """Rebuild the optimizer of ``optimizer_to_values``; None for None.

    Raises:
        InvalidContent: no optimizer is written like this.
    """
    if values is None:
        return None
    with _codec.refuse_malformed("it holds no sound optimizer"):
        kind = _CLASSES.get(values["class"])
        if kind is None:
            raise _codec.InvalidContent(f"{values['class']!r} is not an optimizer that it can hold")
        groups = [dict(group) for group in values["groups"]]
        optimizer: torch.optim.Optimizer = kind(groups, lr=groups[0]["lr"])
        optimizer.defaults.update(values["defaults"])
        for name, value in values["settings"].items():
            if name not in _SETTINGS:
                raise _codec.InvalidContent(f"{name!r} is not a setting of an optimizer")
            setattr(optimizer, name, value)
        if isinstance(optimizer, optim.Optimizer):
            optimizer.variable_attrs._variable_attributes = [str(n) for n in values["variable"]]
        for parameter, state in values["state"]:
            if not isinstance(parameter, nn.Parameter):
                raise _codec.InvalidContent("the state of an optimizer must be that of a parameter")
            optimizer.state[parameter] = dict(state)
        return optimizer


_GROUPS = ("_training", "_distributed", "_tensor_locations")
_FLAGS = (
    "_module_namescope_enabled",
    "_relax_optimizer_checks",
    "_show_compilation_progress_bar",
    "_source_location_excludes",
)


class _Bare(Options):
    """Options that ignore the environment."""

    def _read_environment(self) -> None:
        """Read nothing."""


def options_to_values(options: Options) -> _codec.Values:
    """Convert options to values that ``write_file`` takes.

    Raises:
        Error: an execution strategy of a class of the user's.
    """
    return {
        "values": options._values,
        "groups": {name: getattr(options, name)._values for name in _GROUPS},
        "compiler": options._Popart.options,
        "flags": {name: getattr(options, name) for name in _FLAGS},
        "strategy": _strategy_values(options._execution_strategy),
    }


def options_from_values(values: _codec.Values) -> Options:
    """Rebuild the options of ``options_to_values``; not frozen, and without the environment's."""
    options: Options = _Bare()
    options.__class__ = Options
    options._values = values["values"]
    for name in _GROUPS:
        getattr(options, name)._values = values["groups"][name]
    options._Popart.options = values["compiler"]
    for name in _FLAGS:
        setattr(options, name, values["flags"][name])
    options._execution_strategy = _strategy(values["strategy"])
    return options


def _stage_values(stage: execution.Stage) -> Dict[str, object]:
    return {"blocks": stage.blocks, "ipu": stage._ipu}


def _stage(data: _codec.Values) -> execution.Stage:
    stage = execution.Stage(*data["blocks"])
    return stage if data["ipu"] is None else stage.ipu(data["ipu"])


def _strategy_values(strategy: execution._IExecutionStrategy) -> Dict[str, object]:
    """Convert a strategy to its class' name and its stages."""
    kind = type(strategy).__name__
    if type(strategy) is not execution.STRATEGIES.get(kind):
        raise error(
            f"An execution strategy in a file is one of {', '.join(execution.STRATEGIES)}, got "
            f"{kind}."
        )
    if isinstance(strategy, execution._IPhasedExecution):
        return {
            "kind": kind,
            "phases": [[_stage_values(stage) for stage in p.stages] for p in strategy._phases],
            "liveness": strategy._tensors_liveness.name,
            "separate": strategy._separate_backward_phase,
        }
    assert isinstance(strategy, execution.PipelinedExecution)
    # A stage of several blocks is in the map once for each.
    stages: List[execution.Stage] = []
    for stage in strategy._block_map.values():
        if stage not in stages:
            stages.append(stage)
    return {
        "kind": kind,
        "auto": strategy._auto_stage.name,
        "stages": [_stage_values(stage) for stage in stages],
    }


def _strategy(data: _codec.Values) -> execution._IExecutionStrategy:
    """Rebuild a strategy from plain data."""
    kind = execution.STRATEGIES[data["kind"]]
    if "phases" in data:
        phased: execution._IPhasedExecution = kind(
            *(execution.Phase(*map(_stage, p)) for p in data["phases"])
        )
        phased._tensors_liveness = enums.Liveness[data["liveness"]]
        return phased.useSeparateBackwardPhase(data["separate"])
    stages: List[object] = [_stage(stage) for stage in data["stages"]]
    strategy: execution.PipelinedExecution = kind(*stages or [enums.AutoStage[data["auto"]]])
    return strategy
