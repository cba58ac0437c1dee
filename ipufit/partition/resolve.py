"""From the arguments of ``compile`` to a partition; all that can't work is said at once."""

from __future__ import annotations

import dataclasses
from typing import AbstractSet, Dict, Iterable, Mapping, Optional, Tuple

from torch import nn

from ipufit.errors import PartitionError, shown
from ipufit.partition.cut_layers import has_placed_parts, ipus_of, ipus_with_parts
from ipufit.partition.layers_per_ipu import Division, divide_layers
from ipufit.partition.partition import Partition, Partitions, Placed, begun_by, named_stages
from ipufit.partition.request import POPTORCH_STRATEGIES, PartitionRequest, count_of, strategy_of
from ipufit.partition.serialization import serialized_layers
from ipufit.utils.error_collector import ErrorCollector

# The value of ``stages`` that leaves the division to ipufit.
AUTO = "auto"


def resolve_partitions(
    module: nn.Module, training: PartitionRequest, inference: PartitionRequest
) -> Partitions:
    """Resolve the partitions of training and of inference, which has training's by default.

    Raises:
        PartitionError: the arguments can't work, or not together; with every fault.
        UnknownNameError: a module that there is not, with the nearest name.
    """
    faults = ErrorCollector()
    first = second = None
    with faults.collect():
        first = resolve_partition(module, training)
        # A strategy that was named for training does not bind inference, which has the rest.
        second = None if first is None else dataclasses.replace(first, is_chosen=False)
        if inference.is_empty:
            ipus = 1 if second is None else second.ipus
            check_splits(module, "" if second is None else second.strategy, ipus, False)
    if not inference.is_empty:
        if inference.stages is None and inference.layers_per_ipu is None:
            shared = (inference.strategy, inference.prefix)
            inference = dataclasses.replace(training, strategy=shared[0], prefix=shared[1])
        elif inference.layers_per_ipu is not None:
            inference = dataclasses.replace(inference, layers=training.layers)
        with faults.collect():
            second = resolve_partition(module, inference, is_training=False)
    faults.raise_all()
    return Partitions(first, second, training.sets_ipus)


def resolve_partition(
    module: nn.Module, request: PartitionRequest, is_training: bool = True
) -> Optional[Partition]:
    """Normal form, or None where everything is on one IPU and nobody said otherwise.

    Args:
        module: the user's module.
        request: the arguments.
        is_training: whether they are those of training.

    Raises:
        PartitionError: the arguments can't work, or not together; with every fault.
        UnknownNameError: a module that there is not, with the nearest name.
    """
    faults = ErrorCollector()
    strategy, sdk_strategy = "pipelined", None
    count: Optional[int] = None
    division = Division()
    with faults.collect():
        strategy, sdk_strategy = strategy_of(request)
    with faults.collect():
        count = count_of(request.name("ipus_per_replica"), request.ipus_per_replica)
    with faults.collect():
        if request.stages is not None and request.layers_per_ipu is not None:
            raise PartitionError(
                f"{request.name('stages')} and {request.name('layers_per_ipu')} both divide the "
                "module. Pass one of them."
            )
        if request.layers is not None and request.layers_per_ipu is None:
            raise PartitionError(
                "layers says which layers layers_per_ipu counts, but there is no layers_per_ipu. "
                "Pass both or none."
            )
        if _is_auto(request):
            _check_auto(request, strategy, sdk_strategy)
        elif request.stages is not None:
            division = _named(module, request.stages, request.name("stages"))
        elif request.layers_per_ipu is not None:
            division = divide_layers(module, request, can_return="phased" not in strategy)
    faults.raise_all()
    begins, places = division.begins, division.places
    if sdk_strategy is not None and begins:
        raise PartitionError(
            f"{request.name('strategy')} as a PopTorch object names the module's own blocks, but "
            f"{request.name('stages')} or {request.name('layers_per_ipu')} divides it too. Use "
            f"{request.name('strategy')}={strategy!r}, or leave the other out."
        )
    if sdk_strategy is None and not begins and "phased" in strategy and not _is_auto(request):
        kind = next(k for k, name in POPTORCH_STRATEGIES.items() if name == strategy)
        raise PartitionError(
            f"{request.name('strategy')}={strategy!r} runs the stages of {request.name('stages')} "
            f"or {request.name('layers_per_ipu')} as phases, got neither. Pass one of them, or, "
            f"for the module's own blocks, {request.name('strategy')}=poptorch.{kind}('A', 'B') "
            "with their names."
        )
    if places:
        _check_places(module, strategy, request)
    stages = count or 1
    if begins:
        stages = max(division.stages, *(1 + ipu for ipu in ipus_with_parts(module)))
    ipus = _ipus(strategy, stages) if begins or sdk_strategy is None else count or 1
    if places:
        ipus = 1 + max(places)
    if begins and count is not None and count != ipus:
        cure = f"Set it to {ipus}" if request.ipus_said_by else "Leave it out"
        raise PartitionError(
            f"{request.ipus_said_by or request.name('ipus_per_replica')} must be the number of "
            f"IPUs that the {strategy} stages need, {ipus}, got {count}. {cure}."
        )
    check_splits(module, strategy, ipus, is_training)
    if not begins and sdk_strategy is None and (count or 1) == 1:
        if request.strategy is not None and not _is_auto(request):
            raise PartitionError(
                f"{request.name('strategy')} says how stages run, got {strategy!r}, but nothing "
                "divides the module. Pass stages or layers_per_ipu, or ipus_per_replica for a "
                "module with its own blocks. For overlapped IO on one IPU use poptorch= with "
                "setExecutionStrategy(poptorch.ShardedExecution())."
            )
        return None
    chosen = request.strategy is not None
    return Partition(
        begins, stages, strategy, chosen, ipus, sdk_strategy, _is_auto(request), places
    )


