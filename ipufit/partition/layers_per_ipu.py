"""``layers_per_ipu``: repeated layers, so many on each IPU."""

from __future__ import annotations

import collections.abc
import dataclasses
import operator
from typing import AbstractSet, Any, Dict, List, Sequence, Tuple

from torch import nn

from ipufit.errors import PartitionError
from ipufit.partition.cut_layers import ipus_of
from ipufit.partition.partition import AFTER
from ipufit.partition.repeated_layers import repeated_layers
from ipufit.partition.request import PartitionRequest, count_of
from ipufit.partition.serialized_layers import Serialized
from ipufit.partition.tied_weights import Visit, with_returns

__all__ = ["Division", "check_splits", "counted", "ipus_with_parts", "share_out"]


def check_splits(module: nn.Module, strategy: str, ipus: int, is_training: bool) -> None:
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


def ipus_with_parts(module: nn.Module) -> AbstractSet[int]:
    """The IPUs of a replica on which parts of serialised layers lie."""
    layers = (part for part in module.modules() if isinstance(part, Serialized))
    return {0, *(ipu for layer in layers for ipu in layer.parts.ipus)}


@dataclasses.dataclass(frozen=True)
class Division:
    """Stages as the arguments of ``compile`` give them.

    Attributes:
        begins: as in :class:`ipufit.partition.partition.Partition`.
        stages: how many, as far as the arguments tell.
        places: as there: the IPU of each stage, if one goes back to an earlier IPU.
    """

    begins: Tuple[Tuple[str, int], ...] = ()
    stages: int = 1
    places: Tuple[int, ...] = ()

    @staticmethod
    def along(visits: Sequence[Visit]) -> Division:
        """A stage for every change of the IPU, from IPU 0 on."""
        begins: List[Tuple[str, int]] = []
        places = [0]
        for visit in visits:
            if visit.ipu != places[-1]:
                places.append(visit.ipu)
            begins.append((visit.name, len(places) - 1))
        returns = places != list(range(len(places)))
        return Division(tuple(begins), len(places), tuple(places) if returns else ())


def counted(module: nn.Module, request: PartitionRequest, can_return: bool = True) -> Division:
    """The modules that begin a stage.

    Args:
        module: the user's.
        request: the arguments.
        can_return: whether a stage may be on an IPU that has one before it.
    """
    argument = request.name("layers_per_ipu")
    counts = _whole_numbers(request.layers_per_ipu, argument)
    count = count_of(request.name("ipus_per_replica"), request.ipus_per_replica) or 1
    if counts == [-1] and count == 1:
        return Division()
    layers = repeated_layers(module, request.layers, argument)
    if counts == [-1]:
        # As an IPUConfig has it, which says beside it how many IPUs there are.
        if count > len(layers):
            raise PartitionError(
                f"{argument}=[-1] shares the repeated layers among the IPUs of a replica, but "
                f"ipus_per_replica={count} and the module has {len(layers)} "
                f"({_places(module, layers)}). Use fewer IPUs."
            )
        counts = [-1] * count
    cut = ipus_with_parts(module)
    shares = share_out(counts, len(layers), argument, _places(module, layers), cut)
    ipus = [ipu for ipu, share in enumerate(shares) for _ in range(share)]
    visits = [Visit(layer, ipu) for layer, ipu in zip(layers, ipus)]
    if can_return and not ipus_of(module) and not ipus_of(module, training=False):
        return Division.along(with_returns(module, visits, len(shares) - 1))
    # Parts of a serialised layer say themselves where they are.
    begins = [visits[sum(shares[:ipu])] for ipu, share in enumerate(shares) if share]
    end = len(shares) - 1
    if not shares[end] and end not in cut:
        begins.append(Visit(AFTER + layers[-1], end))
    return Division(tuple((visit.name, visit.ipu) for visit in begins), 1 + end)


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
