"""Weights that are read again after the layers, and the stages that go back to them.

An IPU can't read the memory of another. So what shares the weight of an embedding, as the last
layer of a language model does, runs where the embedding is: in a further stage on that IPU.
"""

from __future__ import annotations

import dataclasses
from typing import Dict, Iterator, List, Sequence, Tuple

from torch import nn

from ipufit.partition.partition import AFTER

__all__ = ["Visit", "with_returns"]


@dataclasses.dataclass(frozen=True)
class Visit:
    """Where the model goes on at some point of its forward pass.

    Attributes:
        name: as in ``Partition.begins``.
        ipu: of a replica.
    """

    name: str
    ipu: int


@dataclasses.dataclass(frozen=True)
class _Holder:
    """A module outside of the layers with a parameter that another one has too.

    Attributes:
        name: of the module.
        gap: how many layers are defined before it.
        is_again: whether it is a module that was there before, by another name.
    """

    name: str
    gap: int
    is_again: bool


def with_returns(module: nn.Module, layers: Sequence[Visit], last: int) -> List[Visit]:
    """Layers on their IPUs, and the modules that go back to the IPU of a weight they share.

    A weight lies where the first module runs that has it: on IPU 0 if no layer comes before, else
    with the next layer. What comes first is told by the order of definition, which the forward
    pass is held against later. Weights that layers share stay where they are.

    Args:
        module: the user's.
        layers: the repeated layers in their order.
        last: the IPU of what runs behind them.

    Returns:
        The visits in their order, without those that stay on the IPU of the one before; of the
        first layer always.
    """
    found = _visits(_homes(module, layers, last), layers, last)
    names = {visit.name for visit in found}
    # What follows one layer can't be two stages.
    return found if len(names) == len(found) else _visits([], layers, last)


def _visits(
    homes: Sequence[Tuple[_Holder, int]], layers: Sequence[Visit], last: int
) -> List[Visit]:
    """The layers, what follows them, and the holders, where the IPU is another one."""
    found: List[Visit] = []
    at = 0
    for gap in range(len(layers) + 1):
        after = AFTER + layers[gap - 1].name if gap else ""
        if gap == len(layers) and last != at:
            found.append(Visit(after, last))
            at = last
        for holder, home in homes:
            if holder.gap == gap and home != at:
                name = after if holder.is_again else holder.name
                found.append(Visit(name, home))
                at = home
        if gap < len(layers) and (not gap or layers[gap].ipu != at):
            found.append(layers[gap])
            at = layers[gap].ipu
    return found


def _homes(module: nn.Module, layers: Sequence[Visit], last: int) -> List[Tuple[_Holder, int]]:
    """Modules that share weights, and the IPU of these; none where all are on one IPU anyway."""
    homes: Dict[str, Tuple[_Holder, int]] = {}
    is_apart = False
    # Of what comes between layers the IPU of the one before.
    stays = [0, *(layer.ipu for layer in layers[:-1]), last]
    for holders in _shared(module, [layer.name for layer in layers]):
        gap = holders[0].gap
        home = stays[gap]
        if len({stays[holder.gap] for holder in holders}) > 1:
            is_apart = True
            home = layers[gap].ipu if gap else 0
        for holder in holders:
            if homes.setdefault(holder.name, (holder, home))[1] != home:
                # It has weights of two IPUs, and nowhere can it read both.
                return []
    return list(homes.values()) if is_apart else []


def _shared(module: nn.Module, layers: Sequence[str]) -> Iterator[List[_Holder]]:
    """For each parameter that several modules outside of the layers have, these modules."""
    names: Dict[int, List[str]] = {}
    places: Dict[str, int] = {}
    first: Dict[int, str] = {}
    again = set()
    for place, (name, part) in enumerate(module.named_modules(remove_duplicate=False)):
        places[name] = place
        if first.setdefault(id(part), name) != name:
            again.add(name)
        for parameter in part._parameters.values():
            if parameter is not None:
                names.setdefault(id(parameter), []).append(name)
    begins = [places[layer] for layer in layers if layer in places]
    if begins != sorted(begins):
        return
    for found in names.values():
        # A module around another one only holds the parameter for it.
        own = [n for n in dict.fromkeys(found) if not any(o.startswith(f"{n}.") for o in found)]
        inside = [n for n in own if any(f"{n}.".startswith(f"{layer}.") for layer in layers)]
        if len(own) > 1 and not inside:
            yield [_Holder(n, sum(begin < places[n] for begin in begins), n in again) for n in own]
