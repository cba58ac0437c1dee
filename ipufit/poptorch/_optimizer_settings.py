"""Settings of an optimizer in the form that a device gets, read from the user's optimizer."""

from __future__ import annotations

import dataclasses
import enum
import math
import numbers
from typing import Any, Dict, Iterator, List, Mapping, NamedTuple, Optional, Tuple, Type

import torch

from ipufit.poptorch import optim
from ipufit.poptorch._logging import Error, error


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


# A constant if it has this value, in an optimizer of torch.optim, which has no marks.
_UNLESS = {
    "momentum": 0.0,
    "dampening": 0.0,
    "weight_decay": 0.0,
    "eps": 1e-8,
    "velocity_scaling": 1.0,
    "max_weight_norm": 65500.0,
    "loss_scaling": 1.0,
}
_ALWAYS = ("alpha", "betas", "nesterov")

# Part of the kind, or refused, but no number of a group.
_NO_NUMBERS = ("amsgrad", "centered")

_NAMES = (
    "torch.optim: SGD, Adam, AdamW, RMSprop; of poptorch.optim: SGD, Adam, AdamW, RMSprop, LAMB"
)


# AdamW before Adam, from which it is derived in new versions of torch.
_FRONT_END: Dict[type, Type[optim.Optimizer]] = {
    torch.optim.SGD: optim.SGD,
    torch.optim.AdamW: optim.AdamW,
    torch.optim.Adam: optim.Adam,
    torch.optim.RMSprop: optim.RMSprop,
    optim.LAMB: optim.LAMB,
}
# Optimizers that a device runs, of torch and of the front end; subclasses are others.
OPTIMIZERS = frozenset((*_FRONT_END, *_FRONT_END.values()))


def class_of(optimizer: object) -> Optional[Type[optim.Optimizer]]:
    """Return the front end's class for an optimizer; None for one that is not supported."""
    return next(
        (ours for theirs, ours in _FRONT_END.items() if isinstance(optimizer, theirs)), None
    )


def kind_of(optimizer: torch.optim.Optimizer) -> OptimizerKind:
    """Return the kind of update that the device computes for this optimizer.

    Raises:
        AssertionError: nothing that it knows, or ``centered`` in some groups only.
    """
    front_end_class = class_of(optimizer)
    if front_end_class is None:
        raise AssertionError(
            f"Unsupported optimizer type {type(optimizer).__name__}. The device knows those of "
            f"{_NAMES}."
        )
    if front_end_class is optim.SGD:
        combined = getattr(optimizer, "use_combined_accum", False)
        return OptimizerKind.SGD_COMBINED if combined else OptimizerKind.SGD_SEPARATE
    if front_end_class is optim.RMSprop:
        centered = [bool(group["centered"]) for group in optimizer.param_groups]
        if any(each != centered[0] for each in centered):
            raise AssertionError(
                "All parameter groups must have the same value for the 'centered' attribute, got "
                f"{centered}. Use one for all."
            )
        return OptimizerKind.RMSPROP_CENTERED if centered[0] else OptimizerKind.RMSPROP
    if front_end_class is optim.LAMB:
        corrected = getattr(optimizer, "bias_correction", True)
        return OptimizerKind.LAMB if corrected else OptimizerKind.LAMB_NO_BIAS
    return OptimizerKind.ADAMW if front_end_class is optim.AdamW else OptimizerKind.ADAM


class _Reader:
    """Reads hyper-parameters from one optimizer."""

    def __init__(
        self, optimizer: torch.optim.Optimizer, kind: OptimizerKind, automatic: bool
    ) -> None:
        self._optimizer = optimizer
        self._kind = kind
        self._marks: Optional[optim.VariableAttributes] = getattr(optimizer, "variable_attrs", None)
        if automatic and self._marks is not None:
            self._marks.markAsVariable("loss_scaling")
        self._automatic = automatic

    def attribute(self, name: str, default: object) -> Any:
        """Return a setting of the optimizer that belongs to no group."""
        value = getattr(self._optimizer, name, default)
        if name.endswith("accum_type") and value not in (torch.float16, torch.float32):
            raise ValueError(
                f"{name} must be set to either torch.float16 or torch.float32, got {value!r}."
            )
        return value

    def scaling(self) -> Value:
        """Return the loss scaling."""
        value = self.attribute("loss_scaling", 1.0)
        fixed = self._fixed("loss_scaling", value) and not self._automatic
        return Value(_number("loss_scaling", value), fixed)

    def values(self, names: List[str], group: Mapping[str, object], place: str) -> Dict[str, Value]:
        """Return the hyper-parameters of a group by name."""
        result = {}
        for name in names:
            value = group.get(name, 1.0 if name == "velocity_scaling" else None)
            if value is None:
                raise AssertionError(
                    f"Mandatory attribute {name} not found in {place} of "
                    f"{type(self._optimizer).__name__}. Set it there."
                )
            if name == "amsgrad" and value:
                raise ValueError(
                    "Only non-amsgrad Adam/AdamW optimizers are supported, got amsgrad=True in "
                    f"{place}. Leave it out."
                )
            if name in _NO_NUMBERS:
                continue
            constant = self._fixed(name, value)
            if name == "betas":
                for key, beta in zip(("beta1", "beta2"), _pair(name, value)):
                    result[key] = Value(beta, constant)
            else:
                result[name] = Value(_number(name, value), constant)
        return result

    def _fixed(self, name: str, value: object) -> bool:
        if self._marks is not None:
            return self._marks.isConstant(name)
        if name == "weight_decay" and self._kind is OptimizerKind.ADAMW:
            return value == 1e-2
        return name in _ALWAYS or (name in _UNLESS and value == _UNLESS[name])