def _is_auto(request: PartitionRequest) -> bool:
    return isinstance(request.stages, str) and request.stages == AUTO


def _check_auto(request: PartitionRequest, strategy: str, sdk_strategy: object) -> None:
    """Refuse what leaves open how many stages to make, or is no pipeline.

    Raises:
        PartitionError: with what to say instead.
    """
    name = request.name("stages")
    if request.prefix:
        raise PartitionError(
            f"{name} must map names of modules to numbers of stages, got 'auto'. Leave it out: "
            "inference then has the stages that stages='auto' finds for training."
        )
    if sdk_strategy is not None or strategy not in ("pipelined", "sharded"):
        raise PartitionError(
            "stages='auto' divides a module for strategy='pipelined' or 'sharded', got "
            f"{request.strategy!r}. Use one of them, or name the stages."
        )
    if request.ipus_per_replica is None:
        raise PartitionError(
            "stages='auto' needs the number of stages, because the IPUs of a replica are fixed "
            "before there is data. Pass for example ipus_per_replica=2, or "
            "stages=model.plan(x).stages, where plan finds the smallest number."
        )


def _ipus(strategy: str, stages: int) -> int:
    """IPUs of a replica: phases follow each other on one, or on two in turn."""
    if strategy == "serial_phased":
        return 1
    return min(stages, 2) if strategy == "parallel_phased" else stages


def _check_places(module: nn.Module, strategy: str, request: PartitionRequest) -> None:
    """Refuse what has a rule of its own for the IPUs of stages.

    Raises:
        PartitionError: phases, or parts of a layer that are on several IPUs.
    """
    if "phased" in strategy:
        raise PartitionError(
            f"{request.name('stages')} puts a stage on a chosen IPU, (number, IPU), but the "
            f"strategy is {strategy!r}, whose phases use the IPUs in turn. Pass only numbers, or "
            "use strategy='pipelined' or 'sharded'."
        )
    if has_placed_parts(module):
        raise PartitionError(
            f"{request.name('stages')} puts a stage on a chosen IPU, (number, IPU), but serialised "
            "layers have parts on several IPUs, which define the stages. Cut them by a factor, or "
            "pass only numbers."
        )


def check_splits(module: nn.Module, strategy: str, ipus: int, is_training: bool) -> None:
    """Refuse layers whose parts lie on other IPUs than a replica has, or on too many."""
    wanted = ipus_of(module, is_training)
    if wanted and wanted != ipus:
        raise _misplaced(module, wanted, ipus, is_training)
    if wanted and "phased" in strategy:
        raise PartitionError(
            "splits_per_ipu puts parts of one layer on several IPUs, which phases can't do, but "
            f"the strategy is {strategy!r}. Use a factor, or another strategy."
        )
    if not is_training:
        _check_places_in_inference(module)


def _misplaced(module: nn.Module, wanted: int, ipus: int, is_training: bool) -> PartitionError:
    by_config = any(layer.by_config for layer in serialized_layers(module))
    if is_training:
        cure = "Divide the module with stages, or pass ipus_per_replica="
        cure = f"{cure}{wanted}." if not by_config else f"Set IPUConfig.ipus_per_replica={wanted}."
        return PartitionError(
            "splits_per_ipu of serialised layers must have a number for each IPU of a replica, got "
            f"{wanted} and a replica has {ipus}. {cure}"
        )
    divide = "divide the module there as in training."
    cure = divide if not by_config else f"set IPUConfig.inference_ipus_per_replica={wanted}."
    return PartitionError(
        "splits_per_ipu of layers serialised in inference must have a number for each IPU of a "
        f"replica, got {wanted} and a replica has {ipus} in inference. Set "
        f"Memory.inference_serialize, or {cure}"
    )


