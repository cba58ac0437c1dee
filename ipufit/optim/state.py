"""The state of torch's optimizers as PopTorch has it on a device, there and back.

A run that a plain torch loop or ipufit has begun goes on in PopTorch, and the other way round, with
SGD, Adam, AdamW, RMSprop and :class:`ipufit.optim.LAMB`. See docs/checkpoints.md.
"""

from __future__ import annotations

import functools
from typing import Any, Callable, Dict, Hashable, Mapping, Protocol, Type, Union, cast

import torch
from torch import Tensor, nn

from ipufit.errors import OptimizerError
from ipufit.optim.optimizers import LAMB

__all__ = ["from_poptorch", "to_poptorch"]

Kind = Type[torch.optim.Optimizer]

# State by torch's names, and the beginnings of the device's names for it.
VELOCITY = {"momentum_buffer": "Accl1___"}
COMBINED_VELOCITY = {"momentum_buffer": "Accl___"}
MOMENTS = {"exp_avg": "Accl1___", "exp_avg_sq": "Accl2___"}
RMSPROP = {"square_avg": "Accl1___", "grad_avg": "Accl2___", "momentum_buffer": "Accl3___"}
STEP = "Step___"
_STATE: Dict[Kind, Dict[str, str]] = {
    torch.optim.SGD: VELOCITY,
    torch.optim.Adam: MOMENTS,
    torch.optim.AdamW: MOMENTS,
    torch.optim.RMSprop: RMSPROP,
    LAMB: MOMENTS,
}
# Under one of these a device may have the velocity of SGD instead.
_OTHER_VELOCITIES = ("Accl2___", COMBINED_VELOCITY["momentum_buffer"])
# The device counts the updates of these.
_COUNTED = (torch.optim.Adam, torch.optim.AdamW, LAMB)


class PoptorchOptimizer(Protocol):
    """One of PopTorch's optimizers, whose state is under "ipu_state"."""

    def state_dict(self) -> Dict[str, Any]:
        """Return its state and its settings."""

    def load_state_dict(self, state: Dict[str, Any]) -> None:
        """Go on from there."""


def device_state(
    optimizer: torch.optim.Optimizer, parameters: Mapping[str, Tensor], zeros: bool
) -> Dict[str, Tensor]:
    """Convert the state of torch's optimizer to a device's.

    Args:
        optimizer: torch's.
        parameters: of the optimizer, by their names in the program.
        zeros: whether the device is told zeros where torch has nothing.
    """
    kind, state = type(optimizer), {}
    for name, parameter in parameters.items():
        parameter_state = optimizer.state.get(parameter, {})
        for torchs, prefix in _STATE[kind].items():
            value = parameter_state.get(torchs)
            if value is None and zeros:
                value = torch.zeros_like(parameter)
            if value is not None:
                state[prefix + name] = value.detach().cpu().clone()
        if kind in _COUNTED and (parameter_state or zeros):
            state[STEP + name] = torch.tensor(float(parameter_state.get("step", 0)))
    return state


def load_device_state(target: PoptorchOptimizer, state: Mapping[str, Tensor]) -> None:
    """Give an optimizer of PopTorch the state of a device; its settings stay as they are."""
    present = target.state_dict()
    # PopTorch would warn of each setting that is left out.
    settings = present.get("ipu_param") or {}
    target.load_state_dict({**present, "ipu_state": state, "ipu_param": settings})


def torch_state(
    kind: Kind, name: str, parameter: Tensor, states: Mapping[str, Tensor], done: float
) -> Dict[str, object]:
    """Convert a device's state of a parameter to torch's; empty where it has none.

    Args:
        kind: of optimizer.
        name: of the parameter, as the program knows it.
        parameter: of torch's optimizer.
        states: the state of the device, by its names.
        done: updates made, for what torch counts and the device does not.
    """
    converted: Dict[str, object] = {}
    others = _OTHER_VELOCITIES if kind is torch.optim.SGD else ()
    for torchs, first in _STATE[kind].items():
        for prefix in (first, *others):
            if prefix + name in states:
                value = states[prefix + name].reshape(parameter.shape)
                converted[torchs] = value.to(parameter.dtype, copy=True)
    if not converted and kind is not torch.optim.RMSprop:
        return {}
    if kind is not torch.optim.SGD:
        if STEP + name in states:
            done = float(states[STEP + name].reshape(-1)[0])
        if done == 0:
            return {}
        converted["step"] = make_step_counter(kind, done, torch.device("cpu"))
    return converted


