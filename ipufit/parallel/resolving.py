"""From the arguments of ``compile`` to a partition; all that can't work is said at once."""

from __future__ import annotations

import collections.abc
import dataclasses
import operator
from typing import AbstractSet, Any, Dict, List, Mapping, Optional, Sequence, Tuple

from torch import nn

from ipufit.errors import PartitionError, UnknownNameError
from ipufit.faults import Faults
from ipufit.parallel.naming import begun_by, first_gap, named_stages
from ipufit.parallel.partition import AFTER, STRATEGIES, Partition, Partitions
from ipufit.parallel.repeated import repeated_layers
from ipufit.parallel.serialized import Serialized
from ipufit.parallel.serializing import ipus_of

__all__ = [
    "AUTO",
    "PartitionRequest",
    "kind_of",
    "resolve_partition",
    "resolve_partitions",
    "share_out",
]

# The value of ``stages`` that leaves the division to ipufit.
AUTO = "auto"

_POPTORCH_STRATEGIES = {
    "ShardedExecution": "sharded",
    "PipelinedExecution": "pipelined",
    "SerialPhasedExecution": "serial_phased",
    "ParallelPhasedExecution": "parallel_phased",
}


@dataclasses.dataclass(frozen=True)
class PartitionRequest:
    """The arguments of ``compile`` that divide a module, as they came; it documents them.

    Attributes:
        prefix: before their names, as the user wrote them.
        ipus_said_by: what says ``ipus_per_replica`` where no argument does.
    """

    stages: Any = None
    layers_per_ipu: Any = None
    layers: Any = None
    strategy: Any = None
    ipus_per_replica: Any = None
    prefix: str = ""
    ipus_said_by: str = ""

    @property
    def is_empty(self) -> bool:
        """Whether nothing was said."""
        return (self.stages, self.layers_per_ipu, self.strategy) == (None, None, None)

    def name(self, argument: str) -> str:
        """What the user calls an argument."""
        return f"{self.prefix}{argument}"


def resolve_partitions(
    module: nn.Module, training: PartitionRequest, inference: PartitionRequest
) -> Partitions:
    """That of training and that of inference, which is training's where nothing else is said.

    Raises:
        PartitionError: the arguments can't work, or not together; with every fault.
        UnknownNameError: a module that there is not, with the nearest name.
    """
    faults = Faults()
    first = second = None
    with faults.collected():
        first = resolve_partition(module, training)
        second = _inherited(first)
        if inference.is_empty:
            ipus = 1 if second is None else second.ipus
            _check_splits(module, "" if second is None else second.strategy, ipus, False)
    if not inference.is_empty:
        if inference.stages is None and inference.layers_per_ipu is None:
            shared = (inference.strategy, inference.prefix)
            inference = dataclasses.replace(training, strategy=shared[0], prefix=shared[1])
        elif inference.layers_per_ipu is not None:
            inference = dataclasses.replace(inference, layers=training.layers)
        with faults.collected():
            second = resolve_partition(module, inference, is_training=False)
    faults.raise_all()
    return Partitions(first, second)


def _inherited(partition: Optional[Partition]) -> Optional[Partition]:
    """Training's for inference, which a strategy that was named for training does not bind."""
    return None if partition is None else dataclasses.replace(partition, is_chosen=False)


