"""The arithmetic of a device's updates: the rules of the embedded engine, and what they lack."""

from __future__ import annotations

import math
from typing import Any, Dict, List, Mapping, Optional, Sequence, Type

import torch
from torch import Tensor

from ipufit.optim.rules import (
    AdamRule,
    AdamWRule,
    Group,
    LAMBRule,
    RMSpropRule,
    Rule,
    SGDRule,
    State,
)
from ipufit.poptorch._optimizer_settings import Kind, Settings, Value, Values

__all__ = ["PREFIXES", "counts_steps", "group_of", "initial", "rule_of", "state_dtype"]


class DeviceSGDRule(SGDRule):
    """SGD as PopART has it: like torch's, but for dampening.

    Velocities start at zero, so that the first gradient is dampened too, which torch takes whole;
    and without momentum dampening makes the learning rate smaller, where torch leaves it aside.
    """

    def coefficients(self, group: Group, step: float) -> List[float]:
        lr, momentum, _, decay = super().coefficients(group, step)
        taken = 1 - group["dampening"]
        return [lr if self.tensors else lr * taken, momentum, taken, decay]


class VelocityRule(DeviceSGDRule):
    """The same, with a factor within its velocity that cancels out.

    Only while the factor stays as it is: a velocity that was made with another one is taken for
    more, or less, than it is.
    """

    def coefficients(self, group: Group, step: float) -> List[float]:
        lr, momentum, taken, decay = super().coefficients(group, step)
        scale = group["velocity_scaling"]
        return [lr / scale, momentum, taken, decay * scale, scale]

    def update(
        self, p: Tensor, g: Tensor, state: State, c: Sequence[Tensor], segments: Sequence[slice]
    ) -> None:
        *plain, scale = c
        super().update(p, g * scale, state, plain, segments)


class CombinedRule(DeviceSGDRule):
    """The same with its gradients added to its velocity, so that there is one tensor.

    Between two updates the velocity has the coming update's momentum and weight decay within it,
    worked out with the numbers of the one before: new ones come into full effect an update later.
    """

    def coefficients(self, group: Group, step: float) -> List[float]:
        lr, momentum, taken, decay = super().coefficients(group, step)
        scale = group["velocity_scaling"]
        return [lr / scale, momentum, taken * scale, decay * scale, scale, taken * decay * scale]

    def update(
        self, p: Tensor, g: Tensor, state: State, c: Sequence[Tensor], segments: Sequence[slice]
    ) -> None:
        lr, momentum, taken, decay, scale, coming = c
        velocity = state["momentum_buffer"].add_(g * taken)
        step = velocity
        if self.nesterov:
            scaled = g * scale + p * decay if self.decay else g * scale
            step = scaled + velocity * momentum
        p.sub_(step * lr)
        velocity.mul_(momentum)
        if self.decay:
            velocity.add_(p * coming)


class TensorFlowRMSpropRule(RMSpropRule):
    """RMSprop as TensorFlow has it."""

    tensorflow = True


# The device's names of the state tensors, by torch's.
_MOMENTS = {"exp_avg": "Accl1___", "exp_avg_sq": "Accl2___"}
_RMSPROP = {"square_avg": "Accl1___", "grad_avg": "Accl2___", "momentum_buffer": "Accl3___"}
PREFIXES: Mapping[Kind, Mapping[str, str]] = {
    Kind.SGD_COMBINED: {"momentum_buffer": "Accl___"},
    Kind.SGD_SEPARATE: {"momentum_buffer": "Accl1___"},
    Kind.ADAM: _MOMENTS,
    Kind.ADAMW: _MOMENTS,
    Kind.LAMB: _MOMENTS,
    Kind.LAMB_NO_BIAS: _MOMENTS,
    Kind.RMSPROP: _RMSPROP,
    Kind.RMSPROP_CENTERED: _RMSPROP,
}


def counts_steps(kind: Kind) -> bool:
    """Whether the device counts the updates of every parameter, for the correction of a bias."""
    return kind in (Kind.ADAM, Kind.ADAMW, Kind.LAMB)


def rule_of(settings: Settings, group: int) -> Rule:
    """The rule of a parameter group, in the shape that it keeps while the program lives.

    What is variable takes part in the arithmetic also while it is zero.
    """
    values = settings.groups[group]
    flags = ("momentum", "dampening", "weight_decay")
    numbers = {
        name: 1.0 if name in flags and not value.constant else value.value
        for name, value in values.items()
    }
    return _class(settings, values)(group_of(settings, numbers))


def _class(settings: Settings, values: Values) -> Type[Rule]:
    if settings.kind in (Kind.SGD_COMBINED, Kind.SGD_SEPARATE):
        if not settings.has_velocity(values):
            return DeviceSGDRule
        if settings.kind is Kind.SGD_SEPARATE and values["velocity_scaling"] == Value(1.0, True):
            return DeviceSGDRule
        return CombinedRule if settings.kind is Kind.SGD_COMBINED else VelocityRule
    if settings.kind in (Kind.RMSPROP, Kind.RMSPROP_CENTERED):
        return TensorFlowRMSpropRule if settings.tensorflow else RMSpropRule
    kinds: Dict[Kind, Type[Rule]] = {Kind.ADAM: AdamRule, Kind.ADAMW: AdamWRule}
    return kinds.get(settings.kind, LAMBRule)


def group_of(settings: Settings, numbers: Mapping[str, float]) -> Dict[str, Any]:
    """A parameter group as the rules read it."""
    group: Dict[str, Any] = dict(numbers)
    if "beta1" in numbers:
        group["betas"] = (numbers["beta1"], numbers["beta2"])
    group["bias_correction"] = settings.kind is not Kind.LAMB_NO_BIAS
    group["centered"] = settings.kind is Kind.RMSPROP_CENTERED
    return group


def state_dtype(settings: Settings, name: str, weight: torch.dtype) -> torch.dtype:
    """The dtype of a state tensor.

    Args:
        settings: of the optimizer.
        name: torch's, of the tensor.
        weight: dtype of the weights.
    """
    chosen: Optional[torch.dtype] = settings.first
    if settings.kind is Kind.SGD_COMBINED:
        return weight
    if name == "exp_avg_sq":
        chosen = settings.second
    elif settings.kind in (Kind.RMSPROP, Kind.RMSPROP_CENTERED) and name == "momentum_buffer":
        # The device has no choice of type for it.
        chosen = torch.float32
    half = chosen == torch.float16
    return torch.float16 if half else torch.promote_types(weight, torch.float32)


def initial(settings: Settings, name: str, weight: Tensor, numbers: Mapping[str, float]) -> Tensor:
    """A state tensor before the first update, in the shape of the weight."""
    dtype = state_dtype(settings, name, weight.dtype)
    if settings.tensorflow and name == "square_avg":
        return torch.ones_like(weight, dtype=dtype)
    if settings.kind is Kind.SGD_COMBINED:
        decay = numbers["weight_decay"] * numbers["velocity_scaling"] * (1 - numbers["dampening"])
        return weight.detach() * decay if math.isfinite(decay) and decay else _zeros(weight, dtype)
    return _zeros(weight, dtype)


def _zeros(weight: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.zeros_like(weight, dtype=dtype)
