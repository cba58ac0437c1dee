"""How an update is made besides loss and optimizer: one frozen object, filled by ``compile``."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Dict, FrozenSet, List, Mapping, Optional, Protocol, Sequence, Tuple, Union

import torch

from ipufit.core.compile_arguments import AUTO, OFF
from ipufit.errors import ConfigurationError

__all__ = [
    "Averaging",
    "Clip",
    "HyperparameterSchedule",
    "LossScale",
    "OutputMode",
    "Precision",
    "TrainConfig",
    "outputs_wanted",
    "refuse_metrics_of_sums",
    "refuse_sums_of_shares",
    "resolve_averaging",
    "resolve_clip",
    "resolve_dtype",
    "resolve_loss_scale",
    "resolve_output_mode",
    "resolve_precision",
]


class HyperparameterSchedule(Protocol):
    """Settings of an optimizer over the updates of a run.

    :class:`ipufit.optim.schedules.Schedule` implements it and documents each method.
    """

    @property
    def name(self) -> str:
        """Name in messages."""
        ...

    @property
    def names(self) -> FrozenSet[str]:
        """Settings of the parameter groups that are known to change."""
        ...

    @property
    def per_update(self) -> bool:
        """True if settings change with every update, False if they do at epoch ends alone."""
        ...

    @property
    def follows_values(self) -> bool:
        """True if settings depend on values of the run, not on updates and epochs alone."""
        ...

    @property
    def configuration(self) -> Dict[str, Any]:
        """Everything that determines the settings of all updates."""
        ...

    def rows(
        self, updates: int, accumulation_steps: Sequence[int] = ()
    ) -> List[List[Dict[str, Any]]]:
        """Settings by update and parameter group for the coming updates, which count as done."""
        ...

    def check(self, updates: int, epoch: Sequence[int] = ()) -> None:
        """Refuse coming updates that have no usable values; nothing changes."""
        ...

    def end_epoch(self, logs: Mapping[str, float]) -> None:
        """Move on where settings change at epoch ends."""
        ...

    def advance_to(self, updates: int, epochs: int) -> None:
        """Bring a schedule that has not begun to where it is after so many updates and epochs."""
        ...

    def snapshot(self) -> Any:
        """Copy everything, the optimizer's settings included."""
        ...

    def restore(self, snapshot: object) -> None:
        """Go back to a snapshot, exactly."""
        ...

    def state_dict(self) -> Dict[str, Any]:
        """Return the state that a checkpoint stores."""
        ...

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Go on from a stored state, settings included."""
        ...


@dataclasses.dataclass(frozen=True)
class Clip:
    """Bounds on the gradient of an update, after its reduction; at most one is set.

    Attributes:
        norm: of the gradient of each parameter, the largest Euclidean norm.
        global_norm: the same of all gradients together.
        value: the largest magnitude of an element.
    """

    norm: Optional[float] = None
    global_norm: Optional[float] = None
    value: Optional[float] = None

    def __bool__(self) -> bool:
        """True if any bound is set."""
        return self != Clip()


@dataclasses.dataclass(frozen=True)
class Averaging:
    """An exponential moving average of the trained weights, moved on after every update.

    Attributes:
        momentum: share of the old average.
        overwrite_every: the weights become the average after every so many updates; None: never
            before the end of ``fit``.
    """

    momentum: float = 0.99
    overwrite_every: Optional[int] = None


@dataclasses.dataclass(frozen=True)
class LossScale:
    """Factor of the loss in the backward pass, by which gradients are divided afterwards.

    Attributes:
        initial: the factor, at first.
        growth_interval: the factor doubles after so many updates without a non-finite gradient, and
            is halved by each with one; None for a factor that never changes.
    """

    initial: float = 2.0**15
    growth_interval: Optional[int] = 2000

    @property
    def dynamic(self) -> bool:
        """True if the factor follows the gradients."""
        return self.growth_interval is not None

    def describe(self) -> Union[float, str]:
        """Write it as ``compile`` takes it: a number, "dynamic", or the changes to that."""
        if not self.dynamic:
            return self.initial
        return "dynamic" if self == LossScale() else str(self)


@dataclasses.dataclass(frozen=True)
class Precision:
    """In which floating-point types the module computes.

    Attributes:
        name: as given to ``compile``; None leaves everything as the module has it.
        autocast: the type that ``torch.autocast`` chooses where it is safe; weights stay as they
            are.
        inputs: the type to which floating-point inputs and targets are brought.
    """

    name: Optional[str] = None
    autocast: Optional[torch.dtype] = None
    inputs: Optional[torch.dtype] = None


@dataclasses.dataclass(frozen=True)
class OutputMode:
    """Which of a training execution's outputs come back to the host.

    Attributes:
        kind: "all", "final", "sum" or "every_n", as in PopTorch.
        every: of "every_n", the number of device iterations between those that come back.
    """

    kind: str = "all"
    every: int = 1

    def check(self, device_iterations: int) -> None:
        """Refuse an interval that does not fit into an execution.

        Raises:
            ConfigurationError: it does not divide the device iterations.
        """
        if device_iterations % self.every:
            fitting = [n for n in range(1, device_iterations + 1) if device_iterations % n == 0]
            raise ConfigurationError(
                f"output_every must divide device_iterations ({device_iterations}), got "
                f"{self.every}. Choose one of {', '.join(map(str, fitting))}."
            )


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """How an update is made, as ``compile`` fixed it.

    Attributes:
        gradient_reduction: over the micro-batches of an update, "mean" or "sum".
        clip: bounds on the reduced gradient.
        accumulation_dtype: of the sum of gradients; None is the dtype of each parameter.
        precision: of forward and loss.
        loss_scale: None where the loss is not scaled.
        averaging: None where weights are not averaged.
        schedule: hyper-parameters by update; None leaves them as the optimizer has them.
        output_mode: which outputs come back in training.
        recompute: names of the layers whose values are computed again in the backward pass.
        offload_optimizer_state: whether the optimizer's state is in host memory between updates.
        shard_optimizer: whether each of several processes, or replicas on an IPU, has a part of the
            optimizer's state.
        shard_weights: whether each has a part of the weights too; then ``shard_optimizer`` is true.
        detect_nan: whether losses, gradients and weights are looked at in every update, and what
            is not finite is traced to where it began.
        jit: how a recorded program runs, a name of ``LOWERINGS``; "off" records none.
    """

    gradient_reduction: str = "mean"
    clip: Clip = dataclasses.field(default_factory=Clip)
    accumulation_dtype: Optional[torch.dtype] = None
    precision: Precision = dataclasses.field(default_factory=Precision)
    loss_scale: Optional[LossScale] = None
    averaging: Optional[Averaging] = None
    schedule: Optional[HyperparameterSchedule] = None
    output_mode: OutputMode = dataclasses.field(default_factory=OutputMode)
    recompute: Tuple[str, ...] = ()
    offload_optimizer_state: bool = False
    shard_optimizer: bool = False
    shard_weights: bool = False
    detect_nan: bool = False
    jit: str = AUTO

    @property
    def run_eagerly(self) -> bool:
        """True if the user's module itself runs, without a recording."""
        return self.jit == OFF

    @property
    def settings(self) -> Tuple[str, ...]:
        """Names under which a training program speaks of itself."""
        scaled = ("loss_scale", "skipped_updates") if self.loss_scale is not None else ()
        return (*(("learning_rate",) if self.schedule is not None else ()), *scaled)

    def describe(self) -> Dict[str, Any]:
        """The arguments of ``compile`` that it was made of, for History."""
        return {"gradient_reduction": self.gradient_reduction, **self.extras()}

    def extras(self) -> Dict[str, Any]:
        """List settings that make more of an update than a plain one, as numbers and strings."""
        averaging, scale, every = self.averaging, self.loss_scale, self.output_mode.every
        dtype, mode = self.accumulation_dtype, self.output_mode.kind
        found = {
            "clipnorm": self.clip.norm,
            "global_clipnorm": self.clip.global_norm,
            "clipvalue": self.clip.value,
            "use_ema": None if averaging is None else True,
            "ema_momentum": None if averaging is None else averaging.momentum,
            "ema_overwrite_frequency": None if averaging is None else averaging.overwrite_every,
            "precision": self.precision.name,
            "loss_scale": None if scale is None else scale.describe(),
            "accumulation_dtype": None if dtype is None else _short(dtype),
            "lr_scheduler": None if self.schedule is None else self.schedule.name,
            "output_mode": None if mode == "all" else mode,
            "output_every": every if mode == "every_n" else None,
            "recompute": list(self.recompute) or None,
            "offload_optimizer_state": self.offload_optimizer_state or None,
            "shard_optimizer": self.shard_optimizer or None,
            "shard_weights": self.shard_weights or None,
            "detect_nan": self.detect_nan or None,
            "jit": None if self.jit == AUTO else self.jit,
        }
        return {name: value for name, value in found.items() if value is not None}


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def resolve_clip(clipnorm: object, global_clipnorm: object, clipvalue: object) -> Clip:
    """Check the bounds on gradients.

    Raises:
        ConfigurationError: one is not a positive number, or several are given.
    """
    given = {"clipnorm": clipnorm, "global_clipnorm": global_clipnorm, "clipvalue": clipvalue}
    given = {name: value for name, value in given.items() if value is not None}
    for name, value in given.items():
        if not _is_number(value) or value <= 0:  # type: ignore[operator]
            raise ConfigurationError(
                f"{name} must be a positive number, got {value!r}. Leave it out for no clipping."
            )
    if len(given) > 1:
        raise ConfigurationError(
            f"at most one bound on gradients can hold, got {' and '.join(given)}. Choose one: "
            "clipnorm for each parameter, global_clipnorm for all together, clipvalue for each "
            "element."
        )
    numbers: Dict[str, Any] = given
    return Clip(
        norm=float(numbers["clipnorm"]) if "clipnorm" in numbers else None,
        global_norm=float(numbers["global_clipnorm"]) if "global_clipnorm" in numbers else None,
        value=float(numbers["clipvalue"]) if "clipvalue" in numbers else None,
    )


