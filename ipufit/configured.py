"""What a configuration, or whole PopTorch options, fix at ``compile``, and what disagrees."""

from __future__ import annotations

import copy
import dataclasses
import os
from typing import Any, Dict, List, Mapping, Optional, Sequence, Tuple, Union

from torch import nn

from ipufit.errors import ConfigurationError, PlanError
from ipufit.faults import Faults
from ipufit.ipu_config import IPUConfig, Partition
from ipufit.parallel.annotations import is_annotated
from ipufit.parallel.choosing import KINDS, check_ties, meant_layer
from ipufit.parallel.partition import Partitions
from ipufit.parallel.request import PartitionRequest
from ipufit.whole_options import INFERENCE, TRAINING, WholeOptions

__all__ = [
    "FixedWork",
    "check_config",
    "cut_layers",
    "divided",
    "load_config",
    "output_mode_of",
    "recomputed",
]

# A value, and what says so.
Fixed = Tuple[int, str]

# What holds where neither an argument nor a configuration says anything.
_DEFAULTS: Dict[str, Optional[int]] = {
    "ipus": None,
    "device_iterations": 1,
    "gradient_accumulation": 1,
}


@dataclasses.dataclass(frozen=True)
class FixedWork:
    """Arguments of ``fit``, ``evaluate`` and ``predict`` that ``compile`` has fixed.

    Attributes:
        training, inference: by argument, its value and what says so; both empty if nothing does.
        seed, inference_seed: the same of seeds, each a pair, or None.
        other: what to compile with to change them, for errors.
        said: sentences for ``explain``.
    """

    training: Mapping[str, Fixed] = dataclasses.field(default_factory=dict)
    inference: Mapping[str, Fixed] = dataclasses.field(default_factory=dict)
    seed: Optional[Fixed] = None
    inference_seed: Optional[Fixed] = None
    other: str = ""
    said: Tuple[str, ...] = ()

    @staticmethod
    def of(config: IPUConfig) -> FixedWork:
        """What a configuration fixes."""
        training = {
            **_work(config, ""),
            "gradient_accumulation": (
                config.gradient_accumulation_steps,
                "IPUConfig.gradient_accumulation_steps",
            ),
        }
        seed = None if config.seed is None else (config.seed, "IPUConfig.seed")
        said = f"Work, seed and options are those of {config!r}."
        inference = _work(config, "inference_")
        return FixedWork(training, inference, seed, None, "another config", (said,))

    @staticmethod
    def of_options(
        training: Optional[WholeOptions],
        inference: Optional[WholeOptions],
        partitions: Partitions,
        said: Sequence[str],
    ) -> FixedWork:
        """What whole PopTorch options fix.

        Args:
            training, inference: the options, or None.
            partitions: of the module over the IPUs of a replica.
            said: sentences for ``explain``.
        """
        work: List[Mapping[str, Fixed]] = []
        for options, is_training in ((training, True), (inference, False)):
            partition = partitions.of(is_training)
            ipus = 1 if partition is None else partition.ipus
            work.append({} if options is None else options.work(ipus))
        one, other = (
            None if options is None else options.seed for options in (training, inference)
        )
        return FixedWork(work[0], work[1], one, other, "other options", tuple(said))

    def resolve(self, is_training: bool, **asked: Any) -> Dict[str, Any]:
        """The arguments with values of the configuration where they are None.

        Args:
            is_training: which of both counts.
            asked: "ipus", "device_iterations" and "gradient_accumulation", as the user has them.

        Raises:
            PlanError: an argument disagrees with the configuration; with all that do.
        """
        fixed = self.training if is_training else self.inference
        found: Dict[str, Any] = {}
        faults = []
        for name, value in asked.items():
            there, said = fixed.get(name, (_DEFAULTS[name], ""))
            found[name] = there if value is None else value
            if said and value is not None and value != there:
                faults.append(
                    f"`{name}` must agree with {said}, which says {there}, got {value!r}. Leave "
                    f"it out, or compile with {self.other}."
                )
                found[name] = there
        if faults:
            raise PlanError(faults, {name: found[name] for name in fixed if name in found})
        return found

    def seed_or(self, seed: Optional[int], is_training: bool = True) -> Optional[int]:
        """The seed that was asked for, else the one that ``compile`` has fixed.

        Raises:
            ConfigurationError: they disagree.
        """
        fixed = self.seed if is_training else self.inference_seed
        if fixed is None:
            return seed
        value, said = fixed
        if seed not in (None, value):
            raise ConfigurationError(
                f"seed must agree with {said}, which is {value}, got {seed}. Leave it out, or "
                f"compile with {self.other}."
            )
        return value


