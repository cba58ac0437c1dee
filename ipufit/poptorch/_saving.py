"""Write a compiled model to a file, read it back, and check that it fits who loads it."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
from typing import Any, Dict, List, Mapping, Optional, Sequence, Tuple

import torch
from torch import Tensor, nn

from ipufit.poptorch import _object_files, _program_files
from ipufit.poptorch._arguments import Arguments
from ipufit.poptorch._codec import InvalidContent, Values
from ipufit.poptorch._compiled import Compiled
from ipufit.poptorch._device import ReplicaGrouping
from ipufit.poptorch._logging import error
from ipufit.poptorch._loss_scale import ScalingSettings
from ipufit.poptorch._optimizer_link import OptimizerLink
from ipufit.poptorch._parsers import flattenTensorStructure
from ipufit.poptorch._recording import RecordedProgram
from ipufit.poptorch.enums import CommGroupType, ConnectionType, VariableRetrievalMode
from ipufit.poptorch.optim import DeviceState
from ipufit.poptorch.options import Options


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
    filename: _program_files.Path,
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
    values: Dict[str, object] = {
        "version": version,
        "program": _program_files.program_to_values(program.recorded),
        "arguments": [arguments.args, arguments.names, arguments.kwargs],
        "state": {name: torch.empty_like(t, device="meta") for name, t in example.items()},
        "groupings": {name: tuple(grouping) for name, grouping in groupings.items()},
        "options": _object_files.options_to_values(options),
        "wide": program.wide,
        "model": None,
        "optimizer": None,
        "optimizer_state": None,
        "rng_state": rng_state,
    }
    if model is not None:
        values["model"] = _object_files.module_to_values(model)
        if optimizer is not None:
            values["optimizer"] = _object_files.optimizer_to_values(optimizer.optimizer)
            values["optimizer_state"] = optimizer.state()
    _program_files.write_file(_program_files.file_to_write(filename), values)


def read(filename: _program_files.Path, version: str) -> Saved:
    """Read a compiled model; nothing in the file is run.

    Raises:
        Error: it is no such file, of another version, or damaged.
    """
    values = _program_files.read_file(filename)
    try:
        file_version = values.get("version")
        if file_version != version:
            raise InvalidContent(
                f"PopTorch version mismatch: it was created with version {file_version}, and this "
                f"is version {version}"
            )
        return _saved(values)
    except InvalidContent as reason:
        raise _program_files.invalid(str(filename), str(reason)) from reason
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as reason:
        raise _program_files.invalid(str(filename), f"it is damaged ({reason!r})") from reason


def _saved(values: Values) -> Saved:
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
        _program_files.program_from_values(values["program"]),
        Arguments(args, names, kwargs),
        dict(values["state"]),
        groupings,
        _options(values["options"]),
        bool(values["wide"]),
        model,
        _object_files.optimizer_from_values(values["optimizer"]),
        values["optimizer_state"],
        None if rng is None else [int(rng[0])],
    )


def _options(values: Values) -> Options:
    """Read options for an available device, even if the file was compiled without one."""
    options = _object_files.options_from_values(values)
    options.deleteIfExists("ipu_version")
    if options.connection_type == ConnectionType.Never:
        options.connectionType(ConnectionType.Always)
    return options


def _model(values: List[Values], arguments: Arguments) -> nn.Module:
    try:
        return _object_files.module_from_values(values)
    except _object_files.UnknownClass as reason:
        model = _object_files.weights_from_values(str(reason), values)
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


def _default(value: object) -> object:
    return inspect.Parameter.empty if flattenTensorStructure(value) else value


# Of the options, those that a program is compiled for, by the setter.
_COMPILED_FOR = {
    "broadcast_buffers": "broadcastBuffers",
    "device_iterations": "deviceIterations",
    "input_cgt": "inputReplicaGrouping",
    "input_group_size": "inputReplicaGrouping",
    "output_mode": "outputMode",
    "output_return_period": "outputMode",
    "replication_factor": "replicationFactor",
}


_COMPILED_FOR_IN_TRAINING = {
    "accumulation_and_replication_reduction_type": "accumulationAndReplicationReductionType",
    "gradient_accumulation": "gradientAccumulation",
}


def check_fits(
    saved: Saved,
    filename: _program_files.Path,
    training: bool,
    options: Options,
    groupings: Mapping[str, ReplicaGrouping],
) -> None:
    """Refuse a program that was compiled for another kind of model, or other options.

    Args:
        saved: content of the file.
        filename: path of the file, for messages.
        training, options, groupings: those of the executor.

    Raises:
        Error: what differs, and how.
    """
    if saved.recorded.trace.training != training:
        theirs, ours = ("inference", "training") if training else ("training", "inference")
        raise error(
            f"{filename} holds a program for {theirs}, and this model is for {ours}. Wrap the "
            f"module with poptorch.{theirs}Model."
        )
    differing = _differing(saved.options, options, training)
    if differing:
        raise error(
            f"{filename} was compiled with other options than these of the model: "
            f"{'; '.join(differing)}. Set them alike, or compile the model anew."
        )
    if dict(saved.groupings) != dict(groupings):
        raise error(
            f"{filename} was compiled with replicaGrouping of "
            f"{', '.join(sorted(saved.groupings)) or 'no parameter'}, and the model has it for "
            f"{', '.join(sorted(groupings)) or 'none'}. Set it alike before loadExecutable()."
        )


def _differing(saved: Options, current: Options, training: bool) -> List[str]:
    texts = []
    groups: List[Tuple[object, object, Mapping[str, str]]] = [(saved, current, _COMPILED_FOR)]
    if training:
        groups.append((saved.Training, current.Training, _COMPILED_FOR_IN_TRAINING))
    for theirs, ours, names in groups:
        for name, setter in names.items():
            left, right = getattr(theirs, name), getattr(ours, name)
            if left != right:
                texts.append(f"{setter} was {left!r}, and is {right!r}")
    if training:
        scalings = [ScalingSettings.of(options._Popart.options) for options in (saved, current)]
        if scalings[0] != scalings[1]:
            texts.append(f"automatic loss scaling was {scalings[0]}, and is {scalings[1]}")
    return texts


def check_state(
    saved: Saved,
    filename: _program_files.Path,
    state: Mapping[str, Tensor],
    trained: Sequence[Sequence[str]],
) -> None:
    """Refuse a program that was compiled for other weights.

    Args:
        saved: content of the file.
        filename: path of the file, for messages.
        state: the device's parameters and buffers by name.
        trained: names of the parameters of the executor's optimizer.

    Raises:
        Error: what differs, and how.
    """

    def shown(tensors: Mapping[str, Tensor]) -> Dict[str, str]:
        return {
            name: f"{str(t.dtype).partition('.')[2]}{list(t.shape)}" for name, t in tensors.items()
        }

    expected, got = shown(saved.state), shown(state)
    # The program takes them in this order.
    if list(expected.items()) != list(got.items()):
        texts = [
            f"{name}: {expected.get(name, 'none')}, here {got.get(name, 'none')}"
            for name in sorted({*expected, *got})
            if expected.get(name) != got.get(name)
        ]
        raise error(
            f"{filename} was compiled for a model with other parameters and buffers: "
            f"{'; '.join(texts) or 'their order'}. Build the model as it was when it was saved."
        )
    missing = sorted(
        set(saved.recorded.with_gradient) - {name for group in trained for name in group}
    )
    if missing:
        raise error(
            f"{filename} trains {', '.join(missing)}, which the optimizer has not, or which has "
            "requires_grad=False. Build the optimizer as it was when the model was saved."
        )
