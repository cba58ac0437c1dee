"""Arguments of ``compile``, merged with what an IPUConfig or PopTorch's options fix beside them."""

from __future__ import annotations

import copy
import dataclasses
import os
from typing import Any, Dict, List, Mapping, Optional, Sequence, Tuple, TypeVar, Union

from torch import nn

from ipufit.core.compile_arguments import INFERENCE, TRAINING
from ipufit.core.train_config import LossScale, Memory, TrainConfig
from ipufit.engines.ipu import poptorch_options
from ipufit.engines.ipu.effects import ENGINES, NONE
from ipufit.engines.ipu.ipu_config import IPUConfig
from ipufit.engines.ipu.ipu_config import settings as config_settings
from ipufit.engines.ipu.poptorch_options import PopTorchOptions
from ipufit.engines.ipu_settings import IpuArguments, IpuSettings, LayerCut, ModeSettings, Setting
from ipufit.engines.program import Engine
from ipufit.errors import ConfigurationError
from ipufit.partition.cut_layers import describe_cuts
from ipufit.partition.embedding_layers import KINDS, check_ties, meant_layer
from ipufit.partition.own_blocks import is_annotated
from ipufit.partition.partition import Partitions
from ipufit.partition.request import PartitionRequest, kind_of
from ipufit.utils.error_collector import ErrorCollector

T = TypeVar("T")
ArgumentsT = TypeVar("ArgumentsT", bound=IpuArguments)