def resolve_averaging(
    use_ema: object, ema_momentum: object, ema_overwrite_frequency: object
) -> Optional[Averaging]:
    """Check Keras' three settings of weight averaging.

    Raises:
        ConfigurationError: one can't work, or is given without ``use_ema=True``.
    """
    if type(use_ema) is not bool:
        raise ConfigurationError(f"use_ema must be True or False, got {use_ema!r}.")
    if not _is_number(ema_momentum) or not 0 <= ema_momentum <= 1:  # type: ignore[operator]
        raise ConfigurationError(
            f"ema_momentum must be between 0 and 1, got {ema_momentum!r}. It is the share of the "
            "old average, such as 0.99."
        )
    every = _count_or_none("ema_overwrite_frequency", ema_overwrite_frequency, "updates")
    if not use_ema:
        if ema_momentum != 0.99 or every is not None:
            raise ConfigurationError(
                "ema_momentum and ema_overwrite_frequency say how weights are averaged, but "
                "use_ema is False. Pass use_ema=True, or leave them out."
            )
        return None
    return Averaging(float(ema_momentum), every)  # type: ignore[arg-type]


def _count_or_none(name: str, value: object, what: str) -> Optional[int]:
    if value is None:
        return None
    if isinstance(value, bool) or not hasattr(value, "__index__") or int(value) < 1:
        raise ConfigurationError(
            f"{name} must be a number of {what}, at least 1, or None, got {value!r}."
        )
    return int(value)


