"""From the arguments of ``compile`` to a session; all that can't work is reported together."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, Callable, Dict, List, Optional, Tuple, Union

import torch
from torch import nn

from ipufit.core.compile_arguments import INFERENCE, TRAINING, resolve_jit
from ipufit.core.train_config import (
    LossScale,
    TrainConfig,
    refuse_metrics_of_sums,
    refuse_sums_of_shares,
    resolve_averaging,
    resolve_clip,
    resolve_dtype,
    resolve_loss_scale,
    resolve_output_mode,
    resolve_precision,
)
from ipufit.engines.program import Engine
from ipufit.errors import ConfigurationError
from ipufit.losses import Loss, resolve_loss
from ipufit.metrics import MetricSet, resolve_metrics
from ipufit.optim.resolve import resolve_optimizer
from ipufit.partition.own_blocks import annotated_ipus
from ipufit.partition.partition import NOT_DIVIDED, Partitions
from ipufit.partition.recomputation import resolve_recompute
from ipufit.partition.request import PartitionRequest
from ipufit.partition.serialization import has_serialized_layers
from ipufit.processes import current
from ipufit.tracing.validate import refuse_unregistered
from ipufit.training.run_defaults import RunDefaults
from ipufit.training.session import Session
from ipufit.utils.error_collector import ErrorCollector, one_of

if TYPE_CHECKING:
    from ipufit.engines.ipu.ipu_config import IPUConfig
    from ipufit.engines.ipu.poptorch_options.pair import OptionPair
    from ipufit.optim.schedules import Schedule

__all__ = ["CompileRequest", "build_session"]


@dataclasses.dataclass(frozen=True)
class CompileRequest:
    """The arguments of ``Model.compile``, as they came; it documents them."""

    optimizer: Any
    loss: Any
    metrics: Any
    loss_weights: Any
    weighted_metrics: Any
    normalize: str
    sample_weight_reduction: str
    lr_scheduler: Any
    lr_scheduler_interval: str
    clipnorm: Optional[float]
    global_clipnorm: Optional[float]
    clipvalue: Optional[float]
    use_ema: bool
    ema_momentum: float
    ema_overwrite_frequency: Optional[int]
    precision: Optional[str]
    loss_scale: Union[float, str, LossScale, None]
    accumulation_dtype: Union[torch.dtype, str, None]
    output_mode: Optional[str]
    output_every: Optional[int]
    gradient_reduction: Optional[str]
    auto_round_ipus: Optional[bool]
    serialized_layers: Any
    inference_serialized_layers: Any
    recompute: Any
    offload_optimizer_state: Optional[bool]
    shard_optimizer: Optional[bool]
    shard_weights: bool
    detect_nan: bool
    run_eagerly: bool
    jit: str
    training_options: Any
    inference_options: Any
    partition: PartitionRequest
    inference_partition: PartitionRequest
    config: Any


def build_session(
    module: nn.Module, make_engine: Callable[[], Engine], request: CompileRequest
) -> Session:
    """Check all arguments, and only then make anything.

    Raises:
        ConfigurationError: something can't work; several faults as one error.
    """
    # Here and below, what plain models need nothing of is imported where it is needed.
    faults = ErrorCollector()
    config = pair = limit = None
    mode = "all"
    with faults.collect():
        request, limit = _as_planned(module, request)
    faults.raise_all()
    if request.config is not None:
        from ipufit.training.ipu_config_adapter import apply_ipu_config, output_mode_of

        config, request = apply_ipu_config(module, request, faults)
        mode = mode if config is None else output_mode_of(config)
    else:
        request = dataclasses.replace(request, partition=_as_annotated(module, request.partition))
    if request.training_options is not None or request.inference_options is not None:
        from ipufit.engines.ipu.poptorch_options.pair import OptionPair

        pair = OptionPair.read(request, faults)
        request = pair.merged(request, faults)
    reduction, offload = request.gradient_reduction, request.offload_optimizer_state
    if offload is None:
        offload = config is not None and config.optimizer_state_offchip
    shard = request.shard_optimizer
    if shard is None:
        # Replicas of one process have one state anyway.
        shard = (
            config is not None and config.replicated_tensor_sharding and current().is_distributed
        )
        shard = shard or request.shard_weights is True
    # optimum-graphcore rounds whatever its configuration says.
    rounds = config is not None if request.auto_round_ipus is None else request.auto_round_ipus
    request = dataclasses.replace(
        request,
        output_mode=mode if request.output_mode is None else request.output_mode,
        gradient_reduction="mean" if reduction is None else reduction,
        auto_round_ipus=rounds,
        offload_optimizer_state=offload,
        shard_optimizer=shard,
    )
    cuts = request.serialized_layers, request.inference_serialized_layers
    if config is None and all(cut is None for cut in cuts):
        return _checked(module, make_engine, request, config, pair, faults, limit)
    from ipufit.partition.cut_layers import serialize_while_checking

    with serialize_while_checking(module, *cuts, faults, by_config=config is not None):
        return _checked(module, make_engine, request, config, pair, faults, limit)


def _as_planned(module: nn.Module, request: CompileRequest) -> Tuple[CompileRequest, Optional[int]]:
    """The arguments with stages and strategy of a plan, and the memory that it was made for.

    Raises:
        PartitionError: the plan is one of another module or strategy, or does not fit.
    """
    first, second = request.partition, request.inference_partition
    if first.stages is None and second.stages is None:
        return request, None
    from ipufit.planner.partition_plan import PartitionPlan, apply_plan

    limit = first.stages.planned.memory if isinstance(first.stages, PartitionPlan) else None
    first, second = apply_plan(module, first), apply_plan(module, second)
    return dataclasses.replace(request, partition=first, inference_partition=second), limit


def _as_annotated(module: nn.Module, request: PartitionRequest) -> PartitionRequest:
    """The request with the IPUs that the module's annotations name, where it names no others."""
    ipus = annotated_ipus(module) or 1
    if ipus == 1 or request.sets_ipus:
        return request
    return dataclasses.replace(request, ipus_per_replica=ipus, is_annotated=True)