@dataclasses.dataclass(frozen=True)
class SettingsSource:
    """An IPUConfig, or options of PopTorch, that ``compile`` was given beside its arguments.

    Attributes:
        settings: the values of a run that it fixes.
        config: None where there are options.
        options: those that were passed, training first.
    """

    settings: IpuSettings
    config: Optional[IPUConfig] = None
    options: Sequence[PopTorchOptions] = ()

    @staticmethod
    def read(arguments: IpuArguments, faults: ErrorCollector) -> Optional[SettingsSource]:
        """Read the IPUConfig, or the options, among the arguments of ``compile``.

        Args:
            arguments: of ``compile``.
            faults: to which is added what can't be read.

        Returns:
            None where there is nothing, or nothing that can be read.
        """
        by_role = {TRAINING: arguments.training_options, INFERENCE: arguments.inference_options}
        if arguments.config is not None:
            for role, options in by_role.items():
                with faults.collect():
                    if options is not None:
                        raise ConfigurationError(
                            f"config and {role} both set how PopTorch runs the model. Leave one "
                            f"out; with {role}, pass ipus, device_iterations and "
                            "gradient_accumulation to fit."
                        )
            with faults.collect():
                config = _load_config(arguments.config)
                return SettingsSource(config_settings.read_settings(config), config)
            return None
        read: Dict[str, Optional[PopTorchOptions]] = {}
        for role, options in by_role.items():
            with faults.collect():
                read[role] = PopTorchOptions.read(role, options)
        pair = read.get(TRAINING), read.get(INFERENCE)
        present = [options for options in pair if options is not None]
        if not present:
            return None
        return SettingsSource(poptorch_options.read_settings(*pair), None, present)

    def merge(self, module: nn.Module, arguments: ArgumentsT, faults: ErrorCollector) -> ArgumentsT:
        """Fill in the arguments of ``compile`` that were left out.

        Args:
            module: the user's module.
            arguments: of ``compile``.
            faults: to which every argument is added that disagrees.
        """
        settings = self.settings
        reduction, memory = arguments.reduction, arguments.memory
        scale = arguments.precision.loss_scale
        _agreed("Precision.loss_scale", scale, settings.loss_scale, faults)
        outputs, shown = arguments.outputs, None
        if outputs is not None and self.config is not None:
            # A configuration has modes only.
            shown = outputs.mode
        outputs = _agreed("outputs", outputs, settings.outputs, faults, shown)
        shard = memory.shard
        if shard != "weights":
            # Of the weights, nothing but an argument says anything.
            shard = _agreed("Memory.shard", shard, settings.shard, faults)
        gradients = _agreed(
            "Reduction.gradients", reduction.gradients, settings.gradient_reduction, faults
        )
        offload = _agreed(
            "Memory.offload_optimizer",
            memory.offload_optimizer,
            settings.offload_optimizer,
            faults,
        )
        rounds = _agreed(
            "Parallel.auto_round_ipus",
            arguments.auto_round_ipus,
            settings.auto_round_ipus,
            faults,
        )
        recompute = _agreed_recompute(memory.recompute, settings.recompute, faults)
        partition, inference = arguments.partition, arguments.inference_partition
        with faults.collect():
            partition, inference = _divide(module, settings, partition, inference)
        serialize, inference_serialize = memory.serialize, memory.inference_serialize
        with faults.collect():
            serialize, inference_serialize = _cut_layers(
                module, settings, serialize, inference_serialize
            )
        return dataclasses.replace(
            arguments,
            outputs=outputs,
            reduction=dataclasses.replace(reduction, gradients=gradients),
            auto_round_ipus=rounds,
            partition=partition,
            inference_partition=inference,
            memory=Memory(serialize, inference_serialize, recompute, offload, shard),
        )

    def apply(
        self,
        module: nn.Module,
        engine: Engine,
        config: TrainConfig,
        partitions: Partitions,
        options: Dict[str, object],
    ) -> Tuple[TrainConfig, Dict[str, object], IpuSettings, Sequence[str]]:
        """Give the engine what it takes, let arguments stand for the rest, and report the effects.

        Args:
            module: the user's module.
            engine: on which the model runs.
            config: how an update is made.
            partitions: of the module.
            options: by the argument of ``compile``.

        Returns:
            How an update is made; the options for the engine; the settings with remarks for
            ``explain``; and reports to print.

        Raises:
            ConfigurationError: it would be another run on this engine.
        """
        settings, made = self.settings, None
        texts, remarks = [], list(settings.remarks)
        if self.config is not None:
            made = engine.options_of(self.config)
            hint = repr(engine.name) if engine.name in ENGINES else ""
            effects = config_settings.effects_of(self.config, engine.name)
            texts = [effects.in_short(f"; config.report({hint}) says why"), *describe_cuts(module)]
        elif not engine.takes_options:
            for passed in self.options:
                passed.refuse_other_processes()
                is_divided = partitions.of(not passed.is_inference) is not None
                effects = passed.effects(engine.name, is_divided)
                texts += [effects.in_short()] if effects.effects else []
                names = ", ".join(effect.name for effect in effects.of(NONE))
                if names:
                    remarks.append(
                        f"Of {passed.role}, these have no effect on {engine.name}: {names}."
                    )
        takes = engine.takes_options if self.config is None else made is not None
        if not takes and settings.loss_scale is not None and config.loss_scale is None:
            config = dataclasses.replace(config, loss_scale=LossScale())
        settings = dataclasses.replace(settings, remarks=remarks)
        return config, options if made is None else made, settings, texts


def _load_config(config: object) -> IPUConfig:
    """Load the configuration that ``compile`` was given; the user's own object stays as it is.

    Args:
        config: an IPUConfig, or what ``IPUConfig.from_pretrained`` takes.

    Raises:
        ConfigurationError: it is none, or can't be read; with every fault.
    """
    if isinstance(config, (str, os.PathLike)):
        return IPUConfig.from_pretrained(config).for_pod_type()
    if not isinstance(config, IPUConfig):
        raise ConfigurationError(
            "config must be an ipufit.IPUConfig, the path of one, or None, got "
            f"{type(config).__name__}. Read a dict with ipufit.IPUConfig.from_dict(...)."
        )
    config.check()
    return copy.deepcopy(config.for_pod_type())