def _work(config: IPUConfig, prefix: str) -> Dict[str, Fixed]:
    replicas = getattr(config, f"{prefix}replication_factor")
    ipus = getattr(config, f"{prefix}ipus_per_replica")
    product = f"IPUConfig.{prefix}replication_factor x {prefix}ipus_per_replica"
    name = f"{prefix}device_iterations"
    return {
        "ipus": (replicas * ipus, product),
        "device_iterations": (getattr(config, name), f"IPUConfig.{name}"),
    }


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


def check_config(config: IPUConfig, asked: Any, faults: Faults) -> None:
    """Note where the arguments of ``compile`` disagree, and what can't be done yet.

    Args:
        config: what was loaded.
        asked: the arguments.
        faults: to which they are added.
    """
    for name in (TRAINING, INFERENCE):
        with faults.collected():
            if getattr(asked, name) is not None:
                raise ConfigurationError(
                    f"config and {name} both say how PopTorch runs the model. Leave one out; "
                    f"beside {name}, fit has ipus, device_iterations and gradient_accumulation."
                )
    mode = output_mode_of(config)
    with faults.collected():
        if asked.output_mode not in (None, mode):
            raise _disagrees("output_mode", asked.output_mode, config.output_mode)
    with faults.collected():
        if config.auto_loss_scaling and asked.loss_scale not in (None, "dynamic"):
            raise ConfigurationError(
                "loss_scale must agree with IPUConfig.auto_loss_scaling, which is True, got "
                f"{asked.loss_scale!r}. Leave one out."
            )
    with faults.collected():
        if asked.offload_optimizer_state not in (None, config.optimizer_state_offchip):
            name, there = "offload_optimizer_state", config.optimizer_state_offchip
            raise _disagrees(name, asked.offload_optimizer_state, there, "optimizer_state_offchip")
    with faults.collected():
        if asked.shard_optimizer not in (None, config.replicated_tensor_sharding):
            name, there = "shard_optimizer", config.replicated_tensor_sharding
            raise _disagrees(name, asked.shard_optimizer, there, "replicated_tensor_sharding")
    with faults.collected():
        if asked.gradient_reduction not in (None, "mean"):
            raise ConfigurationError(
                "gradient_reduction must agree with config, by which gradients are reduced by the "
                f"mean, as in optimum-graphcore, got {asked.gradient_reduction!r}. Leave one out."
            )
    with faults.collected():
        if asked.auto_round_ipus is False:
            raise ConfigurationError(
                "auto_round_ipus must agree with config, by which IPUs are rounded up to a power "
                "of two, as in optimum-graphcore, got False. Leave one out."
            )


def _disagrees(name: str, given: Any, there: Any, parameter: str = "") -> ConfigurationError:
    """An argument and a parameter, by default of the same name, that say two things."""
    return ConfigurationError(
        f"{name} must agree with IPUConfig.{parameter or name}, which is {there!r}, got {given!r}. "
        "Leave it out, or change the config."
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
        "recompute must agree with IPUConfig.recompute_checkpoint_every_layer, which is "
        f"{said}, got {recompute!r}. Leave it out{cure}."
    )


