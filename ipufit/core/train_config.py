"""How an update is made besides loss and optimizer: one frozen object, filled by ``compile``."""

from __future__ import annotations

import dataclasses
from typing import Any, Dict, FrozenSet, List, Mapping, Optional, Protocol, Sequence, Tuple, Union

import torch

from ipufit.core import (
    DynamicScale,
    GradientReduction,
    Normalize,
    OutputMode,
    PrecisionName,
    SampleWeightReduction,
    Shard,
)
from ipufit.core.compile_arguments import AUTO, OFF, Backend
from ipufit.core.objective_arguments import dtype_name
from ipufit.errors import ConfigurationError, unfit
from ipufit.utils.error_collector import ErrorCollector, at_least_or_none, number_in, one_of


class HyperparameterSchedule(Protocol):
    """Settings of an optimizer over the updates of a run.

    :class:`ipufit.optim.schedules.Schedule` implements it and documents each method.
    """

    @property
    def name(self) -> str:
        """Name in messages."""

    @property
    def names(self) -> FrozenSet[str]:
        """Settings of the parameter groups that are known to change."""

    @property
    def per_update(self) -> bool:
        """True if settings change with every update, False if they do at epoch ends alone."""

    @property
    def follows_values(self) -> bool:
        """True if settings depend on values of the run, not on updates and epochs alone."""

    @property
    def configuration(self) -> Mapping[str, object]:
        """Everything that determines the settings of all updates."""

    def rows(
        self, updates: int, accumulation_steps: Sequence[int] = ()
    ) -> List[List[Dict[str, Any]]]:
        """Settings by update and parameter group for the coming updates, which count as done."""

    def check(self, updates: int, epoch: Sequence[int] = ()) -> None:
        """Refuse coming updates that have no usable values; nothing changes."""

    def begin_run(
        self, updates: Optional[int], epochs: Optional[int], is_trial: bool = False
    ) -> None:
        """Learn how long the run is that begins, or goes on and whose state comes next."""

    def end_epoch(self, logs: Mapping[str, float]) -> None:
        """Move on where settings change at epoch ends."""

    def advance_to(self, updates: int, epochs: int, in_run: Tuple[int, int]) -> None:
        """Advance a schedule that has not begun to its state after so many updates and epochs."""

    def snapshot(self) -> Any:
        """Copy everything, the optimizer's settings included."""

    def restore(self, snapshot: Any) -> None:
        """Go back to a snapshot, exactly."""

    def state_dict(self) -> Mapping[str, object]:
        """Return the state that a checkpoint stores."""

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Go on from a stored state, settings included."""


@dataclasses.dataclass(frozen=True)
class Reduction:
    """How samples, their weights and micro-batches count in the gradient of an update.

    ``compile(reduction=...)`` takes it; it is frozen. See docs/optimizers-losses-metrics.md.

    Attributes:
        normalize: how much the micro-batches of an update count: by "samples", by "tokens" (the
            elements that count in the loss), or "micro_batches" (all the same).
        sample_weights: divisor of a loss with sample weights: the number of elements
            ("sum_over_batch_size"), or the sum of their weights ("mean_with_sample_weight").
        gradients: over the micro-batches of an update: "mean" over the samples, or "sum" of the
            micro-batches' means. None is the setting of PopTorch's options, or "mean".

    Raises:
        ConfigurationError: an invalid value, or two that can't be combined.
    """

    normalize: Normalize = "samples"
    sample_weights: SampleWeightReduction = "sum_over_batch_size"
    gradients: Optional[GradientReduction] = None

    def __post_init__(self) -> None:
        faults = ErrorCollector()
        for name, choices in _REDUCTIONS.items():
            with faults.collect():
                one_of(f"Reduction.{name}", getattr(self, name), choices)
        faults.raise_all()
        for name, by in (("normalize", "tokens"), ("sample_weights", "mean_with_sample_weight")):
            if self.gradients == "sum" and getattr(self, name) == by:
                # Micro-batches can't share in a sum that nobody divides.
                raise ConfigurationError(
                    f"Reduction.{name}={by!r} divides the gradient of an update by a count over "
                    "the whole update, but gradients='sum' adds up means. Use gradients='mean'."
                )


_REDUCTIONS: Dict[str, object] = {
    "normalize": Normalize,
    "sample_weights": SampleWeightReduction,
    "gradients": (None, GradientReduction),
}


@dataclasses.dataclass(frozen=True)
class Clip:
    """Limit for the gradient of an update, applied once, after its reduction.

    ``compile(clip=...)`` takes it, with at most one of the three bounds; it is frozen. See
    docs/precision-and-gradients.md.

    Attributes:
        norm: largest Euclidean norm of the gradient of each parameter, as in
            ``torch.nn.utils.clip_grad_norm_``.
        global_norm: largest Euclidean norm of all gradients together.
        value: largest magnitude of an element.

    Raises:
        ConfigurationError: a limit is not a positive number, or there are several.
    """

    norm: Optional[float] = None
    global_norm: Optional[float] = None
    value: Optional[float] = None

    def __post_init__(self) -> None:
        names = [field.name for field in dataclasses.fields(self)]
        names = [name for name in names if getattr(self, name) is not None]
        for name in names:
            advice = "Leave it out for no clipping."
            number = number_in(f"Clip.{name}", getattr(self, name), advice=advice)
            object.__setattr__(self, name, number)
        if len(names) > 1:
            raise ConfigurationError(
                f"Clip takes at most one bound on gradients, got {' and '.join(names)}. Choose "
                "one: norm for each parameter, global_norm for all together, value for each "
                "element."
            )

    def __bool__(self) -> bool:
        """True if any bound is set."""
        return self != Clip()


@dataclasses.dataclass(frozen=True)
class EMA:
    """Exponential moving average of the trained weights, updated after every weight update.

    ``compile(ema=...)`` takes it; it is frozen. When ``fit`` ends, the averages become the weights,
    as in Keras. See docs/precision-and-gradients.md.

    Attributes:
        momentum: share of the old average in the new one.
        overwrite_frequency: the averages also replace the weights after every so many updates; None
            for only at the end of ``fit``.

    Raises:
        ConfigurationError: a value that can't work.
    """

    momentum: float = 0.99
    overwrite_frequency: Optional[int] = None

    def __post_init__(self) -> None:
        momentum = number_in(
            "EMA.momentum",
            self.momentum,
            "between 0 and 1",
            lambda number: 0 <= number <= 1,
            "It is the weight of the old average, such as 0.99.",
        )
        every = at_least_or_none("EMA.overwrite_frequency", self.overwrite_frequency, 1)
        object.__setattr__(self, "momentum", momentum)
        object.__setattr__(self, "overwrite_frequency", every)


@dataclasses.dataclass(frozen=True)
class LossScale:
    """Factor for the loss in the backward pass; gradients are divided by it afterwards.

    :class:`ipufit.Precision` takes it; it is frozen. See docs/precision-and-gradients.md.

    Attributes:
        initial: the factor at the start.
        growth_interval: the factor doubles after so many updates with finite gradients, and is
            halved by each update whose gradient is not finite; None for a constant factor.

    Raises:
        ConfigurationError: a value that can't work.
    """

    initial: float = 2.0**15
    growth_interval: Optional[int] = 2000

    def __post_init__(self) -> None:
        at_least_or_none("LossScale.growth_interval", self.growth_interval, 1)
        object.__setattr__(self, "initial", number_in("LossScale.initial", self.initial))

    @property
    def dynamic(self) -> bool:
        """True if the factor follows the gradients."""
        return self.growth_interval is not None

    def describe(self) -> Union[float, str]:
        """A number, "dynamic", or the text of the object where "dynamic" was changed."""
        if not self.dynamic:
            return self.initial
        return "dynamic" if self == LossScale() else str(self)


_AUTOCAST = {
    **dict.fromkeys(("mixed_float16", "16-mixed"), torch.float16),
    **dict.fromkeys(("mixed_bfloat16", "bf16-mixed"), torch.bfloat16),
}
_PURE = {
    **dict.fromkeys(("float16", "16-true"), torch.float16),
    **dict.fromkeys(("bfloat16", "bf16-true"), torch.bfloat16),
    **dict.fromkeys(("float32", "32-true"), torch.float32),
    **dict.fromkeys(("float64", "64-true"), torch.float64),
}


@dataclasses.dataclass(frozen=True)
class Precision:
    """Floating-point types in which the module computes, and the loss scale.

    ``compile(precision=...)`` takes it, or only the name; it is frozen. See
    docs/precision-and-gradients.md.

    Attributes:
        name: "mixed_float16" or "mixed_bfloat16" ("16-mixed", "bf16-mixed"): autocast around
            forward and loss, while weights keep their dtype. "float16", "bfloat16", "float32",
            "float64" ("16-true", ...): a module of that dtype; floating-point inputs and targets
            are converted to it. None changes nothing.
        loss_scale: a number, "dynamic" or a :class:`ipufit.LossScale`: the loss is multiplied with
            it before the backward pass and the gradient divided by it; an update whose gradient is
            not finite is skipped and counted. None is "dynamic" for "mixed_float16", otherwise no
            scaling.
        accumulation_dtype: dtype in which gradients are added up over the micro-batches of an
            update, or its name; None is that of each parameter.

    Raises:
        ConfigurationError: invalid values; with every fault.
    """

    name: Optional[PrecisionName] = None
    loss_scale: Union[float, DynamicScale, LossScale, None] = None
    accumulation_dtype: Union[torch.dtype, str, None] = None

    def __post_init__(self) -> None:
        faults = ErrorCollector()
        with faults.collect():
            one_of("precision", self.name, (None, PrecisionName))
        with faults.collect():
            scale = self.loss_scale
            is_text = isinstance(scale, str) and scale == "dynamic"
            if scale is not None and not is_text and not isinstance(scale, LossScale):
                needed = "None, a positive number, 'dynamic' or an ipufit.LossScale"
                advice = "Pass 1 for no scaling under mixed_float16."
                number = number_in("Precision.loss_scale", scale, needed, advice=advice)
                object.__setattr__(self, "loss_scale", number)
        with faults.collect():
            name = self.accumulation_dtype
            dtype = getattr(torch, name, None) if isinstance(name, str) else name
            is_dtype = isinstance(dtype, torch.dtype) and dtype.is_floating_point
            if name is not None and not is_dtype:
                needed = "None or a floating-point dtype such as torch.float32"
                raise unfit("Precision.accumulation_dtype", needed, name)
            object.__setattr__(self, "accumulation_dtype", dtype)
        faults.raise_all()

    @property
    def autocast(self) -> Optional[torch.dtype]:
        """The dtype of ``torch.autocast``, or None; weights keep their dtype."""
        return None if self.name is None else _AUTOCAST.get(self.name)

    @property
    def inputs(self) -> Optional[torch.dtype]:
        """The dtype to which floating-point inputs and targets are converted, or None."""
        return None if self.name is None else _PURE.get(self.name)

    @property
    def scale(self) -> Optional[LossScale]:
        """The loss scale; None for none.

        Gradients in float16 underflow without a scale, so mixed float16 has a dynamic scale by
        default, as in Keras.
        """
        if self.loss_scale is None:
            return LossScale() if self.autocast is torch.float16 else None
        if self.loss_scale == "dynamic":
            return LossScale()
        if isinstance(self.loss_scale, LossScale):
            return self.loss_scale
        return LossScale(float(self.loss_scale), None)


@dataclasses.dataclass(frozen=True)
class Outputs:
    """Which outputs of a training execution are copied to the host, for metrics and callbacks.

    ``compile(outputs=...)`` takes it, or only the mode; it is frozen. See docs/logging-values.md.

    Attributes:
        mode: "all"; "final": those of the last micro-batch on every replica; "every_n": those of
            every n-th device iteration; "sum": the sum over the micro-batches of each replica, for
            callbacks.
        every: n of "every_n".

    Raises:
        ConfigurationError: an unknown mode, or a number that the mode does not use.
    """

    mode: OutputMode = "all"
    every: Optional[int] = None

    def __post_init__(self) -> None:
        one_of("outputs", self.mode, OutputMode)
        every = at_least_or_none("Outputs.every", self.every, 1)
        if self.mode == "every_n" and every is None:
            raise ConfigurationError(
                "outputs='every_n' needs the number of device iterations from one returned output "
                "to the next, got None. Pass for example outputs=ipufit.Outputs('every_n', 4)."
            )
        if self.mode != "every_n" and every is not None:
            raise ConfigurationError(
                f"Outputs.every is for mode 'every_n', got it with {self.mode!r}. Leave it out, "
                "or choose 'every_n'."
            )
        object.__setattr__(self, "every", every)


@dataclasses.dataclass(frozen=True)
class Memory:
    """Ways to need less memory on a device; the numbers stay the same.

    ``compile(memory=...)`` takes it; it is frozen. See docs/memory.md.

    Attributes:
        serialize: embeddings and linear layers to compute in parts, as for
            :func:`ipufit.partition.serialize`, which ``compile`` calls on the module; they stay
            divided. Together with ``config``, they name the layers that its numbers apply to.
        inference_serialize: the same for validation, ``evaluate`` and ``predict``, in which layers
            that are not named are whole; None is as in training.
        recompute: layers whose values are computed again in the backward pass instead of being
            kept: names, also patterns such as "encoder.layers.*"; or True for every repeated layer.
            None is the setting of ``config``, or no layers; if ``config`` recomputes, names choose
            the layers.
        offload_optimizer: keep the optimizer's state in host memory, and on the device only during
            the update, which is slower. It has no effect if the module is on the CPU. None is the
            setting of ``config`` or PopTorch's options, or False.
        shard: divide memory over several processes. "optimizer" divides the optimizer's state (see
            :meth:`ipufit.Model.gather_optimizer`; on IPUs, over replicas). "weights" divides
            weights, gradients and the optimizer's state, for a model larger than one device: a
            piece of the weights is whole only while it is used, and more data is sent. During
            ``fit``, the module's own parameters are then copies in host memory, which are updated
            at the end of an epoch and by :meth:`ipufit.Model.gather_weights`. "none" divides
            nothing, and in one process the others have no effect. None is the setting of
            ``config``, or "none".

    Raises:
        ConfigurationError: invalid values; with every fault.
    """

    serialize: Optional[Mapping[str, Any]] = None
    inference_serialize: Optional[Mapping[str, Any]] = None
    recompute: Union[bool, str, Sequence[str], None] = None
    offload_optimizer: Optional[bool] = None
    shard: Optional[Shard] = None

    def __post_init__(self) -> None:
        faults = ErrorCollector()
        with faults.collect():
            one_of("Memory.offload_optimizer", self.offload_optimizer, (None, True, False))
        with faults.collect():
            one_of("Memory.shard", self.shard, (None, Shard))
        faults.raise_all()

    @property
    def shard_optimizer(self) -> Optional[bool]:
        """True if only the optimizer's state is divided; None if ``shard`` is None."""
        return {"none": False, "optimizer": True}.get(self.shard or "")


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """How an update is made, as ``compile`` fixed it.

    Attributes:
        gradient_reduction: over the micro-batches of an update, "mean" or "sum".
        clip: bounds on the reduced gradient.
        optimizer_clips: bounds on that of the parameters of single optimizers, by their names.
        optimizers: how many make an update together.
        accumulation_dtype: of the sum of gradients; None is the dtype of each parameter.
        precision: of forward and loss.
        loss_scale: None where the loss is not scaled.
        ema: None where weights are not averaged.
        schedule: hyper-parameters by update; None leaves them as the optimizer has them.
        outputs: which outputs come back in training.
        recompute: names of the layers whose values are computed again in the backward pass.
        offload_optimizer_state: whether the optimizer's state is in host memory between updates.
        shard_optimizer: whether each of several processes, or replicas on an IPU, has a part of the
            optimizer's state.
        shard_weights: whether each has a part of the weights too; then ``shard_optimizer`` is true.
        detect_nan: whether losses, gradients and weights are looked at in every update, and what
            is not finite is traced to where it began.
        jit: how a recorded program runs, a name of ``LOWERINGS`` or of a backend of torch.compile;
            "off" is ``run_eagerly=True``.
        backend: that backend; None where ``jit`` was compiled as another way.
        max_recordings: forms of micro-batches that a program may record.
    """

    gradient_reduction: str = "mean"
    clip: Clip = dataclasses.field(default_factory=Clip)
    optimizer_clips: Tuple[Tuple[str, Clip], ...] = ()
    optimizers: int = 1
    accumulation_dtype: Optional[torch.dtype] = None
    precision: Precision = dataclasses.field(default_factory=Precision)
    loss_scale: Optional[LossScale] = None
    ema: Optional[EMA] = None
    schedule: Optional[HyperparameterSchedule] = None
    outputs: Outputs = dataclasses.field(default_factory=Outputs)
    recompute: Tuple[str, ...] = ()
    offload_optimizer_state: bool = False
    shard_optimizer: bool = False
    shard_weights: bool = False
    detect_nan: bool = False
    jit: str = AUTO
    backend: Optional[Backend] = None
    max_recordings: int = 16

    @property
    def compiler(self) -> Optional[Backend]:
        """The backend of torch.compile that recorded graphs are handed to; None for none."""
        backend = self.backend
        # A trial may run this configuration in another way.
        return backend if backend is not None and backend.name == self.jit else None

    @property
    def run_eagerly(self) -> bool:
        """True if the user's module itself runs, without a recording."""
        return self.jit == OFF

    @property
    def settings(self) -> Tuple[str, ...]:
        """Names under which a training program speaks of itself."""
        scaled = ("loss_scale", "skipped_updates") if self.loss_scale is not None else ()
        rates = ["learning_rate", *(f"learning_rate_{i}" for i in range(1, self.optimizers))]
        return (*(rates if self.schedule is not None else ()), *scaled)

    def describe(self) -> Dict[str, Any]:
        """The arguments of ``compile`` that it was made of, for History."""
        return {"gradient_reduction": self.gradient_reduction, **self.extras()}

    def extras(self) -> Dict[str, Any]:
        """List settings that make more of an update than a plain one, as numbers and strings."""
        ema, scale, outputs = self.ema, self.loss_scale, self.outputs
        dtype = self.accumulation_dtype
        found = {
            "clipnorm": self.clip.norm,
            "global_clipnorm": self.clip.global_norm,
            "clipvalue": self.clip.value,
            "use_ema": None if ema is None else True,
            "ema_momentum": None if ema is None else ema.momentum,
            "ema_overwrite_frequency": None if ema is None else ema.overwrite_frequency,
            "precision": self.precision.name,
            "loss_scale": None if scale is None else scale.describe(),
            "accumulation_dtype": None if dtype is None else dtype_name(dtype),
            "lr_scheduler": None if self.schedule is None else self.schedule.name,
            "output_mode": None if outputs.mode == "all" else outputs.mode,
            "output_every": outputs.every,
            "recompute": list(self.recompute) or None,
            "offload_optimizer_state": self.offload_optimizer_state or None,
            "shard_optimizer": self.shard_optimizer or None,
            "shard_weights": self.shard_weights or None,
            "detect_nan": self.detect_nan or None,
            "max_recordings": None if self.max_recordings == 16 else self.max_recordings,
            "jit": None if self.jit == AUTO else self.jit,
        }
        return {name: value for name, value in found.items() if value is not None}


