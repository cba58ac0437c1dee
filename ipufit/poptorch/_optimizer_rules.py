"""Update rules of a device, and hyper-parameters by the device's names.

The rules are those of the embedded engine, and where PopART's differ, its own. Some of the device's
numbers are products: ``scaledLearningRate0`` is the learning rate by the loss scaling. They can be
read, and numbers that were read can be written back, also to another optimizer's program.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Callable, Dict, List, Mapping, Optional, Sequence, Tuple, Type

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
from ipufit.optim.state import COMBINED_VELOCITY, MOMENTS, RMSPROP, STEP, VELOCITY
from ipufit.poptorch._optimizer_settings import OptimizerKind, OptimizerSettings, Value, Values


class DeviceSGDRule(SGDRule):
    """SGD as PopART computes it: like torch's, except for dampening.

    Velocities start at zero, so that the first gradient is dampened too, which torch takes whole;
    and without momentum dampening makes the learning rate smaller, where torch ignores it.
    """

    def coefficients(self, group: Group, step: float) -> List[float]:
        lr, momentum, _, decay = super().coefficients(group, step)
        gradient_share = 1 - group["dampening"]
        return [lr if self.tensors else lr * gradient_share, momentum, gradient_share, decay]


class _VelocityRule(DeviceSGDRule):
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


class _CombinedRule(DeviceSGDRule):
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


class _TensorFlowRMSpropRule(RMSpropRule):
    """RMSprop as TensorFlow computes it."""

    tensorflow = True


# Beginnings of the device's names of the state tensors, by torch's names.
PREFIXES: Mapping[OptimizerKind, Mapping[str, str]] = {
    OptimizerKind.SGD_COMBINED: COMBINED_VELOCITY,
    OptimizerKind.SGD_SEPARATE: VELOCITY,
    OptimizerKind.ADAM: MOMENTS,
    OptimizerKind.ADAMW: MOMENTS,
    OptimizerKind.LAMB: MOMENTS,
    OptimizerKind.LAMB_NO_BIAS: MOMENTS,
    OptimizerKind.RMSPROP: RMSPROP,
    OptimizerKind.RMSPROP_CENTERED: RMSPROP,
}


def step_name(kind: OptimizerKind, parameter: str) -> Optional[str]:
    """Return the device's name of a parameter's number of updates.

    It is counted for bias correction; None where the device does not correct any.
    """
    is_counted = kind in (OptimizerKind.ADAM, OptimizerKind.ADAMW, OptimizerKind.LAMB)
    return STEP + parameter if is_counted else None


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
    if settings.kind.family == "SGD":
        if not settings.has_velocity(values):
            return DeviceSGDRule
        if settings.kind is OptimizerKind.SGD_COMBINED:
            return _CombinedRule
        is_plain = values["velocity_scaling"] == Value(1.0, True)
        return DeviceSGDRule if is_plain else _VelocityRule
    if settings.kind.family == "RMSPROP":
        return _TensorFlowRMSpropRule if settings.tensorflow else RMSpropRule
    adams = {OptimizerKind.ADAM: AdamRule, OptimizerKind.ADAMW: AdamWRule}
    return adams.get(settings.kind, LAMBRule)


def group_of(settings: OptimizerSettings, numbers: Mapping[str, float]) -> Dict[str, Any]:
    """Return a parameter group in the form that the rules read."""
    group: Dict[str, object] = dict(numbers)
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
    elif settings.kind.family == "RMSPROP" and name == "momentum_buffer":
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
        if decay and math.isfinite(decay):
            return weight.detach() * decay
    return torch.zeros_like(weight, dtype=dtype)


LOSS_SCALING = "lossScaling_FLOAT"

# Hyper-parameters by name, and what they give.
Numbers = Mapping[str, float]


@dataclasses.dataclass(frozen=True)
class Factors:
    """Number of micro-batches in a gradient, on which only the device's names and numbers depend.

    Attributes:
        accumulation: micro-batches that a replica adds up.
        replicas: all of them, in all processes.
        mean: whether they are averaged, not summed.
        post: whether they are divided at the end, not as they come.
    """

    accumulation: int = 1
    replicas: int = 1
    mean: bool = True
    post: bool = True

    @property
    def after(self) -> float:
        """Divisor that the optimizer's own numbers include."""
        return float(self.accumulation * self.replicas) if self.mean and self.post else 1.0

    @property
    def combined(self) -> float:
        """Factor of gradients in the combined variant."""
        return self.velocity / (self.accumulation * self.replicas) if self.mean else self.velocity

    @property
    def velocity(self) -> float:
        """Factor of velocities in the combined variant."""
        return float(self.replicas) if self.accumulation > 1 else 1.0


