"""Settings of an optimizer in the form that a device gets."""

from __future__ import annotations

import dataclasses
import enum
import math
from typing import Iterator, List, Mapping, NamedTuple, Tuple

import torch

from ipufit.poptorch._errors import error

__all__ = ["OptimizerKind", "OptimizerSettings", "Value", "Values"]


class OptimizerKind(enum.Enum):
    """Update rules of a device; the value is the rule's name in the log."""

    SGD_COMBINED = "SGD1"
    SGD_SEPARATE = "SGD2"
    ADAM = "ADAM"
    ADAMW = "ADAMW"
    RMSPROP = "RMSPROP"
    RMSPROP_CENTERED = "RMSPROP_CENTERED"
    LAMB = "LAMB"
    LAMB_NO_BIAS = "LAMB_NO_BIAS"

    @property
    def family(self) -> str:
        """The name without the variant."""
        return self.value.partition("_")[0].rstrip("12")


class Value(NamedTuple):
    """A hyper-parameter.

    Attributes:
        value: the number.
        constant: whether it is part of the compiled program.
    """

    value: float
    constant: bool

    def __str__(self) -> str:
        return f"{self.value:g}{' (const)' if self.constant else ''}"


Values = Mapping[str, Value]


@dataclasses.dataclass(frozen=True)
class OptimizerSettings:
    """All settings of an optimizer that a device gets; equal ones need not be sent again.

    Attributes:
        kind: what is computed.
        defaults: hyper-parameters of a group that says nothing, by their names in torch, with
            ``beta1`` and ``beta2`` for ``betas``.
        groups: those of each parameter group.
        loss_scaling: factor on the loss.
        accum_type: dtype in which gradients are accumulated.
        first: dtype of the velocity, or of the first average.
        second: dtype of the second average.
        tensorflow: whether RMSprop is TensorFlow's.
        max_grad_norm: bound on the norm of all gradients together; infinite for none.
    """

    kind: OptimizerKind
    defaults: Values
    groups: Tuple[Values, ...]
    loss_scaling: Value
    accum_type: torch.dtype
    first: torch.dtype
    second: torch.dtype
    tensorflow: bool
    max_grad_norm: float

    def has_velocity(self, values: Values) -> bool:
        """Return True if the program has a velocity for a group of these values."""
        momentum = values.get("momentum")
        return momentum is not None and (not momentum.constant or momentum.value != 0)

    def accumulator(self, weight: torch.dtype) -> torch.dtype:
        """Return the dtype in which the gradients of a weight of this dtype are added up.

        The combined variant adds them to its velocity, which has the dtype of the weights.
        """
        if self.kind is OptimizerKind.SGD_COMBINED and self.has_velocity(self.defaults):
            return weight
        half = self.accum_type == torch.float16
        return torch.float16 if half else torch.promote_types(weight, torch.float32)

    def check(self) -> None:
        """Check the values as a device does before it accepts them.

        Raises:
            Error: a number that it can't compute with.
        """
        if math.isnan(self.max_grad_norm):
            raise error(
                "Maximum norm of gradients cannot be NaN. Pass max_grad_norm=float('inf') for none."
            )
        if not abs(self.loss_scaling.value) > 0:
            raise error(f"Loss scaling cannot be {self.loss_scaling.value:g}. Pass 1.0 for none.")
        for place, values in [("the defaults", self.defaults), *_numbered(self.groups)]:
            for name, value in values.items():
                positive = name in ("eps", "velocity_scaling")
                if value.value > 0 or (value.value == 0 and not positive):
                    continue
                wanted = "more than zero" if positive else "zero or more"
                raise error(
                    f"The device needs {name} to be {wanted}, got {value.value:g} in "
                    f"{place} of {self.kind.family}. Pass another one."
                )
            if values["lr"].constant and values["lr"].value == 0:
                raise error(
                    f"A learning rate that is a constant zero trains nothing, got one in "
                    f'{place} of {self.kind.family}. Mark it with markAsVariable("lr").'
                )

    def lines(self) -> Iterator[str]:
        """Yield the lines of the log for the settings: first the defaults, then every group."""
        types = {
            "accumType": self.accum_type,
            "firstOrderMomentumAccumType": self.first,
            "secondOrderMomentumAccumType": self.second,
        }
        tail = [f"{name}={str(dtype).partition('.')[2]}" for name, dtype in types.items()]
        tail += [f"useTfVariant={self.tensorflow}", f"maxGradNorm={self.max_grad_norm:g}"]
        for place, values in [("graph", self.defaults), *_numbered(self.groups)]:
            named = {_device_name(name, place == "graph"): v for name, v in values.items()}
            if place == "graph":
                named["lossScaling"] = self.loss_scaling
            shown = [f"{name}={value}" for name, value in named.items()]
            yield (
                f"Updating {place} optimizer with {self.kind.family}, {', '.join([*shown, *tail])}"
            )


def _numbered(groups: Tuple[Values, ...]) -> List[Tuple[str, Values]]:
    return [(f"group {index}", values) for index, values in enumerate(groups)]


def _device_name(name: str, default: bool) -> str:
    """Return the name of a hyper-parameter on the device."""
    first, *rest = {"lr": "learning_rate"}.get(name, name).split("_")
    camel = first + "".join(word.capitalize() for word in rest)
    return f"default{camel[0].upper()}{camel[1:]}" if default and name != "nesterov" else camel