_AUTOCAST = {
    "mixed_float16": torch.float16,
    "mixed_bfloat16": torch.bfloat16,
    "16-mixed": torch.float16,
    "bf16-mixed": torch.bfloat16,
}
_PURE = {
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float32": torch.float32,
    "float64": torch.float64,
    "16-true": torch.float16,
    "bf16-true": torch.bfloat16,
    "32-true": torch.float32,
    "64-true": torch.float64,
}


def resolve_precision(precision: object) -> Precision:
    """Check a precision's name, Keras' or Lightning's.

    Raises:
        ConfigurationError: an unknown name.
    """
    if precision is None:
        return Precision()
    if isinstance(precision, str) and precision in _AUTOCAST:
        return Precision(precision, autocast=_AUTOCAST[precision])
    if isinstance(precision, str) and precision in _PURE:
        return Precision(precision, inputs=_PURE[precision])
    names = ", ".join(map(repr, (*_AUTOCAST, *_PURE)))
    raise ConfigurationError(f"precision must be None or one of {names}, got {precision!r}.")


def resolve_loss_scale(loss_scale: object, precision: Precision) -> Optional[LossScale]:
    """Check the loss scale: None, a number, "dynamic" or a LossScale.

    float16 gradients underflow without one, so mixed float16 scales dynamically unless told
    otherwise, as Keras does.

    Raises:
        ConfigurationError: anything else.
    """
    if loss_scale is None:
        return LossScale() if precision.autocast is torch.float16 else None
    if loss_scale == "dynamic":
        return LossScale()
    if isinstance(loss_scale, LossScale):
        _count_or_none("LossScale.growth_interval", loss_scale.growth_interval, "updates")
        if not _is_number(loss_scale.initial) or loss_scale.initial <= 0:
            raise ConfigurationError(
                f"LossScale.initial must be a positive number, got {loss_scale.initial!r}."
            )
        return loss_scale
    if _is_number(loss_scale) and loss_scale > 0:  # type: ignore[operator]
        return LossScale(float(loss_scale), None)  # type: ignore[arg-type]
    raise ConfigurationError(
        "loss_scale must be None, a positive number, 'dynamic' or an ipufit.LossScale, got "
        f"{loss_scale!r}. Pass 1 for no scaling under mixed_float16."
    )


