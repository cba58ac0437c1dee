"""Settings of an IPUConfig as arguments of ``compile``, and the arguments that disagree."""

from __future__ import annotations

import copy
import dataclasses
import os
from typing import Any, Dict, List, Mapping, Optional, Sequence, Tuple, Union

from torch import nn

from ipufit.core.compile_arguments import INFERENCE, TRAINING
from ipufit.core.train_config import Outputs
from ipufit.engines.ipu.ipu_config import IPUConfig, IpuLayout
from ipufit.errors import ConfigurationError
from ipufit.partition.embedding_layers import KINDS, check_ties, meant_layer
from ipufit.partition.own_blocks import is_annotated
from ipufit.partition.request import PartitionRequest
from ipufit.utils.error_collector import ErrorCollector

__all__ = [
    "apply_ipu_config",
    "outputs_of",
]


def apply_ipu_config(
    module: nn.Module, asked: Any, faults: ErrorCollector
) -> Tuple[Optional[IPUConfig], Any]:
    """The configuration that ``compile`` was given, and its arguments with what that says of them.

    Args:
        module: the user's.
        asked: the arguments.
        faults: to which conflicts are added, and what can't be read; then there is none.
    """
    config = None
    with faults.collect():
        config = load_config(asked.config)
    if config is None:
        return None, asked
    check_config(config, asked, faults)
    with faults.collect():
        first, second = divided(config, module, asked.partition, asked.inference_partition)
        asked = dataclasses.replace(asked, partition=first, inference_partition=second)
    with faults.collect():
        cuts = asked.memory.serialize, asked.memory.inference_serialize
        first_cuts, second_cuts = cut_layers(config, module, *cuts)
        memory = dataclasses.replace(
            asked.memory, serialize=first_cuts, inference_serialize=second_cuts
        )
        asked = dataclasses.replace(asked, memory=memory)
    with faults.collect():
        recompute = recomputed(config, asked.memory.recompute)
        memory = dataclasses.replace(asked.memory, recompute=recompute)
        asked = dataclasses.replace(asked, memory=memory)
    return config, asked


def load_config(config: Any) -> Optional[IPUConfig]:
    """The configuration that ``compile`` was given; the user's own object stays as it is.

    Args:
        config: an IPUConfig, or what ``IPUConfig.from_pretrained`` takes; None for none.

    Raises:
        ConfigurationError: it is none, or can't be read; with every fault.
    """
    if config is None:
        return None
    if isinstance(config, (str, os.PathLike)):
        return IPUConfig.from_pretrained(config).for_pod_type()
    if not isinstance(config, IPUConfig):
        raise ConfigurationError(
            "config must be an ipufit.IPUConfig, the path of one, or None, got "
            f"{type(config).__name__}. Read a dict with ipufit.IPUConfig.from_dict(...)."
        )
    config.check()
    return copy.deepcopy(config.for_pod_type())


def check_config(config: IPUConfig, asked: Any, faults: ErrorCollector) -> None:
    """Note where the arguments of ``compile`` disagree, and what can't be done yet.

    Args:
        config: what was loaded.
        asked: the arguments.
        faults: to which they are added.
    """
    for name in (TRAINING, INFERENCE):
        with faults.collect():
            if getattr(asked, name) is not None:
                raise ConfigurationError(
                    f"config and {name} both say how PopTorch runs the model. Leave one out; "
                    f"beside {name}, fit has ipus, device_iterations and gradient_accumulation."
                )
    with faults.collect():
        if asked.outputs not in (None, outputs_of(config)):
            passed, there = asked.outputs.mode, config.output_mode
            raise _disagrees("outputs", passed, there, "IPUConfig.output_mode")
    with faults.collect():
        if config.auto_loss_scaling and asked.precision.loss_scale not in (None, "dynamic"):
            raise ConfigurationError(
                "Precision.loss_scale must agree with IPUConfig.auto_loss_scaling, which is True, "
                f"got {asked.precision.loss_scale!r}. Leave one out."
            )
    for name, value, parameter in (
        ("offload_optimizer", asked.memory.offload_optimizer, "optimizer_state_offchip"),
        ("shard", asked.memory.shard_optimizer, "replicated_tensor_sharding"),
    ):
        there = getattr(config, parameter)
        with faults.collect():
            if value not in (None, there):
                passed = getattr(asked.memory, name)
                raise _disagrees(f"Memory.{name}", passed, there, f"IPUConfig.{parameter}")
    with faults.collect():
        if asked.reduction.gradients == "sum":
            raise ConfigurationError(
                "Reduction.gradients must agree with config, by which gradients are reduced by the "
                "mean, as in optimum-graphcore, got 'sum'. Leave one out."
            )
    with faults.collect():
        if asked.auto_round_ipus is False:
            raise ConfigurationError(
                "Parallel.auto_round_ipus must agree with config, by which IPUs are rounded up to "
                "a power of two, as in optimum-graphcore, got False. Leave one out."
            )


def _disagrees(name: str, passed: Any, there: Any, parameter: str) -> ConfigurationError:
    """An argument and a parameter of a configuration that say two things."""
    return ConfigurationError(
        f"{name} must agree with {parameter}, which is {there!r}, got {passed!r}. Leave it out, or "
        "change the config."
    )


def recomputed(config: IPUConfig, recompute: Any) -> Any:
    """``recompute`` of ``compile``, with what the configuration says in its place.

    Names of layers say which ones, where the configuration says that layers are recomputed.

    Raises:
        ConfigurationError: one says so and the other not.
    """
    said = config.recompute_checkpoint_every_layer
    if recompute is None or recompute is said:
        return said
    is_none = recompute is False or (isinstance(recompute, (list, tuple)) and not recompute)
    if said != is_none:
        return recompute
    cure = "" if said else ", or set that to True, beside which recompute may name layers"
    raise ConfigurationError(
        "Memory.recompute must agree with IPUConfig.recompute_checkpoint_every_layer, which is "
        f"{said}, got {recompute!r}. Leave it out{cure}."
    )


