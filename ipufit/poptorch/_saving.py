"""Write a compiled model to a file, and read it back."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
from typing import Any, Dict, List, Mapping, Optional

import torch
from torch import Tensor, nn

from ipufit.poptorch import optim
from ipufit.poptorch._arguments import Arguments
from ipufit.poptorch._codec import InvalidContent, class_path
from ipufit.poptorch._compiled import Compiled
from ipufit.poptorch._errors import error
from ipufit.poptorch._files import Path, file_to_write, invalid, read_file, write_file
from ipufit.poptorch._module_files import (
    UnknownClass,
    WeightsOnly,
    module_from_values,
    module_to_values,
)
from ipufit.poptorch._optimizer_base import DeviceState
from ipufit.poptorch._optimizer_changes import OPTIMIZERS
from ipufit.poptorch._optimizer_link import OptimizerLink
from ipufit.poptorch._options.saved import from_data, to_data
from ipufit.poptorch._parsers import flattenTensorStructure
from ipufit.poptorch._program_files import program_from_values, program_to_values
from ipufit.poptorch._recorded_program import RecordedProgram
from ipufit.poptorch._replica_grouping import ReplicaGrouping
from ipufit.poptorch.enums import CommGroupType, ConnectionType, VariableRetrievalMode
from ipufit.poptorch.options import Options

__all__ = ["Saved", "read", "write"]


@dataclasses.dataclass
class Saved:
    """Content of a file.

    Attributes:
        recorded: the program.
        arguments: arguments that it was compiled for, without values.
        state: the device's parameters and buffers by name, without values.
        groupings: replica groupings of the parameters that have one.
        options: options of the executor, for an available device.
        wide: whether float64 is preserved.
        model: the user's module; None if it was not exported.
        optimizer: None for inference, or if the model was not exported.
        optimizer_state: state on the device; None in the same cases.
        rng_state: None if it was not saved.
    """

    recorded: RecordedProgram
    arguments: Arguments
    state: Dict[str, Tensor]
    groupings: Dict[str, ReplicaGrouping]
    options: Options
    wide: bool
    model: Optional[nn.Module]
    optimizer: Optional[torch.optim.Optimizer]
    optimizer_state: Optional[DeviceState]
    rng_state: Optional[List[int]]


def write(
    filename: Path,
    version: str,
    program: Compiled,
    options: Options,
    groupings: Mapping[str, ReplicaGrouping],
    model: Optional[nn.Module] = None,
    optimizer: Optional[OptimizerLink] = None,
    rng_state: Optional[List[int]] = None,
) -> None:
    """Write a compiled model.

    Args:
        filename: a folder gets ``model.poptorch`` inside.
        version: of the front end; another one does not read the file.
        program, options, groupings: of the executor.
        model: the user's module, with the weights of the device; None to leave it out, and the
            optimizer with it.
        optimizer: that of the executor.
        rng_state: None to leave it out.

    Raises:
        AssertionError: the folder is a file.
        Error: the model, or the program, has something that no file can hold.
    """
    example = program.device.example()
    arguments = program.arguments
    values: Dict[str, Any] = {
        "version": version,
        "program": program_to_values(program.recorded),
        "arguments": [arguments.args, arguments.names, arguments.kwargs],
        "state": {name: torch.empty_like(t, device="meta") for name, t in example.items()},
        "groupings": {name: tuple(grouping) for name, grouping in groupings.items()},
        "options": to_data(options),
        "wide": program.wide,
        "model": None,
        "optimizer": None,
        "optimizer_state": None,
        "rng_state": rng_state,
    }
    if model is not None:
        values["model"] = module_to_values(model)
        if optimizer is not None:
            values["optimizer"] = optimizer_to_values(optimizer.optimizer)
            values["optimizer_state"] = optimizer.state()
    write_file(file_to_write(filename), values)


def read(filename: Path, version: str) -> Saved:
    """Read a compiled model; nothing in the file is run.

    Raises:
        Error: it is no such file, of another version, or damaged.
    """
    values = read_file(filename)
    try:
        file_version = values.get("version")
        if file_version != version:
            raise InvalidContent(
                f"PopTorch version mismatch: it was created with version {file_version}, and this "
                f"is version {version}"
            )
        return _saved(values)
    except InvalidContent as reason:
        raise invalid(str(filename), str(reason)) from reason
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as reason:
        raise invalid(str(filename), f"it is damaged ({reason!r})") from reason


def _saved(values: Mapping[str, Any]) -> Saved:
    args, names, kwargs = values["arguments"]
    model = None
    if values["model"] is not None:
        model = _model(values["model"], Arguments(args, names, kwargs))
    rng = values["rng_state"]
    groupings = {
        name: ReplicaGrouping(CommGroupType(kind), int(shards), VariableRetrievalMode(mode))
        for name, (kind, shards, mode) in values["groupings"].items()
    }
    return Saved(
        program_from_values(values["program"]),
        Arguments(args, names, kwargs),
        dict(values["state"]),
        groupings,
        _options(values["options"]),
        bool(values["wide"]),
        model,
        optimizer_from_values(values["optimizer"]),
        values["optimizer_state"],
        None if rng is None else [int(rng[0])],
    )


def _options(data: Dict[str, Any]) -> Options:
    """Read options for an available device, even if the file was compiled without one."""
    options = from_data(data)
    options.deleteIfExists("ipu_version")
    if options.connection_type == ConnectionType.Never:
        options.connectionType(ConnectionType.Always)
    return options


def _model(values: object, arguments: Arguments) -> nn.Module:
    try:
        return module_from_values(values)
    except UnknownClass as reason:
        model = _weights_only(str(reason), values)
    # Calls are bound as before, with the same constants in the place of what is left out.
    parameters = [
        inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=_default(value))
        for name, value in zip(arguments.names, arguments.args)
        if name.isidentifier()
    ]
    parameters += [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=_default(value))
        for name, value in arguments.kwargs.items()
    ]
    if len(parameters) == len(arguments.args) + len(arguments.kwargs):
        forward: Any = functools.partial(type(model).forward, model)
        with contextlib.suppress(ValueError):  # a default before one that has none
            forward.__signature__ = inspect.Signature(parameters)
            model.forward = forward
    return model


def _default(value: object) -> Any:
    return inspect.Parameter.empty if flattenTensorStructure(value) else value


def _weights_only(path: str, values: Any) -> nn.Module:
    """Rebuild the weights in modules without code, under the same names."""
    modules = [WeightsOnly(path) for _ in values]
    for module, entry in zip(modules, values):
        module.training = bool(entry["training"])
        for name, parameter in entry["parameters"]:
            module.register_parameter(name, parameter)
        for name, buffer in entry["buffers"]:
            module.register_buffer(name, buffer, persistent=name not in entry["not_saved"])
        for name, number in entry["modules"]:
            module.add_module(name, None if number is None else modules[number])
    return modules[0]


# A file can name these and no other.
_CLASSES: Dict[str, Any] = {class_path(kind): kind for kind in OPTIMIZERS}
# What an optimizer of torch may have besides, and those of the front end have.
_SETTINGS = sorted(
    {
        name
        for kind in (optim.SGD, optim.Adam, optim.AdamW, optim.RMSprop, optim.LAMB)
        for name in kind._child_only
    }
    | {"max_weight_norm"}
)


def optimizer_to_values(optimizer: torch.optim.Optimizer) -> Dict[str, Any]:
    """Convert an optimizer to values: class, settings, and the model's own parameters.

    The state on the device is not included.

    Raises:
        Error: an optimizer of a class of the user's.
    """
    kind = class_path(type(optimizer))
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


def optimizer_from_values(values: Optional[Mapping[str, Any]]) -> Optional[torch.optim.Optimizer]:
    """Rebuild the optimizer of ``optimizer_to_values``; None for None.

    Raises:
        InvalidContent: no optimizer is written like this.
    """
    if values is None:
        return None
    try:
        kind = _CLASSES.get(values["class"])
        if kind is None:
            raise InvalidContent(f"{values['class']!r} is not an optimizer that it can hold")
        groups = [dict(group) for group in values["groups"]]
        optimizer: torch.optim.Optimizer = kind(groups, lr=groups[0]["lr"])
        optimizer.defaults.update(values["defaults"])
        for name, value in values["settings"].items():
            if name not in _SETTINGS:
                raise InvalidContent(f"{name!r} is not a setting of an optimizer")
            setattr(optimizer, name, value)
        if isinstance(optimizer, optim.Optimizer):
            optimizer.variable_attrs._variable_attributes = [str(n) for n in values["variable"]]
        for parameter, state in values["state"]:
            if not isinstance(parameter, nn.Parameter):
                raise InvalidContent("the state of an optimizer must be that of a parameter")
            optimizer.state[parameter] = dict(state)
        return optimizer
    except InvalidContent:
        raise
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as reason:
        raise InvalidContent(f"it holds no sound optimizer: {reason!r}") from reason