def resolve_partition(
    module: nn.Module, asked: PartitionRequest, is_training: bool = True
) -> Optional[Partition]:
    """Normal form, or None where everything is on one IPU and nobody said otherwise.

    Args:
        module: the user's.
        asked: the arguments.
        is_training: whether they are those of training.

    Raises:
        PartitionError: the arguments can't work, or not together; with every fault.
        UnknownNameError: a module that there is not, with the nearest name.
    """
    faults = Faults()
    strategy, own = "pipelined", None
    count: Optional[int] = None
    begins: Tuple[Tuple[str, int], ...] = ()
    last = 0
    with faults.collected():
        strategy, own = _strategy(asked)
    with faults.collected():
        count = _count(asked.name("ipus_per_replica"), asked.ipus_per_replica)
    with faults.collected():
        if asked.stages is not None and asked.layers_per_ipu is not None:
            raise PartitionError(
                f"{asked.name('stages')} and {asked.name('layers_per_ipu')} both divide the "
                "module. Give one of them."
            )
        if asked.layers is not None and asked.layers_per_ipu is None:
            raise PartitionError(
                "layers says which layers layers_per_ipu counts, but there is no layers_per_ipu. "
                "Give both or none."
            )
        if _is_auto(asked):
            _check_auto(asked, strategy, own)
        elif asked.stages is not None:
            begins = _named(module, asked.stages, asked.name("stages"))
        elif asked.layers_per_ipu is not None:
            begins, last = _counted(module, asked)
    faults.raise_all()
    if own is not None and begins:
        raise PartitionError(
            f"{asked.name('strategy')} as an object of PopTorch's names blocks of the module's "
            f"own, but {asked.name('stages')} or {asked.name('layers_per_ipu')} divides it too. "
            f"Use {asked.name('strategy')}={strategy!r}, or leave the other out."
        )
    if own is None and not begins and "phased" in strategy and not _is_auto(asked):
        kind = next(k for k, name in _POPTORCH_STRATEGIES.items() if name == strategy)
        raise PartitionError(
            f"{asked.name('strategy')}={strategy!r} runs the stages of {asked.name('stages')} or "
            f"{asked.name('layers_per_ipu')} as phases, got neither. Give one of them, or, for "
            f"blocks of the module's own, {asked.name('strategy')}=poptorch.{kind}('A', 'B') with "
            "their names."
        )
    if begins:
        last = max(last, *(stage for _, stage in begins), *_ipus_with_parts(module))
    stages = 1 + last if begins else count or 1
    ipus = _ipus(strategy, stages) if begins or own is None else count or 1
    if begins and count is not None and count != ipus:
        cure = f"Set it to {ipus}" if asked.ipus_said_by else "Leave it out"
        raise PartitionError(
            f"{asked.ipus_said_by or asked.name('ipus_per_replica')} must be the number of IPUs "
            f"that the {strategy} stages take, {ipus}, got {count}. {cure}."
        )
    _check_splits(module, strategy, ipus, is_training)
    if not begins and own is None and (count or 1) == 1:
        if asked.strategy is not None and not _is_auto(asked):
            raise PartitionError(
                f"{asked.name('strategy')} says how stages run, got {strategy!r}, but nothing "
                "divides the module. Give stages or layers_per_ipu, or ipus_per_replica for a "
                "module with blocks of its own. For overlapped IO on one IPU use training_options "
                "with setExecutionStrategy(poptorch.ShardedExecution())."
            )
        return None
    chosen = asked.strategy is not None
    return Partition(begins, stages, strategy, chosen, ipus, own, _is_auto(asked))


def _is_auto(asked: PartitionRequest) -> bool:
    return isinstance(asked.stages, str) and asked.stages == AUTO


def _check_auto(asked: PartitionRequest, strategy: str, own: Any) -> None:
    """Refuse what leaves open how many stages to make, or is no pipeline.

    Raises:
        PartitionError: with what to say instead.
    """
    name = asked.name("stages")
    if asked.prefix:
        raise PartitionError(
            f"{name} must map names of modules to numbers of stages, got 'auto'. Leave it out, so "
            "that inference has the stages of training, which stages='auto' finds."
        )
    if own is not None or strategy not in ("pipelined", "sharded"):
        raise PartitionError(
            "stages='auto' divides a module for strategy='pipelined' or 'sharded', got "
            f"{asked.strategy!r}. Use one of them, or name the stages."
        )
    if asked.ipus_per_replica is None:
        raise PartitionError(
            "stages='auto' needs to know how many stages to make, for the IPUs of a replica must "
            "be known before the data. Pass ipus_per_replica=2, say, or ask model.plan(x), which "
            "finds the smallest number, and pass stages=model.plan(x).stages."
        )


def _ipus(strategy: str, stages: int) -> int:
    """IPUs of a replica: phases follow each other on one, or on two in turn."""
    if strategy == "serial_phased":
        return 1
    return min(stages, 2) if strategy == "parallel_phased" else stages


def _check_splits(module: nn.Module, strategy: str, ipus: int, is_training: bool) -> None:
    """Refuse layers whose parts lie on other IPUs than a replica has, or on too many."""
    wanted = ipus_of(module, is_training)
    if wanted and wanted != ipus:
        raise _misplaced(module, wanted, ipus, is_training)
    if wanted and "phased" in strategy:
        raise PartitionError(
            f"splits_per_ipu put parts of one layer on several IPUs, which phases can't have, but "
            f"the strategy is {strategy!r}. Use a factor, or another strategy."
        )
    if not is_training:
        _check_places(module)