def _partitions(module: nn.Module, request: CompileRequest) -> Partitions:
    """How the module lies on IPUs.

    Raises:
        PartitionError: the arguments can't work, or not together; with every fault.
    """
    first, second = request.partition, request.inference_partition
    if first.is_absent and second.is_absent and not has_serialized_layers(module):
        return NOT_DIVIDED
    from ipufit.partition.resolve import resolve_partitions

    return resolve_partitions(module, first, second)


def _checked(
    module: nn.Module,
    make_engine: Callable[[], Engine],
    request: CompileRequest,
    config: Optional[IPUConfig],
    pair: Optional[OptionPair],
    faults: ErrorCollector,
    planned_memory: Optional[int],
) -> Session:
    resolved, metrics, optimizer = _resolve_objectives(module, request, faults)
    settings = _resolve_settings(module, request, faults)
    partitions = NOT_DIVIDED
    with faults.collect():
        partitions = _partitions(module, request)
    schedule = _schedule(request, optimizer, faults)
    assert resolved is not None
    engine = make_engine()
    if not isinstance(engine, Engine):
        raise ConfigurationError(
            f"engine must make an object of a class that derives from ipufit.engines.Engine, got "
            f"{engine!r}. Derive its class, or pass for example engine='embedded'."
        )
    train_config = TrainConfig(schedule=schedule, **settings)
    options = {TRAINING: request.training_options, INFERENCE: request.inference_options}
    printed: List[str] = []
    fixed = RunDefaults()
    if pair is not None:
        train_config, printed, sentences = pair.applied(engine, train_config, partitions)
        fixed = RunDefaults.of_options(pair.training, pair.inference, sentences)
    if config is not None:
        from ipufit.engines.ipu.ipu_config.report import in_short
        from ipufit.partition.cut_layers import describe_cuts

        train_config, options = _configured(config, engine, train_config, options)
        printed, fixed = [in_short(config, engine.name)], RunDefaults.of(config)
        printed += describe_cuts(module)
    engine.check(module, optimizer, resolved, train_config, options, partitions)
    for text in printed:
        print(text)
    return Session(
        module,
        optimizer,
        resolved,
        metrics,
        engine,
        train_config,
        request.auto_round_ipus is True,
        options,
        partitions,
        fixed,
        planned_memory,
    )


def _schedule(
    request: CompileRequest, optimizer: Optional[torch.optim.Optimizer], faults: ErrorCollector
) -> Optional[Schedule]:
    """Resolve the schedule, and report its faults with those of all other arguments.

    Args:
        request: the arguments.
        optimizer: None where there is none, or where it could not be made.
        faults: of the other arguments. Where there is one, the optimizer is left as it came.

    Raises:
        ConfigurationError: something can't work.
    """
    if request.lr_scheduler is None:
        faults.raise_all()
        return None
    from ipufit.optim.schedules.resolve import check_form, resolve_schedule
    from ipufit.optim.schedules.settings import keep

    schedule, restore = None, None
    interval = request.lr_scheduler_interval
    with faults.collect():
        if optimizer is None and request.optimizer is not None:
            check_form(request.lr_scheduler)
        else:
            restore = None if optimizer is None else keep(optimizer)
            # An interval that is none has a fault of its own.
            interval = interval if interval in _CHOICES["lr_scheduler_interval"] else "update"
            schedule = resolve_schedule(request.lr_scheduler, optimizer, interval)
    try:
        faults.raise_all()
    except ConfigurationError:
        if restore is not None:
            restore()
        raise
    return schedule