def _agreed(
    title: str,
    passed: Optional[T],
    setting: Optional[Setting[T]],
    faults: ErrorCollector,
    shown: object = None,
) -> Optional[T]:
    """Return an argument, or what is fixed where it is None; a conflict is collected.

    Args:
        title: of the argument, as users write it.
        passed: the argument.
        setting: what is fixed.
        faults: to which a conflict is added.
        shown: the argument as its error shows it; None for as it is.
    """
    if setting is None or passed == setting.value:
        return passed
    if passed is None:
        return setting.value if setting.fills else None
    with faults.collect():
        raise ConfigurationError(setting.conflict(title, passed if shown is None else shown))
    return passed


def _agreed_recompute(
    recompute: Union[bool, str, Sequence[str], None],
    setting: Optional[Setting[bool]],
    faults: ErrorCollector,
) -> Union[bool, str, Sequence[str], None]:
    """Return ``Memory.recompute``; names say which layers, where a setting says that some are."""
    if setting is None or recompute is setting.value:
        return recompute
    if recompute is None:
        return setting.value
    is_none = recompute is False or (isinstance(recompute, (list, tuple)) and not recompute)
    if setting.value == is_none:
        with faults.collect():
            raise ConfigurationError(setting.conflict("Memory.recompute", recompute))
    return recompute


Pair = Tuple[PartitionRequest, PartitionRequest]


def _divide(
    module: nn.Module,
    settings: IpuSettings,
    training: PartitionRequest,
    inference: PartitionRequest,
) -> Pair:
    """Return the arguments that divide the module, with what is fixed in their place.

    Raises:
        ConfigurationError: both divide it, and not alike.
    """
    layers = settings.training.layers_per_ipu, settings.inference.layers_per_ipu
    ipus = settings.training.ipus_per_replica, settings.inference.ipus_per_replica
    if layers[0] is None or layers[1] is None or ipus[0] is None or ipus[1] is None:
        training = _with_strategy(settings.training, training, training)
        return training, _with_strategy(settings.inference, inference, training)
    return _divide_layers(module, (layers[0], layers[1]), (ipus[0], ipus[1]), training, inference)


def _with_strategy(
    mode: ModeSettings, request: PartitionRequest, training: PartitionRequest
) -> PartitionRequest:
    """Add an execution strategy of PopTorch's to a request, where one is set.

    Args:
        mode: what is fixed of the mode of the request.
        request: the division of the module for this mode.
        training: the division for training, which inference follows.

    Raises:
        ConfigurationError: the request has a strategy, too.
    """
    if mode.strategy is None:
        return request
    if request.strategy is not None:
        raise ConfigurationError(
            f"{request.name('strategy')} and {mode.strategy.source} both set how stages run. Leave "
            "one out."
        )
    strategy = mode.strategy.value
    both = (request, training)
    divides = any(r.stages is not None or r.layers_per_ipu is not None for r in both)
    if not divides and all(r.ipus_per_replica is None for r in both):
        # Nothing divides the module, or blocks of its own, which PopTorch counts.
        return request
    if divides and not strategy._block_map:
        return dataclasses.replace(request, strategy=kind_of(strategy))
    return dataclasses.replace(request, strategy=strategy)