def _misplaced(module: nn.Module, wanted: int, ipus: int, is_training: bool) -> PartitionError:
    by_config = any(getattr(layer, "by_config", False) for layer in module.modules())
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
        f"replica there, got {wanted} and a replica has {ipus}. Say with "
        f"inference_serialized_layers how they are cut in inference, or {cure}"
    )


def _check_places(module: nn.Module) -> None:
    """Refuse a parameter that inference, which has those of training, needs on several IPUs."""
    for layer in module.modules():
        places = layer.places(training=False) if isinstance(layer, Serialized) else {}
        for name, ipus in places.items():
            if len(ipus) > 1:
                assert isinstance(layer, Serialized)
                before, parts = layer.parts.describe(), layer.inference_parts
                kind = "embedding" if isinstance(layer, nn.Embedding) else "projection"
                cure = "splits_per_ipu in serialized_layers"
                if layer.by_config:
                    cure = f"IPUConfig.serialized_{kind}_splits_per_ipu or {cure}"
                raise PartitionError(
                    f"a parameter must be on one IPU, but in inference {layer.title!r} is cut by "
                    f"{parts.describe()}, which needs its {name!r} on IPUs "
                    f"{', '.join(map(str, ipus))}; the parameters are those of training, "
                    f"{before}. Cut it into {parts.count} parts in training too, by {cure}."
                )


def _ipus_with_parts(module: nn.Module) -> AbstractSet[int]:
    """The IPUs of a replica on which parts of serialised layers lie."""
    layers = (part for part in module.modules() if isinstance(part, Serialized))
    return {0, *(ipu for layer in layers for ipu in layer.parts.ipus)}


def _strategy(asked: PartitionRequest) -> Tuple[str, Any]:
    given = asked.strategy
    if given is None:
        return "pipelined", None
    if isinstance(given, str):
        if given not in STRATEGIES:
            raise UnknownNameError(asked.name("strategy"), given, STRATEGIES)
        return given, None
    found = kind_of(given)
    if found is not None:
        return found, given
    raise PartitionError(
        f"{asked.name('strategy')} must be one of {', '.join(map(repr, STRATEGIES))}, or an object "
        f"such as poptorch.PipelinedExecution(), got {given!r}."
    )


def kind_of(strategy: object) -> Optional[str]:
    """The name of what an execution strategy of PopTorch's is; None if it is none."""
    for kind in type(strategy).__mro__:
        if kind.__name__ in _POPTORCH_STRATEGIES and "poptorch" in kind.__module__:
            return _POPTORCH_STRATEGIES[kind.__name__]
    return None


def _count(name: str, value: Any) -> Optional[int]:
    if value is None:
        return None
    if isinstance(value, bool) or not hasattr(value, "__index__") or operator.index(value) < 1:
        raise PartitionError(f"{name} must be a positive whole number or None, got {value!r}.")
    return operator.index(value)


def _named(module: nn.Module, given: Any, argument: str) -> Tuple[Tuple[str, int], ...]:
    if not isinstance(given, collections.abc.Mapping) or not given:
        raise PartitionError(
            f"{argument} must map names of modules to numbers of stages, got {given!r}. Write for "
            f"example {argument}={{'encoder': 0, 'head': 1}}."
        )
    pairs = named_stages(module, given, argument)
    numbers = sorted(set(pairs.values()))
    gap = first_gap(numbers, _ipus_with_parts(module))
    if gap is not None:
        raise PartitionError(
            f"{argument} must number the stages without a gap, but no module begins stage "
            f"{gap}, got {', '.join(map(str, numbers))}. Renumber them from 0."
        )
    order = {name: place for place, (name, _) in enumerate(module.named_modules())}
    return tuple(sorted(pairs.items(), key=lambda pair: _place(pair[0], order)))


def _place(name: str, order: Mapping[str, int]) -> Tuple[int, bool]:
    """Where a beginning stands in the order of definition; after a module is after its inside."""
    if name in order:
        return order[name], False
    inside = begun_by(name, order)
    return max(order[n] for n in order if n == inside or n.startswith(f"{inside}.")), True


