"""From the arguments of ``compile`` to a session; all that can't work is reported together."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, Callable, Dict, List, Mapping, Optional, Sequence, Tuple

import torch
from torch import nn

from ipufit.core import Interval
from ipufit.core.compile_arguments import INFERENCE, TRAINING, resolve_jit
from ipufit.core.train_config import (
    EMA,
    Clip,
    HyperparameterSchedule,
    Memory,
    Outputs,
    Precision,
    Reduction,
    TrainConfig,
    refuse_metrics_of_sums,
)
from ipufit.data.fields import name_fields
from ipufit.engines.ipu_settings import IpuArguments, IpuSettings
from ipufit.engines.program import Engine
from ipufit.errors import ConfigurationError, unfit
from ipufit.losses import Loss, check_moves, include_shared, resolve_loss
from ipufit.metrics.metric_set import MetricSet
from ipufit.metrics.resolve import resolve_metrics
from ipufit.optim.resolve import resolve_optimizer
from ipufit.optim.schedules.settings import keep
from ipufit.optim.several import MultiOptimizer, index_of_group, members_of, refuse_unknown_members
from ipufit.partition.own_blocks import annotated_ipus
from ipufit.partition.partition import NOT_DIVIDED, Partitions
from ipufit.partition.recomputation import resolve_recompute
from ipufit.partition.request import Parallel, PartitionRequest
from ipufit.partition.serialization import serialized_layers
from ipufit.planner.divided_module import DividedModule
from ipufit.tracing.validate import refuse_unregistered
from ipufit.training.session import Session
from ipufit.utils.error_collector import ErrorCollector, at_least, one_of

if TYPE_CHECKING:
    from ipufit.training.merge_settings import SettingsSource


@dataclasses.dataclass(frozen=True)
class CompileConfig(IpuArguments):
    """The arguments of ``Model.compile``, short forms as the objects that they stand for.

    Attributes:
        clip: of all gradients together; ``clips`` of those of single optimizers.
        ema: None for no averages.

    ``compile`` documents the others.
    """

    optimizer: object
    loss: object
    metrics: object
    loss_weights: object
    weighted_metrics: object
    inputs: object
    targets: object
    run_eagerly: bool
    jit: object
    lr_scheduler: object
    lr_scheduler_interval: Interval
    clip: Clip
    clips: Mapping[str, Clip]
    ema: Optional[EMA]
    detect_nan: bool
    max_recordings: int

    @staticmethod
    def read(faults: ErrorCollector, **arguments: Any) -> CompileConfig:
        """Read the arguments of ``compile``, by name; what is no form of one is a fault."""
        objects: Dict[str, Any] = {}
        clips: Mapping[str, Clip] = {}
        if isinstance(arguments["clip"], Mapping):
            clips = arguments["clip"]
            arguments["clip"] = None
        for name, clip in clips.items():
            with faults.collect():
                if not isinstance(clip, Clip):
                    raise ConfigurationError(
                        f"clip must have an ipufit.Clip for the optimizer {name!r}, got {clip!r}. "
                        "Write for example clip={'head': ipufit.Clip(global_norm=1.0)}."
                    )
        for name, (kind, example) in _OBJECTS.items():
            value = arguments.pop(name)
            if value is None:
                continue
            with faults.collect():
                is_short = name in _SHORT or (name == "parallel" and _is_plan(value))
                if is_short and not isinstance(value, kind):
                    value = kind(value)
                if not isinstance(value, kind):
                    advice = f"Write for example {name}={example}."
                    raise unfit(name, f"an ipufit.{kind.__name__} or None", value, advice)
                objects[name] = value
        pair: object = (None, None)
        with faults.collect():
            pair = pair_of_options(arguments.pop("poptorch"))
        parallel = objects.pop("parallel", None) or Parallel()
        training, inference = PartitionRequest.pair(parallel)
        return CompileConfig(
            reduction=objects.get("reduction", Reduction()),
            clip=objects.get("clip", Clip()),
            clips=clips,
            ema=objects.get("ema"),
            precision=objects.get("precision", Precision()),
            outputs=objects.get("outputs"),
            memory=objects.get("memory", Memory()),
            partition=training,
            inference_partition=inference,
            auto_round_ipus=parallel.auto_round_ipus,
            training_options=pair[0],
            inference_options=pair[1],
            **arguments,
        )


# By argument: its class, and an example.
_OBJECTS: Dict[str, Tuple[Any, str]] = {
    "reduction": (Reduction, "ipufit.Reduction(normalize='tokens')"),
    "clip": (Clip, "ipufit.Clip(global_norm=1.0)"),
    "ema": (EMA, "ipufit.EMA(momentum=0.99)"),
    "precision": (Precision, "'mixed_bfloat16'"),
    "outputs": (Outputs, "'final'"),
    "parallel": (Parallel, "ipufit.Parallel(layers_per_ipu=[2, 2])"),
    "memory": (Memory, "ipufit.Memory(recompute=True)"),
}
# Those of which the first field alone is the short form.
_SHORT = ("precision", "outputs")


def _is_plan(value: object) -> bool:
    from ipufit.planner.partition_plan import PartitionPlan

    return isinstance(value, PartitionPlan)


def pair_of_options(options: object) -> Tuple[Any, Any]:
    """The options for training and for inference.

    Raises:
        ConfigurationError: a sequence that is no pair.
    """
    if not isinstance(options, (tuple, list)):
        return options, None
    if len(options) != 2:
        raise ConfigurationError(
            "poptorch must be poptorch.Options, a pair (training_options, inference_options) or "
            f"None, got {len(options)} values. Write poptorch=(None, options) for inference alone."
        )
    return options[0], options[1]


def build_session(
    module: nn.Module,
    make_engine: Callable[[], Engine],
    request: CompileConfig,
    faults: ErrorCollector,
) -> Session:
    """Check all arguments, and only then make anything.

    Args:
        module: the user's module.
        make_engine: of the model.
        request: the arguments.
        faults: of their forms.

    Raises:
        ConfigurationError: something can't work; several faults as one error.
    """
    # Here and below, what plain models need nothing of is imported where it is needed.
    source = limit = None
    is_planned = False
    with faults.collect():
        request, limit = _as_planned(module, request)
        is_planned = True
    if not is_planned:
        faults.raise_all()
    partition = request.partition
    ipus = 1 if request.config is not None else annotated_ipus(module) or 1
    if ipus > 1 and not partition.sets_ipus:
        # Those that the module's annotations name.
        partition = dataclasses.replace(partition, ipus_per_replica=ipus, is_annotated=True)
        request = dataclasses.replace(request, partition=partition)
    beside = (request.config, request.training_options, request.inference_options)
    if any(value is not None for value in beside):
        from ipufit.training.merge_settings import SettingsSource

        source = SettingsSource.read(request, faults)
        request = request if source is None else source.merge(module, request, faults)
    by_config = source is not None and source.config is not None
    cuts = request.memory.serialize, request.memory.inference_serialize
    if not by_config and all(cut is None for cut in cuts):
        return _checked(module, make_engine, request, source, faults, limit)
    from ipufit.partition.cut_layers import serialize_while_checking

    with serialize_while_checking(module, *cuts, faults, by_config=by_config):
        return _checked(module, make_engine, request, source, faults, limit)


def _as_planned(module: nn.Module, request: CompileConfig) -> Tuple[CompileConfig, Optional[int]]:
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


def _partitions(module: nn.Module, request: CompileConfig) -> Partitions:
    """How the module lies on IPUs.

    Raises:
        PartitionError: the arguments can't work, or not together; with every fault.
    """
    first, second = request.partition, request.inference_partition
    if first.is_absent and second.is_absent and not any(serialized_layers(module)):
        return NOT_DIVIDED
    from ipufit.partition.resolve import resolve_partitions

    return resolve_partitions(module, first, second)


def _checked(
    module: nn.Module,
    make_engine: Callable[[], Engine],
    request: CompileConfig,
    source: Optional[SettingsSource],
    faults: ErrorCollector,
    planned_memory: Optional[int],
) -> Session:
    resolved, metrics, optimizer = _resolve_objectives(module, request, faults)
    settings = _resolve_settings(module, request, faults)
    partitions = NOT_DIVIDED
    with faults.collect():
        partitions = _partitions(module, request)
    with faults.collect():
        if optimizer is not None and (request.clips or isinstance(optimizer, MultiOptimizer)):
            # The bounds that some of several optimizers have for themselves.
            refuse_unknown_members("clip", request.clips, optimizer)
            settings["optimizers"] = len(members_of(optimizer))
            settings["optimizer_clips"] = tuple(request.clips.items())
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
    texts: Sequence[str] = ()
    fixed = IpuSettings()
    if source is not None:
        train_config, options, fixed, texts = source.apply(
            module, engine, train_config, partitions, options
        )
    divided = DividedModule(
        module,
        optimizer,
        resolved,
        train_config,
        partitions,
        bool(request.auto_round_ipus),
        options.get(TRAINING),
        fixed.find_strategy,
        planned_memory,
    )
    engine.check(divided, options)
    for text in (*texts, *([optimizer.choice] if isinstance(optimizer, MultiOptimizer) else [])):
        if text:
            print(text)
    return Session(divided, metrics, engine, options, fixed)


def _schedule(
    request: CompileConfig, optimizer: Optional[torch.optim.Optimizer], faults: ErrorCollector
) -> Optional[HyperparameterSchedule]:
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

    schedule, restore = None, None
    interval = request.lr_scheduler_interval
    with faults.collect():
        if optimizer is None and request.optimizer is not None:
            check_form(request.lr_scheduler)
        else:
            restore = None if optimizer is None else keep(optimizer)
            # An interval that is none has a fault of its own.
            interval = interval if interval == "epoch" else "update"
            schedule = resolve_schedule(request.lr_scheduler, optimizer, interval)
    try:
        faults.raise_all()
    except ConfigurationError:
        if restore is not None:
            restore()
        raise
    return schedule


def _resolve_objectives(
    module: nn.Module, request: CompileConfig, faults: ErrorCollector
) -> Tuple[Optional[Loss], MetricSet, Optional[torch.optim.Optimizer]]:
    """Loss, metrics and optimizer in normal form."""
    named: List[Tuple[str, nn.Parameter]] = list(module.named_parameters())
    loss, optimizer, metrics = None, None, MetricSet()
    with faults.collect():
        loss = resolve_loss(
            request.loss,
            request.loss_weights,
            request.reduction.normalize,
            request.reduction.sample_weights,
        )
        if request.inputs is not None or request.targets is not None:
            loss = name_fields(loss, request.inputs, request.targets)
        if loss.module is not None:
            named += [(f"loss.{name}", p) for name, p in loss.module.named_parameters()]
    with faults.collect():
        if request.optimizer is not None:
            if not any(parameter.requires_grad for _, parameter in named):
                refuse_unregistered(module)
            modules = [module, *([loss.module] if loss is not None and loss.module else [])]
            optimizer = resolve_optimizer(request.optimizer, named, modules)
            if loss is not None and loss.differentiates:
                loss = include_shared(loss, _all_names(module))
                owned = index_of_group(optimizer)
                check_moves(loss, [n for n, p in named if p.requires_grad and id(p) in owned])
    with faults.collect():
        # What metrics of several outputs go by is not known without their losses.
        if loss is not None or not isinstance(request.loss, (list, tuple, dict)):
            outputs = loss.outputs if loss is not None else None
            metrics = resolve_metrics(request.metrics, request.weighted_metrics, outputs)
    return loss, metrics, optimizer


def _all_names(module: nn.Module) -> Dict[str, List[str]]:
    """All names of each parameter, by its first one."""
    names: Dict[nn.Parameter, List[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    return {each[0]: each for each in names.values()}


def _resolve_settings(
    module: nn.Module,
    request: CompileConfig,
    faults: ErrorCollector,
) -> Dict[str, Any]:
    """The TrainConfig, but for the schedule, which needs an optimizer that is known to be good."""
    memory, outputs = request.memory, request.outputs or Outputs()
    settings: Dict[str, Any] = {
        "gradient_reduction": request.reduction.gradients or "mean",
        "clip": request.clip,
        "ema": request.ema,
        "precision": request.precision,
        "loss_scale": request.precision.scale,
        "accumulation_dtype": request.precision.accumulation_dtype,
        "outputs": outputs,
        "offload_optimizer_state": bool(memory.offload_optimizer),
        "shard_optimizer": memory.shard in ("optimizer", "weights"),
        "shard_weights": memory.shard == "weights",
        "detect_nan": request.detect_nan,
    }
    with faults.collect():
        if outputs.mode == "sum":
            refuse_metrics_of_sums(request.metrics or request.weighted_metrics)
    with faults.collect():
        settings["jit"], settings["backend"] = resolve_jit(request.jit, request.run_eagerly)
        settings["recompute"] = resolve_recompute(module, memory.recompute, settings["jit"])
    with faults.collect():
        settings["max_recordings"] = at_least("max_recordings", request.max_recordings, 1)
    for name, choices in _CHOICES.items():
        with faults.collect():
            one_of(name, getattr(request, name), choices)
    return settings


_CHOICES: Dict[str, object] = {
    "lr_scheduler_interval": Interval,
    "detect_nan": (True, False),
    "run_eagerly": (True, False),
}
