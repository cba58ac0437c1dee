"""``layers_per_ipu``: repeated layers, so many on each IPU."""

from __future__ import annotations

import collections.abc
import operator
from typing import AbstractSet, Any, Dict, List, Sequence

from torch import nn

from ipufit.errors import PartitionError
from ipufit.partition.cut_layers import ipus_of
from ipufit.partition.division import Division
from ipufit.partition.partition import AFTER
from ipufit.partition.repeated_layers import repeated_layers
from ipufit.partition.request import PartitionRequest, count_of
from ipufit.partition.split_layers import ipus_with_parts
from ipufit.partition.tied_weights import Visit, with_returns

__all__ = ["counted", "share_out"]


def counted(module: nn.Module, asked: PartitionRequest, can_return: bool = True) -> Division:
    """The modules that begin a stage.

    Args:
        module: the user's.
        asked: the arguments.
        can_return: whether a stage may be on an IPU that has one before it.
    """
    argument = asked.name("layers_per_ipu")
    counts = _whole_numbers(asked.layers_per_ipu, argument)
    count = count_of(asked.name("ipus_per_replica"), asked.ipus_per_replica) or 1
    if counts == [-1] and count == 1:
        return Division()
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