def _counted(module: nn.Module, asked: PartitionRequest) -> Tuple[Tuple[Tuple[str, int], ...], int]:
    """The modules that begin a stage, and the last stage."""
    argument = asked.name("layers_per_ipu")
    counts = _whole_numbers(asked.layers_per_ipu, argument)
    count = _count(asked.name("ipus_per_replica"), asked.ipus_per_replica) or 1
    if counts == [-1] and count == 1:
        return (), 0
    layers = repeated_layers(module, asked.layers, argument)
    if counts == [-1]:
        # As an IPUConfig has it, which says beside it how many IPUs there are.
        if count > len(layers):
            raise PartitionError(
                f"{argument}=[-1] shares the repeated layers among the IPUs of a replica, but "
                f"ipus_per_replica={count} and the module has {len(layers)} "
                f"({_places(module, layers)}). Use fewer IPUs."
            )
        counts = [-1] * count
    cut = _ipus_with_parts(module)
    shares = share_out(counts, len(layers), argument, _places(module, layers), cut)
    begins: List[Tuple[str, int]] = []
    done = 0
    for ipu, share in enumerate(shares):
        if share:
            begins.append((layers[done], ipu))
        elif ipu not in cut:
            begins.append((AFTER + layers[-1], ipu))
        done += share
    return tuple(begins), len(shares) - 1


def _places(module: nn.Module, layers: Sequence[str]) -> str:
    """The stacks of layers, and how many are in each."""
    counts: Dict[str, int] = {}
    for layer in layers:
        stack = layer.rpartition(".")[0]
        counts[stack] = counts.get(stack, 0) + 1
    told = []
    for stack, count in counts.items():
        places = len(module.get_submodule(stack)._modules)
        more = places - count
        again = f", {more} more places hold one of them again" if more else ""
        told.append(f"{count} in {stack or 'the module itself'}{again}")
    return ", ".join(told)


def _whole_numbers(given: Any, argument: str) -> List[int]:
    if isinstance(given, (str, collections.abc.Mapping)) or not hasattr(given, "__iter__"):
        numbers: Sequence[Any] = ()
    else:
        numbers = list(given)
    good = all(hasattr(n, "__index__") and not isinstance(n, bool) and n >= -1 for n in numbers)
    if not numbers or not good:
        raise PartitionError(
            f"{argument} must list a number of layers for every IPU, -1 for an even share of the "
            f"rest, got {given!r}. Write for example {argument}=[2, 3, -1, -1]."
        )
    return [operator.index(n) for n in numbers]


def share_out(
    counts: Sequence[int],
    total: int,
    argument: str,
    places: str,
    cut: AbstractSet[int] = frozenset((0,)),
) -> List[int]:
    """Layers on each IPU, with every -1 filled in.

    The rest goes in even shares to the wildcards; what does not divide goes to the last one.

    Args:
        counts: for each IPU; -1 for a share of the rest.
        total: layers that there are.
        argument: what the user calls the counts.
        places: where the layers are.
        cut: IPUs with parts of serialised layers, and the first: they need no layer.

    Raises:
        PartitionError: they do not add up; or an IPU would get nothing. Behind the last layer there
            may be one without any, which gets what runs after that layer.

    >>> share_out([2, 3, -1, -1], 12, "layers_per_ipu", "")
    [2, 3, 3, 4]
    """
    wildcards = [ipu for ipu, count in enumerate(counts) if count == -1]
    fixed = sum(count for count in counts if count != -1)
    found = f"the module has {total} ({places})"
    if not wildcards and fixed != total:
        raise PartitionError(
            f"{argument} must add up to the number of repeated layers, got {fixed} and {found}. "
            "Put -1 in place of one number for the rest, or name the layers meant with layers=."
        )
    left = total - fixed
    if left < len(wildcards):
        raise PartitionError(
            f"{argument} must leave a layer for every -1, but {found}, of which the other IPUs "
            f"take {fixed} and {len(wildcards)} of -1 share {max(left, 0)}. Use fewer IPUs or "
            "smaller numbers."
        )
    shares = list(counts)
    for ipu in wildcards:
        shares[ipu] = left // len(wildcards)
    if wildcards:
        shares[wildcards[-1]] += left % len(wildcards)
    end = max((ipu for ipu, share in enumerate(shares) if share), default=-1) + 1
    empty = [ipu for ipu, share in enumerate(shares) if not share and ipu not in cut]
    if empty and empty != [end]:
        first = empty[0] if empty[0] != end else empty[1]
        kept = [n for ipu, n in enumerate(counts) if ipu not in empty]
        named = f"stages={{'name of a module': {first}}}"
        if argument.startswith("IPUConfig."):
            named += " of compile beside layers_per_ipu=[-1] in the config"
        raise PartitionError(
            f"{argument} must give every IPU at least one layer, but for the first, for one behind "
            "the last layer, and for those with parts of a serialised layer, got 0 for IPU "
            f"{first}. Use fewer IPUs, with {kept}, or put other modules there with {named}."
        )
    return shares
