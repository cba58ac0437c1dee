"""Update rules of a device: those of the embedded engine, and where PopART's differ."""

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
    OptimizerRule,
    RMSpropRule,
    SGDRule,
    State,
)
from ipufit.poptorch._optimizer_settings import OptimizerKind, OptimizerSettings, Value, Values

__all__ = ["PREFIXES", "counts_steps", "group_of", "initial", "rule_of", "state_dtype"]


class DeviceSGDRule(SGDRule):
    """SGD as PopART computes it: like torch's, except for dampening.

    Velocities start at zero, so that the first gradient is dampened too, which torch takes whole;
    and without momentum dampening makes the learning rate smaller, where torch ignores it.
    """

    def coefficients(self, group: Group, step: float) -> List[float]:
        lr, momentum, _, decay = super().coefficients(group, step)
        gradient_share = 1 - group["dampening"]
        return [lr if self.tensors else lr * gradient_share, momentum, gradient_share, decay]


class VelocityRule(DeviceSGDRule):
    """SGD whose velocity has a constant factor, which cancels out in the update.

    The factor must not change: a velocity that was accumulated with another factor is
    misinterpreted.
    """

    def coefficients(self, group: Group, step: float) -> List[float]:
        lr, momentum, gradient_share, decay = super().coefficients(group, step)
        scale = group["velocity_scaling"]
        return [lr / scale, momentum, gradient_share, decay * scale, scale]

    def update(
        self, p: Tensor, g: Tensor, state: State, c: Sequence[Tensor], segments: Sequence[slice]
    ) -> None:
        *plain, scale = c
        super().update(p, g * scale, state, plain, segments)


class CombinedRule(DeviceSGDRule):
    """SGD that accumulates gradients in its velocity, so that there is one state tensor.

    Between two updates the velocity already contains the momentum and weight decay of the coming
    one, computed with the old hyper-parameters: new ones come into full effect an update later.
    """

    def coefficients(self, group: Group, step: float) -> List[float]:
        lr, momentum, gradient_share, decay = super().coefficients(group, step)
        scale = group["velocity_scaling"]
        return [
            lr / scale,
            momentum,
            gradient_share * scale,
            decay * scale,
            scale,
            gradient_share * decay * scale,
        ]

    def update(
        self, p: Tensor, g: Tensor, state: State, c: Sequence[Tensor], segments: Sequence[slice]
    ) -> None:
        lr, momentum, gradient_share, decay, scale, coming = c
        velocity = state["momentum_buffer"].add_(g * gradient_share)
        step = velocity
        if self.nesterov:
            scaled = g * scale + p * decay if self.decay else g * scale
            step = scaled + velocity * momentum
        p.sub_(step * lr)
        velocity.mul_(momentum)
        if self.decay:
            velocity.add_(p * coming)


class TensorFlowRMSpropRule(RMSpropRule):
    """RMSprop as TensorFlow computes it."""

    tensorflow = True


# The device's names of the state tensors, by torch's.
_MOMENTS = {"exp_avg": "Accl1___", "exp_avg_sq": "Accl2___"}
_RMSPROP = {"square_avg": "Accl1___", "grad_avg": "Accl2___", "momentum_buffer": "Accl3___"}
PREFIXES: Mapping[OptimizerKind, Mapping[str, str]] = {
    OptimizerKind.SGD_COMBINED: {"momentum_buffer": "Accl___"},
    OptimizerKind.SGD_SEPARATE: {"momentum_buffer": "Accl1___"},
    OptimizerKind.ADAM: _MOMENTS,
    OptimizerKind.ADAMW: _MOMENTS,
    OptimizerKind.LAMB: _MOMENTS,
    OptimizerKind.LAMB_NO_BIAS: _MOMENTS,
    OptimizerKind.RMSPROP: _RMSPROP,
    OptimizerKind.RMSPROP_CENTERED: _RMSPROP,
}


def counts_steps(kind: OptimizerKind) -> bool:
    """Return True if the device counts the updates of every parameter, for bias correction."""
    return kind in (OptimizerKind.ADAM, OptimizerKind.ADAMW, OptimizerKind.LAMB)


def rule_of(settings: OptimizerSettings, group: int) -> OptimizerRule:
    """Return the update rule of a parameter group, which is fixed for the compiled program.

    Variable hyper-parameters take part in the arithmetic also while they are zero.
    """
    values = settings.groups[group]
    flags = ("momentum", "dampening", "weight_decay")
    numbers = {
        name: 1.0 if name in flags and not value.constant else value.value
        for name, value in values.items()
    }
    return _class(settings, values)(group_of(settings, numbers))


def _class(settings: OptimizerSettings, values: Values) -> Type[OptimizerRule]:
    if settings.kind in (OptimizerKind.SGD_COMBINED, OptimizerKind.SGD_SEPARATE):
        if not settings.has_velocity(values):
            return DeviceSGDRule
        if settings.kind is OptimizerKind.SGD_SEPARATE and values["velocity_scaling"] == Value(
            1.0, True
        ):
            return DeviceSGDRule
        return CombinedRule if settings.kind is OptimizerKind.SGD_COMBINED else VelocityRule
    if settings.kind in (OptimizerKind.RMSPROP, OptimizerKind.RMSPROP_CENTERED):
        return TensorFlowRMSpropRule if settings.tensorflow else RMSpropRule
    kinds: Dict[OptimizerKind, Type[OptimizerRule]] = {
        OptimizerKind.ADAM: AdamRule,
        OptimizerKind.ADAMW: AdamWRule,
    }
    return kinds.get(settings.kind, LAMBRule)


def group_of(settings: OptimizerSettings, numbers: Mapping[str, float]) -> Dict[str, Any]:
    """Return a parameter group in the form that the rules read."""
    group: Dict[str, Any] = dict(numbers)
    if "beta1" in numbers:
        group["betas"] = (numbers["beta1"], numbers["beta2"])
    group["bias_correction"] = settings.kind is not OptimizerKind.LAMB_NO_BIAS
    group["centered"] = settings.kind is OptimizerKind.RMSPROP_CENTERED
    return group


def state_dtype(settings: OptimizerSettings, name: str, weight: torch.dtype) -> torch.dtype:
    """Return the dtype of a state tensor.

    Args:
        settings: of the optimizer.
        name: torch's, of the tensor.
        weight: dtype of the weights.
    """
    chosen: Optional[torch.dtype] = settings.first
    if settings.kind is OptimizerKind.SGD_COMBINED:
        return weight
    if name == "exp_avg_sq":
        chosen = settings.second
    elif (
        settings.kind in (OptimizerKind.RMSPROP, OptimizerKind.RMSPROP_CENTERED)
        and name == "momentum_buffer"
    ):
        # The device has no choice of type for it.
        chosen = torch.float32
    half = chosen == torch.float16
    return torch.float16 if half else torch.promote_types(weight, torch.float32)


def initial(
    settings: OptimizerSettings, name: str, weight: Tensor, numbers: Mapping[str, float]
) -> Tensor:
    """Return a state tensor before the first update, in the shape of the weight."""
    dtype = state_dtype(settings, name, weight.dtype)
    if settings.tensorflow and name == "square_avg":
        return torch.ones_like(weight, dtype=dtype)
    if settings.kind is OptimizerKind.SGD_COMBINED:
        decay = numbers["weight_decay"] * numbers["velocity_scaling"] * (1 - numbers["dampening"])
        return weight.detach() * decay if math.isfinite(decay) and decay else _zeros(weight, dtype)
    return _zeros(weight, dtype)


def _zeros(weight: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.zeros_like(weight, dtype=dtype)