@dataclasses.dataclass(frozen=True)
class _Scalar:
    """One number of the device.

    Attributes:
        prefix: its name, without the parameter's.
        of: hyper-parameters that it is computed from; a constant if all of them are.
        value: computes it from them.
        back: computes hyper-parameters from it; empty for one that others determine already.
    """

    prefix: str
    of: Tuple[str, ...]
    value: Callable[[Numbers], float]
    back: Callable[[float, Numbers], Dict[str, float]] = lambda x, n: {}


def _plain(prefix: str, name: str) -> _Scalar:
    """Return the number that is a hyper-parameter itself."""
    return _Scalar(prefix, (name,), lambda n: n[name], lambda x, n: {name: x})


def _unscaling(prefix: str, factors: Factors) -> _Scalar:
    """Return the factor of the gradient that undoes the loss scaling and the sum."""
    return _Scalar(
        prefix,
        ("loss_scaling",),
        lambda n: 1 / (n["loss_scaling"] * factors.after),
        lambda x, n: {"unscaling": x * factors.after},
    )


def _without_velocity(factors: Factors) -> List[_Scalar]:
    return [
        _Scalar(
            "scaledLearningRate0",
            ("lr", "loss_scaling", "dampening"),
            lambda n: n["lr"] / (n["loss_scaling"] * factors.after),
            lambda x, n: {"lr": x * n["loss_scaling"] * factors.after},
        ),
        _Scalar(
            "weightDecayScaleFactor0",
            ("weight_decay", "lr", "dampening"),
            lambda n: 1 - n["lr"] * n["weight_decay"],
            lambda x, n: {"weight_decay": (1 - x) / n["lr"]} if n["lr"] else {},
        ),
    ]


def _with_velocity(factors: Factors, combined: bool, nesterov: bool) -> List[_Scalar]:
    variant = "1" if combined else "2"
    scale = factors.velocity if combined else 1.0
    share = factors.combined if combined else 1 / factors.after
    result = [
        _Scalar(
            f"scaledMomentum{variant}",
            ("momentum",),
            lambda n: n["momentum"] / scale,
            lambda x, n: {"momentum": x * scale},
        ),
        _Scalar(
            f"dampeningScaleFactor{variant}",
            ("dampening", "velocity_scaling", "loss_scaling"),
            lambda n: (1 - n["dampening"]) * n["velocity_scaling"] * share / n["loss_scaling"],
            lambda x, n: {"dampening": 1 - x * n["loss_scaling"] / (n["velocity_scaling"] * share)},
        ),
        _Scalar(
            "scaledWeightDecay1",
            ("dampening", "weight_decay", "velocity_scaling"),
            lambda n: (1 - n["dampening"]) * n["weight_decay"] * n["velocity_scaling"],
            lambda x, n: (
                {"weight_decay": x / ((1 - n["dampening"]) * n["velocity_scaling"])}
                if n["dampening"] != 1
                else {}
            ),
        ),
        _Scalar(
            f"scaledLearningRate{variant}",
            ("lr", "velocity_scaling"),
            lambda n: n["lr"] / (n["velocity_scaling"] * scale),
            lambda x, n: {"lr": x * n["velocity_scaling"] * scale},
        ),
    ]
    if not nesterov:
        return result
    # The rest of these are made of what the others give already.
    return [
        *result,
        _Scalar("sgdMomentum", ("momentum",), lambda n: n["momentum"]),
        _Scalar("sgdWeightDecay", ("weight_decay",), lambda n: n["weight_decay"]),
        _Scalar(
            f"nesterovGradScaleFactor{variant}",
            ("velocity_scaling",),
            lambda n: n["velocity_scaling"] * scale,
        ),
        _Scalar(
            f"nesterovDampeningScaleFactor{variant}",
            ("dampening", "velocity_scaling", "loss_scaling"),
            lambda n: 1 / ((1 - n["dampening"]) * n["velocity_scaling"] * share),
        ),
    ]