def resolve_dtype(name: str, value: object) -> Optional[torch.dtype]:
    """A floating-point dtype, or its name; None for none.

    Raises:
        ConfigurationError: anything else.
    """
    if value is None:
        return None
    dtype = getattr(torch, value, None) if isinstance(value, str) else value
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise ConfigurationError(
            f"{name} must be None or a floating-point dtype such as torch.float32, got {value!r}."
        )
    return dtype


def resolve_output_mode(output_mode: object, output_every: object) -> OutputMode:
    """Check which outputs come back.

    Raises:
        ConfigurationError: an unknown mode, or a number where it means nothing.
    """
    kinds = ("all", "final", "sum", "every_n")
    if not isinstance(output_mode, str) or output_mode not in kinds:
        raise ConfigurationError(
            f"output_mode must be one of {', '.join(map(repr, kinds))}, got {output_mode!r}."
        )
    every = _count_or_none("output_every", output_every, "device iterations")
    if output_mode == "every_n" and every is None:
        raise ConfigurationError(
            "output_mode='every_n' needs output_every, the number of device iterations between "
            "outputs that come back, got None. Pass for example output_every=4."
        )
    if output_mode != "every_n" and every is not None:
        raise ConfigurationError(
            f"output_every belongs to output_mode='every_n', got it with {output_mode!r}. Leave it "
            "out, or choose 'every_n'."
        )
    return OutputMode(output_mode, every or 1)


def refuse_metrics_of_sums(metrics: object) -> None:
    """A sum of outputs has no target to be compared with.

    Raises:
        ConfigurationError: there are metrics.
    """
    if metrics:
        raise ConfigurationError(
            "metrics compare outputs with targets, but output_mode='sum' brings only sums of "
            "outputs back. Leave the metrics out, or log what is to be summed: "
            "ipufit.log('correct', (prediction.argmax(1) == target).sum(), reduce='sum')."
        )


def refuse_sums_of_shares(normalize: object, sample_weight_reduction: object) -> None:
    """Micro-batches can't share in a sum that nobody divides.

    Raises:
        ConfigurationError: their shares would depend on their tokens or weights.
    """
    for name, value, by in (
        ("normalize", normalize, "tokens"),
        ("sample_weight_reduction", sample_weight_reduction, "mean_with_sample_weight"),
    ):
        if value == by:
            raise ConfigurationError(
                f"{name}={by!r} divides the gradient of an update by all that counts in it, but "
                "gradient_reduction='sum' adds up means. Use gradient_reduction='mean'."
            )


def _short(dtype: torch.dtype) -> str:
    return str(dtype).replace("torch.", "")


def outputs_wanted(mode: OutputMode, count: int, per_update: int, replicas: int) -> List[int]:
    """Which micro-batches' outputs come back from an execution.

    Args:
        mode: "sum" wants all of them, to add them up.
        count: micro-batches in the execution.
        per_update: micro-batches in a full update.
        replicas: how many of an update belong to one accumulation step.
    """
    if mode.kind == "final":
        last = (count - 1) // per_update * per_update
        return list(range(last + (count - 1 - last) // replicas * replicas, count))
    if mode.kind == "every_n":
        return [i for i in range(count) if (i // per_update + 1) % mode.every == 0]
    return list(range(count))