def _divide_layers(
    module: nn.Module,
    layers: Tuple[Setting[List[int]], Setting[List[int]]],
    ipus: Tuple[Setting[int], Setting[int]],
    training: PartitionRequest,
    inference: PartitionRequest,
) -> Pair:
    """Divide layers as a configuration says.

    Inference is sharded, as optimum-graphcore has it. A module with blocks of its own is left to
    them where the configuration says no more than how many IPUs there are.
    """
    faults = ErrorCollector()
    has_own = training.ipus_per_replica is not None or is_annotated(module)
    has_own = has_own and (training.stages, training.layers) == (None, None)
    has_own = has_own and layers[0].value == [-1]
    one, other = (setting.value for setting in ipus)
    with faults.collect():
        if has_own and one != other:
            raise ConfigurationError(
                "a module with its own blocks is on the same IPUs in training and in inference, "
                f"but {ipus[0].source} is {one} and {ipus[1].source} {other}. Set both to the "
                "number of its IPUs."
            )
    # Stages of training hold for inference on as many IPUs, as they do without a configuration.
    follows = has_own or (training.stages is not None and one == other)
    pair = []
    for request, layers_setting, ipus_setting in zip((training, inference), layers, ipus):
        with faults.collect():
            pair.append(_divide_mode(request, layers_setting, ipus_setting, follows))
    faults.raise_all()
    training, inference = pair
    if other > 1 and inference.strategy is None:
        inference = dataclasses.replace(inference, strategy="sharded")
    return training, inference


def _divide_mode(
    request: PartitionRequest, layers: Setting[List[int]], ipus: Setting[int], follows: bool
) -> PartitionRequest:
    if request.stages is not None and layers.value != [-1]:
        raise ConfigurationError(
            f"{request.name('stages')} and {layers.source} both divide the module, the latter by "
            f"{layers.value}. Leave one out; with [-1] in the config, compile decides."
        )
    if request.layers_per_ipu is not None and list(request.layers_per_ipu) != layers.value:
        name = request.name("layers_per_ipu")
        raise ConfigurationError(layers.conflict(name, request.layers_per_ipu))
    ipus.agreed("ipus_per_replica", request.ipus_per_replica)
    if request.stages is not None or (follows and layers.value == [-1]):
        return dataclasses.replace(request, ipus_per_replica=ipus.value, ipus_said_by=ipus.source)
    # On one IPU a list of layers says nothing.
    evenly = layers.value == [-1] or ipus.value == 1
    return dataclasses.replace(
        request,
        layers_per_ipu=[-1] * ipus.value if evenly else layers.value,
        prefix=layers.source[: -len("layers_per_ipu")],
    )


Cuts = Optional[Mapping[str, Any]]


def _cut_layers(
    module: nn.Module, settings: IpuSettings, serialize: Cuts, inference: Cuts
) -> Tuple[Cuts, Cuts]:
    """Return the layers that Memory cuts, in training and in inference, with those that are fixed.

    A configuration names no layers. What the arguments name is meant, else what
    :mod:`ipufit.partition.embedding_layers` finds.

    Args:
        module: the user's module.
        settings: say how an embedding and a projection are cut.
        serialize, inference: the arguments.

    Raises:
        ConfigurationError: there is no such layer, or an argument says another number.
    """
    named = [("Memory.serialize", serialize), ("Memory.inference_serialize", inference)]
    if any(not isinstance(layers, (Mapping, type(None))) for _, layers in named):
        return serialize, inference
    # A configuration has a value for everything: what it does not cut in inference is whole there.
    cuts = [dict(serialize or {}), dict((serialize if inference is None else inference) or {})]
    faults = ErrorCollector()
    meant: Dict[str, Tuple[str, Sequence[Tuple[str, LayerCut]]]] = {}
    for kind in KINDS:
        modes = (settings.training, settings.inference)
        both = [(mode.cuts[kind].source, mode.cuts[kind].value) for mode in modes if mode.cuts]
        if all(cut is None for _, cut in both):
            continue
        with faults.collect():
            layer = meant_layer(module, kind, named, both)
            meant[kind] = layer, both
            for by_layer, (_, layers), (_, cut) in zip(cuts, named, both):
                # An argument that says the same may have more to say, such as the mode.
                if cut is not None and layer not in (layers or {}):
                    by_layer[layer] = cut
            if both[1][1] is None and inference is None:
                cuts[1].pop(layer, None)
    with faults.collect():
        check_ties(module, meant)
    faults.raise_all()
    return (cuts[0] or serialize, cuts[1]) if meant else (serialize, inference)