def check_interval(outputs: Outputs, device_iterations: int) -> None:
    """Refuse an interval between outputs that does not fit into an execution.

    Raises:
        ConfigurationError: it does not divide the device iterations.
    """
    if device_iterations % (outputs.every or 1):
        fitting = [n for n in range(1, device_iterations + 1) if device_iterations % n == 0]
        raise ConfigurationError(
            f"Outputs.every must divide device_iterations ({device_iterations}), got "
            f"{outputs.every}. Choose one of {', '.join(map(str, fitting))}."
        )


def refuse_metrics_of_sums(metrics: object) -> None:
    """A sum of outputs has no target to be compared with.

    Raises:
        ConfigurationError: there are metrics.
    """
    if metrics:
        raise ConfigurationError(
            "metrics compare outputs with targets, but outputs='sum' returns only sums of "
            "outputs. Leave the metrics out, or log the value to sum: ipufit.log('correct', "
            "(prediction.argmax(1) == target).sum(), reduce='sum')."
        )


def outputs_wanted(outputs: Outputs, count: int, per_update: int, replicas: int) -> List[int]:
    """Which micro-batches' outputs come back from an execution.

    Args:
        outputs: "sum" wants all of them, to add them up.
        count: micro-batches in the execution.
        per_update: micro-batches in a full update.
        replicas: how many of an update belong to one accumulation step.
    """
    if outputs.mode == "final":
        last = (count - 1) // per_update * per_update
        return list(range(last + (count - 1 - last) // replicas * replicas, count))
    if outputs.every is not None:
        return [i for i in range(count) if (i // per_update + 1) % outputs.every == 0]
    return list(range(count))