def outputs_of(config: IPUConfig) -> Outputs:
    """The argument of ``compile``; PopTorch's default is the final one in training."""
    return Outputs("final" if config.output_mode == "default" else config.output_mode)


def divided(
    config: IPUConfig,
    module: nn.Module,
    training: PartitionRequest,
    inference: PartitionRequest,
) -> Tuple[PartitionRequest, PartitionRequest]:
    """The arguments that divide the module, with what the configuration says in their place.

    Inference is sharded, as optimum-graphcore has it. A module with blocks of its own is left to
    them where the configuration says no more than how many IPUs there are.

    Raises:
        ConfigurationError: both divide it, and not alike.
    """
    faults = ErrorCollector()
    pair = []
    has_own = training.ipus_per_replica is not None or is_annotated(module)
    has_own = has_own and (training.stages, training.layers) == (None, None)
    has_own = has_own and config.layers_per_ipu == [-1]
    one, other = config.ipus_per_replica, config.inference_ipus_per_replica
    with faults.collect():
        if has_own and one != other:
            raise ConfigurationError(
                "a module with blocks of its own is on the same IPUs in training and in inference, "
                f"but IPUConfig.ipus_per_replica is {one} and IPUConfig."
                f"inference_ipus_per_replica {other}. Set both to the number of its IPUs."
            )
    # Stages of training hold for inference on as many IPUs, as they do without a configuration.
    follows = has_own or (training.stages is not None and one == other)
    for asked, for_inference in ((training, False), (inference, True)):
        with faults.collect():
            partition = config.partition(for_inference=for_inference)
            prefix = "IPUConfig.inference_" if for_inference else "IPUConfig."
            pair.append(_divided(partition, asked, follows, prefix))
    faults.raise_all()
    first, second = pair
    if config.inference_ipus_per_replica > 1 and second.strategy is None:
        second = dataclasses.replace(second, strategy="sharded")
    return first, second


def _divided(
    partition: IpuLayout, asked: PartitionRequest, follows: bool, prefix: str
) -> PartitionRequest:
    ipus, layers = partition.ipus_per_replica, list(partition.layers_per_ipu)
    if asked.stages is not None and layers != [-1]:
        raise ConfigurationError(
            f"{asked.name('stages')} and {prefix}layers_per_ipu both divide the module, the latter "
            f"by {layers}. Leave one out; [-1] in the config leaves the choice to compile."
        )
    if asked.layers_per_ipu is not None and list(asked.layers_per_ipu) != layers:
        name = asked.name("layers_per_ipu")
        raise _disagrees(name, asked.layers_per_ipu, layers, f"{prefix}layers_per_ipu")
    if asked.ipus_per_replica not in (None, ipus):
        there = f"{prefix}ipus_per_replica"
        raise _disagrees("ipus_per_replica", asked.ipus_per_replica, ipus, there)
    if asked.stages is not None or (follows and layers == [-1]):
        said = f"{prefix}ipus_per_replica"
        return dataclasses.replace(asked, ipus_per_replica=ipus, ipus_said_by=said)
    return dataclasses.replace(
        asked,
        # On one IPU a list of layers says nothing.
        layers_per_ipu=[-1] * ipus if layers == [-1] or ipus == 1 else layers,
        prefix=prefix,
    )


def cut_layers(config: IPUConfig, module: nn.Module, asked: Any, inference: Any) -> Tuple[Any, Any]:
    """Return a configuration's cuts as ``serialize`` and ``inference_serialize`` of Memory.

    A configuration names no layers. What the arguments name is meant, else what
    :mod:`ipufit.partition.embedding_layers` finds.

    Args:
        config: says how an embedding and a projection are cut.
        module: the user's.
        asked, inference: the arguments, for training and inference.

    Raises:
        ConfigurationError: there is no such layer, or an argument says another number.
    """
    named = [("Memory.serialize", asked), ("Memory.inference_serialize", inference)]
    if any(not isinstance(given, (Mapping, type(None))) for _, given in named):
        return asked, inference
    # A configuration has a value for everything: what it does not cut in inference is whole there.
    cuts = [dict(asked or {}), dict((asked if inference is None else inference) or {})]
    faults = ErrorCollector()
    meant: Dict[str, Tuple[str, Sequence[Tuple[str, Any]]]] = {}
    for kind in KINDS:
        both = [_cut(config, kind, prefix) for prefix in ("", "inference_")]
        if all(cut is None for _, cut in both):
            continue
        with faults.collect():
            layer = meant_layer(module, kind, named, both)
            meant[kind] = layer, both
            for found, (_, given), (_, cut) in zip(cuts, named, both):
                # An argument that says the same may have more to say, such as the mode.
                if cut is not None and layer not in (given or {}):
                    found[layer] = cut
            if both[1][1] is None and inference is None:
                cuts[1].pop(layer, None)
    with faults.collect():
        check_ties(module, meant)
    faults.raise_all()
    return (cuts[0] or asked, cuts[1]) if meant else (asked, inference)


def _cut(config: IPUConfig, kind: str, prefix: str) -> Tuple[str, Union[int, List[int], None]]:
    """The parameter that says how a layer is cut, and what it says; None for nothing."""
    splits = f"{prefix}serialized_{kind}_splits_per_ipu"
    if getattr(config, splits) is not None:
        return f"IPUConfig.{splits}", list(getattr(config, splits))
    factor = f"{prefix}{kind}_serialization_factor"
    value = getattr(config, factor)
    return f"IPUConfig.{factor}", None if value in (None, 1) else value