def _configured(
    config: IPUConfig, engine: Engine, train_config: TrainConfig, options: Dict[str, Any]
) -> Tuple[TrainConfig, Dict[str, Any]]:
    """Apply the rest of a configuration: the engine's settings, or what stands for them here."""
    engine_options = engine.options_of(config)
    if engine_options is not None:
        return train_config, engine_options
    if config.auto_loss_scaling and train_config.loss_scale is None:
        train_config = dataclasses.replace(train_config, loss_scale=LossScale())
    return train_config, options


def _resolve_objectives(
    module: nn.Module, request: CompileRequest, faults: ErrorCollector
) -> Tuple[Optional[Loss], MetricSet, Optional[torch.optim.Optimizer]]:
    """Loss, metrics and optimizer in normal form."""
    named: List[Tuple[str, nn.Parameter]] = list(module.named_parameters())
    loss, optimizer, metrics = None, None, MetricSet()
    with faults.collect():
        loss = resolve_loss(
            request.loss, request.loss_weights, request.normalize, request.sample_weight_reduction
        )
        if loss.module is not None:
            named += [(f"loss.{name}", p) for name, p in loss.module.named_parameters()]
    with faults.collect():
        if request.optimizer is not None:
            if not any(parameter.requires_grad for _, parameter in named):
                refuse_unregistered(module)
            optimizer = resolve_optimizer(request.optimizer, named)
    with faults.collect():
        # What metrics of several outputs go by is not known without their losses.
        if loss is not None or not isinstance(request.loss, (list, tuple, dict)):
            outputs = loss.outputs if loss is not None else None
            metrics = resolve_metrics(request.metrics, request.weighted_metrics, outputs)
    return loss, metrics, optimizer


def _resolve_settings(
    module: nn.Module, request: CompileRequest, faults: ErrorCollector
) -> Dict[str, Any]:
    """The TrainConfig, but for the schedule, which needs an optimizer that is known to be good."""
    settings: Dict[str, Any] = {"gradient_reduction": request.gradient_reduction}
    with faults.collect():
        one_of("gradient_reduction", request.gradient_reduction, ("mean", "sum"))
        if request.gradient_reduction == "sum":
            refuse_sums_of_shares(request.normalize, request.sample_weight_reduction)
    with faults.collect():
        settings["clip"] = resolve_clip(
            request.clipnorm, request.global_clipnorm, request.clipvalue
        )
    with faults.collect():
        settings["averaging"] = resolve_averaging(
            request.use_ema, request.ema_momentum, request.ema_overwrite_frequency
        )
    with faults.collect():
        settings["precision"] = resolve_precision(request.precision)
        settings["loss_scale"] = resolve_loss_scale(request.loss_scale, settings["precision"])
    with faults.collect():
        settings["accumulation_dtype"] = resolve_dtype(
            "accumulation_dtype", request.accumulation_dtype
        )
    with faults.collect():
        settings["output_mode"] = resolve_output_mode(request.output_mode, request.output_every)
        if request.output_mode == "sum":
            refuse_metrics_of_sums(request.metrics or request.weighted_metrics)
    with faults.collect():
        settings["jit"] = resolve_jit(request.jit, request.run_eagerly)
        settings["recompute"] = resolve_recompute(module, request.recompute, settings["jit"])
    for name, choices in _CHOICES.items():
        with faults.collect():
            one_of(name, getattr(request, name), choices)
    settings["offload_optimizer_state"] = request.offload_optimizer_state
    settings["shard_optimizer"] = request.shard_optimizer
    settings["shard_weights"] = request.shard_weights
    with faults.collect():
        if request.shard_weights is True and request.shard_optimizer is False:
            raise ConfigurationError(
                "shard_weights=True divides the optimizer's state too, but got "
                "shard_optimizer=False. Leave shard_optimizer out."
            )
    settings["detect_nan"] = request.detect_nan
    return settings


_CHOICES: Dict[str, Tuple[object, ...]] = {
    "lr_scheduler_interval": ("update", "epoch"),
    "auto_round_ipus": (True, False),
    "offload_optimizer_state": (True, False),
    "shard_optimizer": (True, False),
    "shard_weights": (True, False),
    "detect_nan": (True, False),
    "run_eagerly": (True, False),
}