def _number(name: str, value: object) -> float:
    if not isinstance(value, numbers.Real):
        raise AssertionError(
            f"Expected a number for {name} but got {value!r} instead. Pass a Python number."
        )
    return float(value)


def _pair(name: str, value: object) -> Tuple[float, float]:
    if not isinstance(value, tuple) or len(value) != 2:
        raise AssertionError(
            f"Expected a pair for {name} but got {value!r} instead. Pass a tuple of two numbers."
        )
    return _number(f"{name}[0]", value[0]), _number(f"{name}[1]", value[1])


def settings_of(
    optimizer: torch.optim.Optimizer, automatic_loss_scaling: bool = False
) -> OptimizerSettings:
    """Return the settings that the device gets.

    Args:
        optimizer: of torch, or of the front end.
        automatic_loss_scaling: the loss scaling changes on the device: it is variable then, and
            marked so.

    Raises:
        AssertionError: an optimizer that is not supported, a missing hyper-parameter, one that is
            not a number, or ``centered`` in some groups only.
        ValueError: ``amsgrad``, or another dtype than float16 and float32.
    """
    kind = kind_of(optimizer)
    front_end_class = class_of(optimizer)
    assert front_end_class is not None
    read = _Reader(optimizer, kind, automatic_loss_scaling)
    names = front_end_class._group_vars
    groups = [("the defaults", optimizer.defaults)]
    groups += [(f"group {i}", group) for i, group in enumerate(optimizer.param_groups)]
    values_by_group = [read.values(names, group, place) for place, group in groups]
    scaling = read.scaling()
    if kind is OptimizerKind.SGD_SEPARATE:
        for values in values_by_group:
            values["velocity_scaling"] = scaling
    average = "velocity" if front_end_class is optim.SGD else "first_order_momentum"
    is_clipped = "max_grad_norm" in front_end_class._child_only
    norm = read.attribute("max_grad_norm", math.inf) if is_clipped else None
    return OptimizerSettings(
        kind=kind,
        defaults=values_by_group[0],
        groups=tuple(values_by_group[1:]),
        loss_scaling=scaling,
        accum_type=read.attribute("accum_type", torch.float32),
        first=read.attribute(f"{average}_accum_type", torch.float32),
        second=read.attribute("second_order_momentum_accum_type", torch.float32),
        tensorflow=front_end_class is optim.RMSprop
        and bool(read.attribute("use_tf_variant", False)),
        max_grad_norm=math.inf if norm is None else _number("max_grad_norm", norm),
    )


def check_replacement(old: OptimizerSettings, new: OptimizerSettings) -> None:
    """Check that a compiled program can continue with other settings.

    Raises:
        Error: it can't; says what changed.
    """
    pair = {OptimizerKind.SGD_COMBINED, OptimizerKind.SGD_SEPARATE}
    velocity = old.has_velocity(old.defaults), new.has_velocity(new.defaults)
    if old.kind is not new.kind and not ({old.kind, new.kind} == pair and not any(velocity)):
        raise _refused(f"its type from {old.kind.value} to {new.kind.value}")
    if len(old.groups) != len(new.groups):
        raise _refused(f"the number of groups from {len(old.groups)} to {len(new.groups)}")
    for name in ("accum_type", "first", "second", "tensorflow", "max_grad_norm"):
        before, after = getattr(old, name), getattr(new, name)
        if before != after:
            raise _refused(f"{_TITLES.get(name, name)} from {before} to {after}")
    _compare({"loss_scaling": old.loss_scaling}, {"loss_scaling": new.loss_scaling}, "")
    _compare(old.defaults, new.defaults, " in the defaults")
    for index, (before, after) in enumerate(zip(old.groups, new.groups)):
        _compare(before, after, f" in group {index}")


_TITLES = {
    "first": "the type of the first momentum",
    "second": "the type of the second momentum",
    "tensorflow": "use_tf_variant",
}


def _compare(old: Values, new: Values, place: str) -> None:
    for name, before in old.items():
        after = new[name]
        title = "betas" if name.startswith("beta") else name
        if before.constant != after.constant:
            was, now = (("a constant", "variable"), ("variable", "a constant"))[after.constant]
            raise error(
                f"The optimizer can't change {title}{place} from {was} to {now} once the model is "
                f"compiled. {_mark(title)}"
            )
        if before.constant and before.value != after.value:
            raise error(
                f"The optimizer can't change {title}{place} from {before.value:g} to "
                f"{after.value:g} once the model is compiled: it is a constant of the program. "
                f"{_mark(title)}"
            )


def _mark(title: str) -> str:
    return (
        f'Mark it from the start: optimizer.variable_attrs.markAsVariable("{title}"), or pass it '
        "explicitly to an optimizer of poptorch.optim."
    )


def _refused(change: str) -> Error:
    return error(
        f"The optimizer can't change {change} once the model is compiled. Call destroy() and wrap "
        "the model again."
    )