def to_poptorch(
    optimizer: torch.optim.Optimizer, target: PoptorchOptimizer, module: nn.Module
) -> None:
    """Copy the state of a torch optimizer to a PopTorch optimizer.

    Settings such as the learning rate do not change. A compiled program gets the state with its
    next run.

    Args:
        optimizer: of ``torch.optim``, or ``ipufit.optim.LAMB``, over parameters of the module.
        target: of the same kind, of ``poptorch.optim`` or ``ipufit.poptorch.optim``.
        module: the module that PopTorch trains; its names are the names on the device.

    Raises:
        OptimizerError: a device has no such optimizer, or the two are of different kinds.
    """
    _kind(optimizer, target)
    load_device_state(target, device_state(optimizer, _owned(optimizer, module), zeros=False))


def from_poptorch(
    source: PoptorchOptimizer,
    optimizer: torch.optim.Optimizer,
    module: nn.Module,
    updates: int = 0,
) -> None:
    """Copy the state of a PopTorch optimizer to a torch optimizer.

    Args:
        source: of ``poptorch.optim`` or ``ipufit.poptorch.optim``.
        optimizer: of the same kind, of ``torch.optim``, or ``ipufit.optim.LAMB``, over parameters
            of the module; its settings are its own.
        module: the module that PopTorch has trained.
        updates: number of updates so far, for RMSprop, whose updates torch counts but the device
            does not.

    Raises:
        OptimizerError: a device has no such optimizer, or the two are of different kinds.
    """
    kind = _kind(optimizer, source)
    states = source.state_dict().get("ipu_state") or {}
    for name, parameter in _owned(optimizer, module).items():
        state = torch_state(kind, name, parameter, states, float(updates))
        if state:
            optimizer.state[parameter].update(state)


def _kind(optimizer: torch.optim.Optimizer, other: object) -> Kind:
    kind = type(optimizer)
    if kind not in _STATE:
        supported = ", ".join(each.__name__ for each in _STATE)
        raise OptimizerError(
            f"the state of {supported} can move to a device and back, got {kind.__name__}. Use one "
            "of these."
        )
    if type(other).__name__ != kind.__name__ or not hasattr(other, "state_dict"):
        raise OptimizerError(
            f"the state of {kind.__name__} moves to and from poptorch.optim.{kind.__name__}, got "
            f"{type(other).__name__}. Use the same kind on both sides."
        )
    return kind


def _owned(optimizer: torch.optim.Optimizer, module: nn.Module) -> Dict[str, nn.Parameter]:
    """Parameters of the module that the optimizer has, by name."""
    owned = {id(p) for group in optimizer.param_groups for p in group["params"]}
    parameters = {name: p for name, p in module.named_parameters() if id(p) in owned}
    if len(parameters) != len(owned):
        raise OptimizerError(
            f"the optimizer's {len(owned)} parameters must be those of the module, which has "
            f"{len(parameters)} of them. Pass the module that PopTorch is given to train."
        )
    return parameters


def make_step_counter(
    kind: Type[torch.optim.Optimizer], value: float, device: torch.device
) -> Union[Tensor, float]:
    """Make a step counter of this torch's type: a 0-dim tensor, or a number in old versions."""
    counter = _step_counter(cast(Hashable, kind), torch.get_default_dtype())
    if isinstance(counter, Tensor):
        return counter.new_full((), value, device=device)
    return int(value) if isinstance(counter, int) else value


@functools.lru_cache(maxsize=None)
def _step_counter(kind: Callable[..., torch.optim.Optimizer], default: torch.dtype) -> object:
    # `default` is there for the cache: torch makes its counter of it. Loading a number as state
    # shows what torch turns it into.
    parameter = nn.Parameter(torch.zeros(1))
    optimizer = kind([parameter], lr=0.0)
    optimizer.state[parameter] = {"step": 1}
    optimizer.__setstate__(optimizer.__getstate__())
    return optimizer.state[parameter]["step"]