def output_mode_of(config: IPUConfig) -> str:
    """The mode of ``compile``; PopTorch's default is the final one in training."""
    return "final" if config.output_mode == "default" else config.output_mode


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
    faults = Faults()
    pair = []
    has_own = training.ipus_per_replica is not None or is_annotated(module)
    has_own = has_own and (training.stages, training.layers) == (None, None)
    has_own = has_own and config.layers_per_ipu == [-1]
    one, other = config.ipus_per_replica, config.inference_ipus_per_replica
    with faults.collected():
        if has_own and one != other:
            raise ConfigurationError(
                "a module with blocks of its own is on the same IPUs in training and in inference, "
                f"but IPUConfig.ipus_per_replica is {one} and IPUConfig."
                f"inference_ipus_per_replica {other}. Set both to the number of its IPUs."
            )
    # Stages of training hold for inference on as many IPUs, as they do without a configuration.
    follows = has_own or (training.stages is not None and one == other)
    for asked, for_inference in ((training, False), (inference, True)):
        with faults.collected():
            partition = config.partition(for_inference=for_inference)
            pair.append(_divided(partition, asked, follows))
    faults.raise_all()
    first, second = pair
    if config.inference_ipus_per_replica > 1 and second.strategy is None:
        second = dataclasses.replace(second, strategy="sharded")
    return first, second


def _divided(partition: Partition, asked: PartitionRequest, follows: bool) -> PartitionRequest:
    ipus, layers = partition.ipus_per_replica, list(partition.layers_per_ipu)
    said = f"IPUConfig.{asked.name('layers_per_ipu')}"
    if asked.stages is not None and layers != [-1]:
        raise ConfigurationError(
            f"{asked.name('stages')} and {said} both divide the module, the latter by {layers}. "
            "Leave one out; [-1] in the config leaves the choice to compile."
        )
    if asked.layers_per_ipu is not None and list(asked.layers_per_ipu) != layers:
        raise _disagrees(asked.name("layers_per_ipu"), asked.layers_per_ipu, layers)
    if asked.ipus_per_replica not in (None, ipus):
        there = asked.name("ipus_per_replica")
        raise _disagrees("ipus_per_replica", asked.ipus_per_replica, ipus, there)
    if asked.stages is not None or (follows and layers == [-1]):
        said = f"IPUConfig.{asked.name('ipus_per_replica')}"
        return dataclasses.replace(asked, ipus_per_replica=ipus, ipus_said_by=said)
    return dataclasses.replace(
        asked,
        # On one IPU a list of layers says nothing.
        layers_per_ipu=[-1] * ipus if layers == [-1] or ipus == 1 else layers,
        prefix=f"IPUConfig.{asked.prefix}",
    )


def cut_layers(config: IPUConfig, module: nn.Module, asked: Any, inference: Any) -> Tuple[Any, Any]:
    """What ``serialized_layers`` and its like for inference would say of a configuration's cuts.

    A configuration names no layers. What the arguments name is meant, else what
    :mod:`ipufit.parallel.choosing` finds.

    Args:
        config: says how an embedding and a projection are cut.
        module: the user's.
        asked, inference: the arguments, for training and inference.

    Raises:
        ConfigurationError: there is no such layer, or an argument says another number.
    """
    named = [("serialized_layers", asked), ("inference_serialized_layers", inference)]
    if any(not isinstance(given, (Mapping, type(None))) for _, given in named):
        return asked, inference
    # A configuration has a value for everything: what it does not cut in inference is whole there.
    cuts = [dict(asked or {}), dict((asked if inference is None else inference) or {})]
    faults = Faults()
    meant: Dict[str, Tuple[str, Sequence[Tuple[str, Any]]]] = {}
    for kind in KINDS:
        both = [_cut(config, kind, prefix) for prefix in ("", "inference_")]
        if all(cut is None for _, cut in both):
            continue
        with faults.collected():
            layer = meant_layer(module, kind, named, both)
            meant[kind] = layer, both
            for found, (_, given), (_, cut) in zip(cuts, named, both):
                # An argument that says the same may have more to say, such as the mode.
                if cut is not None and layer not in (given or {}):
                    found[layer] = cut
            if both[1][1] is None and inference is None:
                cuts[1].pop(layer, None)
    with faults.collected():
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