def _scalars(settings: OptimizerSettings, values: Values, factors: Factors) -> List[_Scalar]:
    """Return the numbers of a parameter with these hyper-parameters, in the order of the device."""
    kind = settings.kind
    decay = [_plain("learningRate", "lr"), _plain("weightDecay", "weight_decay")]
    if kind.family == "SGD":
        if not settings.has_velocity(values):
            return _without_velocity(factors)
        nesterov = bool(values["nesterov"].value and values["momentum"].value > 0)
        return _with_velocity(factors, kind is OptimizerKind.SGD_COMBINED, nesterov)
    prefix, names = "adam", ("beta1", "beta2", "eps")
    if kind.family == "RMSPROP":
        prefix, names = "adaptive", ("alpha", "momentum", "eps")
    plain = [_plain(f"{prefix}{name.capitalize()}", name) for name in names]
    limit = [_plain("maxWeightNorm", "max_weight_norm")] if "max_weight_norm" in values else []
    return [*decay, *plain, *limit, _unscaling(f"{prefix}GradientScaling", factors)]


def _name(scalar: _Scalar, parameter: str) -> str:
    return f"{scalar.prefix}___specific___{parameter}"


def _numbers(settings: OptimizerSettings, values: Values) -> Dict[str, float]:
    scaling = settings.loss_scaling.value
    numbers = {name: value.value for name, value in values.items()}
    return {**numbers, "loss_scaling": scaling, "unscaling": 1 / scaling}


def exported(
    settings: OptimizerSettings, group: int, parameter: str, factors: Factors
) -> Dict[str, float]:
    """Return the numbers that the device has of one parameter's variable hyper-parameters.

    Args:
        settings: of the optimizer.
        group: the parameter's.
        parameter: its name.
        factors: of how many micro-batches a gradient is made.
    """
    values = settings.groups[group]
    numbers = _numbers(settings, values)
    all_values = {**values, "loss_scaling": settings.loss_scaling}
    return {
        _name(scalar, parameter): scalar.value(numbers)
        for scalar in _scalars(settings, values, factors)
        if not all(all_values[name].constant for name in scalar.of)
    }


def imported(
    settings: OptimizerSettings,
    group: int,
    parameter: str,
    factors: Factors,
    other: Mapping[str, Any],
) -> Dict[str, float]:
    """Return the hyper-parameters for which the device has these numbers.

    Args:
        settings: of the optimizer.
        group: the parameter's.
        parameter: its name.
        factors: of how many micro-batches a gradient is made.
        other: numbers that differ from those which the settings give, by name.
    """
    values = settings.groups[group]
    numbers = _numbers(settings, values)
    if not other:
        return numbers
    scalars = {_name(each, parameter): each for each in _scalars(settings, values, factors)}
    if not any(name in other for name in scalars):
        return numbers
    current = {name: each.value(numbers) for name, each in scalars.items()}
    for name, each in scalars.items():
        # One that was not written keeps its number, also where what it is made of has changed.
        numbers.update(each.back(float(other.get(name, current[name])), numbers))
    return numbers