def _check_places_in_inference(module: nn.Module) -> None:
    """Refuse a parameter that inference, which has those of training, needs on several IPUs."""
    for layer in serialized_layers(module):
        for name, ipus in layer.places(training=False).items():
            if len(ipus) > 1:
                before, parts = layer.parts.describe(), layer.inference_parts
                kind = "embedding" if isinstance(layer, nn.Embedding) else "projection"
                cure = "splits_per_ipu in Memory.serialize"
                if layer.by_config:
                    cure = f"IPUConfig.serialized_{kind}_splits_per_ipu or {cure}"
                raise PartitionError(
                    f"a parameter must be on one IPU, but in inference {layer.title!r} is cut by "
                    f"{parts.describe()}, which needs its {name!r} on IPUs "
                    f"{', '.join(map(str, ipus))}; the parameters are those of training, "
                    f"{before}. Cut it into {parts.count} parts in training too, by {cure}."
                )


def _named(module: nn.Module, stages: object, argument: str) -> Division:
    if not isinstance(stages, Mapping) or not stages:
        raise PartitionError(
            f"{argument} must map names of modules to numbers of stages, got {shown(stages)}. "
            f"Write for example {argument}={{'encoder': 0, 'head': 1}}."
        )
    placed = named_stages(module, stages, argument)
    pairs = {name: stage for name, (stage, _) in placed.items()}
    numbers = sorted(set(pairs.values()))
    gap = first_gap(numbers, ipus_with_parts(module))
    if gap is not None:
        raise PartitionError(
            f"{argument} must number the stages without gaps, but no module begins stage {gap}, "
            f"got {', '.join(map(str, numbers))}. Renumber them from 0."
        )
    order = {name: place for place, (name, _) in enumerate(module.named_modules())}
    begins = tuple(sorted(pairs.items(), key=lambda pair: _place(pair[0], order)))
    return Division(begins, 1 + numbers[-1], _places(placed, 1 + numbers[-1], argument))


def first_gap(numbers: Iterable[int], filled: AbstractSet[int] = frozenset((0,))) -> Optional[int]:
    """The smallest stage before the last one that nothing begins.

    Args:
        numbers: of the stages that begin.
        filled: others that need no beginning.
    """
    numbered = {*numbers, *filled}
    free = next(number for number in range(len(numbered) + 1) if number not in numbered)
    return free if free < max(numbered) else None


def _places(placed: Mapping[str, Placed], stages: int, argument: str) -> Tuple[int, ...]:
    """The IPU of every stage; none where each has its number's.

    Raises:
        PartitionError: a stage on two IPUs, two that follow each other on one, or a gap.
    """
    ipus: Dict[int, int] = {}
    for name, (stage, ipu) in placed.items():
        if ipu is not None and ipus.setdefault(stage, ipu) != ipu:
            raise PartitionError(
                f"{argument} must put a stage on one IPU, but stage {stage}, with {name!r}, is put "
                f"on IPU {ipus[stage]} and on IPU {ipu}. Give the stage the same pair "
                "throughout."
            )
    places = [ipus.get(stage, stage) for stage in range(stages)]
    text = ", ".join(map(str, places))
    for stage, (before, after) in enumerate(zip(places, places[1:])):
        if before == after:
            raise PartitionError(
                f"{argument} must begin a stage only where the IPU changes, but stages {stage} and "
                f"{stage + 1} are both on IPU {after}. Merge them into one stage."
            )
    gap = first_gap(places, frozenset())
    if gap is not None or places[0]:
        raise PartitionError(
            f"{argument} must begin on IPU 0 and number the IPUs without gaps, got stages on IPUs "
            f"{text}. A single number is both stage and IPU; after a stage that goes back, write "
            "(number, IPU)."
        )
    return () if places == list(range(stages)) else tuple(places)


def _place(name: str, order: Mapping[str, int]) -> Tuple[int, bool]:
    """Position of a beginning in the order of definition; after a module is after its inside."""
    if name in order:
        return order[name], False
    inside = begun_by(name, order)
    return max(order[n] for n in order if n == inside or n.startswith(f"{inside}.")), True
